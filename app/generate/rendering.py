"""The images of one `generate` run: their settings, how their prompts are read, and rendering what is missing."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from tqdm import tqdm

from debias_diffusion.devices import DTYPES
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.errors import UserError, reason
from debias_diffusion.pipelines import PromptLayout
from debias_diffusion.pipelines.checkpoints import (
    PIPELINES,
    STRETCH,
    Checkpoint,
    Part,
    default_dtype,
    load_pipeline,
)
from debias_diffusion.pipelines.rendering import (
    ImagePrompt,
    Sampling,
    plan_batches,
    read_layout,
    render_batch,
    render_in_low_memory,
    runtime_settings,
)

from ..options import GenerateConfig
from .png_settings import settings_text, write_png
from .prompts import LeftOut, Prompt, cleaned, print_left_out


@dataclass(frozen=True)
class ImageTask:
    """One image to render from an entry of the file of prompts (`where`, in words), with all that affects it."""

    prompt: Prompt
    where: str
    path: Path
    settings: dict


class Studio:
    """The settings of a run and its models, which are loaded on demand.

    Raises:
        UserError: there is no such checkpoint or device.
    """

    def __init__(self, config: GenerateConfig, device: torch.device):
        self.config = config
        self.device = device
        checkpoint = Checkpoint.parse(config.base)
        self.kind = checkpoint.check_kind(PIPELINES)
        self.dtype = DTYPES.get(config.precision) or default_dtype(device)
        height, width = checkpoint.size
        self.sampling = Sampling(config.steps, config.guidance_scale, config.height or height, config.width or width)

    def load(self, part: Part = "all") -> DiffusionPipeline:
        config = self.config
        pipe = load_pipeline(config.base, config.encoder, self.device, self.dtype, config.encoder_2, part)
        pipe.set_progress_bar_config(disable=config.several)
        return pipe.set_long_prompt(weighting=config.weighting, reading=config.reading)

    def settings(self) -> dict:
        """What all images of the run have in common and what decides how they look; reads no models."""
        config = vars(self.config)
        names = ("base", "encoder", "encoder_2", "steps", "guidance_scale", "weighting", "reading")
        return {name: config[name] for name in names} | {
            # An encoder that was trained further under the same name is another one.
            "encoder_sha256": _sha256(self.config.encoder),
            "encoder_2_sha256": _sha256(self.config.encoder_2),
            "height": self.sampling.height,
            "width": self.sampling.width,
            **runtime_settings(self.device, self.dtype),
        }

    def image_prompt(self, settings: dict) -> ImagePrompt:
        """What an image with these settings is rendered from."""
        names = ("prompt", "negative_prompt", "prompt_2")
        texts = {name: settings[name] and cleaned(settings[name], self.config.weighting) for name in names}
        return ImagePrompt(seed=settings["seed"], **texts)

    def layout(self, pipe: DiffusionPipeline, prompt: ImagePrompt) -> PromptLayout:
        """How a prompt is read.

        Raises:
            UserError: its weights cannot be used.
        """
        try:
            return read_layout(pipe, prompt, self.sampling)
        except ValueError as error:
            raise UserError(f"The prompt cannot be read: {reason(error)}.") from error


def _sha256(encoder: str | None) -> str | None:
    """sha256 of an encoder's files, of `MODEL:FILE` the file's.

    None for none, and for a hub id or an open_clip tag, whose files lie wherever a cache put them.
    """
    if encoder is None or encoder == STRETCH:
        return None
    sha256 = EncoderSpec.parse(encoder).digest.rpartition(":")[2]
    return sha256 if re.fullmatch("[0-9a-f]{64}", sha256) else None


def _chunks(counts: Sequence[int]) -> str:
    names = ["of the first text encoder", "of the second"] if len(counts) > 1 else ["of the text encoder"]
    counts = [f"{count} chunk{'s' * (count > 1)}" if not i else str(count) for i, count in enumerate(counts)]
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))


def render_missing(
    studio: Studio, tasks: Sequence[ImageTask], missing: set[Path], left_out: list[LeftOut]
) -> list[LeftOut]:
    """Renders the images whose files are missing, and adds to `left_out` the prompts that cannot be read.

    Returns:
        the images with values that are not finite, see `generate_images`; no files are written for them

    Raises:
        UserError: no prompt can be read.
    """
    config, sampling = studio.config, studio.sampling
    pipe = studio.load("encoders" if config.low_memory else "all")
    prompts = [studio.image_prompt(task.settings) for task in tasks]
    layouts = _layouts(studio, pipe, tasks, prompts, left_out)
    wanted = {index for index, task in enumerate(tasks) if task.path in missing}
    batches = plan_batches(prompts, layouts, config.batch, wanted)
    sampler = type(pipe.scheduler).__name__
    texts = [[prompts[index] for index in batch] for batch in batches]
    if config.low_memory:
        rendered = render_in_low_memory(pipe, studio.load, texts, sampling, config.several)
    else:
        rendered = (render_batch(pipe, batch, sampling) for batch in texts)
    failed = []
    with tqdm(total=len(wanted), desc="render", unit="image", disable=not config.several) as bar:
        for batch, images in zip(batches, rendered, strict=True):
            for index, image in zip(batch, images, strict=True):
                task = tasks[index]
                if index not in wanted:
                    continue
                bar.update()
                if isinstance(image, str):
                    failed.append(LeftOut(f"{task.where}, seed {task.settings['seed']}", image))
                    continue
                settings = task.settings | layouts[index]._asdict()
                write_png(image, task.path, settings_text(settings, sampler))
    return failed


def _layouts(
    studio: Studio,
    pipe: DiffusionPipeline,
    tasks: Sequence[ImageTask],
    prompts: Sequence[ImagePrompt],
    left_out: list[LeftOut],
) -> dict[int, PromptLayout]:
    """How the prompt of each image is read, by the image's index; prints it."""
    by_number: dict[int, PromptLayout | LeftOut] = {}
    for task, prompt in zip(tasks, prompts, strict=True):
        if task.prompt.number not in by_number:
            try:
                by_number[task.prompt.number] = studio.layout(pipe, prompt)
            except UserError as error:
                by_number[task.prompt.number] = LeftOut(task.where, str(error))
    unreadable = [entry for entry in by_number.values() if isinstance(entry, LeftOut)]
    readable = [layout for layout in by_number.values() if not isinstance(layout, LeftOut)]
    if not studio.config.several and unreadable:
        raise UserError(unreadable[0].reason)
    if not readable:
        raise UserError(f"No prompt can be rendered. {unreadable[0].where.capitalize()}: {unreadable[0].reason}")
    print_left_out(unreadable)
    left_out += unreadable
    _print_layouts(readable, studio.config.several)
    layouts = {index: by_number[task.prompt.number] for index, task in enumerate(tasks)}
    return {index: layout for index, layout in layouts.items() if not isinstance(layout, LeftOut)}


def _print_layouts(layouts: Sequence[PromptLayout], several: bool) -> None:
    if not several:
        [layout] = layouts
        print(f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions ({_chunks(layout.chunks)})")
        return
    counts = sorted(Counter(layout.positions for layout in layouts).items())
    print(
        "Positions: " + ", ".join(f"{positions} for {count:,} prompt{'s' * (count > 1)}" for positions, count in counts)
    )
