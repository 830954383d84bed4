"""Training of the toy world's UNet as SDXL's was: scenes with captions truncated to one chunk of 77 tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import diffusers.utils.logging
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.files import atomic_file
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import Caption, full_caption, long_caption
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, draw_scene, generator

from ..referring.grammar import STYLES
from .stage import run_stage
from .vae import SIZE, as_input, picture_tensor

_WITHOUT_TEXT = 0.1  # share of samples that classifier-free guidance learns from
TIME_IDS = (SIZE, SIZE, 0, 0, SIZE, SIZE)  # original size, crop, target size
_NAMES = ("latents", "hidden_states", "pooled")
Pairs = dict[str, Tensor]  # by _NAMES: [N, 16, 6, 6], [N, tokens, D] and [N, P]
# (captions, their numbers) -> (hidden_states [captions, tokens, D], pooled [captions, P])
EncodeTexts = Callable[[list[Caption], Iterable[int]], tuple[Tensor, Tensor]]
Change = Callable[[Tensor, torch.Generator], Tensor]  # of hidden states, [batch, tokens, D]


def draw_pair(index: int, split: str = "train") -> tuple[Scene, Caption]:
    """One scene and its caption: half of them of one to three objects that fit 77 tokens, half with four to six."""
    rng = generator(split, index, "unet")
    style = rng.choice([*STYLES.values()])
    if rng.random() < 0.5:
        scene = draw_scene(rng, 1, 3)
        return scene, full_caption(scene, rng, style)
    scene = draw_scene(rng)
    return scene, (full_caption if rng.random() < 0.5 else long_caption)(scene, rng, style)


def encode_texts(pipe: StableDiffusionXLPipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """(hidden_states [texts, 77, D], pooled [texts, P]) by the pipeline's `encode_prompt`"""
    return pipe.encode_prompt(texts, do_classifier_free_guidance=False)[::2]


def saved_pairs(file: Path, encode: Callable[[], Pairs]) -> Pairs:
    """The pairs in a file, which are encoded if it is not there."""
    if not file.exists():
        with atomic_file(file) as unfinished:
            save_file(encode(), unfinished)
    return load_file(file)


@torch.inference_mode()
def encode_pairs(
    pipe: StableDiffusionXLPipeline,
    count: int,
    batch: int = 200,
    start: int = 0,
    encode: EncodeTexts | None = None,
    draw: Callable[[int], tuple[Scene, Caption]] = draw_pair,
) -> Pairs:
    """`count` pairs from number `start` as the UNet learns from them, in bfloat16.

    Args:
        encode: of the captions; None for `encode_texts`, which truncates them at 77 tokens, as stock pipelines do.
        draw: the scene and the caption of a number.
    """
    encode = encode or (lambda captions, _: encode_texts(pipe, [clean(caption.text) for caption in captions]))
    parts = []
    diffusers.utils.logging.set_verbosity_error()  # that captions are cut at 77 tokens is meant here
    for first in tqdm(range(start, start + count, batch), desc="encoding pairs"):
        indices = range(first, min(first + batch, start + count))
        scenes, captions = zip(*map(draw, indices), strict=True)
        pictures = as_input(picture_tensor(render(scene, SIZE) for scene in scenes))
        with torch.autocast("cpu", torch.bfloat16):
            hidden_states, pooled = encode(list(captions), indices)
            latents = pipe.vae.encode(pictures).latent_dist.mean * pipe.vae.config.scaling_factor
        parts.append([tensor.bfloat16() for tensor in (latents, hidden_states, pooled)])
    joined = (torch.cat(tensors).contiguous() for tensors in zip(*parts, strict=True))
    return dict(zip(_NAMES, joined, strict=True))


def train_unet(
    folder: Path,
    pipe: StableDiffusionXLPipeline,
    by_turns: Sequence[Pairs],
    *,
    steps: int = 16_000,
    batch: int = 64,
    seed: int = 0,
    peak: float = 1e-3,
    warmup: int = 500,
    compiled: bool = True,
    change: Change | None = None,
) -> None:
    """Trains the pipeline's UNet in place on what `encode_pairs` gave; of several a step takes the next one."""
    denoise = denoising_loss(pipe, batch, seed, compiled, change)

    def loss(step: int) -> Tensor:
        return denoise(by_turns[step % len(by_turns)], step)

    with in_training(pipe.unet):
        run_stage(folder, pipe.unet, loss, steps=steps, peak=peak, warmup=warmup)


@contextmanager
def in_training(unet: UNet2DConditionModel) -> Iterator[None]:
    """In training mode, with the attention that is quickest there on CPUs."""
    processors = unet.attn_processors
    unet.train().set_attn_processor(AttnProcessor())
    try:
        yield
    finally:
        unet.eval().set_attn_processor(processors)


def denoising_loss(
    pipe: StableDiffusionXLPipeline, batch: int, seed: int, compiled: bool, change: Change | None = None
) -> Callable[[Pairs, int], Tensor]:
    """The mean squared error of v: a function of pairs and of the step's number.

    Args:
        compiled: by torch.compile, which takes a minute once and a third off each step on two cores.
        change: of the hidden states that the UNet reads.
    """
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    unet = torch.compile(pipe.unet) if compiled else pipe.unet
    times_of = torch.tensor([TIME_IDS], dtype=torch.float).expand(batch, 6)

    def loss(pairs: Pairs, step: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(pairs["latents"]), (batch,), generator=rng)
        latents, hidden_states, pooled = (pairs[name][chosen].float() for name in _NAMES)
        kept = (torch.rand(batch, generator=rng) >= _WITHOUT_TEXT).float()
        noise = torch.randn(latents.shape, generator=rng)
        # What stands where is decided at high noise, and only there is the text needed: more of the samples lie there.
        times = (999 * (1 - torch.rand(batch, generator=rng) ** 2)).round().long()
        if change:
            hidden_states = change(hidden_states, rng)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = unet(
                scheduler.add_noise(latents, noise, times),
                times,
                encoder_hidden_states=hidden_states * kept[:, None, None],
                added_cond_kwargs={"text_embeds": pooled * kept[:, None], "time_ids": times_of},
            ).sample
        return F.mse_loss(predicted.float(), scheduler.get_velocity(latents, noise, times))

    return loss
