"""The one renderer: from prompts to embeddings to images. `generate`, the evaluations and the demo are its callers.

An image depends on the models, its prompt and seed, the sampling, and its batch: batch-mates change the last bits. So
batches are planned over all prompts of a run, finished or not, and each image has its own generator, on the CPU.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import diffusers
import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from diffusers import DiffusionPipeline, SchedulerMixin, StableDiffusionXLPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.chunks import TRAINED_POSITIONS
from debias_diffusion.encoders import EncoderSpec, Reading, load_text_encoder
from debias_diffusion.errors import UserError, near_matches, reason
from debias_diffusion.limits import Layer

from .checkpoints import PIPELINES, SDXL, STRETCH, Checkpoint, Part, default_dtype, load_pipeline
from .classes import StableDiffusionXLLongPromptPipeline
from .long_prompt import LongPromptMixin, PromptLayout

ENCODED_AT_ONCE = 500  # images whose embeddings are kept in low memory: up to 4 MB each at 248 positions
# in the order in which `encode_prompt` returns them; Stable Diffusion 1.5 has the first two
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
Embeddings = dict[str, torch.Tensor]  # by the name of the pipeline's argument, on the CPU
# Of one UNet evaluation per step, by class, with changes to the checkpoint's configuration: DDIM would clip latents as
# if they were pixels.
SCHEDULERS: dict[str, dict] = {
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {},
    "DDIMScheduler": {"clip_sample": False},
    "UniPCMultistepScheduler": {},
}


@dataclass(frozen=True)
class ImagePrompt:
    """What one image is rendered from. Texts are as the pipeline reads them, cleaned like training captions.

    Attributes:
        prompt: what to render.
        seed: of the noise, equal on every device.
        negative_prompt: what to avoid; None for the checkpoint's default.
        prompt_2: for SDXL's second text encoder; None for `prompt`.
    """

    prompt: str
    seed: int = 0
    negative_prompt: str | None = None
    prompt_2: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How images are rendered.

    Attributes:
        steps: denoising steps.
        guidance_scale: up to 1 there is no guidance.
        height, width: in pixels; None is the checkpoint's own size.
        layer: of SDXL's text encoders, see `reading_layer`.
    """

    steps: int = 30
    guidance_scale: float = 7.0
    height: int | None = None
    width: int | None = None
    layer: Layer = "penultimate"

    @property
    def guided(self) -> bool:
        """Whether a negative prompt has an effect."""
        return self.guidance_scale > 1


@dataclass(frozen=True)
class ImageTask:
    """One image.

    Attributes:
        name: of its file, without .png; may begin with a folder's name.
        prompt: what it is rendered from.
        where: the prompt's place in words: "line 3".
    """

    name: str
    prompt: ImagePrompt
    where: str = ""


def check_scheduler(name: str) -> None:
    """Raises UserError unless `name` is one of SCHEDULERS."""
    if name not in SCHEDULERS:
        hint = near_matches(name, tuple(SCHEDULERS))
        raise UserError(f"Unknown scheduler {name!r}.{hint} Choose from: {', '.join(SCHEDULERS)}.")


def make_scheduler(pipe: DiffusionPipeline, name: str) -> SchedulerMixin:
    """A new scheduler of a class in SCHEDULERS, with the configuration of the pipeline's."""
    return getattr(diffusers, name).from_config(pipe.scheduler.config, **SCHEDULERS[name])


@contextmanager
def reading_layer(pipe: DiffusionPipeline, layer: Layer) -> Iterator[None]:
    """Within the context, SDXL's UNet reads this layer of both text encoders; pooled embeddings stay as they are.

    Args:
        layer: "penultimate", which SDXL was trained with, or "last": the last layer after the final norm, which
            Long-CLIP's code feeds to SDXL.
    """
    encoders = (pipe.text_encoder, pipe.text_encoder_2) if layer == "last" else ()
    hooks = [encoder.register_forward_hook(last_for_penultimate) for encoder in encoders]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def last_for_penultimate(encoder: torch.nn.Module, inputs, output):
    """A forward hook that puts the last layer, after the final norm, where pipelines read the penultimate one."""
    output.hidden_states = (*output.hidden_states[:-2], output.last_hidden_state, output.hidden_states[-1])
    return output


