"""A transformers ChineseCLIPModel as a two-tower: a folder, or a hub id."""

import os
from dataclasses import asdict
from pathlib import Path

import open_clip
from open_clip.transform import PreprocessCfg
from transformers import AutoTokenizer, ChineseCLIPConfig, ChineseCLIPModel

from ..errors import UserError
from ..models.backbone import Backbone
from ..models.chinese_clip import CONTEXT_LENGTH, ChineseCLIP
from ..models.families import find_family
from ..models.model_files import explain_failure, load_pretrained
from .clip_model import read_preprocessing, tower_cfg, vision_cfg
from .names import State, vision_from_transformers
from .transformers_folder import read_model_config


def read_chinese_clip(source: str | Path) -> Backbone:
    """A transformers ChineseCLIPModel and its tokenizer, of a folder or a hub repository.

    Images are preprocessed by the settings of its image processor, else as the authors' `image_transform` does: resized
    to a square, without a crop. Captions are cut to `CONTEXT_LENGTH` tokens.

    Raises:
        UserError: there is no whole ChineseCLIPModel.
    """
    label = repr(os.fspath(source))
    with explain_failure(f"The ChineseCLIPModel {label} could not be loaded"):
        config = ChineseCLIPConfig.from_dict(read_model_config(source))
        model_cfg = _model_cfg(config, label)
        model = load_pretrained(ChineseCLIPModel, source, label, config=config)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        captions = find_family(label, model_cfg).caption_tokenizer(tokenizer, model_cfg["text_cfg"])
        clip = ChineseCLIP(**model_cfg)
        clip.load_state_dict(_open_clip_state(model))
        size = config.vision_config.image_size
        preprocess = asdict(read_preprocessing(source, PreprocessCfg(size=size, resize_mode="squash")))
        open_clip.set_model_preprocess_cfg(clip, preprocess)
    return Backbone(clip, captions, {"model_cfg": model_cfg, "preprocess_cfg": preprocess})


def _model_cfg(config: ChineseCLIPConfig, label: str) -> dict:
    text, vision = config.text_config, config.vision_config
    if vision.hidden_act not in ("quick_gelu", "gelu"):
        raise UserError(f"The image tower of {label} has the activation {vision.hidden_act}, not quick_gelu or gelu.")
    return {
        "embed_dim": config.projection_dim,
        "quick_gelu": vision.hidden_act == "quick_gelu",
        "vision_cfg": vision_cfg(vision),
        "text_cfg": tower_cfg(text)
        | {
            "model_type": text.model_type,
            "context_length": min(CONTEXT_LENGTH, text.max_position_embeddings),
            "vocab_size": text.vocab_size,
            "heads": text.num_attention_heads,
            "bert": text.to_dict(),
        },
    }


def _open_clip_state(model: ChineseCLIPModel) -> State:
    """The weights under the names of `ChineseCLIP`."""
    state = model.state_dict()
    bert = {name.replace("text_model.", "text.bert."): t for name, t in state.items() if name.startswith("text_model.")}
    visual = {f"visual.{name}": tensor for name, tensor in vision_from_transformers(state).items()}
    outside = {"text.text_projection.weight": state["text_projection.weight"], "logit_scale": state["logit_scale"]}
    return bert | visual | outside
