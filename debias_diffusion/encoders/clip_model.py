"""A two-tower as the folder of a transformers CLIPModel with its CLIPProcessor, and from one."""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import open_clip
from open_clip.transform import PreprocessCfg
from open_clip.transformer import VisionTransformer
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..ablation.heads import Ablation, suppressed_heads
from ..clip.backbone import Backbone
from ..clip.families import find_family
from ..clip.weight_files import State, to_openai_names, to_transformers_names
from ..errors import UserError
from ..registry import MOVED, Registry
from . import modeling_ablated_clip
from .hub import find_file, find_tokenizer, from_pretrained, load_pretrained
from .modeling_ablated_clip import AblatedCLIPConfig
from .text_encoders import (
    activation,
    check_plain_text,
    read_model_config,
    read_tokenizer,
    take_context_length,
    text_config,
    text_state,
    write_tokenizer,
    write_weights,
)


def export_clip_model(backbone: Backbone, folder: str | os.PathLike) -> Path:
    """Writes config.json, model.safetensors, the tokenizer and the image processor. Returns the folder.

    `CLIPModel.from_pretrained(folder)` then gives open_clip's features of images and texts, and
    `CLIPProcessor.from_pretrained(folder)` its inputs; long texts need `padding=True, truncation=True`.
    Where heads of the image tower are suppressed, the folder also holds `modeling_ablated_clip.py`, and
    `AutoModel.from_pretrained(folder, trust_remote_code=True)` takes the place of CLIPModel.

    Raises:
        UserError: a CLIPModel cannot hold this two-tower.
    """
    folder = Path(folder)
    if backbone.pooling != "eot":
        raise UserError(
            f"This text tower was trained with {backbone.pooling} pooling, and a CLIPModel pools at EOT: its text "
            "features would differ. Export it as transformers or open_clip."
        )
    check_plain_text(backbone)
    ablation = suppressed_heads(backbone, "image")
    if ablation is None and backbone.image_attention is not None:
        raise UserError(
            "The attention in the image tower was replaced; a CLIPModel has the plain one. Export it as open_clip."
        )
    text, vision = text_config(backbone), _vision_config(backbone)
    processor = CLIPProcessor(_image_processor(backbone), backbone.tokenizer.tokenizer)
    state = text_state(backbone.text.tower) | to_transformers_names(backbone.model.visual.state_dict(), "vision")
    state["logit_scale"] = backbone.logit_scale
    sizes = dict(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=text.projection_dim)
    if ablation is None:
        write_weights(state, CLIPConfig(**sizes), "CLIPModel", folder)
    else:
        module = "modeling_ablated_clip"
        classes = {"AutoConfig": f"{module}.AblatedCLIPConfig", "AutoModel": f"{module}.AblatedCLIPModel"}
        config = AblatedCLIPConfig(**sizes, beta=ablation.beta, auto_map=classes)
        write_weights(state, config, "AblatedCLIPModel", folder)
        shutil.copy(modeling_ablated_clip.__file__, folder)
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
        f"{visual.pool_type} pooling": visual.pool_type != "tok",
        "images that are not square": len(set(visual.image_size)) > 1 or len(set(visual.patch_size)) > 1,
    }
    if any(unfit.values()):
        parts = ", ".join(name for name, is_unfit in unfit.items() if is_unfit)
        raise UserError(f"A transformers CLIPModel cannot hold this image tower: {parts}.")
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
    """open_clip's validation transform as an image processor of transformers."""
    cfg = PreprocessCfg(**open_clip.get_model_preprocess_cfg(backbone.model))
    size, mode = backbone.model.visual.image_size[0], cfg.resize_mode
    if cfg.interpolation not in _RESAMPLE or mode not in ("shortest", "squash"):
        raise UserError(
            f"Images are prepared with interpolation {cfg.interpolation!r} and resize_mode {mode!r}, which a "
            "CLIPImageProcessor cannot do. Use bicubic or bilinear, and shortest or squash."
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
_INTERPOLATIONS = {number: name for name, number in _RESAMPLE.items()}


def read_two_tower(location: str) -> Backbone:
    """A two-tower of transformers as open_clip's module: a folder that holds it and its tokenizer, or a hub id.

    Images are preprocessed by the settings of its image processor, else as open_clip does for such a model.
    """
    content = read_model_config(location)
    kind = content.get("model_type")
    if kind not in MODEL_TYPES and kind not in MOVED:
        raise UserError(
            f"{location!r} holds a model of type {kind!r}; both towers are needed here, and a CLIPModel's type "
            "is 'clip'. Give the training run, or its export by `debias-diffusion export --to clip`; name a SigLIP as "
            "open_clip does, for example ViT-B-16-SigLIP2:webli."
        )
    return MODEL_TYPES.find(kind)(location, content)


def _read_clip(location: str, content: dict) -> Backbone:
    config = CLIPConfig.from_dict(content)
    take_context_length(config.text_config, content.get("text_config", {}), location)
    model = load_pretrained(CLIPModel, location, repr(location), config=config)
    folder = Path(location)
    place = str(find_tokenizer(folder, folder, folder / "tokenizer")) if folder.is_dir() else location
    tokenizer = read_tokenizer(place, config.text_config)
    text, vision = config.text_config, config.vision_config
    acts = {text.hidden_act, vision.hidden_act}
    if len(acts) > 1:
        raise UserError(
            f"The towers of {location!r} have the activations {text.hidden_act} and {vision.hidden_act}; open_clip's "
            "have both quick_gelu or both gelu."
        )
    cfg, state = {"context_length": text.max_position_embeddings}, to_openai_names(model.state_dict())
    return as_backbone(location, open_clip.CLIP, model, cfg, state, tokenizer, "shortest")


def _read_ablated_clip(location: str, content: dict) -> Backbone:
    backbone = _read_clip(location, content)
    Ablation.of_rows("image", content["beta"]).apply(backbone)
    return backbone


# By the model_type in a config.json, what reads both towers of a location with this config.json.
MODEL_TYPES: Registry[Callable[[str, dict], Backbone]] = Registry(
    "type of model", {CLIPConfig.model_type: _read_clip, AblatedCLIPConfig.model_type: _read_ablated_clip}
)


def as_backbone(
    location: str,
    cls: type[nn.Module],
    model: PreTrainedModel,
    text_cfg: dict,
    text_state: State,
    tokenizer: PreTrainedTokenizerBase,
    resize_mode: str,
) -> Backbone:
    """A two-tower of a class of open_clip's kind with the weights of a transformers model.

    Args:
        text_cfg, text_state: the text tower's configuration in the class, without sizes, and its weights.
        resize_mode: of images, where no image processor says it.
    """
    text, vision = model.config.text_config, model.config.vision_config
    if vision.hidden_act not in ("quick_gelu", "gelu"):
        raise UserError(
            f"The image tower of {location!r} has the activation {vision.hidden_act}, not quick_gelu or gelu."
        )
    vision_cfg = {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "head_width": vision.hidden_size // vision.num_attention_heads,
    }
    text_cfg = text_cfg | {"vocab_size": text.vocab_size, "heads": text.num_attention_heads}
    model_cfg = {
        "embed_dim": model.config.projection_dim,
        "quick_gelu": vision.hidden_act == "quick_gelu",
        "vision_cfg": _tower_cfg(vision) | vision_cfg,
        "text_cfg": _tower_cfg(text) | text_cfg,
    }
    clip = cls(**model_cfg)
    visual = {f"visual.{name}": tensor for name, tensor in to_openai_names(model.state_dict(), "vision").items()}
    clip.load_state_dict(text_state | visual | {"logit_scale": model.logit_scale})
    captions = find_family(location, model_cfg).caption_tokenizer(tokenizer, model_cfg["text_cfg"])
    default = PreprocessCfg(size=vision.image_size, resize_mode=resize_mode)
    preprocess = asdict(_read_preprocessing(location, default))
    open_clip.set_model_preprocess_cfg(clip, preprocess)
    return Backbone(clip, captions, {"model_cfg": model_cfg, "preprocess_cfg": preprocess})


def _tower_cfg(config: PretrainedConfig) -> dict:
    return {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "norm_kwargs": {"eps": config.layer_norm_eps},
    }


def _read_preprocessing(location: str, default: PreprocessCfg) -> PreprocessCfg:
    """A CLIPImageProcessor's settings as open_clip's for images of the default's size; the default if there is none."""
    # transformers 5 writes the second.
    if not any(find_file(location, name) for name in ("preprocessor_config.json", "processor_config.json")):
        return default
    processor = from_pretrained(CLIPImageProcessor, location)
    image_size = default.size
    square = {"height": image_size, "width": image_size}
    size, crop = dict(processor.size or {}), dict(processor.crop_size or {}) if processor.do_center_crop else None
    modes = {"shortest": ({"shortest_edge": image_size}, square), "squash": (square, None)}
    mode = next((name for name, sizes in modes.items() if (size, crop) == sizes), None)
    does_all = processor.do_resize and processor.do_rescale and processor.do_normalize
    if mode is None or processor.resample not in _INTERPOLATIONS or not does_all:
        raise UserError(
            f"The image processor of {location!r} (size {size}, crop {crop}, resample "
            f"{processor.resample}) does what open_clip does not: it resizes images to {image_size} pixels, by the "
            "shorter side with a crop or as a square, bilinear or bicubic, and normalises them."
        )
    return PreprocessCfg(
        size=image_size,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        interpolation=_INTERPOLATIONS[processor.resample],
        resize_mode=mode,
    )
