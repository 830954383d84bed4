"""The models of a run, and how its pictures are drawn with them: in batches of one length, in low memory or not."""

import gc
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.pictures.drawing import model_digest
from debias_diffusion.pipelines import PromptLayout
from debias_diffusion.pipelines.checked import generate_images
from debias_diffusion.pipelines.loading import (
    PIPELINES,
    SDXL,
    STRETCH,
    Part,
    check_base,
    default_dtype,
    default_size,
    load_pipeline,
)
from debias_diffusion.pipelines.memory import check_memory

from .png_settings import settings_text, write_png
from .prompts import LeftOut, Prompt, cleaned, print_left_out

if TYPE_CHECKING:
    from .command import GenerateConfig

ENCODED_AT_ONCE = 500  # pictures whose embeddings are kept under low_memory: up to 4 MB each at 248 positions
_EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
Embeddings = dict[str, torch.Tensor]  # by the name of the pipeline's argument, on the CPU


@dataclass(frozen=True)
class Picture:
    """One picture to draw.

    Attributes:
        prompt: what is on it.
        where: its prompt, in words.
        path: its file.
        settings: everything that decides what it looks like, as its file will say.
    """

    prompt: Prompt
    where: str
    path: Path
    settings: dict


class Studio:
    """The settings of a run, where it runs, and its models, loaded when they are asked for.

    Raises:
        UserError: there is no such base or device.
    """

    def __init__(self, config: "GenerateConfig", device: torch.device):
        self.config = config
        self.device = device
        self.kind = check_base(config.base, tuple(PIPELINES))
        self.dtype = getattr(torch, config.dtype) if config.dtype else default_dtype(device)
        self.guided = config.guidance_scale > 1

    def load(self, part: Part = "all") -> DiffusionPipeline:
        config = self.config
        pipe = load_pipeline(config.base, config.encoder, self.device, self.dtype, config.encoder_2, part)
        pipe.set_progress_bar_config(disable=config.several)
        if config.strict or config.weighting:
            pipe.set_long_prompt(strict=config.strict, weighting=config.weighting)
        return pipe

    def settings(self) -> dict:
        """What all pictures of the run have in common and what decides how they look; reads no models."""
        config = vars(self.config)
        names = ("base", "encoder", "encoder_2", "steps", "guidance_scale", "weighting")
        height, width = default_size(self.config.base)
        return {name: config[name] for name in names} | {
            # An encoder that was trained further under the same name is another one.
            "encoder_sha256": _digest(self.config.encoder),
            "encoder_2_sha256": _digest(self.config.encoder_2),
            "height": self.config.height or height,
            "width": self.config.width or width,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def check_memory(self, images: int) -> None:
        """Raises UserError where the memory surely does not suffice for so many pictures at once."""
        height, width = default_size(self.config.base)
        size = self.config.height or height, self.config.width or width
        check_memory(self.config.base, self.device, self.dtype, *size, images)

    def texts(self, prompt: Prompt) -> dict[str, str | None]:
        """A prompt's texts, cleaned as captions were cleaned for training, SDXL's own encoders included."""
        negative = self.config.negative_prompt if prompt.negative is None else prompt.negative
        texts = {"prompt": prompt.text, "negative_prompt": negative}
        if prompt.second is not None:
            texts["prompt_2"] = prompt.second
        return {name: None if text is None else cleaned(text, self.config.weighting) for name, text in texts.items()}

    def layout(self, pipe: DiffusionPipeline, prompt: Prompt) -> PromptLayout:
        """How a prompt is read.

        Raises:
            UserError: it needs a second window, under `strict`; or its weights cannot be used.
        """
        texts = self.texts(prompt)
        try:
            layout = pipe.prompt_layout(**texts, do_classifier_free_guidance=self.guided)
            windows = [layout.windows]
            if self.guided and texts["negative_prompt"] is not None:
                turned = {"prompt": texts["negative_prompt"], "negative_prompt": texts["prompt"]}
                turned |= {"negative_prompt_2": texts["prompt_2"]} if "prompt_2" in texts else {}
                windows.append(pipe.prompt_layout(**turned).windows)
        except ValueError as error:
            raise UserError(f"The prompt cannot be read: {reason(error)}.") from error
        if self.config.strict and max(map(max, windows)) > 1:
            raise UserError(
                f"With its {layout.tokens} tokens it takes {_windows(max(windows))}, and --strict allows one window."
            )
        return layout


def _digest(encoder: str | None) -> str | None:
    """sha256 of an encoder's files, of `MODEL:FILE` the file's.

    None for none, and for a hub id or a tag of open_clip's, whose files lie wherever a cache put them.

    Raises:
        UserError: a file cannot be read.
    """
    if encoder is None or encoder == STRETCH:
        return None
    sha256 = model_digest(encoder).rpartition(":")[2]
    return sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None


def _windows(windows: Sequence[int]) -> str:
    names = ["of the first text encoder", "of the second"] if len(windows) > 1 else ["of the text encoder"]
    counts = [f"{count} window{'s' * (count > 1)}" if not i else str(count) for i, count in enumerate(windows)]
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))


