import contextlib
import shutil

import pytest
import torch
from helpers.text_batches import BACKBONE, BEGINNINGS, MANY, batch_of
from helpers.text_encoders import open_clip_states
from helpers.tiny_clip import tiny_clip, tiny_siglip
from helpers.vocabulary import EOS
from hypothesis import example, given, settings
from hypothesis import strategies as st

from debias_diffusion.errors import UserError
from debias_diffusion.interchange import to_transformers
from debias_diffusion.models.text_tower import POOLINGS

BACKBONE.stretch(keep=5, factor=2)


@contextlib.contextmanager
def pooled(backbone, pooling):
    backbone.pooling = pooling
    try:
        yield
    finally:
        backbone.pooling = "eot"


def gradients(backbone, loss):
    backbone.zero_grad()
    loss.backward()
    text = {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}
    assert text
    return text


def literal_features(backbone, tokens):
    """open_clip's own forward on literal rows; for average pooling the mean slot by slot."""
    rows = tokens.padded()
    if backbone.pooling == "eot":
        return backbone.model.encode_text(rows)
    tower = getattr(backbone.model, "text", backbone.model)
    states = tower.transformer(tower.token_embedding(rows) + tower.positional_embedding, attn_mask=tower.attn_mask)
    means = []
    for caption, row_states in enumerate(tower.ln_final(states)):
        start = int(tokens.n_prefix[caption])
        counted = [0] if tokens.shared_sot else []
        counted += range(start, start + int(tokens.lengths[caption]))
        means.append(sum(row_states[slot] for slot in counted) / len(counted))
    return backbone.text.project(torch.stack(means))


def assert_same_values_and_gradients(backbone, tokens, direction):
    fast = backbone.encode_text(tokens)
    fast_gradients = gradients(backbone, (fast * direction).sum())
    plain = literal_features(backbone, tokens)
    plain_gradients = gradients(backbone, (plain * direction).sum())
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-9)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@given(
    st.lists(st.tuples(st.integers(0, 147), st.floats(0, 1)), min_size=1, max_size=40),
    st.sampled_from(BEGINNINGS),
    st.sampled_from(POOLINGS),
    st.integers(0, 2**31),
)
@example([(5, 0.0), (0, 0.0)], "pads, SOT, text", "eot", 0)  # nothing is shared
@example([(5, 0.01), (3, 0.0), (9, 1.0)], "pads, text", "average", 0)
@example(MANY, "SOT, pads, text", "eot", 0)
@example(MANY, "SOT, pads, text", "average", 0)
@example(MANY, "pads, SOT, text", "eot", 0)
@example(MANY, "pads, text", "eot", 0)
@settings(max_examples=20)
def test_text_tower_equals_the_padded_rows_in_value_and_gradient(captions, beginning, pooling, seed):
    tokens = batch_of(captions, beginning, seed)
    assert BACKBONE.context_length == 149
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(len(captions), 24, generator=generator, dtype=torch.float64)
    with pooled(BACKBONE, pooling):
        assert_same_values_and_gradients(BACKBONE, tokens, direction)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_tower_without_a_mask_is_pooled_likewise(pooling):
    backbone = tiny_siglip().double()
    tokens = backbone.tokenizer.batch(backbone.tokenizer.text_ids(["the cat", "", "a thing " * 40]), [5, 0, 0])
    direction = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pooled(backbone, pooling):
        assert_same_values_and_gradients(backbone, tokens, direction)


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_states_of_eot_after_each_block_equal_the_padded_rows(beginning, pooling):
    tokens = batch_of(MANY, beginning, 0)
    (_, *blocks), _ = open_clip_states(BACKBONE.model, tokens.padded())
    eot = torch.arange(len(tokens)), tokens.n_prefix + tokens.lengths - 1
    expected = torch.stack([blocks[block][eot] for block in (2, 0, 2)], dim=1)
    expected_gradients = gradients(BACKBONE, expected.square().sum())
    with pooled(BACKBONE, pooling):
        features, states = BACKBONE.text.encode(tokens, blocks=[-1, 0, 2])
        assert torch.equal(features, BACKBONE.encode_text(tokens))
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
    for name, gradient in gradients(BACKBONE, states.square().sum()).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=name)
    assert BACKBONE.text.encode(tokens)[1].shape == (40, 0, 32)
    with pytest.raises(UserError, match="no block 3. Give numbers from 0 to 2"):
        BACKBONE.text.encode(tokens, blocks=[3])


def test_states_of_a_tower_without_a_mask_are_of_its_last_slot():
    backbone = tiny_siglip().double()
    tokens = backbone.tokenizer.batch(backbone.tokenizer.text_ids(["the cat", "", "a thing " * 40]), [5, 0, 0])
    features, states = backbone.text.encode(tokens, blocks=[1, 0, -1])
    (_, *rows), expected = open_clip_states(backbone.model, tokens.padded())
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-12)
    last_slots = torch.stack([rows[block][:, -1] for block in (1, 0, 1)], dim=1)
    torch.testing.assert_close(states, last_slots, rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="has no causal mask, and SDXL's UNet reads"):
        backbone.text.penultimate_states(tokens, 0)


