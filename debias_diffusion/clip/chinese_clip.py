"""Chinese-CLIP (Yang et al. 2022): CLIP's image tower and a Chinese BERT. It is evaluated and ablated, not trained."""

from collections.abc import Sequence

import torch
from open_clip.transformer import LayerNorm, QuickGELU, VisionTransformer
from torch import nn
from transformers import ChineseCLIPTextConfig, ChineseCLIPTextModel

from ..errors import UserError
from ..text.tokens import TokenBatch
from .families import CHINESE_CLIP
from .text_tower import PaddedTextTower

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
        vision_cfg, text_cfg: as `encoders.clip_model` makes them.
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
            raise UserError(f"A {CHINESE_CLIP} only encodes captions as they are. {NOT_TRAINED}")
        rows = tokens.padded()[:, :longest]
        seen = (torch.arange(longest) <= tokens.lengths[:, None]).to(rows)
        cls_states = self.tower.bert(input_ids=rows, attention_mask=seen).last_hidden_state[:, 0]
        return self.project(cls_states), cls_states.new_empty(len(rows), 0, cls_states.shape[-1])


NOT_TRAINED = "It is evaluated and ablated here, and neither trained nor exported. Give a CLIP, such as ViT-B-16."
