"""The image tower block by block against open_clip's own forward."""

import pytest
import torch
from helpers.text_encoders import block_states
from helpers.tiny_clip import everyday, tiny_clip, tiny_siglip
from open_clip.modified_resnet import ModifiedResNet
from open_clip.transformer import VisionTransformer

from debias_diffusion.errors import UserError
from debias_diffusion.eval.session import how_used
from debias_diffusion.interchange.clip_model import export_clip_model
from debias_diffusion.models.blocks import full_attention
from debias_diffusion.models.image_tower import ImageTower
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.weight_files import weights_digest

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


def images(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


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
    visual.transformer.resblocks[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    features = ImageTower(visual)(images())
    torch.testing.assert_close(features, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(visual, features).items():
        assert expected_gradients[name].abs().max() > 0
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-9, atol=1e-12)
    assert len(calls) == 1 + checkpointing


def test_states_of_cls_are_those_after_the_blocks():
    visual = visual_of().double()
    (_, *blocks), _ = block_states(visual.transformer, lambda: visual(images()))
    features, states = ImageTower(visual).encode(images(), blocks=[2, 0, -2])
    assert states.shape == (3, 3, 32) and features.shape == (3, 24)
    torch.testing.assert_close(states, torch.stack([blocks[b][:, 0] for b in (2, 0, 1)], dim=1), rtol=0, atol=1e-12)
    assert ImageTower(visual).encode(images())[1].shape == (3, 0, 32)
    for block in (3, -4):
        with pytest.raises(UserError, match=f"no block {block}. Give numbers from 0 to 2"):
            ImageTower(visual).encode(images(), blocks=[0, block])


def without_second_head(query, key, value):
    attended = full_attention(query, key, value)
    return torch.cat([attended[:, :, :1], torch.zeros_like(attended[:, :, 1:])], dim=2)


def test_replaced_attention_is_that_of_the_chosen_blocks_alone():
    visual = visual_of().double()
    tower = ImageTower(visual)
    plain = tower(images())
    tower.attends = {1: without_second_head}
    replaced = tower(images())
    torch.testing.assert_close(plain, visual(images()), rtol=0, atol=1e-12)
    with torch.no_grad():  # the second head's share of the block's output
        visual.transformer.resblocks[1].attn.out_proj.weight[:, 16:] = 0
    torch.testing.assert_close(replaced, visual(images()), rtol=0, atol=1e-12)
    assert not torch.allclose(replaced, plain, atol=1e-3)


def test_tokens_can_be_added_between_blocks_and_masked():
    visual = visual_of().double()
    tower, expected = ImageTower(visual), visual(images())
    prompts = torch.randn(3, 2, 32, dtype=torch.float64, requires_grad=True)

    def features(seen_by_cls: bool) -> torch.Tensor:
        hidden_states = tower.embed(images())
        # [queries, keys]: of the added tokens only CLS sees the keys
        mask = torch.ones(19, 19, dtype=torch.bool)
        mask[0 if not seen_by_cls else 1 :, 1:3] = False
        for block in range(tower.depth):
            hidden_states = torch.cat([hidden_states[:, :1], prompts, hidden_states[:, -16:]], dim=1)
            attend = lambda *parts: full_attention(*parts, attn_mask=mask)  # noqa: E731
            hidden_states = tower.run_block(block, hidden_states, attend)
        return tower.project(hidden_states)

    torch.testing.assert_close(features(False), expected, rtol=0, atol=1e-12)
    seen = features(True)
    assert not torch.allclose(seen, expected, atol=1e-3)
    seen.sum().backward()
    assert prompts.grad.abs().max() > 0


def test_towers_of_another_kind_are_refused():
    resnet = ModifiedResNet(layers=[1, 1, 1, 1], output_dim=8, heads=2, image_size=32, width=8)
    for visual, message in (
        (resnet, "is a ModifiedResNet, which cannot be run block by block"),
        (tiny_siglip().model.visual, "is a VisionTransformer of timm, which"),
        (VisionTransformer(**SIZES, qk_norm=True), "not plain CLIP blocks"),
    ):
        with pytest.raises(UserError, match=message):
            ImageTower(visual)
    with pytest.raises(UserError, match="of timm"):
        tiny_siglip().replace_image_attention({0: full_attention}, {"heads": [0]})


def test_a_plain_backbone_keeps_open_clips_forward_and_its_cache_key():
    backbone = tiny_clip()
    plain = images(torch.float32)
    assert torch.equal(backbone.encode_image(plain), backbone.model.encode_image(plain))
    assert backbone.image_fingerprint() == {
        "weights": weights_digest(backbone.model.visual),
        "vision_cfg": backbone.config["model_cfg"]["vision_cfg"],
        "preprocess": str(backbone.preprocess),
    }


def test_replaced_attention_reaches_features_caches_and_saved_folders(tmp_path):
    backbone = tiny_clip().eval()
    pixels = images(torch.float32)
    plain, key, used = backbone.encode_image(pixels), backbone.image_fingerprint(), str(how_used(backbone))
    backbone.replace_image_attention({-1: without_second_head}, {"without heads": {"1": [1]}})
    features = backbone.encode_image(pixels)
    assert not torch.allclose(features, plain, atol=1e-3)
    assert backbone.image_fingerprint() == key | {"attention": {"without heads": {"1": [1]}}}
    assert str(how_used(backbone)) != used
    backbone.save(tmp_path / "saved")
    again = load_backbone(str(tmp_path / "saved")).eval()
    with pytest.raises(UserError, match="saved with other attention in its image tower, .*without heads"):
        again.encode_image(pixels)
    again.replace_image_attention({1: without_second_head}, again.image_attention)
    assert torch.equal(again.encode_image(pixels), features)
    with pytest.raises(UserError, match="a CLIPModel has the plain one"):
        export_clip_model(backbone, tmp_path / "clip")
    with pytest.raises(UserError, match="at least one block and a description"):
        backbone.replace_image_attention({}, {})
