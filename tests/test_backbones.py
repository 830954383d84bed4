import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_clip import save_tiny_clip, tiny_clip

from debias_diffusion.backbones import load_backbone
from debias_diffusion.errors import UserError

BACKBONE = tiny_clip().double()
BACKBONE.stretch(keep=5, factor=2)


def gradients(backbone, loss):
    backbone.zero_grad()
    loss.backward()
    text = {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}
    assert text
    return text


@given(
    st.lists(st.tuples(st.integers(0, 147), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_text_tower_equals_the_padded_rows_in_value_and_gradient(captions, seed):
    generator = torch.Generator().manual_seed(seed)
    tokenizer = BACKBONE.tokenizer
    assert BACKBONE.context_length == 149
    ids = [torch.randint(1, 49406, (length,), generator=generator).tolist() for length, _ in captions]
    n_pre = [int(share * tokenizer.n_post(row)) for row, (_, share) in zip(ids, captions, strict=True)]
    tokens = tokenizer.batch(ids, n_pre)
    direction = torch.randn(len(ids), 24, generator=generator, dtype=torch.float64)

    fast = BACKBONE.encode_text(tokens)
    fast_gradients = gradients(BACKBONE, (fast * direction).sum())
    plain = BACKBONE.model.encode_text(tokens.padded())
    plain_gradients = gradients(BACKBONE, (plain * direction).sum())

    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-9)
    assert fast_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(fast_gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_nothing_after_eot_is_computed():
    seen = []
    handle = BACKBONE.model.transformer.resblocks[0].mlp.register_forward_hook(lambda m, i, o: seen.append(i[0].shape))
    ids = BACKBONE.tokenizer.text_ids(["a cat", "a dog on a mat", "birds"])
    BACKBONE.encode_text(BACKBONE.tokenizer.batch(ids, [10, 0, 4]))
    handle.remove()
    # SOT and the longest prefix once, then each caption's text and EOT
    assert seen == [(11 + sum(len(row) + 1 for row in ids), 32)]


def test_stretching_leaves_short_captions_as_they_were():
    backbone = tiny_clip()
    tokens = backbone.tokenize(["a cat on a mat"])
    before = backbone.encode_text(tokens)
    backbone.stretch()
    assert backbone.context_length == 248 and backbone.tokenizer.context_length == 248
    assert torch.equal(backbone.encode_text(backbone.tokenize(["a cat on a mat"])), before)
    assert backbone.model.encode_text(backbone.tokenize(["a cat"]).padded()).shape == (1, 24)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_saved_folder_loads_in_open_clip_and_here(tmp_path, quick_gelu):
    backbone = tiny_clip(quick_gelu=quick_gelu)
    backbone.stretch()
    backbone.save(tmp_path)
    tokens = backbone.tokenize(["a caption of a few words. " * 20])
    expected = backbone.encode_text(tokens)
    again = load_backbone(str(tmp_path))
    assert torch.equal(again.encode_text(tokens), expected)
    assert (again.context_length, again.kept_positions, again.random_weights) == (248, 20, False)
    theirs = open_clip.create_model(f"local-dir:{tmp_path}")
    torch.testing.assert_close(theirs.encode_text(tokens.padded()), expected, rtol=0, atol=1e-5)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs.encode_image(images), backbone.encode_image(images))


def test_random_weights_come_from_the_seed():
    torch.manual_seed(3)
    first = load_backbone("ViT-S-32-alt")
    torch.manual_seed(3)
    second = load_backbone("ViT-S-32-alt")
    assert first.random_weights
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        ("ViT-B16", None, r"Unknown model 'ViT-B16'. Did you mean ViT-B-16"),
        ("ViT-B-16-SigLIP", None, "no_causal_mask.*must have a causal mask and pool at EOT"),
        ("coca_ViT-B-32", None, "cannot be used"),
        ("ViT-B-16", "openai", "trained with QuickGELU, which 'ViT-B-16' lacks. Use --model ViT-B-16-quickgelu"),
        ("ViT-B-16-quickgelu", "laion2b_s34b_b88k", "No weights|Use --model ViT-B-16"),
        ("ViT-B-16", "opneai", "No weights 'opneai' for 'ViT-B-16'. Did you mean openai"),
        ("local-dir:/nowhere", None, "holds no open_clip_config.json"),
    ],
)
def test_what_cannot_be_used_is_named(model, pretrained, message):
    with pytest.raises(UserError, match=message):
        load_backbone(model, pretrained)


def test_weights_that_do_not_fit_or_are_no_weights_are_refused(tmp_path):
    folder = save_tiny_clip(tmp_path)
    with pytest.raises(UserError, match="brings its own weights"):
        load_backbone(folder, "openai")
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="could not be loaded"):
        load_backbone(folder)


def test_a_pickle_with_code_is_not_executed(tmp_path):
    import pickle

    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (marker.write_text, ("x",))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Hostile()}))
    with pytest.raises(UserError, match="could not be loaded"):
        load_backbone("ViT-S-32-alt", str(tmp_path / "weights.pt"))
    assert not marker.exists()
