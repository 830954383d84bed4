"""Encoders as people publish them: what each file or folder is, through every door, with the same states or refused.

The names of tensors and the keys of configurations are those of public cards, code and headers; weights are random.
"""

import json
from functools import partial

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.text_encoders import SMALL, Expected, text_backbone
from helpers.vocabulary import tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from debias_diffusion.app.export import export
from debias_diffusion.app.options import ExportConfig
from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.single_file import write_file
from debias_diffusion.encoders.spec import EncoderSpec, load_text_encoder, load_two_tower
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.tokens import clip_tokenizer

CPU = torch.device("cpu")
TABLE = "text_model.embeddings.position_embedding{}.weight"


@pytest.fixture(scope="module")
def long():
    """A ViT-L/14 at a tenth of its width, with 248 positions, and what it computes."""
    backbone = text_backbone(SMALL, 64, quick_gelu=True, vocabulary=clip_tokenizer)
    return backbone, Expected(backbone)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    parts = tiny_sdxl.sdxl_parts(64, vocabulary=clip_tokenizer)
    folder = tmp_path_factory.mktemp("base")
    tiny_sdxl.assemble(StableDiffusionXLPipeline, parts).save_pretrained(folder)
    return folder


def clip_model(backbone, folder, change=lambda config, state: None):
    """A CLIPModel's folder, whose configuration and weights are changed in place."""
    export_clip_model(backbone, folder)
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, state)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def fg_clip(config, state):
    """FG-CLIP keeps a table of 77 for short captions, and makes that of long ones of two, as Long-CLIP does."""
    table = state[TABLE.format("")]
    state[TABLE.format("_ori")] = torch.cat([table[:20], torch.full_like(table[20:], 7)])
    state[TABLE.format("_res")] = torch.cat([torch.full_like(table[:20], 7), table[20:]])
    state[TABLE.format("")] = torch.full_like(table[:77], 7)
    state["text_filip_projection.weight"] = torch.randn(64, 64)
    state |= {f"logit_scale_{loss}": torch.tensor(1.0) for loss in ("finegraind", "hardneg")}
    config["text_config"]["max_position_embeddings"] = 77
    config["architectures"] = ["FGCLIPModel"]


def without_length(config, state):
    del config["text_config"]["max_position_embeddings"]
    state["text_model.embeddings.position_ids"] = torch.arange(248)[None]


def comfyui_file(backbone, folder):
    folder.mkdir()
    return write_file(to_transformers(backbone)[0], folder / "Long-ViT-L-14-GmP.safetensors")


LAYOUTS = {
    "zer0int's CLIPModel": clip_model,
    "its older snapshots": partial(clip_model, change=without_length),
    "FG-CLIP": partial(clip_model, change=fg_clip),
    "a longer CLIP-L for SDXL": comfyui_file,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_encoder_is_the_same_through_every_door(tmp_path, long, base, layout):
    backbone, expected = long
    place = LAYOUTS[layout](backbone, tmp_path / "published")
    expected.check(*load_text_encoder(place))
    if place.is_dir():
        expected.check(*load_text_encoder(place / "model.safetensors"))
        texts = ["a red star above a blue ring " * 14 + end for end in ("with a dog", "with three cats")]
        features = load_two_tower(place).encode_text(backbone.tokenize(texts))
        torch.testing.assert_close(features, backbone.encode_text(backbone.tokenize(texts)), rtol=0, atol=1e-5)
    export(ExportConfig(str(tmp_path / "export"), str(place)))
    expected.check(*load_text_encoder(tmp_path / "export"))
    pipe = load_pipeline(base, str(place), CPU)
    assert pipe.encode_prompt("a red star " * 70)[0].shape[1] == 227


@pytest.mark.parametrize("name", [TABLE.format("_2d"), "text_model.encoder.layers.0.adapter.weight", "memory.weight"])
def test_a_tensor_without_a_place_is_named(tmp_path, long, name):
    place = clip_model(long[0], tmp_path / "odd", lambda config, state: state.update({name: torch.zeros(2, 64)}))
    for load in (load_text_encoder, load_two_tower):
        with pytest.raises(UserError, match=f"{name.removeprefix('text_model.')} has no place in it"):
            load(place)


def test_of_a_model_with_image_registers_the_text_encoder_alone_is_read(tmp_path, long):
    """zer0int's registers and gates: its conversion to transformers has a plain text tower beside them."""
    registers = {"embeddings.register_embeddings": torch.zeros(4, 64), "fusion_mlp.0.weight": torch.zeros(64, 128)}
    added = {f"vision_model.{name}": tensor for name, tensor in registers.items()}
    place = clip_model(long[0], tmp_path / "registers", lambda config, state: state.update(added))
    long[1].check(*load_text_encoder(place))
    with pytest.raises(UserError, match="register_embeddings.*has no place in it"):
        load_two_tower(place)


@pytest.mark.parametrize("kind", ["jina_clip", "siglip", "eva02", "fgclip2"])
def test_other_architectures_are_named_as_what_they_are(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    for load in (load_text_encoder, load_two_tower):
        with pytest.raises(UserError, match=f"of type '{kind}'"):
            load(tmp_path)


def test_a_pipeline_that_came_with_248_positions_is_stocks_at_that_length():
    """As xllsd16, whose UNet learned from 248: at 77 positions, the usual length, its embeddings are others."""
    parts = tiny_sdxl.sd15_parts()
    long = {"text_encoder": tiny_sdxl.text_encoder(positions=248), "tokenizer": tiny_tokenizer(248)}
    stock = tiny_sdxl.assemble(StableDiffusionPipeline, parts | long)
    ours = with_long_prompts(tiny_sdxl.assemble(StableDiffusionPipeline, parts | long))
    call = {"device": CPU, "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    lengths = {77: ours.encode_prompt("a red cat", **call), 248: stock.encode_prompt("a red cat", **call)}
    assert all(part.shape[1] == length for length, parts in lengths.items() for part in parts)
    again = ours.set_long_prompt(positions=248).encode_prompt("a red cat", **call)
    assert all(map(torch.equal, again, lengths[248]))


def test_the_encoder_of_a_width_is_taken_of_a_checkpoint(base, tmp_path):
    first, second = (EncoderSpec.parse(base).load_text_encoder(width)[0] for width in (64, tiny_sdxl.WIDTH_2))
    assert type(first) is CLIPTextModel and second.config.hidden_size == tiny_sdxl.WIDTH_2