def runtime_settings(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Device and precision as every settings record of an image has them."""
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}


def replace_encoder(
    pipe: StableDiffusionXLPipeline,
    text_encoder: torch.nn.Module,
    tokenizer,
    cls: type[StableDiffusionXLPipeline] = StableDiffusionXLLongPromptPipeline,
    **components,
) -> StableDiffusionXLPipeline:
    """A pipeline of class `cls` with another first text encoder, which shares the other models with `pipe`.

    `pipe` stays as it is. The encoder must be on its device and in its dtype. `components` replace others, by name.
    """
    components = {**pipe.components, "text_encoder": text_encoder, "tokenizer": tokenizer, **components}
    zeros = pipe.config.force_zeros_for_empty_prompt
    replaced = cls(**components, force_zeros_for_empty_prompt=zeros, add_watermarker=False)
    replaced.set_progress_bar_config(disable=True)
    return replaced


def read_layout(pipe: DiffusionPipeline, prompt: ImagePrompt, sampling: Sampling) -> PromptLayout | None:
    """How `pipe` reads a prompt; None for a stock pipeline, which gives all prompts the same length."""
    if not isinstance(pipe, LongPromptMixin):
        return None
    texts = {"prompt": prompt.prompt, "negative_prompt": prompt.negative_prompt}
    if prompt.prompt_2 is not None:
        texts["prompt_2"] = prompt.prompt_2
    return pipe.prompt_layout(**texts, do_classifier_free_guidance=sampling.guided)


def plan_batches(
    prompts: Sequence[ImagePrompt], layouts: Mapping[int, PromptLayout | None], size: int, wanted: Collection[int]
) -> list[list[int]]:
    """Indices of prompts in batches of one length, so that none is padded further than it would be alone.

    In a batch either all or no prompts have a negative prompt. Finished images keep their place in their batch, so that
    a resumed run renders the rest with the same batch-mates, bit for bit.

    Args:
        prompts: all of the run.
        layouts: of those that can be rendered, by index.
        size: images in a batch at most.
        wanted: indices of the images to render; batches without one are left out.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, layout in layouts.items():
        key = layout and layout.positions, prompts[index].negative_prompt is None
        groups.setdefault(key, []).append(index)
    batches = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    return sorted(batch for batch in batches if not set(wanted).isdisjoint(batch))


@torch.no_grad()
def encode(pipe: DiffusionPipeline, prompts: Sequence[ImagePrompt], sampling: Sampling) -> Embeddings:
    """Embeddings of one batch, [batch, ...] each: two for SD 1.5, four for SDXL, half without guidance."""
    arguments = {"prompt": [prompt.prompt for prompt in prompts]}
    if prompts[0].negative_prompt is not None:
        arguments["negative_prompt"] = [prompt.negative_prompt for prompt in prompts]
    if any(prompt.prompt_2 is not None for prompt in prompts):
        arguments["prompt_2"] = [prompt.prompt if prompt.prompt_2 is None else prompt.prompt_2 for prompt in prompts]
    arguments |= {"device": None, "num_images_per_prompt": 1, "do_classifier_free_guidance": sampling.guided}
    with reading_layer(pipe, sampling.layer):
        embeddings = pipe.encode_prompt(**arguments)
    named = zip(EMBEDDINGS, embeddings, strict=False)
    return {name: embedding.cpu() for name, embedding in named if embedding is not None}


def generate_images(
    pipe: DiffusionPipeline,
    *prompts: Sequence[str],
    on_step: Callable[[int, int], None] | None = None,
    **arguments,
) -> list[Image.Image | str]:
    """Calls a Stable Diffusion pipeline and checks its images.

    Embeddings, the latents after each step and the decoded pixels must be finite. A batch without a finite image ends
    at once. All other images are bit for bit those of the pipeline without checks.

    Args:
        pipe: may have a safety checker.
        prompts, arguments: of the call.
        on_step: called after each step with the number of finished steps and of all. What it raises ends the rendering.

    Returns:
        each image, or in words why there is none: "its embeddings are not finite (NaN or infinite)"
    """
    given = [arguments[name] for name in EMBEDDINGS if arguments.get(name) is not None]
    if given and not any(embedded := [all(rows) for rows in zip(*map(_finite_rows, given), strict=True)]):
        return [_not_finite("embeddings")] * len(embedded)
    decoded: list[bool] = []

    def check_latents(pipe: DiffusionPipeline, index: int, timestep, tensors: dict) -> dict:
        rows = _finite_rows(tensors["latents"])
        if not any(rows):
            raise _LostError(index + 1, len(rows))
        if on_step is not None:
            on_step(index + 1, pipe.num_timesteps)
        return {}

    hook = pipe.vae.decoder.register_forward_hook(lambda module, inputs, pixels: decoded.extend(_finite_rows(pixels)))
    arguments |= {"callback_on_step_end": check_latents, "callback_on_step_end_tensor_inputs": ["latents"]}
    try:
        with np.errstate(invalid="ignore"):  # NaN is reported below
            output = pipe(*prompts, **arguments)
    except _LostError as lost:
        return [_not_finite(f"latents after step {lost.step}")] * lost.images
    finally:
        hook.remove()
    flagged = getattr(output, "nsfw_content_detected", None) or [False] * len(output.images)
    if len(decoded) != len(output.images):  # in tiles
        decoded = [all(decoded)] * len(output.images)
    return [
        _not_finite("pixels") if not finite else _FLAGGED if black else image
        for image, finite, black in zip(output.images, decoded, flagged, strict=True)
    ]


_FLAGGED = "the safety checker of the checkpoint has blacked it out"


class _LostError(Exception):
    def __init__(self, step: int, images: int):
        self.step, self.images = step, images


def _not_finite(values: str) -> str:
    return f"its {values} are not finite (NaN or infinite)"


def _finite_rows(tensor: torch.Tensor) -> list[bool]:
    """Whether all values of each row of [rows, ...] are finite."""
    return tensor.isfinite().flatten(1).all(dim=1).tolist()


def render(
    pipe: DiffusionPipeline,
    embeddings: Embeddings,
    seeds: Sequence[int],
    sampling: Sampling,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Image.Image | str]:
    """Images of one batch from the embeddings of `encode`, see `generate_images`; `pipe` needs no text encoder."""
    return generate_images(
        pipe,
        **{name: embedding.to(pipe.device) for name, embedding in embeddings.items()},
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_scale,
        # On the CPU, because each kind of device draws other numbers from the same seed.
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        on_step=on_step,
    )


def render_batch(
    pipe: DiffusionPipeline, prompts: Sequence[ImagePrompt], sampling: Sampling
) -> list[Image.Image | str]:
    """`encode`, then `render`."""
    return render(pipe, encode(pipe, prompts, sampling), [prompt.seed for prompt in prompts], sampling)


def render_in_low_memory(
    encoders: DiffusionPipeline,
    load: Callable[[Part], DiffusionPipeline],
    batches: Sequence[Sequence[ImagePrompt]],
    sampling: Sampling,
    show_progress: bool = True,
) -> Iterator[list[Image.Image | str]]:
    """`render_batch` of each batch, with either the text encoders or the UNet in memory, never both.

    In rounds, because the embeddings of thousands of prompts take more memory than the encoders. `encoders` is a
    pipeline of the text encoders alone, which are removed from it.
    """
    per_round = max(1, ENCODED_AT_ONCE // max(map(len, batches), default=1))
    for start in range(0, len(batches), per_round):
        encoders = encoders or load("encoders")
        batches_now = batches[start : start + per_round]
        bar = tqdm(batches_now, desc="encode", disable=not show_progress, leave=False)
        encoded = [encode(encoders, batch, sampling) for batch in bar]
        # The caller may hold the pipeline, too.
        names = {"text_encoder", "text_encoder_2"} & encoders.components.keys()
        encoders.register_modules(**dict.fromkeys(names))
        encoders = None
        clear_device_cache(garbage_collection=True)
        denoiser = load("denoiser")
        for batch, embeddings in zip(batches_now, encoded, strict=True):
            yield render(denoiser, embeddings, [prompt.seed for prompt in batch], sampling)
        del denoiser
        clear_device_cache(garbage_collection=True)


class Renderer:
    """A checkpoint with one text encoder after the other; its other models are loaded once, on demand.

    Args:
        base: see `Checkpoint.parse`.
        sampling: of all images; without height and width, in the checkpoint's size.
        encoder_2: replaces SDXL's second encoder, but for encoders that `align` fitted one with; see `load_pipeline`.
        scheduler: one of SCHEDULERS; None keeps the checkpoint's.
        weighting: prompts hold weights, see `parse_weights`.
        batch: images rendered at once.
        low_memory: see `render_in_low_memory`.

    Raises:
        UserError: there is no such checkpoint.
    """

    def __init__(
        self,
        base: str,
        sampling: Sampling,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        encoder_2: str | None = None,
        scheduler: str | None = None,
        weighting: bool = False,
        batch: int = 1,
        low_memory: bool = False,
    ):
        self.checkpoint = Checkpoint.parse(base)
        height, width = self.checkpoint.size
        self.sampling = replace(sampling, height=sampling.height or height, width=sampling.width or width)
        self.device, self.dtype = device, dtype or default_dtype(device)
        self.encoder_2, self.scheduler, self.weighting = encoder_2, scheduler, weighting
        self.batch, self.low_memory = batch, low_memory
        self._pipe: DiffusionPipeline | None = None
        self._loaded: tuple[str | None, str | None] = None, None  # the encoders in `_pipe`
        self._digests: dict[str | None, str | None] = {None: None, STRETCH: STRETCH}

    def settings(self, encoder: str | None, reading: Reading = "overlap") -> dict:
        """Everything that affects an image besides its `ImagePrompt`; reads no models."""
        encoders = {"encoder": encoder, "encoder_2": self._second(encoder)}
        for name in encoders.values():
            if name not in self._digests:  # of gigabytes, so it is computed once
                self._digests[name] = EncoderSpec.parse(name).digest
        return {
            "base": self.checkpoint.digest,
            **{slot: self._digests[name] for slot, name in encoders.items()},
            "reading": reading,
            "scheduler": self.scheduler,
            "weighting": self.weighting,
            **asdict(self.sampling),
            **runtime_settings(self.device, self.dtype),
        }

    def pipeline(
        self, encoder: str | None, reading: Reading = "overlap", part: Part | None = None
    ) -> DiffusionPipeline:
        """The checkpoint with an encoder that reads prompts as asked.

        Args:
            encoder: replaces the first one, anything `load_text_encoder` takes; None is the checkpoint's own.
            reading: "cut" cuts prompts at 77 tokens, as in stock SDXL, where both encoders have that context length.
            part: see `load_pipeline`; None is the text encoders in low memory, else all.

        Raises:
            UserError: it cannot be loaded, or does not fit.
        """
        pipe = self._load(encoder, part or ("encoders" if self.low_memory else "all"))
        if reading == "cut" and pipe.text_encoder and self.checkpoint.check_kind(PIPELINES) == SDXL:
            lengths = {part.config.max_position_embeddings for part in (pipe.text_encoder, pipe.text_encoder_2)}
            if len(lengths) == 1 and max(lengths) <= TRAINED_POSITIONS:
                return replace_encoder(pipe, pipe.text_encoder, pipe.tokenizer, StableDiffusionXLPipeline)
        return pipe.set_long_prompt(reading=reading, weighting=self.weighting)

    def render(
        self,
        pipe: DiffusionPipeline,
        encoder: str | None,
        reading: Reading,
        tasks: Sequence[ImageTask],
        layouts: Mapping[int, PromptLayout | None],
        missing: Collection[str],
        process: int = 0,
        processes: int = 1,
    ) -> Iterator[list[tuple[ImageTask, Image.Image | str]]]:
        """The missing images of one process's batches, batch by batch; each, or in words why there is none.

        Args:
            pipe: from `pipeline`, of this encoder and reading.
            tasks: all images, finished or not.
            layouts: from `read_layout`, by index, of those that can be rendered.
            missing: names of the images to render.
            process, processes: several share the batches; each yields equally often, perhaps nothing at last.
        """
        prompts = [task.prompt for task in tasks]
        wanted = {index for index in layouts if tasks[index].name in missing}
        batches = plan_batches(prompts, layouts, self.batch, wanted)
        own = batches[process::processes]
        texts = [[prompts[index] for index in batch] for batch in own]
        if self.low_memory:
            rendered = render_in_low_memory(pipe, partial(self.pipeline, encoder, reading), texts, self.sampling, False)
        else:
            rendered = (render_batch(pipe, batch, self.sampling) for batch in texts)
        for batch, images in zip(own, rendered, strict=True):
            yield [(tasks[index], image) for index, image in zip(batch, images, strict=True) if index in wanted]
        if process >= len(batches) % processes > 0:
            yield []

    def _load(self, encoder: str | None, part: Part) -> DiffusionPipeline:
        names = encoder, self._second(encoder)
        if part == "all" and self._pipe is not None:
            if names == self._loaded:
                return self._pipe
            if encoder is not None and names[1] == self._loaded[1]:
                text_encoder, tokenizer = load_text_encoder(encoder)
                self.checkpoint.check_fits("text_encoder", text_encoder, encoder)
                return replace_encoder(self._pipe, text_encoder.to(self.device, self.dtype), tokenizer)
        self._pipe = None  # before the next one is loaded
        pipe = load_pipeline(self.checkpoint.name, encoder, self.device, self.dtype, names[1], part)
        if self.scheduler:
            pipe.scheduler = make_scheduler(pipe, self.scheduler)
        pipe.set_progress_bar_config(disable=True)
        if part == "all":
            self._pipe, self._loaded = pipe, names
        return pipe

    def _second(self, encoder: str | None) -> str | None:
        return (encoder and EncoderSpec.parse(encoder).fitted_second) or self.encoder_2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, on an accelerator or the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)


@contextmanager
def explain_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"The memory of {device} does not suffice ({reason(error)}). What is finished stays. {advice}"
        ) from error
