"""The one renderer: a checkpoint with its encoders and options. `generate`, evaluations and the demo are its callers.

An image depends on the models, its prompt and seed, the sampling, and its batch: batch-mates change the last bits. So
batches are planned over all prompts of a run, finished or not, and each image has its own generator, on the CPU.
"""

import copy
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryFile

import diffusers
import torch
from accelerate.utils.memory import clear_device_cache
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.encoders.spec import EncoderSpec, Kind
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.text.options import LongPromptOptions, PromptLayout

from ..calls import StepEmbeddings
from .checkpoints import DENOISER, KINDS, REFINER, SDXL, STRETCH, TOKENIZERS, Checkpoint
from .images import encode_batch, render_batch
from .loading import REFINERS, default_dtype, load_pipeline, load_text_encoders
from .loras import Lora, LoraFolder, lora_tags, read_lora
from .options import KARRAS, USUAL, Sampling
from .png import sampler, settings_text
from .prompts import ImagePrompt


def replace_components(pipe: DiffusionPipeline, **components) -> DiffusionPipeline:
    """A pipeline with other components, by name, which shares the rest with `pipe`; that one stays as it is."""
    replaced = copy.copy(pipe)
    replaced.register_modules(**components)
    return replaced


@dataclass
class Renderer:
    """A checkpoint with one text encoder after the other; its other models are loaded once, on demand.

    Args:
        base: see `Checkpoint.parse`.
        sampling: of all images.
        encoder_2: replaces SDXL's second encoder, but for encoders that `align` fitted one with; see `load_pipeline`.
        batch: images rendered at once.
        low_memory: on an NVIDIA GPU a model is in its memory while it runs, by diffusers' offloading. Elsewhere either
            the text encoders or the UNet are in memory, never both, unless there are LoRAs, which act on both.
        show_steps: with a progress bar for the steps of each batch, in place of one for all images.
        loras: whose files tags in prompts name; None: tags are not read.
        refiner: folder or hub id of SDXL's refiner, see `render_batch`.

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
                raise UserError("The refiner is a second UNet in memory. Set low_memory or refiner, not both.")
            if (refiner := Checkpoint.parse(self.refiner)).file:
                raise UserError(f"The refiner {self.refiner!r} is one file. Give a folder in diffusers' layout.")
            refiner.check_kind((REFINER,))
        self.sampling = self._with_defaults(self.sampling)
        self.dtype = self.dtype or default_dtype(self.device)
        self._offloads = self.low_memory and self.device.type == "cuda"
        self._drops_encoders = self.low_memory and not self._offloads and self.loras is None
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
        runtime = {"device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}
        return asdict(self.options(encoder)) | sampling | runtime

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

    def pipeline(self, encoder: EncoderSpec) -> DiffusionPipeline:
        """The checkpoint with an encoder in place of the first one, but for "original", and the options asked for.

        Without UNet and autoencoder where low memory drops encoders. Raises UserError if it does not fit.
        """
        return self.prepare(self._load(encoder, DENOISER if self._drops_encoders else ()), encoder)

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

    def render_batches(
        self, pipe: DiffusionPipeline, encoder: EncoderSpec, batches: Sequence[Sequence[ImagePrompt]]
    ) -> Iterator[list[Image.Image | str]]:
        """The images of each batch of cleaned prompts, see `render_batch`.

        `pipe` is of `pipeline` for this encoder. It loses its text encoders where they are dropped.
        """
        with TemporaryFile() as encoded:  # of thousands of prompts, each up to 4 MB at 248 positions
            if self._drops_encoders:
                bar = tqdm(batches, "encode", disable=self.show_steps, leave=False)
                for batch in bar:
                    pickle.dump(encode_batch(pipe, batch, self.sampling), encoded)
                encoded.seek(0)
                encoders = TOKENIZERS.keys() & pipe.components.keys()
                pipe.register_modules(**dict.fromkeys(encoders))  # the caller may hold the pipeline, too
                clear_device_cache(garbage_collection=True)
                pipe = self.prepare(self._load(encoder, encoders), encoder)
            for batch in self._with_loras(pipe, batches):
                embeddings = None if self._drops_encoders else encode_batch(pipe, batch, self.sampling)
                refined = self._refined(pipe, encoder, batch) if self.refiner else None
                seeds = [prompt.seed for prompt in batch]
                yield render_batch(pipe, embeddings or pickle.load(encoded), seeds, self.sampling, refined=refined)

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
    ) -> tuple[DiffusionPipeline, StepEmbeddings]:
        """The refiner with the scheduler and the options of `pipe`, and a batch's embeddings of its one encoder."""
        if self._refiner is None:
            self._refiner = load_pipeline(self.refiner, None, self.device, self.dtype, kinds=REFINERS)
            self._refiner.set_progress_bar_config(disable=not self.show_steps)
        refiner = self.prepare(replace_components(self._refiner, scheduler=pipe.scheduler), encoder)
        trained = replace(self.sampling, layer="penultimate", clip_skip=None)
        return refiner, encode_batch(refiner, batch, trained)

    def _load(self, encoder: EncoderSpec, without: Collection[str]) -> DiffusionPipeline:
        first, second, _ = self._models(encoder).values()
        given = zip(("text_encoder", "text_encoder_2"), (first, second), self._loaded, strict=False)
        others = {slot: name for slot, name, loaded in given if name != loaded}
        place = torch.device("cpu") if self._offloads else self.device
        if self._pipe is not None and not {None, STRETCH} & {*others.values()}:
            pipe = replace_components(self._pipe, **load_text_encoders(self.checkpoint, others, place, self.dtype))
        else:
            self._pipe = None  # before the next one is loaded
            pipe = load_pipeline(self.base, first, place, self.dtype, second, without)
            pipe.set_progress_bar_config(disable=not self.show_steps)
            if not without:
                self._pipe, self._loaded = pipe, (first, second)
        if self._offloads:
            pipe.enable_model_cpu_offload(device=self.device)
        return pipe

    def _models(self, encoder: EncoderSpec) -> dict[str, str | None]:
        """The names of the encoders that replace the checkpoint's, and of the refiner."""
        first, second = encoder.name, encoder.fitted_second or self.encoder_2
        if encoder.kind is Kind.ORIGINAL:
            first, second = None, self.encoder_2
        return {"encoder": first, "encoder_2": second, "refiner": self.refiner}
