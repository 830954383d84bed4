"""Images of several text encoders in one SDXL checkpoint, from equal noise, in a folder for each encoder.

A killed run continues with the missing images, and several processes share them. Either way the images equal those of
one uninterrupted run, bit for bit.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.chunks import TRAINED_POSITIONS
from debias_diffusion.encoders import EncoderSpec, Kind
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import atomic_file, describe_changes, read_json_object, write_json
from debias_diffusion.limits import Layer, check_guidance, check_pixels, check_seeds, check_side, check_steps
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS, shipped
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.checkpoints import (
    STRETCH,
    Checkpoint,
    default_dtype,
    load_pipeline,
    quiet_diffusers,
)
from debias_diffusion.pipelines.rendering import (
    ImagePrompt,
    Sampling,
    check_scheduler,
    explain_memory,
    make_scheduler,
    plan_batches,
    read_layout,
    reading_layer,
    render_batch,
    replace_encoder,
    runtime_settings,
)
from debias_diffusion.png import png_damage
from debias_diffusion.tokens import clean

from ..processes import Processes

_SETTINGS, _DRAWN = "settings.json", "drawn.json"
# "auto" for any checkpoint, and for toy/sdxl: its own settings, and as many small images as fill two cores.
_AUTO = {"steps": (30, STEPS), "guidance_scale": (7.0, GUIDANCE_SCALE), "images_at_once": (1, 20)}


@dataclass(frozen=True)
class DrawingSettings:
    """How images are rendered.

    Attributes:
        base: SDXL checkpoint, see `Checkpoint.parse`.
        steps: denoising steps.
        guidance_scale: how strongly prompts are followed; 1 is no guidance.
        images_at_once: batch size, of prompts of equal length. Other sizes round differently.
        prefix: put before each prompt.
        seed: added to the number of each image for the seed of its noise.
        encoder_2: replaces SDXL's second text encoder for all; None keeps the checkpoint's own.
        layer: of both text encoders, see `reading_layer`.
        scheduler: one of SCHEDULERS; None keeps the checkpoint's own.
        height, width: in pixels, multiples of 8; None is the checkpoint's own.
    """

    base: str
    steps: int = 30
    guidance_scale: float = 7.0
    images_at_once: int = 1
    prefix: str = ""
    seed: int = 0
    encoder_2: str | None = None
    layer: Layer = "penultimate"
    scheduler: str | None = None
    height: int | None = None
    width: int | None = None

    @classmethod
    def of(cls, config: Any) -> "DrawingSettings":
        """The fields of an evaluation's configuration, with "auto" resolved for its checkpoint.

        Raises:
            UserError: a number is too small or too large, or there is no such SDXL checkpoint.
        """
        is_toy = config.base != shipped(config.base)
        settings = {name: getattr(config, name) for name in cls.__dataclass_fields__}
        settings |= {name: values[is_toy] for name, values in _AUTO.items() if settings[name] == "auto"}
        if settings["images_at_once"] < 1:
            raise UserError(f"images_at_once={settings['images_at_once']} is not allowed. Give a whole number from 1.")
        check_steps(settings["steps"])
        check_guidance(settings["guidance_scale"])
        if settings["layer"] not in get_args(Layer):
            raise UserError(f"layer={settings['layer']!r} is not allowed. Give {' or '.join(get_args(Layer))}.")
        if settings["scheduler"] is not None:
            check_scheduler(settings["scheduler"])
        for name in ("height", "width"):
            check_side(name, settings[name])
        Checkpoint.parse(config.base).check_kind()
        checked = cls(**settings)
        check_pixels(*checked.size())
        return checked

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        height, width = Checkpoint.parse(self.base).size
        return self.height or height, self.width or width


@dataclass(frozen=True)
class Subject:
    """One image to render.

    Attributes:
        name: file name without .png; may begin with a folder's name.
        prompt: what to render.
        number: plus the seed of the settings, the seed of its noise, equal on every device.
    """

    name: str
    prompt: str
    number: int


def folder_names(labels: Sequence[str]) -> dict[str, str]:
    """A folder name for each label: at most 200 bytes, without characters special to file systems and shells."""
    plain = {label: re.sub(r"[^\w.-]+", "-", label).strip(".-") or "encoder" for label in labels}
    for label, name in plain.items():
        while len(os.fsencode(name)) + len(f"-{len(plain)}") > 200:
            name = name[:-1]
        plain[label] = name.rstrip(".-")
    taken = [name.lower() for name in plain.values()]  # some file systems tell no cases apart
    for number, (label, name) in enumerate(plain.items(), 1):
        if taken.count(name.lower()) > 1:
            plain[label] = f"{name}-{number}"
    return plain


class Drawing:
    """Renders with one encoder after the other. The checkpoint's other models are loaded once, on demand.

    Args:
        processes: share the work; all must make the same calls.
        data: digest of the source of the prompts.

    Attributes:
        digests: of the checkpoint, and of the encoders so far; in the main process.
    """

    def __init__(self, settings: DrawingSettings, processes: Processes, data: str | None = None):
        self.settings, self.processes, self.data = settings, processes, data
        self.dtype = default_dtype(processes.device)
        self.sampling = Sampling(settings.steps, settings.guidance_scale, settings.height, settings.width)
        self.digests = {"base": None, "encoder_2": None, "encoders": {}}
        self._pipe: StableDiffusionXLLongPromptPipeline | None = None
        self._loaded_second: str | None = None
        self._second_digests: dict[str | None, str | None] = {}

    def check(self, encoders: Sequence[EncoderSpec], folders: Sequence[Path], subjects: Sequence[Subject]) -> None:
        """Checks all encoders before anything is rendered.

        Raises:
            UserError: an encoder with missing images cannot be loaded or does not fit the checkpoint, a seed is out of
                range, or a folder holds images of other settings.
        """

        def check_all() -> None:
            self._check_seeds(subjects)
            for encoder, folder in zip(encoders, folders, strict=True):
                _check_same_settings(folder, self._settings_record(encoder))
                if _missing(folder, subjects) and encoder.kind is not Kind.ORIGINAL:
                    self._load_encoder(encoder)

        self.processes.from_main(check_all)

    def draw(self, encoder: EncoderSpec, folder: Path, subjects: Sequence[Subject], title: str) -> list[Path]:
        """Renders the missing images of a folder.

        Args:
            encoder: replaces SDXL's first text encoder; this and the second read long prompts as it says.
            folder: gets `{name}.png` of each subject, and `settings.json` with every setting that affects the images.
            subjects: all images of the folder, finished or not.

        Returns:
            The image files, in the order of `subjects`.

        Raises:
            UserError: the folder holds images of other settings, the models cannot be loaded, or memory does not
                suffice.
            FailedError: some images have values that are not finite. These are not written, all others are.
        """

        def begin() -> set[str]:
            self._check_seeds(subjects)
            record = self._settings_record(encoder)
            _check_same_settings(folder, record)
            missing = _missing(folder, subjects)
            if missing:
                write_json(folder / _SETTINGS, record)
                for leftover in folder.rglob(".*.tmp"):  # of processes that were killed
                    if not leftover.is_dir():
                        leftover.unlink()
            return missing

        missing = self.processes.from_main(begin)
        if missing:
            with explain_memory(self.processes.device, "Lower --images-at-once."):
                self._draw(encoder, folder, subjects, missing, title)
        return [_file(folder, subject) for subject in subjects]

    def _check_seeds(self, subjects: Sequence[Subject]) -> None:
        seeds = [self.settings.seed + subject.number for subject in subjects]
        if seeds:
            check_seeds(min(seeds), max(seeds))

    def _settings_record(self, encoder: EncoderSpec) -> dict:
        """Every setting that affects an image, besides its prompt and seed."""
        if self.digests["base"] is None:
            self.digests["base"] = Checkpoint.parse(self.settings.base).digest
            self.digests["encoder_2"] = self._second_digest(self.settings.encoder_2)
        known = self.digests["encoders"]
        if encoder not in known:
            known[encoder] = None if encoder.kind is Kind.ORIGINAL else encoder.digest
        names = ("steps", "guidance_scale", "prefix", "seed", "layer", "scheduler", "height", "width")
        return {
            "data": self.data,
            "base": self.digests["base"],
            "encoder": known[encoder],
            "reading": encoder.reading,
            "encoder_2": self._second_digest(self._second(encoder)),
            **{name: getattr(self.settings, name) for name in names},
            **runtime_settings(self.processes.device, self.dtype),
        }

    def _draw(
        self, encoder: EncoderSpec, folder: Path, subjects: Sequence[Subject], missing: set[str], title: str
    ) -> None:
        prompts = [
            # Cleaned like training captions.
            ImagePrompt(clean(self.settings.prefix + subject.prompt), self.settings.seed + subject.number)
            for subject in subjects
        ]
        processes, pipe, failed = self.processes, self._load(encoder), []
        layouts = {index: read_layout(pipe, prompt, self.sampling) for index, prompt in enumerate(prompts)}
        wanted = {index for index, subject in enumerate(subjects) if subject.name in missing}
        batches = plan_batches(prompts, layouts, self.settings.images_at_once, wanted)
        if processes.is_main:
            _note(folder, **_cuts(pipe, prompts))
        several = f", {processes.count} processes" if processes.count > 1 else ""
        bar = tqdm(desc=f"render{several}, {title}", total=len(missing), disable=not processes.is_main)
        with quiet_diffusers(), bar:  # it warns of every prompt that it cuts
            for start in range(0, len(batches), processes.count):
                batches_now, started = batches[start : start + processes.count], time.monotonic()
                if processes.index < len(batches_now):
                    batch = batches_now[processes.index]
                    with reading_layer(pipe, self.settings.layer):
                        images = render_batch(pipe, [prompts[index] for index in batch], self.sampling)
                    failed += _write_missing(images, [subjects[index] for index in batch], folder, missing)
                if processes.is_main:
                    _note(folder, time.monotonic() - started)
                bar.update(sum(subjects[index].name in missing for batch in batches_now for index in batch))
        _raise_if_failed(processes.gathered(failed), len(subjects), encoder.name, self.dtype)

    def _load(self, encoder: EncoderSpec) -> StableDiffusionXLPipeline:
        """The SDXL checkpoint with an encoder that reads prompts as it says."""
        second = self._second(encoder)
        if self._pipe is None or second != self._loaded_second:
            self._pipe = None  # before the next one is loaded
            self._pipe = load_pipeline(self.settings.base, None, self.processes.device, self.dtype, second)
            self._loaded_second = second
        text_encoder, tokenizer = self._pipe.text_encoder, self._pipe.tokenizer
        if encoder.kind is not Kind.ORIGINAL:
            text_encoder, tokenizer = self._load_encoder(encoder)
            text_encoder.to(self.processes.device, self.dtype)
        lengths = [part.config.max_position_embeddings for part in (text_encoder, self._pipe.text_encoder_2)]
        cut = lengths[0] == lengths[1] <= TRAINED_POSITIONS and encoder.reading == "cut"
        cls = StableDiffusionXLPipeline if cut else StableDiffusionXLLongPromptPipeline
        scheduler = self.settings.scheduler
        changed = {"scheduler": make_scheduler(self._pipe, scheduler)} if scheduler else {}
        pipe = replace_encoder(self._pipe, text_encoder, tokenizer, cls, **changed)
        return pipe if cut else pipe.set_long_prompt(reading=encoder.reading)

    def _second(self, encoder: EncoderSpec) -> str | None:
        """SDXL's second encoder beside it: the one that `align` has fitted with it, else that of the settings."""
        return encoder.fitted_second or self.settings.encoder_2

    def _second_digest(self, encoder: str | None) -> str | None:
        """Of gigabytes, so it is computed once."""
        if encoder not in self._second_digests:
            self._second_digests[encoder] = encoder if encoder in (None, STRETCH) else EncoderSpec.parse(encoder).digest
        return self._second_digests[encoder]

    def _load_encoder(self, encoder: EncoderSpec) -> tuple[torch.nn.Module, Any]:
        """The text encoder and its tokenizer. Raises UserError unless it has the replaced encoder's width."""
        text_encoder, tokenizer = encoder.load_text_encoder()
        Checkpoint.parse(self.settings.base).check_fits("text_encoder", text_encoder, encoder.name)
        return text_encoder, tokenizer


