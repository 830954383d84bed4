"""The one renderer: from prompts to embeddings to images. `generate`, the evaluations and the demo are its callers.

An image depends on the models, its prompt and seed, the sampling, and its batch: batch-mates change the last bits. So
batches are planned over all prompts of a run, finished or not, and each image has its own generator, on the CPU.
"""

import copy
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path

import diffusers
import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.encoders.spec import EncoderSpec, Kind
from debias_diffusion.errors import FailedError, UserError, explain_failure, reason
from debias_diffusion.jobs import Job
from debias_diffusion.limits import Layer
from debias_diffusion.processes import Processes
from debias_diffusion.text.options import LongPromptOptions, PromptLayout

from ..calls import Parts, calling
from ..scheduling import EMBEDDINGS, ExchangeEmbeddings, count_calls
from .checkpoints import KINDS, REFINER, SDXL, STRETCH, Checkpoint
from .loading import REFINERS, Part, default_dtype, load_pipeline, load_text_encoders
from .loras import Lora, LoraFolder, lora_tags, read_lora
from .options import KARRAS, ClipSkip, Denoising, Scheduler
from .png import first_difference, sampler, settings_text, write_png
from .prompts import ImagePrompt, ImageTask

ENCODED_AT_ONCE = 500  # images whose embeddings are kept in low memory: up to 4 MB each at 248 positions


@dataclass(kw_only=True)
class Sampling(Denoising):
    """How images are rendered: the options that all callers share, and those of some.

    Attributes:
        long_prompt: how prompts are read; the encoder's name says the reading.
        layer: of SDXL's text encoders, see `reading_layer`.
        scheduler: None keeps the checkpoint's.
        karras: noise levels as in Karras et al. (2022), see KARRAS; None for the checkpoint's own.
        clip_skip: counts as A1111, Forge and ComfyUI do, not as diffusers: the text encoders' layer that is read, for
            both prompts, from the last, 1. As in Forge, SDXL never reads the last.
    """

    long_prompt: LongPromptOptions = field(default_factory=LongPromptOptions)
    layer: Layer = "penultimate"
    scheduler: Scheduler | None = None
    karras: bool | None = None
    clip_skip: ClipSkip | None = None

    @classmethod
    def of(cls, settings: Mapping) -> "Sampling":
        """From all settings of a command, by the names of these fields and of those of `LongPromptOptions`."""
        names, options = ({field.name for field in fields(each)} & settings.keys() for each in (cls, LongPromptOptions))
        with explain_failure("Prompts cannot be read so"):
            long_prompt = LongPromptOptions(**{name: settings[name] for name in options - {"reading"}})
        return cls(long_prompt=long_prompt, **{name: settings[name] for name in names})


USUAL = dict.fromkeys(("karras", "clip_skip", "loras", "refiner", "refiner_sha256"))
USUAL |= {"layer": "penultimate", **asdict(LongPromptOptions())}  # what an image's settings do not say
del USUAL["reading"]
HANDOVER = 0.8  # of the denoising, after which SDXL's refiner takes over


