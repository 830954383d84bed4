"""A two-tower as the folder of a transformers CLIPModel, with all that its CLIPProcessor needs."""

import os
from pathlib import Path

import open_clip
from open_clip.transform import PreprocessCfg
from open_clip.transformer import VisionTransformer
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPProcessor, CLIPVisionConfig

from ..backbones import Backbone
from ..errors import UserError
from .encoders import activation, text_config, text_state
from .names import text_to_transformers, vision_to_transformers
from .transformers_folder import write_tokenizer, write_weights


def export_clip_model(backbone: Backbone, folder: str | os.PathLike) -> Path:
    """Writes config.json, model.safetensors, the tokenizer and the image processor. Returns the folder.

    `CLIPModel.from_pretrained(folder)` then gives open_clip's features of images and texts, and
    `CLIPProcessor.from_pretrained(folder)` what goes in; long texts want `padding=True, truncation=True`.

    Raises:
        UserError: transformers' CLIPModel has no such two-tower.
    """
    folder = Path(folder)
    if backbone.pooling != "eot":
        raise UserError(
            f"This text tower was trained with {backbone.pooling} pooling, and a CLIPModel pools at EOT: its text "
            "features would be others. Export it as transformers or open_clip."
        )
    text, vision = text_config(backbone), _vision_config(backbone)
    processor = CLIPProcessor(_image_processor(backbone), backbone.tokenizer.tokenizer)
    state = text_to_transformers(text_state(backbone.text.tower))
    state |= vision_to_transformers(backbone.model.visual.state_dict())
    state["logit_scale"] = backbone.logit_scale
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=text.projection_dim)
    write_weights(state, config, "CLIPModel", folder)
    processor.save_pretrained(folder)
    # Also under the name that older versions of transformers look for.
    processor.image_processor.save_pretrained(folder)
    write_tokenizer(backbone.tokenizer.tokenizer, folder)
    return folder


def _vision_config(backbone: Backbone) -> CLIPVisionConfig:
    visual = backbone.model.visual
    if not isinstance(visual, VisionTransformer):
        raise UserError(f"The image tower is a {type(visual).__name__}; a transformers CLIPModel has a plain ViT.")
    block = visual.transformer.resblocks[0]
    unfit = {
        "no projection": visual.proj is None or text_config(backbone).projection_dim is None,
        "no norm before the blocks": not isinstance(visual.ln_pre, nn.LayerNorm),
        "attention pooling": visual.attn_pool is not None,
        f"{visual.pool_type} pooling": visual.pool_type != "tok",
        "layer scale": not isinstance(block.ls_1, nn.Identity),
        "images that are not square": len(set(visual.image_size)) > 1 or len(set(visual.patch_size)) > 1,
        "another activation than the text tower": activation(block) != text_config(backbone).hidden_act,
    }
    if any(unfit.values()):
        found = ", ".join(name for name, is_so in unfit.items() if is_so)
        raise UserError(f"The image tower has what a transformers CLIPModel has not: {found}.")
    return CLIPVisionConfig(
        hidden_size=visual.conv1.out_channels,
        intermediate_size=block.mlp.c_fc.out_features,
        projection_dim=visual.output_dim,
        num_hidden_layers=len(visual.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        image_size=visual.image_size[0],
        patch_size=visual.patch_size[0],
        hidden_act=activation(block),
        layer_norm_eps=visual.ln_post.eps,
    )


def _image_processor(backbone: Backbone) -> CLIPImageProcessor:
    """open_clip's validation transform in transformers' words."""
    cfg = PreprocessCfg(**open_clip.get_model_preprocess_cfg(backbone.model))
    size, mode = backbone.model.visual.image_size[0], cfg.resize_mode
    if cfg.interpolation not in _RESAMPLE or mode not in ("shortest", "squash"):
        raise UserError(
            f"Images are prepared with interpolation {cfg.interpolation!r} and resize_mode {mode!r}, for which a "
            "CLIPImageProcessor has no words."
        )
    square = {"height": size, "width": size}
    return CLIPImageProcessor(
        size={"shortest_edge": size} if mode == "shortest" else square,
        do_center_crop=mode == "shortest",
        crop_size=square,
        resample=_RESAMPLE[cfg.interpolation],
        image_mean=list(cfg.mean),
        image_std=list(cfg.std),
    )


_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