def _write_missing(
    images: Sequence[Image.Image | str], batch: Sequence[Subject], folder: Path, missing: set[str]
) -> list[str]:
    """Writes the missing images of a batch. Returns those that there is no image of, with the reason."""
    failed = []
    for subject, image in zip(batch, images, strict=True):
        if subject.name in missing and isinstance(image, str):
            failed.append(f"{subject.name} ({image})")
        elif subject.name in missing:
            with atomic_file(_file(folder, subject)) as unfinished:
                image.save(unfinished, format="PNG")
    return failed


def _raise_if_failed(failed: Sequence[str], count: int, encoder: str, dtype: torch.dtype) -> None:
    """Raises FailedError if images could not be rendered."""
    if failed:
        raise FailedError(
            f"{len(failed):,} of {count:,} images by {encoder!r} were not rendered, the first: {failed[0]}. Where "
            "values are not finite, weights of the encoder or of the SDXL checkpoint are damaged, or too large for "
            f"{str(dtype).removeprefix('torch.')}. Give another encoder. The other images are kept."
        )


def _file(folder: Path, subject: Subject) -> Path:
    return folder / f"{subject.name}.png"


def _missing(folder: Path, subjects: Sequence[Subject]) -> set[str]:
    """The names of the images that do not exist or are damaged."""
    return {subject.name for subject in subjects if png_damage(_file(folder, subject))}


