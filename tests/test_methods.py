"""The method of docs/extending.md, added as the page says and trained in chunks, two processes and pieces."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.ranks import forked
from helpers.training_runs import checkpoint, config, is_the_same_run, killed_copy, log, losses, settings_of
from safetensors.torch import load_file

from debias_diffusion.app.cli import main
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS, Method, find_method, import_methods
from debias_diffusion.training.loop import train

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
SETTINGS = dict(recipe="predicting", method={"alpha": 0.75}, max_steps=5)  # and `import_file`, see `page`


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    """The page's file, which every run imports."""
    file = tmp_path_factory.mktemp("page") / "predicting.py"
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file.write_text(block)
    SETTINGS["import_file"] = str(file)
    import_methods(str(file.resolve()))
    yield file
    del METHODS["predicting"]


@pytest.fixture(scope="module")
def finished(world, page, tmp_path_factory):
    """The output folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("finished")
    train(config(world, output, **SETTINGS))
    return output


def test_the_added_term_and_its_module_are_trained_and_the_module_is_not_exported(world, finished, tmp_path, capsys):
    lines = [line for line in log(finished) if "loss" in line]
    assert all(line["predicted"] > 0 for line in lines) and lines[-1]["predicted"] < lines[0]["predicted"]
    one, all_steps = (checkpoint(finished, step)["modules"] for step in (4, 5))
    assert all_steps.keys() == {"weight", "bias"}
    assert not any(torch.equal(one[name], all_steps[name]) for name in one)
    train(config(world, tmp_path / "plain", max_steps=1))
    models = (load_file(folder / "last" / "open_clip_model.safetensors") for folder in (finished, tmp_path / "plain"))
    assert next(models).keys() == next(models).keys()
    assert "modules" not in checkpoint(tmp_path / "plain", 1)
    main(["export", f"--model={finished}", f"--output={tmp_path / 'export'}"])
    card = (tmp_path / "export" / "README.md").read_text()
    assert "long captions predicted with weight 0.75" in card and "| recipe | `predicting` with" in card


def test_chunks_give_the_same_run(world, finished, tmp_path):
    train(config(world, tmp_path, chunk=3, **SETTINGS))
    assert losses(tmp_path) == pytest.approx(losses(finished), rel=1e-4)


def test_two_processes_give_the_same_run(world, tmp_path):
    # AdamW divides by the size of a gradient, so rounding of one near 0 could become a whole step. Not with this `eps`.
    settings = SETTINGS | {"eps": 1e-2}
    train(config(world, tmp_path / "alone", **settings))
    forked(2, lambda _: str(train(config(world, tmp_path / "run", **settings))))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    for part in ("model", "modules"):
        one, other = (checkpoint(tmp_path / run, 5)[part] for run in ("alone", "run"))
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_a_killed_run_resumes_bit_identically_with_the_module_and_its_averages(world, page, finished, tmp_path):
    run = killed_copy(finished, tmp_path / "run", step=5)
    train(config(world, run, **SETTINGS))
    is_the_same_run(run, finished)
    one, other = (checkpoint(folder, 5) for folder in (run, finished))
    torch.testing.assert_close(one["modules"], other["modules"], rtol=0, atol=0)
    averages = [content["optimizer"]["adamw"]["state"] for content in (one, other)]
    torch.testing.assert_close(*averages, rtol=0, atol=0)
    assert len(averages[0]) == len(list(load_two_tower(run).model.parameters())) + 2  # with the module's two
    with pytest.raises(UserError, match=r"method: \{'alpha': 0.75\} there, None here"):
        train(config(world, run, **SETTINGS | {"method": None}))
    other = tmp_path / page.name
    other.write_text(page.read_text() + "# changed")
    with pytest.raises(UserError, match="import file"):
        train(config(world, run, **SETTINGS | {"import_file": str(other)}))


def test_a_methods_settings_are_given_on_the_command_line_and_in_yaml(world, page, tmp_path, capsys):
    settings = replace(config(world, tmp_path / "run"), max_steps=1, batch=8)
    given = {name: getattr(settings, name) for name in ("data", "images", "model", "validation", "components", "batch")}
    options = [f"--{name}={value}" for name, value in given.items()] + ["--max-steps=1", "--workers=0"]
    (tmp_path / "run.yaml").write_text("recipe: predicting\nmethod: {alpha: 0.25}\n")
    for name, more in {
        "flag": ["--recipe=predicting", "--import", str(page), "--method.alpha", "0.75"],
        "yaml": [f"--config={tmp_path / 'run.yaml'}"],
    }.items():
        main(["train", *options, *more, f"--output={tmp_path / name}"])
    written = [settings_of(tmp_path / name)["method"] for name in ("flag", "yaml")]
    assert written == [{"alpha": 0.75}, {"alpha": 0.25}]
    with pytest.raises(SystemExit):
        main(["train", *options, "--recipe=predicting", "--method.alpa=1", f"--output={tmp_path / 'x'}"])
    assert "The recipe 'predicting' has no setting 'alpa'. Did you mean alpha" in capsys.readouterr().err


def test_unknown_methods_and_settings_are_refused():
    def refused(message, name="predicting", **settings):
        with pytest.raises(UserError, match=message):
            find_method(name, settings)

    refused("Unknown recipe 'debias'. Did you mean debias-clip", "debias")
    refused("alpha must be above 0 .*got -1", alpha=-1)
    refused("alpha is 'much', but must be a number", alpha="much")
    refused("components is True, but must be a whole number", components=True)
    refused("'debias-clip' has no setting 'alpha'", "debias-clip", alpha=0.5)
    with pytest.raises(UserError, match="There is no Python file '/.*absent.py' to import. Give the file that adds"):
        config(("m", "d", "i"), "o", import_file="absent.py")
    with pytest.raises(UserError, match="short_weight is an option of its own: give --short-weight"):
        config(("m", "d", "i"), "o", recipe="predicting", method={"short_weight": 0.5})
    assert find_method("predicting", {"alpha": 1}).alpha == 1
    assert all(isinstance(method, Method) for method in METHODS.values())
