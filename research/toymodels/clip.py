"""The toy world's CLIP: 77 positions, learned from nothing on short captions, as the real one was.

A captioning loss beside the contrastive one, as CoCa has it, lets hidden states say which word belongs to which:
contrastive training alone leaves the toy CLIP's texts a bag of words (see research/toy-world-making.md).
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn
from tqdm import tqdm
from transformers import CLIPTokenizer

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import ARRANGEMENTS, Scene, generator

from ..referring.grammar import STYLES
from .scenes import base_scene, short_caption
from .stage import run_stage

CONTEXT_LENGTH = 77
CAPTIONING_WEIGHT = 2.0  # beside 1 for the contrastive loss (Yu et al., 2022, CoCa, section 4.1)
_LARGER_START = 5
CONFIG = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": 48, "layers": 3, "width": 128, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": CONTEXT_LENGTH, "width": 128, "heads": 4, "layers": 3},
}


def new_clip(tokenizer: CLIPTokenizer, seed: int = 0, **vision) -> Backbone:
    """The untrained model; `vision` are settings of another image tower."""
    config = deepcopy(CONFIG)
    config["text_cfg"]["vocab_size"] = len(tokenizer)
    config["vision_cfg"] |= vision
    torch.manual_seed(seed)
    model = open_clip.CLIP(**deepcopy(config))
    with torch.no_grad():  # drawn so small, words and places would be drowned by what the layers add to them
        model.token_embedding.weight.mul_(_LARGER_START)
        model.visual.positional_embedding.mul_(_LARGER_START)
    preprocess = asdict(PreprocessCfg(size=config["vision_cfg"]["image_size"]))
    open_clip.model.set_model_preprocess_cfg(model, preprocess)
    captions = CaptionTokenizer(tokenizer, CONTEXT_LENGTH)
    return Backbone(model, captions, {"model_cfg": config, "preprocess_cfg": preprocess}, random_weights=True)


def render_all(scenes: Sequence[Scene], backbone: Backbone) -> Tensor:
    """Scenes as the model sees them, uint8 [len(scenes), 3, size, size]."""
    return torch.stack([backbone.read_pixels(render(scene)) for scene in tqdm(scenes, desc="drawing")])


def train_clip(
    folder: Path, tokenizer: CLIPTokenizer, *, scenes: int = 30_000, steps: int = 4000, batch: int = 128, seed: int = 0
) -> Backbone:
    """Trains the base model on summaries with one or two details, drawn anew at each step; see `base_scene`."""
    backbone = new_clip(tokenizer, seed)
    pictures = render_all([base_scene(index) for index in range(scenes)], backbone)
    learner = nn.ModuleDict({"clip": backbone.model, "captioner": new_captioner(tokenizer)})
    loss = partial(_loss, backbone, learner["captioner"], pictures, batch, seed)
    run_stage(folder, learner, loss, steps=steps, peak=1e-3, weight_decay=0.1)
    return backbone


class Captioner(nn.Module):
    """Predicts each next token of a caption from the text tower's hidden state there and the patches of the image.

    It reads the layer that SDXL's UNet reads and has no attention between tokens: what the words so far say must be
    in that one state. Only training uses it.

    Args:
        width: of both towers' hidden states.
    """

    def __init__(self, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.before_attention, self.before_mlp, self.before_head = (nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, hidden_states: Tensor, patches: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """The mean cross-entropy of the tokens behind SOT, EOT included.

        Args:
            hidden_states: [batch, tokens, width], after the block before the last.
            patches: [batch, patches, width], of the image tower.
            ids: [batch, tokens]
            lengths: [batch], SOT and EOT included.
        """
        queries = self.before_attention(hidden_states)
        hidden_states = hidden_states + self.attention(queries, patches, patches, need_weights=False)[0]
        hidden_states = hidden_states + self.mlp(self.before_mlp(hidden_states))
        asked = torch.arange(1, ids.shape[1]) < lengths[:, None]
        logits = self.head(self.before_head(hidden_states[:, :-1][asked]))
        return F.cross_entropy(logits.float(), ids[:, 1:][asked])


def new_captioner(tokenizer: CLIPTokenizer) -> Captioner:
    return Captioner(CONFIG["text_cfg"]["width"], CONFIG["text_cfg"]["heads"], len(tokenizer))


def _loss(backbone: Backbone, captioner: Captioner, pictures: Tensor, batch: int, seed: int, step: int) -> Tensor:
    indices = draw_indices(len(pictures), batch, seed, step)
    texts = [draw_text(index, f"short/{seed}/{step}") for index in indices]
    tokens = backbone.tokenize(texts)
    lengths = tokens.n_prefix + tokens.lengths  # SOT and EOT included
    ids = tokens.padded()[:, : lengths.max()]
    with torch.autocast("cpu", torch.bfloat16):
        image, patches = encode_patches(backbone, pictures[torch.from_numpy(indices)])
        text, hidden_states = _encode_text(backbone.model, ids, lengths)
        captioning = captioner(hidden_states, patches, ids, lengths)
    scale = backbone.logit_scale.clamp(max=np.log(100)).exp()
    contrastive = contrastive_loss(F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1), scale)
    return contrastive + CAPTIONING_WEIGHT * captioning


def draw_text(index: int, purpose: str) -> str:
    """A short caption of scene `index`, another one for each purpose."""
    rng = generator("train", index, purpose)
    return short_caption(base_scene(index), rng, rng.choice([*STYLES.values()])).text


def encode_patches(backbone: Backbone, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Images -> features [batch, embed_dim], and the patches' states after the final norm [batch, patches, width]"""
    tower = backbone.image
    hidden_states = tower.embed(backbone.as_floats(pixels))
    for block in range(tower.depth):
        hidden_states = tower.run_block(block, hidden_states)
    return tower.project(hidden_states), tower.visual.ln_post(hidden_states[:, 1:])


def _encode_text(model: open_clip.CLIP, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ids -> features [batch, embed_dim], and the states after the block before the last [batch, tokens, width]

    `lengths` [batch] counts SOT and EOT. The text tower of the package computes the states of the text alone, packed:
    here, one for every slot is wanted.
    """
    hidden_states = model.token_embedding(ids) + model.positional_embedding[: ids.shape[1]]
    mask = model.attn_mask[: ids.shape[1], : ids.shape[1]]
    *blocks, last = model.transformer.resblocks
    for block in blocks:
        hidden_states = block(hidden_states, attn_mask=mask)
    pooled = model.ln_final(last(hidden_states, attn_mask=mask))[torch.arange(len(ids)), lengths - 1]
    return pooled @ model.text_projection, hidden_states


def draw_indices(scenes: int, batch: int, seed: int, step: int) -> np.ndarray:
    """`batch` of `scenes` scenes, all arrangements of the same objects together, so that places must be told apart."""
    first = np.random.default_rng([seed, step]).choice(scenes // ARRANGEMENTS, batch // ARRANGEMENTS, replace=False)
    return (first[:, None] * ARRANGEMENTS + np.arange(ARRANGEMENTS)).ravel()