def how_drawn(folder: Path) -> dict:
    """How the images of a folder were rendered.

    Returns:
        "cut_at": the number of tokens, BOS and EOS included, at which prompts were cut, or None; "prompts_cut": how
        many were; "seconds" of rendering in all runs, without the loading of models.
    """
    return {"cut_at": None, "prompts_cut": 0, "seconds": 0.0} | read_json_object(folder / _DRAWN)


def _note(folder: Path, seconds: float = 0.0, **numbers) -> None:
    before = how_drawn(folder)
    write_json(folder / _DRAWN, before | numbers | {"seconds": round(before["seconds"] + seconds, 3)})


def _cuts(pipe: StableDiffusionXLPipeline, prompts: Sequence[ImagePrompt]) -> dict:
    """ "cut_at" and "prompts_cut" of `how_drawn`"""
    if isinstance(pipe, StableDiffusionXLLongPromptPipeline) and pipe._long_prompt.reading != "cut":
        return {"cut_at": None, "prompts_cut": 0}
    context_length = min(TRAINED_POSITIONS, pipe.text_encoder.config.max_position_embeddings)
    counts = [len(pipe.tokenizer(prompt.prompt, verbose=False)["input_ids"]) for prompt in prompts]
    return {"cut_at": context_length, "prompts_cut": sum(count > context_length for count in counts)}


def _check_same_settings(folder: Path, settings: dict) -> None:
    """Raises UserError for a folder of images with other settings."""
    file = folder / _SETTINGS
    if not file.exists():
        if any(folder.rglob("*.png")):
            raise UserError(f"{str(folder)!r} holds images but no settings.json. Give another output, or remove them.")
        return
    before = read_json_object(file)
    if before != settings:
        raise UserError(
            f"The images in {str(folder)!r} were made with other settings: {describe_changes(before, settings)}. Give "
            "another output, return to those settings, or remove the folder."
        )
