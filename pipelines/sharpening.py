"""A UNet's cross-attention made sharper for prompts longer than it was trained with: all of it, or by sentences."""

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention

from debias_diffusion.text.chunks import MOST_SHARPENING, TRAINED_POSITIONS
from debias_diffusion.text.options import check_sharpening

from .calls import Call, ThreadValue

# Attention without parts of its own, such as an IP-Adapter's, for which another way to choose can stand in.
_PLAIN = ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0", "XFormersAttnProcessor")


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
    check_sharpening("sharpen", factor, MOST_SHARPENING)
    if factor == 1:
        yield
        return
    with _key_factors(unet) as factors:
        if any(key_factor.value != 1 for key_factor in factors):
            raise ValueError("the UNet is sharpened in this thread already: leave that context before the next.")
        with _set_values(factors, factor):
            yield


def view_of(pipe: Any, call: Call, unet: Any) -> Any:
    """An object with the UNet's attributes, methods and `__dict__`, whose forwards alone are sharpened."""
    factor, power = call.options.sharpen, call.options.sharpen_sentences
    factors = call.stack.enter_context(_key_factors(unet)) if factor != 1 else []
    choices = call.stack.enter_context(_choices(unet)) if power != 1 else []

    def forward(_, *args, **kwargs):
        choice = _choice(pipe, call.member, power) if choices else None
        with _set_values(factors, factor), _set_values(choices, choice):
            return unet(*args, **kwargs)

    cls = type(unet)
    view = object.__new__(type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__call__": forward}))
    object.__setattr__(view, "__dict__", vars(unet))
    return view


def note_sentences(call: Call, sentences: torch.Tensor | None, repeats: int, embeds: torch.Tensor) -> None:
    """Says which sentences the embeddings have that a call goes on with.

    Args:
        sentences: the number of each position's sentence, from 0, [prompts, positions]; -1 for BOS, EOS and pads. None:
            those that were passed to the call.
        repeats: images of each prompt.
        embeds: what the UNet reads, on its device.
    """
    call.sentences = sentences
    member = call.member if sentences is None else member_of(sentences)
    call.member = None if member is None else member.repeat_interleave(repeats, 0).to(embeds)


def member_of(sentences: torch.Tensor | None) -> torch.Tensor | None:
    """See `Choice`."""
    if sentences is None:
        return None
    return (sentences[..., None] == torch.arange(max(1, int(sentences.max()) + 1), device=sentences.device)).float()


@contextmanager
def _set_values(values: list[ThreadValue], new: Any) -> Iterator[None]:
    before = [value.value for value in values]
    try:
        for value in values:
            value.value = new
        yield
    finally:
        for value, old in zip(values, before, strict=True):
            value.value = old


def _cross_attentions(unet: torch.nn.Module) -> list[Attention]:
    return [module for module in unet.modules() if isinstance(module, Attention) and module.is_cross_attention]


@contextmanager
def _key_factors(unet: torch.nn.Module) -> Iterator[list[ThreadValue]]:
    """Within the context, each cross-attention's keys are multiplied by one of these, which are 1 at first."""
    with ExitStack() as stack:
        factors = []
        for attention in _cross_attentions(unet):
            # q is shared with an IP-Adapter's image keys, so the text's keys are scaled.
            fused = getattr(attention, "fused_projections", False)
            layer = attention.to_kv if fused else attention.to_k
            # Unlike a hook, a `forward` is noticed by a UNet that is compiled already.
            scaling = functools.partial(_scaling, layer, 2 if fused else 1)
            factors.append(stack.enter_context(_replaced(layer, "forward", scaling)).value)
        yield factors


@contextmanager
def _choices(unet: torch.nn.Module) -> Iterator[list[ThreadValue]]:
    """Within the context, each cross-attention makes the choice that one of these holds, None at first."""
    with ExitStack() as stack:
        choices, others = [], set()
        for attention in _cross_attentions(unet):
            name = type(attention.processor).__name__
            if isinstance(attention.processor, ChoosingProcessor) or name in _PLAIN:
                choices.append(stack.enter_context(_replaced(attention, "processor", ChoosingProcessor)).value)
            else:
                others.add(name)
        if others:
            warnings.warn(
                f"sharpen_sentences is not used where attention is by {', '.join(sorted(others))}.", stacklevel=2
            )
        yield choices


_USERS: Counter = Counter()  # calls and contexts under way, by what was set for them
_LOCK = threading.RLock()  # of _USERS


@contextmanager
def _replaced(module: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[Any]:
    """Within the context, an attribute of the module's own is what `replace` makes of it; for all users the same.

    Args:
        name: "forward" may be set on the object here, or by accelerate's and diffusers' offloading.
    """
    with _LOCK:
        new = vars(module).get(name)
        if not _USERS[new]:
            new = replace(new)
            setattr(module, name, new)
        _USERS[new] += 1
    try:
        yield new
    finally:
        with _LOCK:
            _USERS[new] -= 1
            if not _USERS[new]:
                del _USERS[new]
                if vars(module).get(name) is new:  # no hook came or went meanwhile
                    vars(module).update({name: new.own}) if new.own else vars(module).pop(name)


def _scaling(layer: Any, parts: int, own: Callable | None) -> Any:
    """A key projection whose output, the first of so many `parts` of it, is multiplied if the text is long."""
    # A bound method would be a new object each time, for which torch 2.8 compiles anew.
    factor, class_forward = ThreadValue(1.0), type(layer).forward

    def scaled_keys(hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        output = own(hidden_states, *args, **kwargs) if own else class_forward(layer, hidden_states, *args, **kwargs)
        if factor.value == 1 or hidden_states.shape[1] <= TRAINED_POSITIONS:
            return output
        keys, *values = output.chunk(parts, dim=-1)
        return torch.cat([keys * factor.value, *values], dim=-1)

    scaled_keys.value, scaled_keys.own = factor, own
    return scaled_keys


class Choice(NamedTuple):
    """How attention to the words of prompts chooses between their sentences.

    Attributes:
        member: 1 where a position is of a sentence, else 0, [prompts, positions, sentences].
        power: of each sentence's share.
        plain: how many rows of a batch come first that do not choose, in prompts: 1 with guidance, else 0.
    """

    member: torch.Tensor
    power: float
    plain: int


def _choice(pipe: Any, member: torch.Tensor | None, power: float) -> Choice | None:
    if member is None:
        warnings.warn(
            "sharpen_sentences is not used: pass sentences=torch.tensor(pipe.prompt_layout(...).sentences) beside"
            " `prompt_embeds`, which do not say where sentences end.",
            stacklevel=2,
        )
        return None
    return Choice(member, power, int(getattr(pipe, "do_classifier_free_guidance", True)))


class ChoosingProcessor:
    """Plain attention, or `own` where there is nothing to choose."""

    def __init__(self, own: Any):
        self.own, self.value = own, ThreadValue(None)

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, *args, **kwargs
    ) -> torch.Tensor:
        choice, text = self.value.value, encoder_hidden_states
        if choice is None or text is None or text.shape[1] <= TRAINED_POSITIONS or attention_mask is not None:
            return self.own(attn, hidden_states, text, attention_mask, temb, *args, **kwargs)
        fused = getattr(attn, "fused_projections", False)
        keys_values = attn.to_kv(text).chunk(2, -1) if fused else (attn.to_k(text), attn.to_v(text))
        parts = attn.to_q(hidden_states), *keys_values
        q, k, v = (states.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for states in parts)
        copies, plain = len(text) // len(choice.member), choice.plain * len(choice.member)
        read = [F.scaled_dot_product_attention(q[:plain], k[:plain], v[:plain], scale=attn.scale)] if plain else []
        weights = attn.get_attention_scores(q[plain:].flatten(0, 1), k[plain:].flatten(0, 1))
        member = choice.member.repeat(copies - choice.plain, 1, 1)
        read.append(choose(weights.unflatten(0, (-1, attn.heads)), member, choice.power) @ v[plain:])
        return attn.to_out[1](attn.to_out[0](torch.cat(read).transpose(1, 2).flatten(2)))


def choose(weights: torch.Tensor, member: torch.Tensor, power: float) -> torch.Tensor:
    """Attention weights in which each sentence's share of the words' attention is raised to a power.

    The words' share of all, that of other positions, and each word's share of its sentence stay as they are.

    Args:
        weights: [prompts, heads, places, positions], sums 1.
        member: see `Choice`.
    """
    member = member[:, None].to(weights)
    shares = (weights @ member).float()
    shares = shares.clamp(min=torch.finfo(weights.dtype).tiny)  # [prompts, heads, places, sentences]
    powers = (shares / shares.amax(-1, keepdim=True)) ** power
    factors = powers / powers.sum(-1, keepdim=True) * shares.sum(-1, keepdim=True) / shares
    return weights * ((factors - 1).to(weights) @ member.mT + 1)
