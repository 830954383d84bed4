"""A UNet's cross-attention made sharper for prompts longer than it was trained with."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import Attention

from debias_diffusion.text.chunks import MOST_SHARPENING, TRAINED_POSITIONS


def check_sharpening(factor: float) -> None:
    """Raises ValueError for a factor that is not above 0 and at most 4."""
    if not 0 < factor <= MOST_SHARPENING:  # nor NaN
        raise ValueError(
            f"sharpen is {factor!r}, but must be above 0 and at most {MOST_SHARPENING:g}; 1 changes nothing, and 1.5"
            " makes attention sharper."
        )


@contextmanager
def sharpened(unet: torch.nn.Module, factor: float) -> Iterator[None]:
    """Within the context, the UNet's cross-attention to a text of more than 77 positions has `factor` times the scale:
    softmax(factor * q k^T / sqrt(d)) v.

    A UNet that was trained with 77 keys spreads its attention over more of them; a factor above 1 makes it choose. At
    77 positions and below nothing changes, to the bit, nor do self-attention and the image keys of IP-Adapters.

    Only forwards in this thread are sharpened, not those that gradient checkpointing repeats on a GPU. A pipeline with
    a `sharpen` of its own uses that instead.

    Args:
        unet: diffusers' UNet of SDXL or Stable Diffusion 1.5, compiled or not, with or without LoRAs and offloading.
        factor: above 0, at most 4. 1: nothing changes.

    Raises:
        ValueError: another factor, or a context within a context of this UNet.
    """
    check_sharpening(factor)
    if factor == 1:
        yield
        return
    with _key_factors(unet) as factors:
        if any(key_factor.value != 1 for key_factor in factors):
            raise ValueError("the UNet is sharpened in this thread already: leave that context before the next.")
        with _set_factors(factors, factor):
            yield


class SharpenedMixin:
    """A pipeline whose forwards of its UNet, and no others, are sharpened by `self._long_prompt.sharpen`."""

    _long_prompt: Any

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if issubclass(cls, DiffusionPipeline):
            own = vars(cls).get("__call__")

            @functools.wraps(cls.__call__)  # so that its signature is still diffusers'
            def sharpened_call(self, *args, **kwargs):
                call = super(cls, self).__call__ if own is None else functools.partial(own, self)
                with _views(self, self._long_prompt.sharpen):
                    return call(*args, **kwargs)

            cls.__call__ = sharpened_call

    @property
    def unet(self) -> Any:
        """The UNet; within a call, in the call's thread, the view of it that is sharpened."""
        if "unet" not in vars(self):
            raise AttributeError("unet")
        view_of = _VIEWS.value.get(id(self), lambda unet: unet)
        return view_of(vars(self)["unet"])

    @unet.setter
    def unet(self, unet: Any) -> None:
        vars(self)["unet"] = unet

    @unet.deleter
    def unet(self) -> None:
        del vars(self)["unet"]

    @property
    def components(self) -> dict[str, Any]:
        """As in diffusers, with the UNet itself: other pipelines are made of them, and hooks are set on them."""
        return super().components | {"unet": vars(self)["unet"]}


@contextmanager
def _views(pipe: SharpenedMixin, factor: float) -> Iterator[None]:
    """Within the context, in this thread, `pipe.unet` is a view whose forwards, and no others, are sharpened."""
    with ExitStack() as stack:

        @functools.cache
        def view_of(unet: Any) -> Any:
            """An object with the attributes and methods of the UNet, and one `__dict__`, but a call of its own."""
            if factor == 1:  # as for most calls, and a UNet has thousands of modules
                return unet
            factors = stack.enter_context(_key_factors(unet))

            def forward(_, *args, **kwargs):
                with _set_factors(factors, factor):
                    return unet(*args, **kwargs)

            cls = type(unet)
            view = object.__new__(type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__call__": forward}))
            object.__setattr__(view, "__dict__", vars(unet))
            return view

        stack.callback(setattr, _VIEWS, "value", _VIEWS.value)
        _VIEWS.value = _VIEWS.value | {id(pipe): view_of}
        yield


class ThreadValue(threading.local):
    """A value of each thread, at first the same in all."""

    def __init__(self, value):  # an attribute of the class is what torch 2.8 would compile
        self.value = value


_VIEWS = ThreadValue({})  # by the id of the pipeline


@contextmanager
def _set_factors(factors: list[ThreadValue], value: float) -> Iterator[None]:
    before = [factor.value for factor in factors]
    try:
        for factor in factors:
            factor.value = value
        yield
    finally:
        for factor, value in zip(factors, before, strict=True):
            factor.value = value


@contextmanager
def _key_factors(unet: torch.nn.Module) -> Iterator[list[ThreadValue]]:
    """Within the context, each cross-attention's keys are multiplied by one of these, which are 1 at first."""
    attentions = [module for module in unet.modules() if isinstance(module, Attention) and module.is_cross_attention]
    with ExitStack() as stack:
        yield [stack.enter_context(_key_factor(attention)) for attention in attentions]


_USERS: Counter = Counter()  # calls and contexts under way, by the function that scales for them
_LOCK = threading.RLock()  # of _USERS


@contextmanager
def _key_factor(attention: Any) -> Iterator[ThreadValue]:
    # q is shared with an IP-Adapter's image keys, so the text's keys are scaled.
    fused = getattr(attention, "fused_projections", False)
    layer = attention.to_kv if fused else attention.to_k
    with _LOCK:
        forward = vars(layer).get("forward")  # set on the object here, or by accelerate's and diffusers' offloading
        if not _USERS[forward]:
            # Unlike a hook, this is noticed by a UNet that is compiled already.
            forward = layer.forward = _scaling(layer, forward, 2 if fused else 1)
        _USERS[forward] += 1
    try:
        yield forward.factor
    finally:
        with _LOCK:
            _USERS[forward] -= 1
            if not _USERS[forward]:
                del _USERS[forward]
                if vars(layer).get("forward") is forward:  # no hook came or went meanwhile
                    vars(layer).update(forward=forward.own) if forward.own else vars(layer).pop("forward")


def _scaling(layer: Any, own: Callable | None, parts: int) -> Any:
    """A key projection whose output, the first of so many `parts` of it, is multiplied if the text is long."""
    # A bound method would be a new object each time, for which torch 2.8 compiles anew.
    factor, class_forward = ThreadValue(1.0), type(layer).forward

    def scaled_keys(hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        output = own(hidden_states, *args, **kwargs) if own else class_forward(layer, hidden_states, *args, **kwargs)
        if factor.value == 1 or hidden_states.shape[1] <= TRAINED_POSITIONS:
            return output
        keys, *values = output.chunk(parts, dim=-1)
        return torch.cat([keys * factor.value, *values], dim=-1)

    scaled_keys.factor, scaled_keys.own = factor, own
    return scaled_keys
