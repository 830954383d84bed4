"""The text encoder in bigG's role: 77 positions and a pooled projection, trained against the toy CLIP's image tower."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.text.sentences import join_sentences
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import long_caption
from debias_diffusion.toyworld.scenes import generator

from ..referring.grammar import STYLES
from .clip import CAPTIONING_WEIGHT, CONFIG, CONTEXT_LENGTH, draw_indices, encode_patches, new_captioner, render_all
from .scenes import base_scene
from .stage import run_stage

_MOST_SENTENCES = 5  # as many as 77 tokens hold


def new_second_text_encoder(tokenizer: CLIPTokenizer, seed: int = 1) -> CLIPTextModelWithProjection:
    """The untrained model. It takes the last hidden state at the first EOT, as every CLIPTextModel does."""
    width, heads, layers = (CONFIG["text_cfg"][name] for name in ("width", "heads", "layers"))
    torch.manual_seed(seed)
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=heads,
            num_hidden_layers=layers,
            max_position_embeddings=CONTEXT_LENGTH,
            projection_dim=CONFIG["embed_dim"],
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
    )


def train_second_text_encoder(
    folder: Path, backbone: Backbone, tokenizer: CLIPTokenizer, *, scenes=30_000, steps=3000, batch=128, seed=0
) -> CLIPTextModelWithProjection:
    """Trains it on a few sentences of a scene's caption, with the summary or without, drawn anew at each step."""
    learner = nn.ModuleDict({"encoder": new_second_text_encoder(tokenizer), "captioner": new_captioner(tokenizer)})
    learner.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))
    images = _encode_images(backbone, scenes)
    run_stage(folder, learner, partial(_loss, learner, tokenizer, images, batch, seed), steps=steps, peak=1e-3)
    return learner["encoder"].eval()


@torch.no_grad()
def _encode_images(backbone: Backbone, scenes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised features [scenes, embed_dim], and the patches' states [scenes, patches, width] in bfloat16."""
    pictures = render_all([base_scene(index) for index in range(scenes)], backbone)
    parts = [encode_patches(backbone, part) for part in tqdm(pictures.split(500), desc="image features")]
    features, patches = zip(*parts, strict=True)
    return F.normalize(torch.cat(features), dim=-1), torch.cat([part.bfloat16() for part in patches])


def draw_text(index: int, purpose: str) -> str:
    """Up to five sentences of a scene's caption in their order; half the time the summary is the first of them."""
    rng = generator("train", index, purpose)
    summary, *details = long_caption(base_scene(index), rng, rng.choice([*STYLES.values()])).sentences
    kept = details[: rng.randint(1, _MOST_SENTENCES)]
    return join_sentences([sentence.text for sentence in ([summary] if rng.random() < 0.5 else []) + kept])


def _loss(learner, tokenizer, images: tuple[torch.Tensor, torch.Tensor], batch: int, seed: int, step: int):
    features, patches = images
    indices = draw_indices(len(features), batch, seed, step)
    texts = [clean(draw_text(i, f"second/{seed}/{step}")) for i in indices]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=CONTEXT_LENGTH, return_tensors="pt")
    ids, lengths, chosen = tokens.input_ids, tokens.attention_mask.sum(1), torch.from_numpy(indices)
    with torch.autocast("cpu", torch.bfloat16):
        # Causal: what follows EOT changes nothing.
        encoded = learner["encoder"](input_ids=ids, output_hidden_states=True)
        captioning = learner["captioner"](encoded.hidden_states[-2], patches[chosen].float(), ids, lengths)
    scale = learner.logit_scale.clamp(max=np.log(100)).exp()
    text = F.normalize(encoded.text_embeds.float(), dim=-1)
    return contrastive_loss(features[chosen], text, scale) + CAPTIONING_WEIGHT * captioning