@contextmanager
def reading_layer(pipe: DiffusionPipeline, layer: Layer) -> Iterator[None]:
    """Within the context, SDXL's UNet reads this layer of both text encoders; pooled embeddings stay as they are.

    Args:
        layer: "penultimate", which SDXL was trained with, or "last": the last layer after the final norm, which
            Long-CLIP's code feeds to SDXL.
    """

    def last_for_penultimate(encoder: torch.nn.Module, inputs, output):
        output.hidden_states = (*output.hidden_states[:-2], output.last_hidden_state, output.hidden_states[-1])
        return output

    encoders = (pipe.text_encoder, pipe.text_encoder_2) if layer == "last" else ()
    hooks = [encoder.register_forward_hook(last_for_penultimate) for encoder in encoders]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def runtime_settings(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Device and precision as every settings record of an image has them."""
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}


def replace_components(pipe: DiffusionPipeline, **components) -> DiffusionPipeline:
    """A pipeline with other components, by name, which shares the rest with `pipe`; that one stays as it is."""
    replaced = copy.copy(pipe)
    replaced.register_modules(**components)
    return replaced


def read_layout(pipe: DiffusionPipeline, prompt: ImagePrompt, sampling: Sampling) -> PromptLayout:
    """How `pipe` reads a prompt. Raises UserError for one that cannot be read, such as of weights beyond the limits."""
    steps = count_calls(pipe, sampling.steps)
    with explain_failure("The prompt cannot be read"), calling(pipe, steps=steps):
        return pipe.prompt_layout(**_texts(pipe, [prompt]), do_classifier_free_guidance=sampling.guidance_scale > 1)


def _texts(pipe: DiffusionPipeline, prompts: Sequence[ImagePrompt]) -> dict[str, list[str]]:
    """The arguments of a pipeline for a batch, in which all prompts have a negative prompt, or none has."""
    texts = {"prompt": [prompt.prompt for prompt in prompts]}
    if prompts[0].negative_prompt is not None:
        texts["negative_prompt"] = [prompt.negative_prompt for prompt in prompts]
    if any(prompt.prompt_2 is not None for prompt in prompts):
        if not hasattr(pipe, "text_encoder_2"):
            raise UserError("The prompt has a prompt_2, and this checkpoint has one text encoder. Leave it out.")
        texts["prompt_2"] = [prompt.prompt if prompt.prompt_2 is None else prompt.prompt_2 for prompt in prompts]
    return texts


def plan_batches(
    prompts: Sequence[ImagePrompt], layouts: Mapping[int, PromptLayout], size: int, wanted: Collection[int]
) -> list[list[int]]:
    """Indices of prompts in batches of one length, so that none is padded further than it would be alone.

    In a batch either all or no prompts have a negative prompt, and all have the same LoRAs. Finished images keep their
    place in their batch, so that a resumed run renders the rest with the same batch-mates, bit for bit.

    Args:
        prompts: all of the run.
        layouts: of those that can be rendered, by index.
        size: images in a batch at most.
        wanted: indices of the images to render; batches without one are left out.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, layout in layouts.items():
        key = layout.positions, prompts[index].negative_prompt is None, prompts[index].loras
        groups.setdefault(key, []).append(index)
    batches = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    wanted = set(wanted)
    batches = [batch for batch in batches if not wanted.isdisjoint(batch)]
    return sorted(batches, key=lambda batch: (prompts[batch[0]].loras, batch))  # each LoRA is loaded once


@torch.no_grad()
def encode(pipe: DiffusionPipeline, prompts: Sequence[ImagePrompt], sampling: Sampling) -> Parts:
    """Embeddings of one batch on the CPU, [batch, ...] each: two for SD 1.5, four for SDXL, half without guidance.

    Returns:
        one part, or, where a prompt changes from step to step, several
    """
    skipped = (sampling.clip_skip or 0) - (2 if hasattr(pipe, "text_encoder_2") else 1)
    guided = {"do_classifier_free_guidance": sampling.guidance_scale > 1}
    how = guided | {"clip_skip": max(skipped, 0) or None}
    try:
        steps = count_calls(pipe, sampling.steps)
        with reading_layer(pipe, sampling.layer), calling(pipe, steps=steps) as call:
            embeddings = pipe.encode_prompt(**_texts(pipe, prompts), device=None, num_images_per_prompt=1, **how)
    except ValueError as error:  # more layers than an encoder has
        raise UserError(f"The prompt cannot be encoded: {reason(error)}.") from error
    parts = call.parts or [(steps, dict(zip(EMBEDDINGS, embeddings, strict=False)))]
    embeddings_by_id = {id(part): part for _, part in parts}  # alternating parts share theirs
    moved = {
        key: {name: embedding.cpu() for name, embedding in part.items() if embedding is not None}
        for key, part in embeddings_by_id.items()
    }
    if call.options.sharpen_sentences != 1:  # then there is one part
        moved[id(parts[0][1])]["sentences"] = torch.tensor(
            pipe.prompt_layout(**_texts(pipe, prompts), **guided).sentences
        )
    return [(last, moved[id(part)]) for last, part in parts]


def render(
    pipe: DiffusionPipeline,
    parts: Parts,
    seeds: Sequence[int],
    sampling: Sampling,
    on_step: Callable[[int, int], None] | None = None,
    refined: tuple[DiffusionPipeline, Parts] | None = None,
) -> list[Image.Image | str]:
    """Images of one batch from the parts of `encode`; `pipe` needs no text encoder.

    Embeddings, the latents after each step and the decoded pixels must be finite. A batch without a finite image ends
    at once. All other images are bit for bit those of the pipeline without checks.

    Args:
        pipe: may have a safety checker.
        on_step: called after each step with the number of finished steps and of all. What it raises ends the rendering.
        refined: SDXL's refiner, which does the last fifth of the denoising, with embeddings of its own.

    Returns:
        each image, or in words why there is none: "its embeddings are not finite (NaN or infinite)"
    """
    decoded: list[bool] = []

    def check_latents(pipe: DiffusionPipeline, index: int, timestep, tensors: dict) -> dict:
        if not any(_finite_rows(tensors["latents"])):
            raise _LostError(_NOT_FINITE.format(f"latents after step {index + 1}"))
        if on_step is not None:
            on_step(index + 1, pipe.num_timesteps)
        return {}

    size = {"height": sampling.height, "width": sampling.width}
    stages = [(pipe, parts, size)]
    if refined:
        unfinished = size | {"denoising_end": HANDOVER, "output_type": "latent"}
        stages = [(pipe, parts, unfinished), (*refined, {"denoising_start": HANDOVER})]
    output, calls = None, 0
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    decoder = stages[-1][0].vae.decoder
    embeddings = [embedding for _, of_stage, _ in stages for _, part in of_stage for embedding in part.values()]
    hook = decoder.register_forward_hook(lambda module, inputs, pixels: decoded.extend(_finite_rows(pixels)))
    try:
        if not any(map(all, zip(*map(_finite_rows, embeddings), strict=True))):
            raise _LostError(_NOT_FINITE.format("embeddings"))
        for stage, of_stage, settings in stages:
            # The refiner counts its calls of the UNet from 0, and schedules count all.
            left = [(last - calls, part) for last, part in of_stage if last >= calls] or of_stage[-1:]
            exchange = ExchangeEmbeddings(left, check_latents, ["latents"])
            with np.errstate(invalid="ignore"):  # NaN is reported below
                output = stage(
                    **{name: embedding.to(stage.device) for name, embedding in left[0][1].items()},
                    **settings | ({"image": output.images} if output else {}),
                    num_inference_steps=sampling.steps,
                    guidance_scale=sampling.guidance_scale,
                    generator=generators,  # on the CPU: each kind of device draws other numbers from the same seed
                    callback_on_step_end=exchange,
                    callback_on_step_end_tensor_inputs=exchange.inputs(stage),
                )
            calls = stage.num_timesteps
    except _LostError as lost:
        return [str(lost)] * len(seeds)
    finally:
        hook.remove()
    flagged = getattr(output, "nsfw_content_detected", None) or [False] * len(seeds)
    if len(decoded) != len(seeds):  # in tiles
        decoded = [all(decoded)] * len(seeds)
    return [
        _NOT_FINITE.format("pixels") if not finite else _FLAGGED if black else image
        for image, finite, black in zip(output.images, decoded, flagged, strict=True)
    ]


_NOT_FINITE = "its {} are not finite (NaN or infinite)"
_FLAGGED = "the safety checker of the checkpoint has blacked it out"


class _LostError(Exception):
    """No image of a batch is left; says why."""


def _finite_rows(tensor: torch.Tensor) -> list[bool]:
    """Whether all values of each row of [rows, ...] are finite."""
    return tensor.isfinite().flatten(1).all(dim=1).tolist()


@dataclass
class Renderer:
    """A checkpoint with one text encoder after the other; its other models are loaded once, on demand.

    Args:
        base: see `Checkpoint.parse`.
        sampling: of all images.
        encoder_2: replaces SDXL's second encoder, but for encoders that `align` fitted one with; see `load_pipeline`.
        batch: images rendered at once.
        low_memory: either the text encoders or the UNet are in memory, never both.
        show_steps: with a progress bar for the steps of each batch, in place of one for all images.
        loras: whose files tags in prompts name; None: tags are not read.
        refiner: folder or hub id of SDXL's refiner, see `render`.

    Raises:
        UserError: there is no such checkpoint, it is of another kind, or cannot render images of this size.
    """

    base: str
    sampling: Sampling
    device: torch.device
    dtype: torch.dtype | None = None
    encoder_2: str | None = None
    batch: int = 1
    low_memory: bool = False
    show_steps: bool = False
    loras: LoraFolder | None = None
    refiner: str | None = None

    def __post_init__(self):
        self.checkpoint = Checkpoint.parse(self.base)
        self.checkpoint.check_kind(KINDS if self.refiner is None else (SDXL,))
        self._refiner: DiffusionPipeline | None = None
        if self.refiner is not None:
            if self.low_memory:
                raise UserError("The refiner is a second UNet in memory. Give --low-memory or --refiner, not both.")
            if (refiner := Checkpoint.parse(self.refiner)).file:
                raise UserError(f"The refiner {self.refiner!r} is one file. Give a folder in diffusers' layout.")
            refiner.check_kind((REFINER,))
        self.sampling = self._with_defaults(self.sampling)
        self.dtype = self.dtype or default_dtype(self.device)
        self._pipe: DiffusionPipeline | None = None
        self._loaded: tuple[str | None, ...] = ()  # the encoders in `_pipe`
        self._digests: dict[str | None, str | None] = {None: None, STRETCH: STRETCH}

    def with_sampling(self, sampling: Sampling) -> "Renderer":
        """A renderer of the same loaded models. Raises UserError for a size that they cannot render."""
        renderer = copy.copy(self)
        renderer.sampling = self._with_defaults(sampling)
        return renderer

    def _with_defaults(self, sampling: Sampling) -> Sampling:
        """With the checkpoint's own numbers in the place of None."""
        defaults = asdict(self.checkpoint.defaults) | dict(zip(("height", "width"), self.checkpoint.size, strict=True))
        unsaid = {name: value for name, value in defaults.items() if getattr(sampling, name, value) is None}
        sampling = replace(sampling, **unsaid)
        self.checkpoint.check_size(sampling.height, sampling.width)
        return sampling

    def settings(self, encoder: EncoderSpec) -> dict:
        """Everything that affects an image besides its `ImagePrompt` and the models."""
        names = ("scheduler", "karras", "steps", "guidance_scale", "height", "width", "layer", "clip_skip")
        sampling = {name: getattr(self.sampling, name) for name in names}
        return asdict(self.options(encoder)) | sampling | runtime_settings(self.device, self.dtype)

    def options(self, encoder: EncoderSpec) -> LongPromptOptions:
        """How prompts are read."""
        given = {"reading": encoder.reading, "negative_clip_skip": bool(self.sampling.clip_skip)}
        with explain_failure("Prompts cannot be read so"):
            return replace(self.sampling.long_prompt, **given)

    def cleaned(self, encoder: EncoderSpec, prompt: ImagePrompt) -> ImagePrompt:
        """A prompt as pipelines read it, with the LoRAs that its tags name. Raises UserError for a tag of no file."""
        tags, text = lora_tags(prompt.prompt, encoder.reading) if self.loras else [], prompt.prompt
        for tag in tags:
            text = text.replace(tag, "")
        prompt = replace(prompt, prompt=text, loras=tuple(map(read_lora, tags)))
        if self.loras:
            self.loras.digests(prompt.loras)
        return prompt.cleaned(self.options(encoder))

    def identity(self, encoder: EncoderSpec, prompt: ImagePrompt) -> dict:
        """The values of a prompt, and the digests of its LoRAs: what tells the images of a job apart."""
        loras = self.loras and self.loras.digests([*map(read_lora, lora_tags(prompt.prompt, encoder.reading))])
        return asdict(prompt) | {"loras": loras}

    def inputs(self, encoder: EncoderSpec) -> dict[str, str | None]:
        """The digests of the models, read from their files; None for an encoder of the checkpoint."""
        digests = {slot: self.digest(name) for slot, name in self._models(encoder).items()}
        return {"base": self.checkpoint.digest, **digests}

    def digest(self, encoder: str | None) -> str | None:
        """Of an encoder or the refiner, computed once, because it may have gigabytes."""
        if encoder not in self._digests:
            self._digests[encoder] = (Checkpoint if encoder == self.refiner else EncoderSpec).parse(encoder).digest
        return self._digests[encoder]

    def png_settings(self, encoder: EncoderSpec, prompt: ImagePrompt) -> dict:
        """The settings of an image before it is rendered; its PNG holds those that are not as USUAL.

        Models are named as they were given. Of an encoder in files there is the sha256, too.
        """
        names = self._models(encoder)
        digests = {f"{slot}_sha256": (self.digest(name) or "").rpartition(":")[2] for slot, name in names.items()}
        return {
            **self.identity(encoder, prompt),
            "base": self.base,
            **names,
            **{name: digest if re.fullmatch("[0-9a-f]{64}", digest) else None for name, digest in digests.items()},
            **self.settings(encoder),
        }

    def png_text(
        self,
        pipe: DiffusionPipeline,
        encoder: EncoderSpec,
        prompt: ImagePrompt,
        layout: PromptLayout,
        further: Mapping | None = None,
    ) -> dict[str, str]:
        """The text chunks of an image's PNG, with all its settings and `further` ones, see `settings_text`."""
        settings = self.png_settings(encoder, prompt)
        settings = {name: value for name, value in settings.items() if USUAL.get(name, ...) != value}
        settings["scheduler"] = sampler(type(pipe.scheduler).__name__)
        return settings_text(settings | layout.settings() | (further or {}))

    def pipeline(self, encoder: EncoderSpec, part: Part | None = None) -> DiffusionPipeline:
        """The checkpoint with an encoder, with the options that were asked for.

        Args:
            encoder: replaces the first one, unless it is "original".
            part: None: all, in low memory the text encoders alone.

        Raises:
            UserError: it cannot be loaded, or does not fit.
        """
        return self.prepare(self._load(encoder, part or ("encoders" if self.low_memory else "all")), encoder)

    def prepare(self, pipe: DiffusionPipeline, encoder: EncoderSpec) -> DiffusionPipeline:
        """A pipeline of the same models with this renderer's options, and a scheduler without state of past steps."""
        name, configuration = self.sampling.scheduler, pipe.scheduler.config
        cls = getattr(diffusers, name) if name else type(pipe.scheduler)
        changes = {"clip_sample": False} if name == "DDIMScheduler" else {}  # which would clip latents as if pixels
        if self.sampling.karras:
            if cls.__name__ not in KARRAS:
                raise UserError(f"{cls.__name__} has no noise levels of Karras: leave out karras, or give {KARRAS[0]}.")
            changes["use_karras_sigmas"] = True
        pipe = replace_components(pipe, scheduler=cls.from_config(configuration, **changes))
        pipe._long_prompt = self.options(encoder)
        return pipe

    def render(
        self, pipe: DiffusionPipeline, encoder: EncoderSpec, batches: Sequence[Sequence[ImagePrompt]]
    ) -> Iterator[list[Image.Image | str]]:
        """The images of each batch of cleaned prompts, see `render`; `pipe` is that of `pipeline` for this encoder.

        In low memory in rounds, because the embeddings of thousands of prompts take more memory than the encoders,
        which are removed from `pipe`.
        """
        sampling = self.sampling
        seeds = [[prompt.seed for prompt in batch] for batch in batches]
        if not self.low_memory:
            for batch, of_batch in zip(self._with_loras(pipe, batches), seeds, strict=True):
                refined = self._refined(pipe, encoder, batch) if self.refiner else None
                yield render(pipe, encode(pipe, batch, sampling), of_batch, sampling, refined=refined)
            return
        per_round = max(1, ENCODED_AT_ONCE // self.batch)
        for start in range(0, len(batches), per_round):
            pipe = pipe or self.pipeline(encoder)
            bar = tqdm(batches[start : start + per_round], "encode", disable=self.show_steps, leave=False)
            encoded = [encode(pipe, batch, sampling) for batch in self._with_loras(pipe, bar)]
            # The caller may hold the pipeline, too.
            pipe.register_modules(**dict.fromkeys({"text_encoder", "text_encoder_2"} & pipe.components.keys()))
            pipe = None
            clear_device_cache(garbage_collection=True)
            denoiser = self.pipeline(encoder, "denoiser")
            of_round = self._with_loras(denoiser, batches[start : start + per_round])
            for parts, _, of_batch in zip(encoded, of_round, seeds[start : start + per_round], strict=True):
                yield render(denoiser, parts, of_batch, sampling)
            del denoiser
            clear_device_cache(garbage_collection=True)

    def _with_loras(self, pipe: DiffusionPipeline, batches: Iterable[Sequence[ImagePrompt]]) -> Iterator:
        """The batches, each while `pipe` has its LoRAs and no others."""
        loaded: tuple[Lora, ...] | None = None
        for batch in batches:
            if self.loras and batch[0].loras != loaded:
                self.loras.apply(pipe, loaded := batch[0].loras)
            yield batch
        if loaded:
            self.loras.apply(pipe, ())

    def _refined(
        self, pipe: DiffusionPipeline, encoder: EncoderSpec, batch: Sequence[ImagePrompt]
    ) -> tuple[DiffusionPipeline, Parts]:
        """The refiner with the scheduler and the options of `pipe`, and a batch's embeddings of its one encoder."""
        if self._refiner is None:
            self._refiner = load_pipeline(self.refiner, None, self.device, self.dtype, kinds=REFINERS)
            self._refiner.set_progress_bar_config(disable=not self.show_steps)
        refiner = self.prepare(replace_components(self._refiner, scheduler=pipe.scheduler), encoder)
        trained = replace(self.sampling, layer="penultimate", clip_skip=None)
        return refiner, encode(refiner, batch, trained)

    def _load(self, encoder: EncoderSpec, part: Part) -> DiffusionPipeline:
        first, second = names = tuple(self._encoders(encoder).values())
        if part == "all" and self._pipe is not None:
            given = zip(("text_encoder", "text_encoder_2"), names, self._loaded, strict=True)
            others = {slot: name for slot, name, loaded in given if name != loaded}
            if not {None, STRETCH} & {*others.values()}:
                others = load_text_encoders(self.checkpoint, others, self.device, self.dtype)
                return replace_components(self._pipe, **others)
        self._pipe = None  # before the next one is loaded
        pipe = load_pipeline(self.base, first, self.device, self.dtype, second, part)
        pipe.set_progress_bar_config(disable=not self.show_steps)
        if part == "all":
            self._pipe, self._loaded = pipe, names
        return pipe

    def _models(self, encoder: EncoderSpec) -> dict[str, str | None]:
        """The names of `_encoders`, and of the refiner."""
        return self._encoders(encoder) | {"refiner": self.refiner}

    def _encoders(self, encoder: EncoderSpec) -> dict[str, str | None]:
        """The names of the encoders that replace the checkpoint's."""
        if encoder.kind is Kind.ORIGINAL:
            return {"encoder": None, "encoder_2": self.encoder_2}
        return {"encoder": encoder.name, "encoder_2": encoder.fitted_second or self.encoder_2}


@dataclass(frozen=True)
class Rendered:
    """The images of one encoder.

    Attributes:
        folder: of the job.
        files: of the images that are there, in the order of the tasks.
        reading: for reports. "cut_at": the number of tokens, BOS and EOS included, at which prompts are cut, None if
            they are not; "prompts_cut": how many were; "seconds": of rendering, in all runs, without loading models.
    """

    folder: Path
    files: list[Path]
    reading: dict


def render_into(
    job: Job,
    renderer: Renderer,
    encoder: EncoderSpec,
    tasks: Sequence[ImageTask],
    left_out: dict[str, str] | None = None,
    processes: Processes | None = None,
    unread: list[str] | None = None,
) -> Rendered:
    """Renders the images that are missing in a job folder, each with its settings in its PNG.

    Images of a resumed run, and of several processes, equal those of one uninterrupted run, bit for bit.

    Args:
        job: with the renderer's settings and inputs. Images are its items, `NAME.png`.
        tasks: all images, finished or not; a finished one must be of the same prompt.
        left_out: gets, by its place, why an image was not rendered.
        unread: gets what is not read of the prompts of missing images, in sentences.
        processes: that share the work, by default this one alone; all make this call, each with a job of its own.

    Raises:
        UserError: an image is of another prompt or was not made by this job, or no prompt can be read.
        FailedError: some images have values that are not finite, see `render`. All others are rendered.
    """
    left_out, processes = {} if left_out is None else left_out, processes or Processes(renderer.device)
    missing = processes.from_main(lambda: _missing(job, renderer, encoder, tasks))
    print(f"Images: {len(tasks) - len(missing):,} are in {job.folder}, {len(missing):,} to render")
    if missing:
        failed = processes.gathered(_render_share(job, renderer, encoder, tasks, missing, left_out, processes, unread))
        left_out |= dict(failed)
        if failed:
            raise FailedError(explain_failures(failed, f"{len(tasks):,} images in {str(job.folder)!r}", renderer.dtype))
    finished = Job.read(job.folder)  # other processes have added theirs
    there = [task.file for task in tasks if task.file in finished]
    notes = [finished.notes(name) for name in there]
    reading = {
        "cut_at": max((entry["cut_at"] or 0 for entry in notes), default=0) or None,
        "prompts_cut": sum(entry["tokens"] + 2 > (entry["cut_at"] or math.inf) for entry in notes),
        "seconds": round(sum(entry["seconds"] for entry in notes), 3),
    }
    return Rendered(job.folder, [job.folder / name for name in there], reading)


def explain_failures(failed: Sequence[tuple[str, str]], images: str, dtype: torch.dtype) -> str:
    """What to do about those of the images, "7 images", that were not rendered, (place, reason) each."""
    return (
        f"{len(failed):,} of {images} were not rendered, the first: {': '.join(failed[0])}. Where values are "
        "not finite, weights of an encoder or of the SDXL checkpoint are damaged, or too large for "
        f"{str(dtype).removeprefix('torch.')}. Try another encoder or, with `generate`, --precision fp32. The other "
        "images are kept."
    )


def _missing(job: Job, renderer: Renderer, encoder: EncoderSpec, tasks: Sequence[ImageTask]) -> set[int]:
    """Indices of the images that are not there or damaged. Raises UserError for one that is something else."""
    missing, differing, damaged = set(), [], []
    finished = set(job.names())
    for index, task in enumerate(tasks):
        name = task.file
        if name not in finished:
            missing.add(index)
            if os.path.lexists(job.folder / name):
                differing.append(f"{name} ({task.where}): it was not made by this job")
        elif difference := first_difference(job.notes(name), renderer.identity(encoder, task.prompt)):
            differing.append(f"{name} ({task.where}): {difference}")
        elif job.path(name, damaged="absent") is None:
            missing.add(index)
            damaged.append(name)
    if differing:
        raise UserError(
            f"{len(differing):,} of the images in {str(job.folder)!r} are others, the first {differing[0]}. Give "
            "another output, return to those prompts, or remove the images to replace."
        )
    if damaged:
        print(f"Damaged: {len(damaged):,} of the images, rendered again, the first {damaged[0]}")
    return missing


def _render_share(
    job: Job,
    renderer: Renderer,
    encoder: EncoderSpec,
    tasks: Sequence[ImageTask],
    missing: set[int],
    left_out: dict[str, str],
    processes: Processes,
    unread: list[str] | None,
) -> list[tuple[str, str]]:
    """Renders one process's share of the missing images. Returns the places and reasons of those that failed."""
    prompts, failed = [renderer.cleaned(encoder, task.prompt) for task in tasks], []
    pipe = renderer.pipeline(encoder)
    layouts = _layouts(renderer, pipe, tasks, prompts, left_out)
    if unread is not None:
        unread += dict.fromkeys(sentence for layout in layouts.values() for sentence in layout.warnings)
    batches = plan_batches(prompts, layouts, renderer.batch, missing)[processes.index :: processes.count]
    title = f"render{f', {processes.count} processes' if processes.count > 1 else ''}, {job.folder.name}"
    total = sum(index in missing for batch in batches for index in batch)
    with tqdm(desc=title, total=total, unit="image", disable=not processes.is_main) as bar:
        started = time.monotonic()
        rendered = renderer.render(pipe, encoder, [[prompts[index] for index in batch] for batch in batches])
        for batch, images in zip(batches, rendered, strict=True):
            seconds = (time.monotonic() - started) / len(batch) / processes.count
            for index, image in zip(batch, images, strict=True):
                task = tasks[index]
                if index in missing and isinstance(image, str):
                    failed.append((f"{task.where}, seed {task.prompt.seed}", image))
                elif index in missing:
                    notes = renderer.identity(encoder, task.prompt) | layouts[index].settings()
                    text = renderer.png_text(pipe, encoder, task.prompt, layouts[index])
                    with job.write(task.file, **notes, seconds=seconds) as temporary:
                        write_png(image, temporary, text)
                    bar.update()
            started = time.monotonic()
    return failed


def _layouts(
    renderer: Renderer,
    pipe: DiffusionPipeline,
    tasks: Sequence[ImageTask],
    prompts: Sequence[ImagePrompt],
    left_out: dict[str, str],
) -> dict[int, PromptLayout]:
    """How the prompt of each image, cleaned, is read, by the image's index; prints it."""
    read, layouts = cache(lambda prompt: read_layout(pipe, prompt, renderer.sampling)), {}
    for index, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
        try:
            layouts[index] = read(replace(prompt, seed=0))
        except UserError as error:
            left_out[task.where] = str(error)
    if not layouts:
        place, why = next(iter(left_out.items()))
        raise UserError(f"No prompt can be rendered. {place.capitalize()}: {why}")
    counts = sorted(Counter(layout.positions for layout in layouts.values()).items())
    print("Positions:", ", ".join(f"{length} for {count:,} image{'s' * (count > 1)}" for length, count in counts))
    return layouts
