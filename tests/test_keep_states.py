"""The term that keeps the states a UNet reads: against the pipelines' own states, closed forms, and what is drawn."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from helpers.tiny_data import caption, make_tiny_data
from helpers.tiny_sdxl import assemble
from helpers.training_runs import checkpoint, config, is_the_same_run, killed_copy, log, losses
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.chunks import TRAINED_POSITIONS, Cut, Tokens, split_text, tokenize_text
from debias_diffusion.errors import UserError
from debias_diffusion.interchange.text_encoders import to_transformers
from debias_diffusion.jobs import Job
from debias_diffusion.methods import METHODS, find_method
from debias_diffusion.methods.base import MethodAndTerms
from debias_diffusion.methods.keep_states import SHARE, KeepStates, Teacher, state_errors
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.tokens import CaptionTokenizer
from debias_diffusion.training.checkpoints import TrainState, load_checkpoint, save_checkpoint
from debias_diffusion.training.loop import train
from debias_diffusion.training.optimizer import Optimizer

LONG = "A street at night, seen from above. " + " ".join(f"House number {n} is not red." for n in range(1, 24))


def pipeline_states(backbone, text: str) -> torch.Tensor:
    """What the first encoder of a long-prompt pipeline gives the UNet, in chunks that overlap, [positions, width]."""
    encoder, tokenizer = to_transformers(backbone)
    pipe = assemble(StableDiffusionXLLongPromptPipeline, tiny_sdxl.sdxl_parts())
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


# ---- what is compared


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


# ---- what is drawn


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


# ---- training


def test_training_brings_the_states_back(world, tmp_path):
    data = make_tiny_data(tmp_path, count=40)
    errors = {}
    for weight, steps in ((0.0, 2), (20.0, 30)):
        output = tmp_path / f"run-{weight}"
        settings = dict(batch=16, validation=0, learning_rate=3e-3, weight_decay=1e-2, epochs=99, max_steps=steps)
        train(config((world[0], *data), output, keep_states=weight, checkpoint_every=30, **settings))
        errors[weight] = [line["state_error"] for line in log(output) if "state_error" in line]
    assert not errors[0.0] and len(errors[20.0]) == 30
    assert sum(errors[20.0][-5:]) < 0.7 * sum(errors[20.0][:5])


def test_a_killed_run_resumes_bit_identically_and_chunks_change_nothing(world, tmp_path):
    settings = dict(max_steps=6, keep_states=5.0)
    train(config(world, tmp_path / "whole", **settings))
    run = killed_copy(tmp_path / "whole", tmp_path / "run", step=6)
    train(config(world, run, **settings))
    is_the_same_run(run, tmp_path / "whole")
    assert not checkpoint(run, 6)["modules"]  # the teacher is made anew
    train(config(world, tmp_path / "chunks", chunk=3, **settings))
    assert losses(tmp_path / "chunks") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert load_backbone(str(run / "last")).context_length == 248
    with pytest.raises(UserError, match="keep_states: 5.0 there, None here"):
        train(config(world, run, max_steps=6))


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


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be_used_are_refused(weight):
    with pytest.raises(UserError, match="keep_states is .*, but must be a number, at least 0"):
        find_method("debias-clip", {"keep_states": weight})


def test_a_tower_that_no_unet_reads_is_refused():
    with pytest.raises(UserError, match="keep_states is 2, but no UNet of SDXL reads the text tower of a SigLIP"):
        KeepStates(2.0).check_base(tiny_siglip(), 20, False)


def test_every_recipe_takes_the_term():
    for name, method in METHODS.items():
        kept = find_method(name, {"keep_states": 3.0})
        assert kept == replace(method, terms=(KeepStates(3.0),))
        assert kept.describe_all() == f"{method.describe()}; hidden states kept with weight 3"
        assert not find_method(name, {"keep_states": 0.0}).terms
