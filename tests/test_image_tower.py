"""The image tower block by block against open_clip's own forward."""

import pytest
import torch
from helpers.tiny_clip import everyday, tiny_clip
from open_clip.modified_resnet import ModifiedResNet
from open_clip.transformer import VisionTransformer

from debias_diffusion.clip.blocks import full_attention
from debias_diffusion.clip.image_tower import ImageTower
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.errors import UserError

SIZES = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "heads": 2, "mlp_ratio": 2.0, "output_dim": 24}
KINDS = {
    "CLS": {},
    "mean": {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "attention pooling": {"attentional_pool": True, "attn_pooler_queries": 3},
    "layer scale": {"ls_init_value": 0.5},
}


def visual_of(kind: str = "CLS") -> VisionTransformer:
    torch.manual_seed(0)
    return everyday(VisionTransformer(**SIZES, **KINDS[kind]))


def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(visual: VisionTransformer, features: torch.Tensor) -> dict[str, torch.Tensor]:
    visual.zero_grad()
    features.square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in visual.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_features_and_gradients_equal_open_clips(kind, checkpointing):
    visual, calls = visual_of(kind).double(), []
    expected = visual(images())
    expected_gradients = gradients(visual, expected)
    visual.set_grad_checkpointing(checkpointing)
    for block in visual.transformer.resblocks[1:]:
        block.mlp.register_forward_pre_hook(lambda _, given: calls.append(given[0].shape[1]))
    features = ImageTower(visual)(images())
    torch.testing.assert_close(features, expected, rtol=1e-12, atol=1e-12)
    assert all(gradient.abs().max() > 0 for gradient in expected_gradients.values())
    torch.testing.assert_close(gradients(visual, features), expected_gradients, rtol=1e-9, atol=1e-12)
    last = 17 if kind in ("mean", "attention pooling") else 1  # where CLS is pooled, it is computed alone
    assert calls == [17, last] + [last, 17] * checkpointing


def without_second_head(query, key, value):
    attended = full_attention(query, key, value)
    return torch.cat([attended[:, :, :1], torch.zeros_like(attended[:, :, 1:])], dim=2)


def test_towers_of_another_kind_are_refused():
    resnet = ModifiedResNet([1, 1, 1, 1], output_dim=8, heads=2, image_size=32, width=8)
    for visual, message in (
        (resnet, "is a ModifiedResNet"),
        (VisionTransformer(**SIZES, qk_norm=True), "blocks are not plain ones"),
    ):
        with pytest.raises(UserError, match=message):
            ImageTower(visual)


def test_replaced_attention_reaches_features_caches_and_saved_folders(tmp_path):
    backbone = tiny_clip().eval()
    pixels = images().float()
    plain, key, used = backbone.encode_image(pixels), backbone.image_digest(), backbone.digest()
    torch.testing.assert_close(plain, backbone.model.encode_image(pixels))
    backbone.replace_attention("image", {-1: lambda _: without_second_head}, {"without heads": {"1": [1]}})
    features = backbone.encode_image(pixels)
    assert not torch.allclose(features, plain, atol=1e-3)
    assert backbone.image_digest() != key and backbone.digest() != used
    backbone.save(tmp_path / "saved")
    again = load_backbone(str(tmp_path / "saved")).eval()
    with pytest.raises(UserError, match="saved with other attention"):
        again.encode_image(pixels)
    again.replace_attention("image", {1: lambda _: without_second_head}, again.image_attention)
    assert torch.equal(again.encode_image(pixels), features)
