"""Training of the toy world's UNet on scenes with captions cut to 77 tokens."""

from pathlib import Path

import diffusers.utils.logging
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor
from tqdm import tqdm

from ..tokens import clean
from .grammar import Caption, long_caption, plain_caption
from .render import render
from .scenes import Scene, draw_scene, generator
from .stage import run_stage
from .vae import SIZE, as_input, picture_tensor

_WITHOUT_TEXT = 0.1  # share of samples that classifier-free guidance learns from
# What fine-tuning does to the first encoder's hidden states, in shares of their spread: see docs/toy-world.md.
_SHIFT, _MIXING = 0.9, 0.5  # at most
TIME_IDS = (SIZE, SIZE, 0, 0, SIZE, SIZE)  # original size, crop, target size


def draw_pair(index: int, split: str = "train") -> tuple[Scene, Caption]:
    """One scene and its caption: half of them of one to three objects that fit 77 tokens, half in the long style."""
    rng = generator(split, index, "unet")
    if rng.random() < 0.5:
        its = draw_scene(rng, 1, 3)
        return its, plain_caption(its, rng)
    its = draw_scene(rng)
    return its, (plain_caption if rng.random() < 0.5 else long_caption)(its, rng)


@torch.inference_mode()
def encode_pairs(pipe: StableDiffusionXLPipeline, count: int, batch: int = 200) -> dict[str, Tensor]:
    """Pairs 0 to `count` - 1 as the UNet learns from them, in bfloat16, by the pipeline's own `encode_prompt`.

    Returns:
        "latents" [count, 16, 6, 6], "hidden_states" [count, 77, D] and "pooled" [count, P].
    """
    parts = []
    diffusers.utils.logging.set_verbosity_error()  # that captions are cut at 77 tokens is meant here
    for start in tqdm(range(0, count, batch), desc="encoding pairs"):
        pairs = [draw_pair(index) for index in range(start, min(start + batch, count))]
        pictures = as_input(picture_tensor(render(its, SIZE) for its, _ in pairs))
        texts = [clean(caption.text) for _, caption in pairs]
        with torch.autocast("cpu", torch.bfloat16):
            hidden_states, _, pooled, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
            latents = pipe.vae.encode(pictures).latent_dist.mean * pipe.vae.config.scaling_factor
        parts.append([tensor.bfloat16() for tensor in (latents, hidden_states, pooled)])
    names = ("latents", "hidden_states", "pooled")
    joined = (torch.cat(tensors).contiguous() for tensors in zip(*parts, strict=True))
    return dict(zip(names, joined, strict=True))


def train_unet(
    folder: Path, pipe: StableDiffusionXLPipeline, pairs: dict[str, Tensor], *, steps=20_000, batch=64, seed=0
) -> None:
    """Trains the pipeline's UNet in place on what `encode_pairs` gave.

    In the second half it also learns to bear what fine-tuning will do to the first encoder (`disturbed`).
    """
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    width = pipe.text_encoder.config.hidden_size

    def loss(step: int) -> Tensor:
        return _loss(pipe.unet, scheduler, pairs, batch, seed, step, width if 2 * step >= steps else 0)

    pipe.unet.train()
    as_they_were = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(AttnProcessor())  # on CPUs half of a step goes to the fused attention's gradient
    run_stage(folder, pipe.unet, loss, steps=steps, peak=1e-3, warmup=500)
    pipe.unet.set_attn_processor(as_they_were)
    pipe.unet.eval()


def disturbed(hidden_states: Tensor, width: int, rng: torch.Generator) -> Tensor:
    """The first `width` channels as another encoder of the same origin might give them: shifted and mixed at random.

    Each sample is disturbed in its own way and strength, all its tokens alike.

    Args:
        hidden_states: [batch, tokens, channels]
    """
    first, others = hidden_states.split([width, hidden_states.shape[-1] - width], dim=-1)
    centred = first - first.mean(dim=(0, 1))
    shift = centred.std() * torch.randn(len(first), 1, width, generator=rng)
    mixing = torch.randn(len(first), width, width, generator=rng) / width**0.5
    strength = torch.rand(len(first), 1, 1, generator=rng)
    return torch.cat([first + strength * (_SHIFT * shift + _MIXING * (centred @ mixing)), others], dim=-1)


def _loss(
    unet, scheduler: DDPMScheduler, pairs: dict[str, Tensor], batch: int, seed: int, step: int, disturb: int = 0
) -> Tensor:
    """`disturb`: the channels that are disturbed, from the first."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = torch.randint(len(pairs["latents"]), (batch,), generator=rng)
    latents, hidden_states, pooled = (pairs[name][chosen].float() for name in ("latents", "hidden_states", "pooled"))
    kept = (torch.rand(batch, generator=rng) >= _WITHOUT_TEXT).float()
    noise = torch.randn(latents.shape, generator=rng)
    # What stands where is decided at high noise, and only there is the text needed: more of the samples lie there.
    times = (999 * (1 - torch.rand(batch, generator=rng) ** 2)).round().long()
    if disturb:
        hidden_states = disturbed(hidden_states, disturb, rng)
    added = {
        "text_embeds": pooled * kept[:, None],
        "time_ids": torch.tensor([TIME_IDS], dtype=torch.float).expand(batch, 6),
    }
    with torch.autocast("cpu", torch.bfloat16):
        predicted = unet(
            scheduler.add_noise(latents, noise, times),
            times,
            encoder_hidden_states=hidden_states * kept[:, None, None],
            added_cond_kwargs=added,
        ).sample
    return F.mse_loss(predicted.float(), scheduler.get_velocity(latents, noise, times))
