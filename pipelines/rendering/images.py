"""From a batch of prompts to embeddings, and from these to images."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from debias_diffusion.errors import UserError, explain_failure, reason
from debias_diffusion.limits import Layer
from debias_diffusion.text.options import PromptLayout

from ..calls import EMBEDDINGS, ExchangeEmbeddings, StepEmbeddings, calling, count_calls
from ..sharpening import words_of
from .options import Sampling
from .prompts import ImagePrompt

HANDOVER = 0.8  # of the denoising, after which SDXL's refiner takes over


@contextmanager
def reading_layer(pipe: DiffusionPipeline, layer: Layer) -> Iterator[None]:
    """Within the context, SDXL's UNet reads this layer of both text encoders; pooled embeddings stay as they are.

    "last" is the last layer after the final norm, which Long-CLIP's code feeds to SDXL.
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


@torch.no_grad()
def encode_batch(pipe: DiffusionPipeline, prompts: Sequence[ImagePrompt], sampling: Sampling) -> StepEmbeddings:
    """Embeddings of one batch on the CPU, [batch, ...] each: two for SD 1.5, four for SDXL, half without guidance.

    One part, or, where a prompt changes from step to step, several.
    """
    skipped = (sampling.clip_skip or 0) - (2 if hasattr(pipe, "text_encoder_2") else 1)
    how = {"do_classifier_free_guidance": sampling.guidance_scale > 1, "clip_skip": max(skipped, 0) or None}
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
    for part in moved.values() if call.known else ():
        part["words"] = torch.cat([words_of(part[name], call.known)[0] for name in EMBEDDINGS[:2] if name in part])
    return [(last, moved[id(part)]) for last, part in parts]


def render_batch(
    pipe: DiffusionPipeline,
    parts: StepEmbeddings,
    seeds: Sequence[int],
    sampling: Sampling,
    on_step: Callable[[int, int], None] | None = None,
    refined: tuple[DiffusionPipeline, StepEmbeddings] | None = None,
) -> list[Image.Image | str]:
    """Images of one batch from the parts of `encode_batch`; `pipe` needs no text encoder.

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
            with np.errstate(invalid="ignore"), calling(stage) as call:  # NaN is reported below
                for part in (part for _, part in of_stage if "words" in part):
                    embeds = torch.cat([part[name] for name in EMBEDDINGS[:2] if name in part])
                    call.note(*(each.to(stage._execution_device) for each in (embeds, part["words"])))
                output = stage(
                    **{name: left[0][1][name].to(stage._execution_device) for name in EMBEDDINGS if name in left[0][1]},
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
