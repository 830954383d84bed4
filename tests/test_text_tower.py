import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_clip import tiny_clip

from debias_diffusion.tokens import CaptionTokenizer, Markers

BACKBONE = tiny_clip().double()
BACKBONE.stretch(keep=5, factor=2)
WITHOUT_SOT = CaptionTokenizer(BACKBONE.tokenizer.tokenizer, 149, Markers(sot=None, eot=49407, pad=7))
# How rows begin: what all captions share, and what not.
BEGINNINGS = ["SOT, pads, text", "pads, SOT, text", "pads, text"]


def batch_of(captions, beginning, seed):
    """Captions of random ids, given as (text tokens, share of the room that pads in front take)."""
    tokenizer = WITHOUT_SOT if beginning == "pads, text" else BACKBONE.tokenizer
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 49406, (length,), generator=generator).tolist() for length, _ in captions]
    n_pre = [int(share * tokenizer.n_post(row)) for row, (_, share) in zip(ids, captions, strict=True)]
    return tokenizer.batch(ids, n_pre, pads_before_sot=beginning == "pads, SOT, text")


def gradients(backbone, loss):
    backbone.zero_grad()
    loss.backward()
    text = {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}
    assert text
    return text


@given(
    st.lists(st.tuples(st.integers(0, 147), st.floats(0, 1)), min_size=1, max_size=40),
    st.sampled_from(BEGINNINGS),
    st.integers(0, 2**31),
)
@example([(5, 0.0), (0, 0.0)], "pads, SOT, text", 0)  # nothing is shared
@example([(5, 0.01), (3, 0.0), (9, 1.0)], "pads, text", 0)
@settings(max_examples=25)
def test_text_tower_equals_the_padded_rows_in_value_and_gradient(captions, beginning, seed):
    tokens = batch_of(captions, beginning, seed)
    assert BACKBONE.context_length == 149
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(len(captions), 24, generator=generator, dtype=torch.float64)

    fast = BACKBONE.encode_text(tokens)
    fast_gradients = gradients(BACKBONE, (fast * direction).sum())
    plain = BACKBONE.model.encode_text(tokens.padded())
    plain_gradients = gradients(BACKBONE, (plain * direction).sum())

    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-9)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_nothing_that_is_not_needed_is_computed():
    seen = []
    hooks = [
        block.mlp.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
        for block in BACKBONE.model.transformer.resblocks
    ]
    ids = BACKBONE.tokenizer.text_ids(["a cat", "a dog on a mat", "birds"])
    BACKBONE.encode_text(BACKBONE.tokenizer.batch(ids, [10, 0, 4]))
    for hook in hooks:
        hook.remove()
    # SOT and the longest prefix once, then each caption's text and EOT; of the last block EOT alone
    tokens = 11 + sum(len(row) + 1 for row in ids)
    assert seen == [(tokens, 32), (tokens, 32), (3, 32)]
