import contextlib

import pytest
import torch
from helpers.literal import literal_text
from helpers.same_steps import gradients
from helpers.text_batches import BEGINNINGS, MANY, batch_of, text_tower
from helpers.text_encoders import open_clip_states
from helpers.tiny_clip import tiny_siglip
from helpers.vocabulary import EOS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from debias_diffusion.clip.packing import Layout, arranged
from debias_diffusion.clip.text_tower import POOLINGS
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError


@contextlib.contextmanager
def pooled(backbone, pooling):
    backbone.pooling = pooling
    try:
        yield
    finally:
        backbone.pooling = "eot"


def assert_same_values_and_gradients(backbone, tokens, direction):
    fast, plain = backbone.encode_text(tokens), literal_text(backbone, tokens)
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-9)
    fast_gradients, plain_gradients = (gradients(backbone, (side * direction).sum()) for side in (fast, plain))
    torch.testing.assert_close(fast_gradients, plain_gradients, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 147), st.floats(0, 1)), min_size=1, max_size=40),
    st.sampled_from(BEGINNINGS),
    st.sampled_from(POOLINGS),
    st.integers(0, 2**31),
)
@example([(5, 0.0), (0, 0.0)], "pads, SOT, text", "eot", 0)  # nothing is shared
@example([(5, 0.01), (3, 0.0), (9, 1.0)], "pads, text", "average", 0)
@example(MANY, "SOT, pads, text", "average", 0)
@example(MANY, "pads, SOT, text", "eot", 0)
@settings(max_examples=10)
def test_text_tower_equals_the_padded_rows_in_value_and_gradient(captions, beginning, pooling, seed):
    backbone = text_tower()
    tokens = batch_of(captions, beginning, seed)
    direction = torch.randn(len(captions), 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with pooled(backbone, pooling):
        assert_same_values_and_gradients(backbone, tokens, direction)


@pytest.mark.parametrize("is_ragged", [True, False])
def test_a_layout_made_beforehand_is_taken_by_the_whole_batch_alone(is_ragged, monkeypatch):
    backbone, tokens = text_tower(), batch_of(MANY, "SOT, pads, text", 0)
    expected, of_some = backbone.encode_text(tokens), backbone.encode_text(tokens.select([2, 0]))
    tokens = arranged(tokens, is_ragged).to("cpu")
    made = {"ragged", "ragged_last"} if is_ragged else set()
    assert {"ragged", "ragged_last", "groups"} & vars(tokens.layout).keys() == made
    assert torch.equal(backbone.encode_text(tokens.select([2, 0])), of_some)
    monkeypatch.delattr(Layout, "__init__")
    assert torch.equal(backbone.encode_text(tokens), expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_tower_without_a_mask_is_read_likewise(pooling):
    backbone = tiny_siglip().double()
    tokens = backbone.tokenizer.batch(backbone.tokenizer.text_ids(["the cat", "", "a thing " * 40]), [5, 0, 0])
    direction = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pooled(backbone, pooling):
        assert_same_values_and_gradients(backbone, tokens, direction)
        _, states = backbone.text.encode(tokens, blocks=[1, 0, -1])
    (_, *rows), _ = open_clip_states(backbone.model, tokens.padded())
    last_slots = torch.stack([rows[block][:, -1] for block in (1, 0, 1)], dim=1)
    torch.testing.assert_close(states, last_slots, rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="no causal mask"):
        backbone.text.penultimate_states(tokens, 0)


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_states_of_eot_after_each_block_equal_the_padded_rows(beginning, pooling):
    backbone = text_tower()
    tokens = batch_of(MANY, beginning, 0)
    (_, *blocks), _ = open_clip_states(backbone.model, tokens.padded())
    eot = torch.arange(len(tokens)), tokens.n_prefix + tokens.lengths - 1
    expected = torch.stack([blocks[block][eot] for block in (2, 0, 2)], dim=1)
    expected_gradients = gradients(backbone, expected.square().sum())
    with pooled(backbone, pooling):
        features, states = backbone.text.encode(tokens, blocks=[-1, 0, 2])
        assert torch.equal(features, backbone.encode_text(tokens))
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradients(backbone, states.square().sum()), expected_gradients, rtol=1e-9, atol=1e-9)
    with pytest.raises(UserError, match="no block 3"):
        backbone.text.encode(tokens, blocks=[3])


@pytest.mark.parametrize("pad", [0, EOS])
def test_penultimate_states_equal_those_of_the_exported_encoder(pad):
    backbone = text_tower()
    encoder, tokenizer = to_transformers(backbone)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    captions = ["a cat", "", "two dogs on a mat " * 40]
    tokens = backbone.tokenize(captions)
    rows = tokenizer(captions, padding="max_length", max_length=149, truncation=True, return_tensors="pt").input_ids
    assert rows[0, -1] == pad
    expected = encoder(rows, output_hidden_states=True).hidden_states[-2]
    states = backbone.text.penultimate_states(tokens, pad)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
    expected.square().sum().backward()
    (theirs,) = (weight.grad for name, weight in encoder.named_parameters() if "position_embedding" in name)
    ours = gradients(backbone, states.square().sum())["positional_embedding"]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
