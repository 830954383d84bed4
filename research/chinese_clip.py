"""Chinese-CLIP (Yang et al. 2022): CLIP's image tower and a Chinese BERT. It is evaluated and ablated, not trained."""

from collections.abc import Sequence
from pathlib import Path

import torch
from open_clip.transformer import LayerNorm, QuickGELU, VisionTransformer
from torch import nn
from transformers import (
    AutoTokenizer,
    ChineseCLIPConfig,
    ChineseCLIPModel,
    ChineseCLIPTextConfig,
    ChineseCLIPTextModel,
    PreTrainedTokenizerBase,
)

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.families import FAMILIES, Family
from debias_diffusion.clip.text_tower import PaddedTextTower
from debias_diffusion.encoders.clip_model import MODEL_TYPES, as_backbone
from debias_diffusion.encoders.hub import from_pretrained, load_pretrained
from debias_diffusion.errors import UserError
from debias_diffusion.text.tokens import CaptionTokenizer, Markers, TokenBatch

NAME = "Chinese-CLIP"
NOT_TRAINED = "It is evaluated and ablated here, and neither trained nor exported. Give a CLIP, such as ViT-B-16."
_CURLY_QUOTES = dict.fromkeys(map(ord, "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"), '"')
# Tokens that a caption has at most, [CLS] and [SEP] included: "all baseline models use 52 as the context length"
# (cn_clip/clip/utils.py of https://github.com/OFA-Sys/Chinese-CLIP), although BERT has 512 positions.
CONTEXT_LENGTH = 52


class BertText(nn.Module):
    """A Chinese-CLIP's BERT and the projection of its state of [CLS].

    Args:
        config: transformers' configuration of the BERT.
        embed_dim: of the features.
        context_length: in tokens.
    """

    def __init__(self, config: ChineseCLIPTextConfig, embed_dim: int, context_length: int):
        super().__init__()
        self.context_length = context_length
        self.bert = ChineseCLIPTextModel(config, add_pooling_layer=False)
        self.text_projection = nn.Linear(config.hidden_size, embed_dim, bias=False)


class ChineseCLIP(nn.Module):
    """Both towers: `visual` is open_clip's vision transformer, so that its blocks run one by one as any CLIP's.

    Args:
        embed_dim: of the features.
        quick_gelu: whether the image tower has QuickGELU, else GELU.
        vision_cfg, text_cfg: as `read_chinese_clip` makes them.
    """

    logit_bias = None

    def __init__(self, embed_dim: int, quick_gelu: bool, vision_cfg: dict, text_cfg: dict):
        super().__init__()
        eps = vision_cfg["norm_kwargs"]["eps"]
        self.visual = VisionTransformer(
            image_size=vision_cfg["image_size"],
            patch_size=vision_cfg["patch_size"],
            width=vision_cfg["width"],
            layers=vision_cfg["layers"],
            heads=vision_cfg["width"] // vision_cfg["head_width"],
            mlp_ratio=vision_cfg["mlp_ratio"],
            output_dim=embed_dim,
            act_layer=QuickGELU if quick_gelu else nn.GELU,
            norm_layer=lambda width: LayerNorm(width, eps=eps),
        )
        bert = ChineseCLIPTextConfig.from_dict(text_cfg["bert"])
        self.text = BertText(bert, embed_dim, text_cfg["context_length"])
        self.logit_scale = nn.Parameter(torch.zeros([]))

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width], preprocessed -> [batch, embed_dim]"""
        return self.visual(images)


class BertTower(PaddedTextTower):
    """A Chinese-CLIP's text tower: every token sees all others but pads, and [CLS] is pooled."""

    @property
    def context_length(self) -> int:
        return self.tower.context_length

    def encode(self, tokens: TokenBatch, blocks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [batch, embed_dim], not normalised, and no states: [batch, 0, width].

        Raises:
            UserError: states after blocks, pads before the text, or average pooling, which are for training.
        """
        longest = int(tokens.lengths.max()) + 1  # with [CLS], which all captions share
        if blocks or self.pooling != "eot" or (tokens.n_prefix != 1).any():
            raise UserError(f"A {NAME} only encodes captions as they are. {NOT_TRAINED}")
        rows = tokens.padded()[:, :longest]
        seen = (torch.arange(longest) <= tokens.lengths[:, None]).to(rows)
        cls_states = self.tower.bert(input_ids=rows, attention_mask=seen).last_hidden_state[:, 0]
        return self.project(cls_states), cls_states.new_empty(len(rows), 0, cls_states.shape[-1])


class _ChineseClip(Family):
    """Rows are `[CLS] text [SEP] [PAD] ..`, and [CLS] is pooled."""

    def caption_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text_cfg: dict) -> CaptionTokenizer:
        markers = Markers(tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id)
        return CaptionTokenizer(tokenizer, text_cfg["context_length"], markers, self.cleaning)

    def save_tokenizer(self, tokenizer: CaptionTokenizer, folder: Path) -> None:
        raise UserError(f"open_clip has no {NAME}. {NOT_TRAINED}")


def clean_chinese(caption: str) -> str:
    """Lower case, with straight quotes, as `_preprocess_text` in the authors' cn_clip/eval/data.py.

    A literal special token ("[SEP]") is then in lower case and read as text.
    """
    return " ".join(caption.lower().translate(_CURLY_QUOTES).split())


def _family(model_cfg: dict) -> Family | None:
    if "bert" not in model_cfg["text_cfg"]:
        return None
    return _ChineseClip(NAME, causal=False, loss="softmax", cleaning=clean_chinese, text_tower=BertTower)


def read_chinese_clip(location: str, content: dict) -> Backbone:
    """A transformers ChineseCLIPModel and its tokenizer, of a folder or a hub repository with this config.json.

    Images are preprocessed by the settings of its image processor, else as the authors' `image_transform` does: resized
    to a square, without a crop. Captions are cut to `CONTEXT_LENGTH` tokens.

    Raises:
        UserError: there is no whole ChineseCLIPModel.
    """
    config = ChineseCLIPConfig.from_dict(content)
    text, prefix = config.text_config, "text_model."
    cfg = {
        "context_length": min(CONTEXT_LENGTH, text.max_position_embeddings),
        "no_causal_mask": True,
        "bert": text.to_dict(),
    }
    model = load_pretrained(ChineseCLIPModel, location, repr(location), config=config)
    tokenizer = from_pretrained(AutoTokenizer, location, trust_remote_code=False)
    weights = model.state_dict().items()
    state = {f"text.bert.{name.removeprefix(prefix)}": t for name, t in weights if name.startswith(prefix)}
    state["text.text_projection.weight"] = model.text_projection.weight
    return as_backbone(location, ChineseCLIP, model, cfg, state, tokenizer, "squash")


def register() -> None:
    """Lets every command read a Chinese-CLIP where it reads a CLIP."""
    FAMILIES.register(NAME, _family)
    MODEL_TYPES.register(ChineseCLIPConfig.model_type, read_chinese_clip)
