"""A UNet's cross-attention made sharper for prompts longer than it was trained with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from debias_diffusion.chunks import MOST_SHARPENING, TRAINED_POSITIONS


def check_sharpening(factor: float) -> None:
    """Raises ValueError for a factor that is not above 0 and at most 4."""
    if not 0 < factor <= MOST_SHARPENING:  # nor NaN
        raise ValueError(
            f"sharpen is {factor!r}, but must be above 0 and at most {MOST_SHARPENING:g}; 1 changes nothing, and 1.5"
            " makes attention sharper."
        )


_SCALED = "scaled_keys"  # name of the functions that `_scaling` makes


@contextmanager
def sharpened(unet: torch.nn.Module, factor: float) -> Iterator[None]:
    """Within the context, the UNet's cross-attention to a text of more than 77 positions has `factor` times the scale:
    softmax(factor * q k^T / sqrt(d)) v.

    A UNet that was trained with 77 keys spreads its attention over more of them; a factor above 1 makes it choose. At
    77 positions and below nothing changes, to the bit, nor do self-attention and the image keys of IP-Adapters.

    Args:
        unet: diffusers' UNet of SDXL or Stable Diffusion 1.5, compiled or not, with or without LoRAs and offloading.
        factor: above 0, at most 4. 1: nothing changes.

    Raises:
        ValueError: another factor.
    """
    check_sharpening(factor)
    if factor == 1:  # as for most calls of a pipeline, whose UNet has thousands of modules
        yield
        return
    patched: list[tuple[Any, Any]] = []
    attentions = [module for module in unet.modules() if isinstance(module, Attention) and module.is_cross_attention]
    try:
        for attention in attentions:
            # q is shared with an IP-Adapter's image keys, so the text's keys are scaled.
            fused = getattr(attention, "fused_projections", False)
            layer: Any = attention.to_kv if fused else attention.to_k
            own = vars(layer).get("forward")  # set on the object by accelerate's and diffusers' offloading
            if getattr(own, "__name__", "") != _SCALED:  # else this is a context in a context
                # Unlike a hook, this is noticed by a UNet that is compiled already.
                layer.forward = _scaling(layer.forward, factor, 2 if fused else 1)
                patched.append((layer, own))
        yield
    finally:
        for layer, own in patched:
            del layer.forward
            if own is not None:
                layer.forward = own


def _scaling(forward: Callable[..., torch.Tensor], factor: float, parts: int) -> Callable[..., torch.Tensor]:
    """A key projection whose output, the first of so many `parts` of it, is scaled if the text is long."""

    def scaled_keys(hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        output = forward(hidden_states, *args, **kwargs)
        if hidden_states.shape[1] <= TRAINED_POSITIONS:
            return output
        keys, *values = output.chunk(parts, dim=-1)
        return torch.cat([keys * factor, *values], dim=-1)

    return scaled_keys
