"""A stretched encoder is an ordinary one, shares its weights, and leaves the one it came from alone."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.tiny_sdxl import text_encoder, text_encoder_2
from helpers.vocabulary import tiny_tokenizer
from transformers import CLIPTextModelWithProjection

from debias_diffusion import stretch_positions
from debias_diffusion.clip.positions import stretched_length
from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.errors import UserError

OLD = torch.tensor([[*range(20), *range(20, 248, 4)]])  # where the 77 old positions are in the new table


@pytest.fixture
def tokenizer():
    return tiny_tokenizer(77, pad_token="!")


@pytest.fixture
def encoder():
    return text_encoder_2()


def outputs(encoder, ids, **arguments):
    with torch.inference_mode():
        found = encoder(ids, output_hidden_states=True, **arguments)
    return [*found.hidden_states, found.last_hidden_state]


def captions(tokenizer):
    texts = ["A cat sits on a mat.", "A red house stands behind two green trees. " * 20]
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids


def table_of(encoder):
    return next(weight for name, weight in encoder.named_parameters() if name.endswith("position_embedding.weight"))


def test_at_the_old_positions_it_is_the_old_encoder_bit_for_bit(encoder, tokenizer):
    stretched, longer = stretch_text_encoder(encoder, tokenizer)
    assert type(stretched) is type(encoder) and stretched.config.max_position_embeddings == 248
    ids = captions(tokenizer)
    for ours, theirs in zip(outputs(stretched, ids, position_ids=OLD), outputs(encoder, ids), strict=True):
        assert torch.equal(ours, theirs)
    assert captions(longer).shape == (2, 248) and torch.isfinite(outputs(stretched, captions(longer))[-1]).all()
    assert torch.equal(table_of(stretched), stretch_positions(table_of(encoder)))


def test_it_shares_all_other_weights_and_leaves_the_original_alone(encoder, tokenizer):
    encoder.to(torch.bfloat16).train()
    before = copy.deepcopy(encoder.state_dict())
    stretched, longer = stretch_text_encoder(encoder, tokenizer)
    assert stretched.training and {weight.dtype for weight in stretched.parameters()} == {torch.bfloat16}
    theirs, ours = dict(encoder.named_parameters()), dict(stretched.named_parameters())
    assert theirs.keys() == ours.keys()
    (apart,) = [weight for name, weight in ours.items() if weight.data_ptr() != theirs[name].data_ptr()]
    assert apart is table_of(stretched) and not any(buffer.is_meta for buffer in stretched.buffers())
    stretched.to(torch.float16)
    assert encoder.config.max_position_embeddings == 77
    torch.testing.assert_close(encoder.state_dict(), before, rtol=0, atol=0)
    assert longer.pad_token == tokenizer.pad_token == "!"
    assert (tokenizer.model_max_length, longer.model_max_length) == (77, 248)


def test_other_lengths_and_added_words_are_kept():
    tokenizer, short = tiny_tokenizer(64), text_encoder(positions=64)
    tokenizer.add_tokens("<toy>")
    short.resize_token_embeddings(len(tokenizer))
    stretched, longer = stretch_text_encoder(short, tokenizer, keep=10, factor=2)
    assert table_of(stretched).shape[0] == stretched.config.max_position_embeddings == longer.model_max_length == 118
    ids = longer("<toy>", return_tensors="pt").input_ids
    assert ids.shape == (1, 3) and torch.equal(outputs(stretched, ids)[-1], outputs(short, ids)[-1])


def test_what_cannot_be_stretched_is_named(tokenizer):
    with torch.device("meta"):
        empty = CLIPTextModelWithProjection(text_encoder().config)
    for encoder, message in (
        (stretch_text_encoder(text_encoder(), tokenizer)[0], "already has 248"),
        (torch.nn.Linear(2, 2), "A Linear"),
        (empty, "no weights yet"),
        (text_encoder().to(torch.float8_e4m3fn), "quantised"),
        (add_hook_to_module(text_encoder(), ModelHook()), "offloaded"),
    ):
        with pytest.raises(UserError, match=message):
            stretch_text_encoder(encoder, tokenizer)


# ---- the table


def literal(table, keep, factor):
    """The definition, row by row, with Long-CLIP's extrapolation at the end."""
    rows = [table[i] for i in range(keep)]
    for j in range((len(table) - keep) * factor):
        old, weight = keep + j // factor, (j % factor) / factor
        if old + 1 < len(table):
            rows.append((1 - weight) * table[old] + weight * table[old + 1])
        else:
            rows.append(table[-1] + weight * (table[-1] - table[-2]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("positions", "keep", "factor", "stretched"),
    [(77, 20, 4, 248), (64, 20, 4, 196), (77, 0, 4, 308), (64, 0, 4, 256), (10, 8, 3, 14), (9, 2, 1, 9)],
)
def test_equals_a_slow_literal_reading(positions, keep, factor, stretched):
    table = torch.randn(positions, 5, dtype=torch.float64)
    out = stretch_positions(table, keep, factor)
    assert len(out) == stretched == stretched_length(positions, keep, factor)
    torch.testing.assert_close(out, literal(table, keep, factor), rtol=0, atol=1e-12)
    assert torch.equal(out[:keep], table[:keep]) and torch.equal(out[keep::factor], table[keep:])
