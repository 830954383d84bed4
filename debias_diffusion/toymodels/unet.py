"""Training of the toy world's UNet on scenes with captions cut to 77 tokens."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import diffusers.utils.logging
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPTokenizer

from ..sentences import join_sentences
from ..tokens import clean
from ..toyworld.grammar import Caption, long_caption, plain_caption
from ..toyworld.render import render
from ..toyworld.scenes import Scene, draw_scene, generator
from .stage import run_stage
from .vae import SIZE, as_input, picture_tensor

_WITHOUT_TEXT = 0.1  # share of samples that classifier-free guidance learns from
# What fine-tuning does to the first encoder's hidden states, in shares of their spread: see docs/toy-world-diary.md.
_SHIFT, _MIXING = 0.9, 0.5  # at most
TIME_IDS = (SIZE, SIZE, 0, 0, SIZE, SIZE)  # original size, crop, target size


def draw_pair(index: int, split: str = "train") -> tuple[Scene, Caption]:
    """One scene and its caption: half of them of one to three objects that fit 77 tokens, half in the long style."""
    rng = generator(split, index, "unet")
    if rng.random() < 0.5:
        scene = draw_scene(rng, 1, 3)
        return scene, plain_caption(scene, rng)
    scene = draw_scene(rng)
    return scene, (plain_caption if rng.random() < 0.5 else long_caption)(scene, rng)


def windows_of(caption: Caption, tokenizer: CLIPTokenizer, rng: random.Random) -> tuple[str, str]:
    """What 77 tokens hold of a caption, without its summary half the time, cut in two between sentences.

    The UNet is to draw from several windows as well, of which all but one begin with a detail.
    """
    sentences = [sentence.text for sentence in caption.sentences[rng.randint(0, 1) :]]
    while len(tokenizer(clean(join_sentences(sentences))).input_ids) > tokenizer.model_max_length:
        sentences.pop()
    cut = rng.randint(1, len(sentences))
    return clean(join_sentences(sentences[:cut])), clean(join_sentences(sentences[cut:]))


def _encode(pipe: StableDiffusionXLPipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """(hidden_states [texts, 77, D], pooled [texts, P])"""
    hidden_states, _, pooled, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
    return hidden_states, pooled


def _encode_windows(
    pipe: StableDiffusionXLPipeline, texts: list[tuple[str, str]], whole: list[bool]
) -> tuple[Tensor, Tensor]:
    """The states of two windows as `pipelines.chunks.join_chunks` joins them.

    BOS and the tokens of the first window, tokens, EOS and pads of the second, then pads of an empty one.

    Args:
        texts: of the two windows, within 77 tokens together.
        whole: where the first encoder reads both at once, as one of 248 positions does.

    Returns:
        (hidden_states [texts, 152, D], pooled [texts, P], of the first windows)
    """
    (first, pooled), (second, _) = (_encode(pipe, list(window)) for window in zip(*texts, strict=True))
    at_once, _ = _encode(pipe, [" ".join(windows).strip() for windows in texts])
    empty, width = _encode(pipe, [""])[0][0], pipe.text_encoder.config.hidden_size
    joined = []
    for i, (text, _) in enumerate(texts):
        n = len(pipe.tokenizer(text, add_special_tokens=False).input_ids)
        states = torch.cat([first[i, : 1 + n], second[i, 1:], empty[1 : len(empty) - 1 - n]])
        if whole[i]:
            states[:, :width] = torch.cat([at_once[i], empty[1:-1]])[:, :width]
        joined.append(states)
    return torch.stack(joined), pooled


@torch.inference_mode()
def encode_pairs(
    pipe: StableDiffusionXLPipeline, count: int, windows: int = 1, batch: int = 200, start: int = 0
) -> dict[str, Tensor]:
    """`count` pairs from number `start` as the UNet learns from them, in bfloat16, by the pipeline's `encode_prompt`.

    Args:
        windows: 1, or 2 for captions in two windows, joined as `StableDiffusionXLLongPromptPipeline` joins them.

    Returns:
        "latents" [count, 16, 6, 6], "hidden_states" [count, 77 or 152, D] and "pooled" [count, P].
    """
    parts = []
    diffusers.utils.logging.set_verbosity_error()  # that captions are cut at 77 tokens is meant here
    for first in tqdm(range(start, start + count, batch), desc="encoding pairs"):
        indices = range(first, min(first + batch, start + count))
        pairs = [draw_pair(index) for index in indices]
        pictures = as_input(picture_tensor(render(scene, SIZE) for scene, _ in pairs))
        with torch.autocast("cpu", torch.bfloat16):
            if windows == 1:
                hidden_states, pooled = _encode(pipe, [clean(caption.text) for _, caption in pairs])
            else:
                rngs = [generator("train", index, "windows") for index in indices]
                texts = [
                    windows_of(caption, pipe.tokenizer, rng) for (_, caption), rng in zip(pairs, rngs, strict=True)
                ]
                hidden_states, pooled = _encode_windows(pipe, texts, [rng.random() < 0.5 for rng in rngs])
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
    _train(folder, pipe, (pairs,), (steps + 1) // 2, steps=steps, peak=1e-3, warmup=500, batch=batch, seed=seed)


def train_unet_on_windows(
    folder: Path,
    pipe: StableDiffusionXLPipeline,
    pairs: Sequence[dict[str, Tensor]],
    *,
    steps=8000,
    batch=64,
    seed=1,
) -> None:
    """Trains the trained UNet further, by turns on pairs in one window and in two, the first encoder disturbed."""
    _train(folder, pipe, pairs, 0, steps=steps, peak=5e-4, batch=batch, seed=seed)


def _train(
    folder: Path,
    pipe: StableDiffusionXLPipeline,
    pairs: Sequence[dict[str, Tensor]],
    disturbed_from: int,
    *,
    batch: int,
    seed: int,
    **schedule,
) -> None:
    """Trains on each of `pairs` by turns, from step `disturbed_from` on with the first encoder disturbed."""
    scheduler, width = DDPMScheduler.from_config(pipe.scheduler.config), pipe.text_encoder.config.hidden_size

    def loss(step: int) -> Tensor:
        disturb = width if step >= disturbed_from else 0
        return _loss(pipe.unet, scheduler, pairs[step % len(pairs)], batch, seed, step, disturb)

    with _in_training(pipe.unet):
        run_stage(folder, pipe.unet, loss, **schedule)


@contextmanager
def _in_training(unet: UNet2DConditionModel) -> Iterator[None]:
    processors = unet.attn_processors
    unet.train().set_attn_processor(AttnProcessor())  # on CPUs half of a step goes to the fused attention's gradient
    try:
        yield
    finally:
        unet.eval().set_attn_processor(processors)


def disturbed(hidden_states: Tensor, width: int, rng: torch.Generator) -> Tensor:
    """The first `width` channels as another encoder of the same origin might give them: shifted and mixed at random.

    Each sample is disturbed in its own way and strength, all its tokens alike.

    Args:
        hidden_states: [batch, tokens, channels]
    """
    first, second = hidden_states.split([width, hidden_states.shape[-1] - width], dim=-1)
    centred = first - first.mean(dim=(0, 1))
    shift = centred.std() * torch.randn(len(first), 1, width, generator=rng)
    mixing = torch.randn(len(first), width, width, generator=rng) / width**0.5
    strength = torch.rand(len(first), 1, 1, generator=rng)
    return torch.cat([first + strength * (_SHIFT * shift + _MIXING * (centred @ mixing)), second], dim=-1)


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
