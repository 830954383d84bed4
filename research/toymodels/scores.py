"""What the toy world's models are worth, each in the terms of what it is for; kept beside the weights."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from PIL import Image, ImageFilter
from tqdm import tqdm

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.retrieval import embed_texts, encode_images, recall_at_k
from debias_diffusion.data.toy_scenes import read_toy_scenes
from debias_diffusion.eval.caption_edits import edit_caption
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import PLACES, Scene, draw_scene, generator
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS

from ..referring.grammar import short_prompt
from .unet import TIME_IDS
from .vae import SIZE, as_input, picture_tensor


@torch.no_grad()
def score_clip(backbone: Backbone, split: str, count: int = 1000) -> dict[str, dict[str, float]]:
    """R@1 in percent with whole captions, with sentences 1 and 4 swapped, and without sentence 1."""
    captions, scenes = read_toy_scenes(f"toy/{split}")
    records, scores = captions.records[:count], {}
    images, _, _ = encode_images(backbone, records, scenes, 250, "cpu")
    for edit in ("keep", "move4", "remove"):
        texts = embed_texts(backbone, [edit_caption(record.caption, edit) for record in records], 250, "cpu")
        recall = recall_at_k(images, texts, ks=(1,))
        scores[edit] = {"t2i_r1": recall["text_to_image"]["R@1"], "i2t_r1": recall["image_to_text"]["R@1"]}
    return scores


@torch.inference_mode()
def score_checker(vae: AutoencoderKL, split: str, count: int = 500) -> dict[str, dict[str, float]]:
    """How well the checker reads pictures whose content is known, in shares of 1.

    Returns:
        For rendered pictures, the same blurred (1 pixel), passed through the autoencoder, and that blurred: "objects",
        those read with the right kind and colour, "sizes", those read with the right size as well, and "empty", empty
        places read as empty. And "mismatched": objects said to be right when picture i is read for scene i + 1.
    """
    scenes = [draw_scene(generator(split, index, "checker"), 1, 6) for index in range(count)]
    rendered = [render(true_scene, SIZE) for true_scene in scenes]
    decoded = _pictures(vae, vae.encode(as_input(picture_tensor(rendered))).latent_dist.mean)
    blur = ImageFilter.GaussianBlur(1.0)
    versions = {"rendered": rendered, "rendered, blurred": [picture.filter(blur) for picture in rendered]}
    versions |= {"decoded": decoded, "decoded, blurred": [picture.filter(blur) for picture in decoded]}
    scores = {}
    for version, pictures in versions.items():
        shares = _contents(pictures, scenes)
        scores[version] = {name: shares[name] for name in ("objects", "sizes")} | {
            "empty": round(1 - shares["filled"], 4)
        }
    return scores | {"mismatched": {"objects": _contents([rendered[-1], *rendered[:-1]], scenes)["objects"]}}


def _pictures(vae: AutoencoderKL, latents: torch.Tensor) -> list[Image.Image]:
    decoded = torch.cat([vae.decode(part).sample for part in latents.split(100)])
    pixels = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(picture) for picture in pixels]


@torch.inference_mode()
def score_sdxl(
    pipe: StableDiffusionXLPipeline, split: str, count: int = 200, batch: int = 50, style: str = "plain"
) -> tuple[dict[str, float], list[Image.Image]]:
    """What is right in images of captions of one to three objects within 77 tokens, in shares of 1; and the images.

    Returns:
        "objects": of the named objects, those with the right kind and colour in the right place; "sizes", those with
        the right size as well; "precision", right objects among the places that are filled; "filled", empty places that
        are filled; "background", right ones. "objects in one step" is the first for what the UNet makes of pure noise
        at once, without guidance: it says early in training whether the text is used.
    """
    pipe.set_progress_bar_config(disable=True)
    generated, at_once, scenes = [], [], []
    for start in tqdm(range(0, count, batch), desc="drawing"):
        pairs = [short_prompt(split, index, style) for index in range(start, min(start + batch, count))]
        scenes += [true_scene for true_scene, _ in pairs]
        texts = [clean(text.text) for _, text in pairs]
        noise = [torch.Generator().manual_seed(index) for index in range(start, start + len(pairs))]
        generated += pipe(texts, generator=noise, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE).images
        at_once += _in_one_step(pipe, texts)
    return _contents(generated, scenes) | {"objects in one step": _contents(at_once, scenes)["objects"]}, generated


def _contents(pictures: Sequence[Image.Image], scenes: Sequence[Scene]) -> dict[str, float]:
    compared = [compare(read_image(picture), true_scene) for picture, true_scene in zip(pictures, scenes, strict=True)]
    asked, filled = (sum(len(getattr(comparison, name)) for comparison in compared) for name in ("correct", "filled"))
    right = sum(sum(comparison.correct.values()) for comparison in compared)
    shares = {
        "objects": right / asked,
        "sizes": sum(sum(comparison.sizes.values()) for comparison in compared) / asked,
        "precision": right / max(1, filled),
        "filled": sum(len(comparison.invented) for comparison in compared) / (len(PLACES) * len(compared) - asked),
        "background": sum(comparison.background for comparison in compared) / len(compared),
    }
    return {name: round(share, 4) for name, share in shares.items()}


def _in_one_step(pipe: StableDiffusionXLPipeline, texts: list[str]) -> list[Image.Image]:
    hidden_states, _, pooled, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
    shape = (len(texts), pipe.unet.config.in_channels, *(pipe.unet.config.sample_size,) * 2)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    added = {"text_embeds": pooled, "time_ids": torch.tensor([TIME_IDS], dtype=torch.float).expand(len(texts), 6)}
    velocity = pipe.unet(latents, 999, encoder_hidden_states=hidden_states, added_cond_kwargs=added).sample
    return _pictures(pipe.vae, -velocity / pipe.vae.config.scaling_factor)  # v = -x0 where no signal is left
