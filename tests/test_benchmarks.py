"""benchmarks/: what all share, the arithmetic of the studies, and the studies that are settings of `reproduce`."""

import importlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.small_papers import STUDIES

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.app.reproduce.papers import read_tables
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.eval.images.drift import Moments, Reader
from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering import ImagePrompt, Sampling, encode
from debias_diffusion.toyworld.grammar import caption

CPU = torch.device("cpu")
PROMPT = "In the top left there is a small red star."
TRAININGS = {"toy": 6, "toy-test": 4, "toy-test-twice": 2, "fix-clip": 15}  # of each world's studies


def module(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def harness():
    return module("harness")


@pytest.fixture(scope="module")
def states():
    return module("studies.states")


@pytest.fixture(scope="module")
def reading():
    return module("studies.reading")


def test_options_have_the_types_of_their_defaults(harness, monkeypatch):
    words = "x --short-prompts 3 --rates 1 2 --seeds 7 --precision bf16 --more --peer a --output b"
    monkeypatch.setattr("sys.argv", words.split())
    defaults = dict(rates=[0.5], seeds=[], precision=("fp32", "bf16"), more=False, peer=None, output=Path("runs"))
    options = vars(harness.read_options("", short_prompts=1, **defaults))
    assert options.pop("output") == Path("b") and options.pop("rates") == [1.0, 2.0]
    assert options == {"short_prompts": 3, "seeds": [7], "precision": "bf16", "more": True, "peer": "a"}
    monkeypatch.setattr("sys.argv", ["x"])
    assert vars(harness.read_options("", **defaults)) == defaults | {"precision": "fp32"}


def test_variants_take_turns_and_the_first_round_does_not_count(harness):
    order = []
    measured = harness.by_turns(lambda number: {"a": number, "b": -number}, 2, lambda run: order.append(run) or run)
    assert order == [0, 0, 1, -1, 2, -2] and measured == {"a": [1, 2], "b": [-1, -2]}


def test_results_are_printed_and_written_beside_the_machine(harness, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    harness.publish("small", {"rows": [1]}, "A title", Table(["x", "y"], [["z", 1.0]]))
    written = json.loads((tmp_path / "results" / "small.json").read_text())
    assert list(written) == ["machine", "versions", "rows"] and written["rows"] == [1]
    text = (tmp_path / "results" / "small.md").read_text()
    assert text == "A title\n\n| x | y |\n| --- | --: |\n| z | 1.00 |\n" and text in capsys.readouterr().out


@pytest.mark.parametrize("world", TRAININGS)
def test_every_study_has_settings_that_can_be_used(world, tmp_path, capsys):
    module("studies.fix_clip")  # has a kind of evaluation
    worlds = {name: "fix-clip" for name in read_tables(STUDIES) if name.startswith("fix-clip")}
    worlds |= {name: "toy" for name in read_tables(STUDIES) if name.startswith(("trade-off", "ablation"))}
    tables = [name for name in read_tables(STUDIES) if worlds.get(name, "toy-test") == world]
    for made in ("model", *(f"heads-{name}" for name in ("clip", "long-clip", "debias-clip"))):  # by scripts, in --root
        (tmp_path / made).mkdir()
        (tmp_path / made / "open_clip_config.json").write_text("{}")
    given = {"papers": str(STUDIES), "output": str(tmp_path / "new"), "root": str(tmp_path), "plan": True}
    reproduce(ReproduceConfig(tables or ["longer-training"], world=world, **given))
    assert f"to do: {TRAININGS[world]} trainings" in capsys.readouterr().out


# ---- states


def random_states(states):
    """Six positions: SOT, three words, EOT, a pad; the encoder's are the original's, moved by one shift."""
    random = torch.Generator().manual_seed(0)
    original, shift = torch.randn(6, 8, generator=random), torch.randn(8, generator=random)
    drifted, moments = original.clone(), Moments(8)
    drifted[1:] += shift
    moments.add(drifted[1:], original[1:], 1.0)
    return states.States(drifted, original, eot=4, moments=moments)


def test_words_and_pads_are_exchanged_and_a_shift_is_undone(states):
    of_prompt = random_states(states)
    words, pads = of_prompt.original_words(), of_prompt.original_pads()
    for position in range(6):
        of_words = of_prompt.original if 1 <= position < 4 else of_prompt.drifted
        of_pads = of_prompt.original if position >= 4 else of_prompt.drifted
        assert torch.equal(words[position], of_words[position]) and torch.equal(pads[position], of_pads[position])
    torch.testing.assert_close(of_prompt.less_shift(), of_prompt.original, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_prompt.shifted_original(), of_prompt.drifted, rtol=0, atol=1e-5)


def test_a_fitted_linear_map_brings_mapped_states_back(states):
    random = torch.Generator().manual_seed(1)
    original, rotation = torch.randn(200, 8, generator=random), torch.linalg.qr(torch.randn(8, 8, generator=random)).Q
    drifted, moments = original @ rotation + 3, Moments(8)
    moments.add(drifted[1:], original[1:], 1.0)
    mapped = states.States(drifted, original, eot=190, moments=moments).less_linear_map()
    assert torch.equal(mapped[0], drifted[0])
    torch.testing.assert_close(mapped[1:], original[1:], rtol=0, atol=0.02)


def test_unchanged_states_are_those_that_the_pipeline_reads(states):
    texts, sampling = [caption("development", index).text for index in range(2)], Sampling(1, 3.0)
    prompts, name = [ImagePrompt(text) for text in texts], "toy/debias-clip"
    base, drifted = (encode(load_pipeline(states.BASE, encoder, CPU), prompts, sampling) for encoder in (None, name))
    reader = Reader.load(EncoderSpec.parse(name), CPU)
    changed = states.changed(base["prompt_embeds"], texts, reader, Moments(128), states.States.unchanged)
    torch.testing.assert_close(changed, drifted["prompt_embeds"], rtol=0, atol=1e-5)
    assert not torch.allclose(changed, base["prompt_embeds"], atol=0.1)


# ---- reading


def test_images_of_one_prompt_count_as_one_sample(reading):
    right, mentions = [{"top": True, "left": False}, {"right": True}], [{"top": 3, "left": 4}, {"right": 5}]
    assert reading.mentioned_in(right, mentions, lambda number: number < 4) == [{"top": True}, {}]
    a, b = [{"top": True}, {"left": False}], [{"top": False}, {"left": True}]
    joined = reading.joined({"a": a, "b": b})
    assert joined == [{("a", "top"): True, ("b", "top"): False}, {("a", "left"): False, ("b", "left"): True}]
    # One encoder gains in an image what the other loses there: as one sample, the difference is zero without doubt.
    numbers = reading.compare(joined, reading.joined({"a": b, "b": a}))
    assert numbers == {"objects": 4, "right": 50, "difference": 0, "low": 0, "high": 0}


def test_every_change_meets_every_first_encoder_in_the_table(reading):
    def cell(right):
        return {"long": {"right": 2 * [{"top": right, "left": False}]}, "short": {"right": 2 * [{"top": right}]}}

    names = product(reading.CHANGES, reading.FIRST)
    cells = {(change, first): cell(right=change != "both padded with 0") for change, first in names}
    rows = reading.compare_all(cells, 2 * [{"top": 1, "left": 4}])
    assert len(rows) == len(reading.CHANGES) * (1 + len(reading.FIRST))
    worse = {(row["change"], row["first"]): row for row in rows}["both padded with 0", "all three"]
    assert worse["all"] == {"objects": 12, "right": 0, "difference": -50, "low": -50, "high": -50}
    assert worse["2 to 4"]["difference"] == worse["short"]["difference"] == -100 and worse["later"]["difference"] == 0
    lines = reading.as_table(rows).markdown().splitlines()
    worse = "| both padded with 0 | clip | 0.0: -50.0 (-50.0 to -50.0) | 0.0: -100.0 (-100.0 to -100.0) |"
    assert any(line.startswith(worse) for line in lines)
    assert f"| {reading.DEFAULT} | clip | 50.0 | 100.0 | 0.0 | 100.0 |" in lines


@torch.inference_mode()
def test_layers_pads_and_second_encoders_are_those_named(reading):
    def embeds(pipe):
        return pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[0]

    def literal(pipe, layer):
        """Hidden states of both encoders for a prompt of one chunk, of the layer that `layer` picks."""
        parts = []
        for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
            ids = tokenizer(PROMPT, padding="max_length", max_length=77, return_tensors="pt").input_ids
            parts.append(layer(encoder(ids, output_hidden_states=True)))
        return torch.cat(parts, dim=-1)

    default, last, first_only, padded, stretched = (
        reading.make_pipeline(reading.Policy("clip", **change), None)
        for change in (
            *({}, {"last": reading.BOTH}, {"last": reading.BOTH[:1]}),
            *({"pads": ("0", "EOT")}, {"second": "stretched"}),
        )
    )
    final = literal(default, lambda output: output.last_hidden_state)
    penultimate = literal(default, lambda output: output.hidden_states[-2])
    assert torch.equal(embeds(default), penultimate) and not torch.equal(penultimate, final)
    assert torch.equal(embeds(last), final)
    width = default.text_encoder.config.hidden_size
    assert torch.equal(embeds(first_only), torch.cat([final[..., :width], penultimate[..., width:]], dim=-1))
    eot = default.tokenizer.eos_token_id
    assert (default.tokenizer.pad_token_id, default.tokenizer_2.pad_token_id) == (eot, 0)
    assert (padded.tokenizer.pad_token_id, padded.tokenizer_2.pad_token_id) == (0, eot)
    assert torch.equal(embeds(padded), literal(padded, lambda output: output.hidden_states[-2]))
    assert stretched.text_encoder_2.config.max_position_embeddings == stretched.tokenizer_2.model_max_length == 248
    assert stretched.tokenizer_2.pad_token_id == 0
    long = "In the top left there is a small red star. " * 9
    trained = reading.make_pipeline(reading.Policy("long-clip", second="trained"), stretched.text_encoder_2)
    assert trained.text_encoder_2 is stretched.text_encoder_2 and trained.prompt_layout(long).chunks == (1, 1)
    assert default.prompt_layout(long).chunks == (2, 2)