def draw(studio: Studio, pictures: Sequence[Picture], missing: set[Path], left_out: list[LeftOut]) -> list[LeftOut]:
    """Draws the pictures whose files are missing, and adds to `left_out` the prompts that cannot be read.

    Returns:
        the pictures of which nothing came that could be written, see `generate_images`

    Raises:
        UserError: no prompt can be read, or memory cannot suffice for the largest batch.
    """
    low_memory = studio.config.low_memory
    pipe = studio.load("encoders" if low_memory else "all")
    layouts = _layouts(studio, pipe, pictures, left_out)
    _print_layouts(studio, layouts)
    batches = _batches(studio, pictures, layouts, missing)
    studio.check_memory(max(map(len, batches), default=1))
    failed = []
    sampler = type(pipe.scheduler).__name__
    drawn = _encode_then_draw(studio, pipe, batches) if low_memory else _encode_and_draw(studio, pipe, batches)
    with tqdm(total=len(missing), desc="draw", unit="picture", disable=not studio.config.several) as bar:
        for batch, images in drawn:
            for picture, image in zip(batch, images, strict=True):
                if picture.path not in missing:
                    continue
                bar.update()
                if isinstance(image, str):
                    failed.append(LeftOut(f"{picture.where}, seed {picture.settings['seed']}", image))
                    continue
                settings = picture.settings | layouts[picture.prompt.number]._asdict()
                write_png(image, picture.path, settings_text(settings, sampler))
    return failed


def _layouts(
    studio: Studio, pipe: DiffusionPipeline, pictures: Sequence[Picture], left_out: list[LeftOut]
) -> dict[int, PromptLayout]:
    """How each prompt is read, by its number."""
    layouts, unreadable = {}, []
    for picture in {picture.prompt.number: picture for picture in pictures}.values():
        try:
            layouts[picture.prompt.number] = studio.layout(pipe, picture.prompt)
        except UserError as error:
            unreadable.append(LeftOut(picture.where, str(error)))
    if not studio.config.several and unreadable:
        raise UserError(unreadable[0].reason)
    if not layouts:
        raise UserError(f"No prompt can be drawn. {unreadable[0].where.capitalize()}: {unreadable[0].reason}")
    print_left_out(unreadable)
    left_out += unreadable
    return layouts


