"""A method in a file of its own, as docs/extending.md shows, and the term that keeps the states which a UNet reads."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.tiny_data import caption, make_tiny_data
from helpers.training_runs import checkpoint, config, is_the_same_run, killed_copy, log, losses, settings_of
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from debias_diffusion.app.cli import main
from debias_diffusion.chunks import TRAINED_POSITIONS, Cut, Tokens, split_text, tokenize_text
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.jobs import Job
from debias_diffusion.methods import METHODS, Method, find_method, import_methods
from debias_diffusion.methods.base import MethodAndTerms
from debias_diffusion.methods.keep_states import SHARE, KeepStates, Teacher, state_errors
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.tokens import CaptionTokenizer
from debias_diffusion.training.checkpoints import TrainState, load_checkpoint, save_checkpoint
from debias_diffusion.training.loop import train
from debias_diffusion.training.optimizer import Optimizer

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
    for weight in (-1.0, float("nan"), float("inf")):
        refused("keep_states is .*, but must be a number, at least 0", keep_states=weight)
    with pytest.raises(UserError, match="There is no Python file '/.*absent.py' to import. Give the file that adds"):
        config(("m", "d", "i"), "o", import_file="absent.py")
    with pytest.raises(UserError, match="short_weight is an option of its own: give --short-weight"):
        config(("m", "d", "i"), "o", recipe="predicting", method={"short_weight": 0.5})
    assert find_method("predicting", {"alpha": 1}).alpha == 1
    assert all(isinstance(method, Method) for method in METHODS.values())


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
    return tokenize_text(backbone.tokenizer.cleaning(text), backbone.tokenizer.tokenizer)[0]


def stretched(**changes):
    backbone = tiny_clip()
    backbone.stretch(**changes)
    return backbone


TOKENIZER = CaptionTokenizer(tiny_tokenizer(248), 248)


@pytest.mark.parametrize("text", ["A red cat.", LONG, caption(1)])
def test_the_teacher_reads_as_the_pipeline_does_with_the_base_model(text):
    base, backbone = tiny_clip(), stretched()
    tokens = tokens_of(backbone, text)
    assert (len(tokens.ids) > 150) == (text == LONG)
    sot, states = Teacher(backbone)([tokens], backbone.tokenizer)
    read = pipeline_states(base, text)
    torch.testing.assert_close(torch.cat([sot, states]), read[: 1 + len(tokens.ids)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("text", ["A red cat.", LONG])
def test_the_trained_tower_is_compared_on_what_a_pipeline_feeds_the_unet(text):
    """The formula, written out on the states of both pipelines."""
    base, backbone, teacher = tiny_clip(), stretched(), Teacher(stretched())
    everyday(backbone.model)
    tokens = tokens_of(backbone, text)
    error = state_errors(backbone.text, teacher, [tokens], backbone.tokenizer).item()
    end = 1 + len(tokens.ids)
    student, expected = pipeline_states(backbone, text)[:end], pipeline_states(base, text)[:end]
    variance = expected[1:].var(0, correction=0).mean()
    assert error == pytest.approx(((student - expected).square().mean() / variance).item(), rel=1e-4)
    assert error > 0.01


def test_texts_of_one_batch_do_not_change_each_other():
    backbone = stretched()
    everyday(backbone.model)
    teacher, texts = Teacher(stretched()), [tokens_of(backbone, text) for text in (LONG, "A red cat.", caption(2))]
    together = state_errors(backbone.text, teacher, texts, backbone.tokenizer)
    apart = [state_errors(backbone.text, teacher, [text], backbone.tokenizer) for text in texts]
    torch.testing.assert_close(together, torch.cat(apart))


def test_without_training_nothing_is_lost_where_positions_are_kept():
    backbone = stretched(keep=70)
    teacher, texts = Teacher(backbone), [tokens_of(backbone, text) for text in ("A red cat.", LONG[:310])]
    assert 80 < len(texts[1].ids) < 96
    short, long = state_errors(backbone.text, teacher, texts, backbone.tokenizer)
    assert short.item() == pytest.approx(0, abs=1e-9)
    assert long > 0.01  # a second chunk stands at other positions than in the base model


def test_texts_from_the_shortest_to_those_that_fill_the_context():
    backbone = stretched()
    everyday(backbone.model)
    whole = tokens_of(backbone, LONG * 2)
    texts = [Tokens(*(column[:length] for column in whole)) for length in (246, 245, 75, 2)]
    errors = state_errors(backbone.text, Teacher(stretched()), texts, backbone.tokenizer)
    assert errors.isfinite().all() and (errors > 0).all()


@pytest.mark.parametrize("keep, factor", [(20, 4), (0, 4), (10, 3), (75, 1)])
def test_the_teacher_has_the_positions_of_before_the_stretching(keep, factor):
    base = tiny_clip()
    backbone = stretched(keep=keep, factor=factor)
    assert torch.equal(Teacher(backbone).positional_embedding, base.model.positional_embedding)
    assert tiny_clip().unstretched_rows == list(range(77))


@settings(max_examples=100, deadline=None)
@given(sentences=st.lists(st.text("abc .,!?é'\"", max_size=60), max_size=30), sample=st.integers(0, 99))
def test_draws_are_texts_that_both_encoders_can_read(sentences, sample):
    tokenizer, term = TOKENIZER, KeepStates(1.0)
    text = ". ".join(sentences)
    image = torch.zeros(3, 1, 1)
    (drawn,) = term.views(image, text, tokenizer, 0, 0, str(sample)).values()
    assert torch.equal(drawn, *term.views(image, text, tokenizer, 0, 0, str(sample)).values())
    assert drawn.shape == (2, 246)
    ids, cuts = drawn[:, drawn[0] >= 0]
    assert torch.equal(drawn[0, : len(ids)], ids)
    assert (drawn[:, len(ids) :] == -1).all()
    assert set(cuts.tolist()) <= set(Cut)
    whole = tokenize_text(tokenizer.cleaning(text), tokenizer.tokenizer)[0].ids
    assert (len(ids) != 1 and len(ids) <= TRAINED_POSITIONS - 2) or ids.tolist() == whole[:246]


def test_a_quarter_of_the_samples_and_of_these_a_third_in_part():
    tokenizer, term = TOKENIZER, KeepStates(1.0)
    whole, _ = tokenize_text(tokenizer.cleaning(LONG), tokenizer.tokenizer)
    drawn = [term.views(torch.zeros(3, 1, 1), LONG, tokenizer, 7, 0, str(n))["state_tokens"][0] for n in range(2000)]
    rows = [row[row >= 0].tolist() for row in drawn]
    rows = [row for row in rows if row]
    parts = [row for row in rows if row != whole.ids]
    assert len(rows) == pytest.approx(2000 * SHARE, abs=80) and len(parts) == pytest.approx(len(rows) / 3, abs=40)
    first = whole.ids[: split_text(whole, 40, overlap=False)[0].kept.stop]
    assert any(row[:8] == first[:8] for row in parts) and any(row[:8] != first[:8] for row in parts)
    assert len({tuple(row) for row in parts}) > 0.9 * len(parts)


def test_a_methods_own_captions_stay_the_same():
    kept, plain = find_method("debias-clip", {"keep_states": 1.0}), find_method("debias-clip")
    arguments = caption(3), TOKENIZER, 0, 1, "x"
    assert kept.captions(*arguments) == plain.captions(*arguments)
    assert find_method("debias-clip", {"keep_states": 0.0}) == plain


def test_training_brings_the_states_back_in_chunks_too(world, tmp_path):
    world, errors = (world[0], *make_tiny_data(tmp_path, count=40)), {}
    settings = dict(batch=16, validation=0, learning_rate=3e-3, weight_decay=1e-2, epochs=99, checkpoint_every=30)
    for name, more in {
        "without": dict(keep_states=0.0, max_steps=2),
        "kept": dict(keep_states=20.0, max_steps=30),
        "in chunks": dict(keep_states=20.0, max_steps=3, chunk=3),
    }.items():
        train(config(world, tmp_path / name, **settings, **more))
        errors[name] = [line["state_error"] for line in log(tmp_path / name) if "state_error" in line]
    assert not errors["without"] and len(errors["kept"]) == 30
    assert sum(errors["kept"][-5:]) < 0.7 * sum(errors["kept"][:5])
    assert errors["in chunks"] == pytest.approx(errors["kept"][:3], rel=1e-4)


def test_checkpoints_hold_what_a_method_trains_and_its_buffers_but_not_the_teacher(tmp_path):
    def parts(seed):
        backbone, method = stretched(), torch.nn.BatchNorm1d(3)
        torch.manual_seed(seed)
        for tensor in method.state_dict().values():
            tensor.copy_(torch.randint(1, 9, tensor.shape))
        modules = MethodAndTerms(method, [Teacher(backbone)])
        return backbone.model, Optimizer(backbone, 0.0, (0.9, 0.999), 1e-8, modules=modules), modules

    model, optimizer, modules = parts(0)
    sum(parameter.sum() for parameter in (*model.parameters(), *modules.method.parameters())).backward()
    optimizer.step(1e-3)
    again, other_optimizer, others = parts(1)
    others.terms[0].positional_embedding.data.fill_(7.0)
    with Job.open(tmp_path, "train") as job:
        save_checkpoint(job, model, optimizer, TrainState(step=1), 1, modules)
        load_checkpoint(job, again, other_optimizer, others)
    content = checkpoint(tmp_path, 1)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert content["modules"].keys() == {f"method.{name}" for name in names}
    trained = [*model.parameters(), *modules.method.parameters()]
    assert len(content["optimizer"]["adamw"]["state"]) == len(trained)  # none of the teacher
    for name, tensor in modules.method.state_dict().items():
        assert torch.equal(others.method.state_dict()[name], tensor)
    assert (others.terms[0].positional_embedding == 7.0).all()


def test_a_tower_that_no_unet_reads_is_refused():
    with pytest.raises(UserError, match="keep_states is 2, but no UNet of SDXL reads the text tower of a SigLIP"):
        KeepStates(2.0).check_base(tiny_siglip(), 20, False)


def test_every_recipe_takes_the_term():
    for name, method in METHODS.items():
        kept = find_method(name, {"keep_states": 3.0})
        assert kept == replace(method, terms=(KeepStates(3.0),))
        assert kept.describe_all() == f"{method.describe()}; hidden states kept with weight 3"
        assert not find_method(name, {"keep_states": 0.0}).terms
