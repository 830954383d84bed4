"""A method in a file of its own, as docs/extending.md shows, and the term that keeps the states which a UNet reads."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.training_runs import checkpoint, config, log, saved, settings_of

from debias_diffusion.app.cli import main
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS, Batch, find_method
from debias_diffusion.methods.keep_states import Teacher, state_errors
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.text.prompt_tokens import tokenize_text
from debias_diffusion.training.two_tower import train


@pytest.fixture(scope="module")
def predicting(extended):
    """Settings of a run with the page's method."""
    return dict(recipe="predicting", method={"alpha": 0.75}, max_steps=5, import_file=str(extended / "predicting.py"))


@pytest.fixture(scope="module")
def finished(world, predicting, tmp_path_factory):
    """The output folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("finished")
    train(config(world, output, **predicting))
    return output


def test_the_added_term_and_its_module_are_trained_and_the_module_is_not_exported(
    world, predicting, finished_run, finished, tmp_path
):
    lines = [line for line in log(finished) if "loss" in line]
    assert all(line["predicted"] > 0 for line in lines) and lines[-1]["predicted"] < lines[0]["predicted"]
    one, last = (checkpoint(finished, step)["modules"] for step in (4, 5))
    assert last.keys() == {"head.weight", "head.bias"} and not any(torch.equal(one[name], last[name]) for name in one)
    assert saved(finished, "last").keys() == saved(finished_run, "last").keys()
    assert "modules" not in checkpoint(finished_run, 7)
    main(["export", f"--model={finished}", f"--output={tmp_path / 'export'}"])
    assert "long captions predicted with weight 0.75" in (tmp_path / "export" / "README.md").read_text()
    changed = tmp_path / "predicting.py"
    changed.write_text(Path(predicting["import_file"]).read_text() + "# changed")
    METHODS.pop("predicting")  # as in another process
    with pytest.raises(UserError, match="import file"):
        train(config(world, finished, **predicting | {"import_file": str(changed)}))


def test_checkpoints_hold_no_teacher(world, tmp_path):
    train(config(world, tmp_path, keep_states=1.0, max_steps=1))
    assert not checkpoint(tmp_path, 1)["modules"]


def test_a_methods_settings_are_given_on_the_command_line_and_in_yaml(world, predicting, tmp_path, capsys):
    model, data, images = world
    options = [f"--data={data}", f"--images={images}", f"--model={model}", "--validation=6", "--components=3"]
    options = ["train", *options, "--batch=8", "--max-steps=1", "--workers=0"]
    (tmp_path / "run.yaml").write_text("recipe: predicting\nmethod: {alpha: 0.25}\n")
    given = ["--import", predicting["import_file"], f"--config={tmp_path / 'run.yaml'}"]
    for alpha, more in {0.75: ["--method.alpha=0.75"], 0.25: []}.items():
        main([*options, *given, *more, f"--output={tmp_path / str(alpha)}"])
        assert settings_of(tmp_path / str(alpha))["method"] == {"alpha": alpha}
    with pytest.raises(SystemExit):
        main([*options, "--recipe=predicting", "--method.alpa=1", f"--output={tmp_path / 'x'}"])
    assert "The recipe 'predicting' has no setting 'alpa'. Did you mean alpha" in capsys.readouterr().err


REFUSED = [
    ("debias", {}, "Did you mean debias-clip"),
    ("predicting", {"alpha": -1}, "alpha must be above 0"),
    ("debias-clip", {"alpha": 0.5}, "no setting 'alpha'"),
    ("fix-clip", {"groups": 0, "first_group": 1}, "from 1 to groups, which is 0"),
    ("fix-clip", {"padding": "random"}, "Give padding none, or short_positions shared"),
    ("fix-clip", {"short_weight": 0.0}, "need both captions"),
]


def test_unknown_methods_settings_and_options_in_the_wrong_place_are_refused(finished):
    def of_run(**settings):
        return lambda: config(("m", "d", "i"), "o", **settings)

    cases = [(partial(find_method, name, changes), message) for name, changes, message in REFUSED]
    cases += [
        (of_run(import_file="absent.py"), "no Python file '/.*absent.py'"),
        (of_run(prompts=4), "'debias-clip' has no setting 'prompts'"),
        (partial(find_method("debias-clip", {"keep_states": 2.0}).check_base, tiny_siglip(), 20, False), "a SigLIP"),
        (partial(find_method, "debias-clip-as-released"), "train --config research/debias-clip-as-released.yaml"),
    ]
    for use, message in cases:
        with pytest.raises(UserError, match=message):
            use()


# ---- the term that keeps states

LONG = "A street at night, seen from above. " + " ".join(f"House number {n} is not red." for n in range(1, 24))


def pipeline_states(backbone, text: str) -> torch.Tensor:
    """What the first encoder of a long-prompt pipeline gives the UNet, in chunks that overlap, [positions, width]."""
    encoder, tokenizer = to_transformers(backbone)
    pipe = tiny_sdxl.assemble(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())
    pipe.text_encoder, pipe.tokenizer = encoder, tokenizer
    width = encoder.config.hidden_size
    with torch.no_grad():
        return pipe.encode_prompt(text, do_classifier_free_guidance=False)[0][0, :, :width]


def tokens_of(backbone, text: str):
    return tokenize_text(backbone.tokenizer.cleaning(text), backbone.tokenizer.tokenizer)


def stretched(**changes):
    backbone = tiny_clip()
    backbone.stretch(**changes)
    return backbone


def test_a_step_reads_the_ids_of_kept_texts_without_a_wait_for_the_device():
    views = {"state_tokens": torch.zeros(1, 2, 3, dtype=torch.long), "is_masked": torch.zeros(1, 4, dtype=torch.bool)}
    batch = Batch(["a"], torch.zeros(1, 3, 2, 2), tiny_clip().tokenizer(["a"]), [], views)
    on_device = batch.to(torch.device("meta")).views
    assert [view.device.type for view in on_device.values()] == ["cpu", "meta"]


@pytest.mark.parametrize("text", ["A red cat.", LONG])
def test_the_trained_tower_is_compared_on_what_a_pipeline_feeds_the_unet(text):
    """The formula, written out on the states of both pipelines."""
    base, backbone, teacher = tiny_clip(), stretched(), Teacher(stretched())
    everyday(backbone.model)
    tokens = tokens_of(backbone, text)
    assert (len(tokens.ids) > 150) == (text == LONG)  # in several chunks
    error = state_errors(backbone.text, teacher, [tokens], backbone.tokenizer).item()
    end = 1 + len(tokens.ids)
    student, expected = pipeline_states(backbone, text)[:end], pipeline_states(base, text)[:end]
    variance = expected[1:].var(0, correction=0).mean()
    assert error == pytest.approx(((student - expected).square().mean() / variance).item(), rel=1e-4)
    assert error > 0.01


@pytest.mark.parametrize("keep, factor", [(20, 4), (0, 4), (10, 3), (75, 1)])
def test_the_teacher_has_the_positions_of_before_the_stretching(keep, factor):
    base = tiny_clip()
    backbone = stretched(keep=keep, factor=factor)
    assert torch.equal(Teacher(backbone).positional_embedding, base.model.positional_embedding)
    assert tiny_clip().unstretched_rows == list(range(77))