def _print_layouts(studio: Studio, layouts: dict[int, PromptLayout]) -> None:
    if not studio.config.several:
        layout = layouts[0]
        windows = _windows(layout.windows)
        print(f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions ({windows})")
        return
    counts = sorted(Counter(layout.positions for layout in layouts.values()).items())
    print(
        "Positions: " + ", ".join(f"{positions} for {count:,} prompt{'s' * (count > 1)}" for positions, count in counts)
    )


def _batches(
    studio: Studio, pictures: Sequence[Picture], layouts: dict[int, PromptLayout], missing: set[Path]
) -> list[list[Picture]]:
    """The pictures in batches of one length, so that none is padded further than it would be alone.

    What is there already counts too, so that a run that goes on draws in the same batches: others would change the
    last bits of a picture. Only batches that lack a picture are drawn.
    """
    groups: dict[tuple, list[Picture]] = {}
    for picture in pictures:
        if picture.prompt.number in layouts:
            # In a batch either all or none have a negative prompt.
            key = layouts[picture.prompt.number].positions, picture.settings["negative_prompt"] is None
            groups.setdefault(key, []).append(picture)
    size = studio.config.batch
    batches = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    batches = [batch for batch in batches if any(picture.path in missing for picture in batch)]
    return sorted(batches, key=lambda batch: batch[0].prompt.number)


def _encode_and_draw(
    studio: Studio, pipe: DiffusionPipeline, batches: Sequence[list[Picture]]
) -> Iterator[tuple[list[Picture], list[Image.Image | str]]]:
    for batch in batches:
        yield batch, _images(studio, pipe, batch, _encode(studio, pipe, batch))


def _encode_then_draw(
    studio: Studio, encoders: DiffusionPipeline, batches: Sequence[list[Picture]]
) -> Iterator[tuple[list[Picture], list[Image.Image | str]]]:
    """Like `_encode_and_draw`, with either the text encoders or the UNet in memory, never both.

    In rounds, because the embeddings of thousands of prompts take more room than the encoders.
    """
    at_once = max(1, ENCODED_AT_ONCE // studio.config.batch)
    for start in range(0, len(batches), at_once):
        encoders = encoders or studio.load("encoders")
        now = batches[start : start + at_once]
        encoded = [
            _encode(studio, encoders, batch)
            for batch in tqdm(now, desc="encode", disable=not studio.config.several, leave=False)
        ]
        # Whoever else holds the pipeline holds no encoders.
        encoders.register_modules(text_encoder=None, **({"text_encoder_2": None} if studio.kind == SDXL else {}))
        encoders = None
        _free_memory()
        denoiser = studio.load("denoiser")
        for batch, embeddings in zip(now, encoded, strict=True):
            yield batch, _images(studio, denoiser, batch, embeddings)
        del denoiser
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


@torch.no_grad()
def _encode(studio: Studio, pipe: DiffusionPipeline, batch: Sequence[Picture]) -> Embeddings:
    texts = [studio.texts(picture.prompt) for picture in batch]
    arguments = {"prompt": [text["prompt"] for text in texts]}
    if texts[0]["negative_prompt"] is not None:
        arguments["negative_prompt"] = [text["negative_prompt"] for text in texts]
    if any("prompt_2" in text for text in texts):
        arguments["prompt_2"] = [text.get("prompt_2", text["prompt"]) for text in texts]
    embeddings = pipe.encode_prompt(
        **arguments, device=studio.device, num_images_per_prompt=1, do_classifier_free_guidance=studio.guided
    )
    # Two from Stable Diffusion 1.5, four from SDXL; None where guidance does not ask for it.
    named = zip(_EMBEDDINGS, embeddings, strict=False)
    return {name: embedding.cpu() for name, embedding in named if embedding is not None}


def _images(
    studio: Studio, pipe: DiffusionPipeline, batch: Sequence[Picture], embeddings: Embeddings
) -> list[Image.Image | str]:
    config, first = studio.config, batch[0].settings
    return generate_images(
        pipe,
        **{name: embedding.to(studio.device) for name, embedding in embeddings.items()},
        height=first["height"],
        width=first["width"],
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale,
        # One an image, so that it does not matter what it is drawn with; on the CPU, because every device's own
        # generator draws other numbers from the same seed.
        generator=[torch.Generator("cpu").manual_seed(picture.settings["seed"]) for picture in batch],
    )
