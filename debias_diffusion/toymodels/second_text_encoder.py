"""The text encoder in bigG's role: 77 positions and a pooled projection, trained against the toy CLIP's image tower."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from ..methods.objectives import contrastive_loss
from ..models.backbone import Backbone
from ..sentences import join_sentences
from ..tokens import clean
from ..toyworld.grammar import long_caption
from ..toyworld.scenes import base_scene, generator
from .clip import CONFIG, CONTEXT_LENGTH, draw_indices, render_all
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
    folder: Path, backbone: Backbone, tokenizer: CLIPTokenizer, *, scenes=30_000, steps=2500, batch=128, seed=0
) -> CLIPTextModelWithProjection:
    """Trains it on a few sentences of a scene's caption, with the summary or without, drawn anew at each step."""
    model = new_second_text_encoder(tokenizer)
    model.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))
    image = _image_features(backbone, scenes)
    run_stage(folder, model, partial(_loss, model, tokenizer, image, batch, seed), steps=steps, peak=1e-3)
    del model.logit_scale
    return model.eval()


@torch.inference_mode()
def _image_features(backbone: Backbone, scenes: int) -> torch.Tensor:
    pictures = render_all([base_scene(index) for index in range(scenes)], backbone)
    parts = tqdm(pictures.split(500), desc="image features")
    return torch.cat([F.normalize(backbone.encode_image(part), dim=-1) for part in parts])


def draw_text(index: int, purpose: str) -> str:
    """Up to five sentences of a scene's caption in their order; half the time the summary is the first of them."""
    rng = generator("train", index, purpose)
    summary, *details = long_caption(base_scene(index), rng).sentences
    kept = details[: rng.randint(1, _MOST_SENTENCES)]
    return join_sentences([sentence.text for sentence in ([summary] if rng.random() < 0.5 else []) + kept])


def _loss(model, tokenizer, image: torch.Tensor, batch: int, seed: int, step: int) -> torch.Tensor:
    indices = draw_indices(len(image), batch, seed, step)
    texts = [clean(draw_text(i, f"second/{seed}/{step}")) for i in indices]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=CONTEXT_LENGTH, return_tensors="pt")
    with torch.autocast("cpu", torch.bfloat16):
        text = model(input_ids=tokens.input_ids).text_embeds.float()  # causal: what follows EOT changes nothing
    scale = model.logit_scale.clamp(max=np.log(100)).exp()
    return contrastive_loss(image[torch.from_numpy(indices)].clone(), F.normalize(text, dim=-1), scale)