@pytest.mark.parametrize("pad", [0, EOS])
def test_penultimate_states_equal_those_of_the_exported_encoder(pad):
    encoder, tokenizer = to_transformers(BACKBONE)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    captions = ["a cat", "", "two dogs on a mat " * 40]
    tokens = BACKBONE.tokenize(captions)
    rows = tokenizer(captions, padding="max_length", max_length=149, truncation=True, return_tensors="pt").input_ids
    assert rows[0, -1] == pad
    expected = encoder(rows, output_hidden_states=True).hidden_states[-2]
    states = BACKBONE.text.penultimate_states(tokens, pad)
    assert states.shape == (3, 149, 32)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-9)
    table = "embeddings.position_embedding.weight"
    expected.square().sum().backward()
    theirs = next(parameter.grad for name, parameter in encoder.named_parameters() if name.endswith(table))
    ours = gradients(BACKBONE, states.square().sum())["positional_embedding"]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_pads_before_a_text_stay_in_the_penultimate_states():
    tokens = batch_of([(5, 0.1)], "SOT, pads, text", 0)
    states, others = (BACKBONE.text.penultimate_states(tokens, pad) for pad in (0, EOS))
    end = int(tokens.n_prefix) + 6
    torch.testing.assert_close(others[:, :end], states[:, :end], rtol=0, atol=1e-12)
    assert not torch.allclose(others[:, end:], states[:, end:], atol=1e-3)
    torch.testing.assert_close(states, open_clip_states(BACKBONE.model, tokens.padded())[0][-2], rtol=0, atol=1e-12)


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


TINY = {"clip": tiny_clip, "siglip": tiny_siglip}


def pairs_of(backbone, sizes):
    """Batches of random images and captions, every caption but the first with pads in front."""
    side = backbone.model.visual.image_size[0]
    for size in sizes:
        images = torch.randint(0, 256, (4, 3, side, side), dtype=torch.uint8)
        ids = backbone.tokenizer.text_ids(["the cat " * (size + index) for index in range(4)])
        yield images, backbone.tokenizer.batch(ids, [index * size for index in range(4)])


def assert_same_steps(plain, other, sizes, **tolerances):
    """Both give the same features and gradients for batches of captions of `sizes` words and more."""
    for images, tokens in pairs_of(plain, sizes):
        results = []
        for backbone in (plain, other):
            features = torch.cat([backbone.encode_image(images), backbone.encode_text(tokens)])
            results.append((features, gradients(backbone, features.square().sum())))
        (features, expected), (other_features, other_gradients) = results
        torch.testing.assert_close(other_features, features, **tolerances)
        assert other_gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            tolerance = tolerances["rtol"] * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(other_gradients[name], gradient, rtol=0, atol=tolerance, msg=name)
    assert plain.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("family", TINY)
def test_activations_that_are_computed_again_give_the_same_gradients(family):
    plain, other = (TINY[family]().double() for _ in range(2))
    image_block = {"clip": "visual.transformer.resblocks.0", "siglip": "visual.trunk.blocks.0"}[family]
    calls = [0, 0]
    for index, block in enumerate((other.text.tower.transformer.resblocks[0], other.model.get_submodule(image_block))):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    other.checkpoint_activations()
    for pooling in POOLINGS:
        calls[:] = [0, 0]
        with pooled(plain, pooling), pooled(other, pooling):
            assert_same_steps(plain, other, [2], rtol=1e-9, atol=1e-9)
        assert calls == [2, 2]  # in the forward pass, and again in the backward pass
    with torch.no_grad():
        other.encode_text(other.tokenize(["a cat"]))
    assert calls == [3, 2]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_towers_give_the_same(checkpointing):
    plain, other = tiny_clip(), tiny_clip()
    if checkpointing:
        other.checkpoint_activations()
    torch.compiler.reset()
    other.compile(backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]
    assert_same_steps(plain, other, [2], rtol=1e-4, atol=1e-4)
    before = graphs["unique_graphs"]
    assert before > 0
    assert_same_steps(plain, other, [3, 5, 9], rtol=1e-4, atol=1e-4)
    assert graphs["unique_graphs"] == before  # no length is compiled anew


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_compiled_towers_give_the_same_through_the_compiler(family):
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (`c++`) on this machine: what torch.compile builds here goes UNTESTED")
    plain, other = TINY[family](), TINY[family]()
    torch.compiler.reset()
    other.compile()
    assert_same_steps(plain, other, [2, 5], rtol=1e-4, atol=1e-4)
