"""The arithmetic of benchmarks/studies/reading.py, and that each of its changes takes effect."""

import importlib
from itertools import product
from pathlib import Path

import pytest
import torch

PROMPT = "In the top left there is a small red star."


@pytest.fixture(scope="module")
def policies():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("studies.reading")


def test_objects_are_selected_by_the_sentence_that_mentions_them_first(policies):
    right, mentions = [{"top": True, "left": False}, {"right": True}], [{"top": 3, "left": 4}, {"right": 5}]
    assert policies.mentioned_in(right, mentions, lambda number: number < 4) == [{"top": True}, {}]
    assert policies.mentioned_in(right, mentions, lambda number: number >= 4) == [{"left": False}, {"right": True}]


def test_images_of_one_prompt_count_as_one_sample(policies):
    a, b = [{"top": True}, {"left": False}], [{"top": False}, {"left": True}]
    joined = policies.joined({"a": a, "b": b})
    assert joined == [{("a", "top"): True, ("b", "top"): False}, {("a", "left"): False, ("b", "left"): True}]
    # One encoder gains in an image what the other loses there: as one sample, the difference is zero without doubt.
    numbers = policies.compare(joined, policies.joined({"a": b, "b": a}))
    assert numbers == {"objects": 4, "right": 50, "difference": 0, "low": 0, "high": 0}


def test_a_difference_is_in_points(policies):
    default = [{"top": False, "left": True}] * 10
    numbers = policies.compare([{"top": True, "left": True}] * 10, default)
    assert numbers == {"objects": 20, "right": 100, "difference": 50, "low": 50, "high": 50}


def test_every_change_meets_every_first_encoder_in_the_table(policies):
    def cell(right):
        return {"long": {"right": [{"top": right, "left": False}]}, "short": {"right": [{"top": right}]}}

    names = product(policies.CHANGES, policies.FIRST)
    cells = {(change, first): cell(right=change != "both padded with 0") for change, first in names}
    rows = policies.compare_all(cells, [{"top": 1, "left": 4}])
    assert len(rows) == len(policies.CHANGES) * (1 + len(policies.FIRST))
    by_name = {(row["change"], row["first"]): row for row in rows}
    worse = by_name["both padded with 0", "all three"]
    assert worse["all"] == {"objects": 6, "right": 0, "difference": -50, "low": -50, "high": -50}
    assert worse["2 to 4"]["difference"] == worse["short"]["difference"] == -100 and worse["later"]["difference"] == 0
    lines = policies.as_table(rows).markdown().splitlines()
    worse = "| both padded with 0 | clip | 0.0: -50.0 (-50.0 to -50.0) | 0.0: -100.0 (-100.0 to -100.0) |"
    assert any(line.startswith(worse) for line in lines)
    assert f"| {policies.DEFAULT} | clip | 50.0 | 100.0 | 0.0 | 100.0 |" in lines


@torch.inference_mode()
def states(pipe, layer):
    """Hidden states of both encoders for a prompt of one chunk, of the layer that `layer` picks from an output."""
    parts = []
    for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        ids = tokenizer(PROMPT, padding="max_length", max_length=77, return_tensors="pt").input_ids
        parts.append(layer(encoder(ids, output_hidden_states=True)))
    return torch.cat(parts, dim=-1)


@torch.inference_mode()
def embeds(pipe):
    return pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[0]


def test_layers_and_pads_are_those_named(policies):
    default, last, first_only, padded = (
        policies.make_pipeline(policies.Policy("clip", **change), None)
        for change in ({}, {"last": policies.BOTH}, {"last": policies.BOTH[:1]}, {"pads": ("0", "EOT")})
    )
    penultimate, final = states(default, lambda o: o.hidden_states[-2]), states(default, lambda o: o.last_hidden_state)
    assert torch.equal(embeds(default), penultimate) and not torch.equal(penultimate, final)
    assert torch.equal(embeds(last), final)
    width = default.text_encoder.config.hidden_size
    assert torch.equal(embeds(first_only), torch.cat([final[..., :width], penultimate[..., width:]], dim=-1))
    eot = default.tokenizer.eos_token_id
    assert (default.tokenizer.pad_token_id, default.tokenizer_2.pad_token_id) == (eot, 0)
    assert (padded.tokenizer.pad_token_id, padded.tokenizer_2.pad_token_id) == (0, eot)
    assert torch.equal(embeds(padded), states(padded, lambda o: o.hidden_states[-2]))


def test_the_second_encoder_is_the_one_named(policies):
    stretched = policies.make_pipeline(policies.Policy("clip", second="stretched"), None)
    assert stretched.text_encoder_2.config.max_position_embeddings == stretched.tokenizer_2.model_max_length == 248
    assert stretched.tokenizer_2.pad_token_id == 0
    trained = policies.make_pipeline(policies.Policy("long-clip", second="trained"), stretched.text_encoder_2)
    assert trained.text_encoder_2 is stretched.text_encoder_2
    assert trained.text_encoder.config.max_position_embeddings == 248
    long = "In the top left there is a small red star. " * 9
    assert trained.prompt_layout(long).chunks == (1, 1)
    assert policies.make_pipeline(policies.Policy("clip"), None).prompt_layout(long).chunks == (2, 2)
