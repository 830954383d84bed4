"""A method in a file of its own, as docs/extending.md shows, and the term that keeps the states which a UNet reads."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.training_runs import checkpoint, config, log, saved, settings_of
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.app.cli import main
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job
from debias_diffusion.methods import find_method
from debias_diffusion.methods.keep_states import Teacher, state_errors
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.text.chunks import TRAINED_POSITIONS, Cut
from debias_diffusion.text.reading import tokenize_text
from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.training.checkpoints import TrainState, load_checkpoint, save_checkpoint
from debias_diffusion.training.loop import train
from debias_diffusion.training.optimizer import Optimizer


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
    with pytest.raises(UserError, match="import file"):
        train(config(world, finished, **predicting | {"import_file": str(changed)}))


def test_a_methods_settings_are_given_on_the_command_line_and_in_yaml(world, predicting, tmp_path, capsys):
    model, data, images = world
    options = [f"--data={data}", f"--images={images}", f"--model={model}", "--validation=6", "--components=3"]
    options = ["train", *options, "--batch=8", "--max-steps=1", "--workers=0"]
    (tmp_path / "run.yaml").write_text("recipe: predicting\nmethod: {alpha: 0.25}\n")
    for alpha, more in {
        0.75: ["--recipe=predicting", "--import", predicting["import_file"], "--method.alpha", "0.75"],
        0.25: [f"--config={tmp_path / 'run.yaml'}"],
    }.items():
        main([*options, *more, f"--output={tmp_path / str(alpha)}"])
        assert settings_of(tmp_path / str(alpha))["method"] == {"alpha": alpha}
    with pytest.raises(SystemExit):
        main([*options, "--recipe=predicting", "--method.alpa=1", f"--output={tmp_path / 'x'}"])
    assert "The recipe 'predicting' has no setting 'alpa'. Did you mean alpha" in capsys.readouterr().err


REFUSED = [
    ("debias", {}, "Did you mean debias-clip"),
    ("predicting", {"alpha": -1}, "alpha must be above 0"),
    ("predicting", {"alpha": "much"}, "alpha is 'much'"),
    ("debias-clip", {"alpha": 0.5}, "no setting 'alpha'"),
    ("fix-clip", {"groups": 0, "first_group": 1}, "from 1 to --groups, which is 0"),
    ("fix-clip", {"mask_ratio": 1.0}, "mask_ratio is 1.0"),
    ("fix-clip", {"padding": "random"}, "Give --padding none, or --short-positions shared"),
    ("fix-clip", {"short_weight": 0.0}, "need both captions"),
    ("fix-clip", {"prompt_mask": "r2p"}, "must be bands or none"),
    ("fix-clip", {"patches": 3}, "has no setting 'patches'"),
    ("debias-clip", {"keep_states": float("nan")}, "keep_states is "),
]


def test_unknown_methods_settings_and_options_in_the_wrong_place_are_refused(finished):
    def of_run(**settings):
        return lambda: config(("m", "d", "i"), "o", **settings)

    cases = [(partial(find_method, name, changes), message) for name, changes, message in REFUSED]
    cases += [
        (of_run(import_file="absent.py"), "no Python file '/.*absent.py'"),
        (of_run(prompts=4), "'debias-clip' has no setting 'prompts'"),
        (partial(find_method("debias-clip", {"keep_states": 2.0}).check_base, tiny_siglip(), 20, False), "a SigLIP"),
    ]
    for name, option in (("short_weight", "--short-weight"), ("mask_ratio", "--mask-ratio")):
        wrong = of_run(recipe="predicting", method={name: 0.5})
        cases.append((wrong, f"give {option} instead of --method.{name}"))
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
    return tokenize_text(backbone.tokenizer.cleaning(text), backbone.tokenizer.tokenizer)[0]


def stretched(**changes):
    backbone = tiny_clip()
    backbone.stretch(**changes)
    return backbone


TOKENIZER = CaptionTokenizer(tiny_tokenizer(248), 248)
KEEPING = find_method("debias-clip", {"keep_states": 1.0})


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


def draw_states(text, sample, seed=0):
    """[2, 246] ids and cuts, -1 where there is nothing"""
    (drawn,) = KEEPING.views(torch.zeros(3, 1, 1), text, TOKENIZER, seed, 0, str(sample)).values()
    return drawn


@settings(max_examples=100, deadline=None)
@given(sentences=st.lists(st.text("abc .,!?é'\"", max_size=60), max_size=30), sample=st.integers(0, 99))
def test_draws_are_texts_that_both_encoders_can_read(sentences, sample):
    text = ". ".join(sentences)
    drawn = draw_states(text, sample)
    assert drawn.shape == (2, 246) and torch.equal(drawn, draw_states(text, sample))
    ids, cuts = drawn[:, drawn[0] >= 0]
    assert torch.equal(drawn[0, : len(ids)], ids) and (drawn[:, len(ids) :] == -1).all()
    assert set(cuts.tolist()) <= set(Cut)
    whole = tokenize_text(TOKENIZER.cleaning(text), TOKENIZER.tokenizer)[0].ids
    assert (len(ids) != 1 and len(ids) <= TRAINED_POSITIONS - 2) or ids.tolist() == whole[:246]


def test_checkpoints_hold_what_a_method_trains_and_its_buffers_but_not_the_teacher(tmp_path):
    def parts(seed):
        backbone, norm = stretched(), torch.nn.BatchNorm1d(3)
        torch.manual_seed(seed)
        for tensor in norm.state_dict().values():
            tensor.copy_(torch.randint(1, 9, tensor.shape))
        modules = torch.nn.ModuleDict({"norm": norm, "teacher": Teacher(backbone)})
        return backbone.model, Optimizer(backbone, 0.0, (0.9, 0.999), 1e-8, modules=modules), modules

    model, optimizer, modules = parts(0)
    trained = [*model.parameters(), *modules["norm"].parameters()]
    sum(parameter.sum() for parameter in trained).backward()
    optimizer.step(1e-3, dict.fromkeys(("loss", "gradient_norm"), torch.ones(())))
    *again, others = parts(1)
    others["teacher"].positional_embedding.data.fill_(7.0)
    with Job.open(tmp_path, "train") as job:
        save_checkpoint(job, model, optimizer, TrainState(step=1), 1, modules)
        load_checkpoint(job, *again, others)
    content, norm = checkpoint(tmp_path, 1), modules["norm"].state_dict()
    assert content["modules"].keys() == {f"norm.{name}" for name in norm}
    assert len(content["optimizer"]["adamw"]["state"]) == len(trained)  # none of the teacher
    assert all(torch.equal(others["norm"].state_dict()[name], tensor) for name, tensor in norm.items())
    assert (others["teacher"].positional_embedding == 7.0).all()
