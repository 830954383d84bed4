"""Images, or why there are none: diffusers silently turns values that are not finite into black pixels."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

# in the order in which `encode_prompt` returns them; Stable Diffusion 1.5 has the first two
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def generate_images(pipe: DiffusionPipeline, *prompts: Sequence[str], **arguments) -> list[Image.Image | str]:
    """Calls a Stable Diffusion pipeline and checks its images.

    Embeddings, the latents after each step and the decoded pixels must be finite. A batch without a finite image ends
    at once. All other images are bit for bit those of the pipeline without checks.

    Args:
        pipe: may have a safety checker.
        prompts, arguments: of the call.

    Returns:
        each image, or in words why there is none: "its embeddings are not finite (NaN or infinite)"
    """
    given = [arguments[name] for name in EMBEDDINGS if arguments.get(name) is not None]
    if given and not any(embedded := [all(rows) for rows in zip(*map(_finite_rows, given), strict=True)]):
        return [_not_finite("embeddings")] * len(embedded)
    decoded: list[bool] = []
    after_step = arguments.pop("callback_on_step_end", None)

    def check_latents(pipe: DiffusionPipeline, index: int, timestep, tensors: dict) -> dict:
        rows = _finite_rows(tensors["latents"])
        if not any(rows):
            raise _LostError(index + 1, len(rows))
        if after_step is not None:
            after_step(pipe, index, timestep, {})
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
