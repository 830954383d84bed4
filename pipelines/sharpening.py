"""A UNet's cross-attention made sharper for prompts longer than it was trained with, among the words alone."""

import functools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import Attention

from debias_diffusion.text.chunks import TRAINED_POSITIONS
from debias_diffusion.text.options import check_sharpening

from .calls import Call, ThreadValue


@contextmanager
def sharpened(unet: torch.nn.Module, power: float, words: torch.Tensor | None = None) -> Iterator[None]:
    """Within the context, the UNet's cross-attention to a text of more than 77 positions chooses more sharply between
    words: the probability of each word is raised to a power, and all are divided so that the words keep their part.

    A UNet that was trained with 77 positions spreads its attention over more of them; a power above 1 makes it choose.
    What BOS, EOS and pads get stays as it is. At 77 positions and below nothing changes, to the bit, nor do
    self-attention and the images of IP-Adapters. It works with every attention processor that takes a mask.

    Only forwards in this thread are sharpened, not those that gradient checkpointing repeats on a GPU. A pipeline with
    a `sharpen` of its own uses that instead.

    Args:
        unet: diffusers' UNet of SDXL or Stable Diffusion 1.5, compiled or not, with or without LoRAs and offloading.
        power: above 0, at most 4. 1: nothing changes.
        words: bool [rows of the UNet's batch, positions], which are words. None: all positions but the first.

    Raises:
        ValueError: another power, a context within a context of this UNet, or words for another number of positions.
    """
    check_sharpening(power)
    if power == 1:
        yield
        return
    with _replaced_forwards(unet) as values:
        if any(value.value is not None for value in values):
            raise ValueError("the UNet is sharpened in this thread already: leave that context before the next.")
        with _set_values(values, float(power) if words is None else powers_of(words, power)):
            yield


def powers_of(words: torch.Tensor, power: float) -> torch.Tensor:
    """For each position the power of its attention, 1 but for words."""
    return torch.where(words, power, 1.0)


def view_of(call: Call, unet: Any) -> Any:
    """An object with the UNet's attributes, methods and `__dict__`, whose forwards alone are sharpened."""
    values = call.stack.enter_context(_replaced_forwards(unet))
    unknown: list[torch.Tensor] = []  # of each forward, whether it had a row whose words are not known
    call.stack.callback(_warn_of_unknown, unknown)

    def forward(_, sample, timestep, encoder_hidden_states, *args, **kwargs):
        powers = None
        if encoder_hidden_states.shape[1] > TRAINED_POSITIONS:
            words, is_unknown = words_of(encoder_hidden_states, call.known)
            powers = powers_of(words, call.options.sharpen)
            unknown.append(is_unknown)
        with _set_values(values, powers):
            return unet(sample, timestep, encoder_hidden_states, *args, **kwargs)

    cls = type(unet)
    view = object.__new__(type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, "__call__": forward}))
    object.__setattr__(view, "__dict__", vars(unet))
    return view


def words_of(rows: torch.Tensor, known: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions are words in what a UNet reads: those of the equal known embeddings. Without a wait for a GPU.

    Args:
        rows: [rows, positions, width]
        known: embeddings [positions, width] and their words, bool [positions], of any lengths.

    Returns:
        bool [rows, positions], in rows that equal none all but the BOS of each chunk; whether there are such rows, not
        counting zeros, between which there is nothing to choose.
    """
    length = rows.shape[1]
    numbers = torch.arange(length, device=rows.device)
    words = numbers % (TRAINED_POSITIONS if length % TRAINED_POSITIONS == 0 else length) > 0
    words, is_unknown = words.expand(len(rows), -1), rows.flatten(1).any(1)
    for embeds, own in known:
        if len(embeds) == length:
            is_equal = (rows == embeds.to(rows)).flatten(1).all(1)
            words, is_unknown = torch.where(is_equal[:, None], own.to(rows.device), words), is_unknown & ~is_equal
    return words, is_unknown.any()


def _warn_of_unknown(unknown: list[torch.Tensor]) -> None:
    if unknown and bool(torch.stack(unknown).any()):
        warnings.warn(
            "The UNet read embeddings that this call did not encode, such as `prompt_embeds` without `words`, or what a"
            " callback changed. There `sharpen` took all positions but BOS for words.",
            stacklevel=2,
        )


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


@contextmanager
def _replaced_forwards(unet: torch.nn.Module) -> Iterator[list[ThreadValue]]:
    """Within the context, each cross-attention is sharpened by one of these, None at first: powers [rows, positions],
    or one power, of all positions but the first."""
    with ExitStack() as stack:
        attentions = [
            module for module in unet.modules() if isinstance(module, Attention) and module.is_cross_attention
        ]
        # Unlike a hook, a `forward` is noticed by a UNet that is compiled already.
        yield [stack.enter_context(_replaced(attn, functools.partial(_sharpening, attn))).value for attn in attentions]


_USERS: Counter = Counter()  # calls and contexts under way, by what was set for them
_LOCK = threading.RLock()  # of _USERS


@contextmanager
def _replaced(module: Any, replace: Callable[[Any], Any]) -> Iterator[Any]:
    """Within the context, the module's own `forward` is what `replace` makes of it; for all users the same.

    It may be set on the object here, or by accelerate's and diffusers' offloading.
    """
    with _LOCK:
        new = vars(module).get("forward")
        if not _USERS[new]:
            new = replace(new)
            module.forward = new
        _USERS[new] += 1
    try:
        yield new
    finally:
        with _LOCK:
            _USERS[new] -= 1
            if not _USERS[new]:
                del _USERS[new]
                if vars(module).get("forward") is new:  # no hook came or went meanwhile
                    vars(module).update(forward=new.own) if new.own else vars(module).pop("forward")


def _sharpening(attn: Attention, own: Callable | None) -> Any:
    """A cross-attention's forward with a mask that sharpens it if the text is long."""
    # A bound method would be a new object each time, for which torch 2.8 compiles anew.
    powers, class_forward = ThreadValue(None), type(attn).forward

    def masked(hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs) -> torch.Tensor:
        # An IP-Adapter's images come behind the text.
        text: Any = encoder_hidden_states[0] if isinstance(encoder_hidden_states, tuple) else encoder_hidden_states
        if powers.value is not None and text.shape[1] > TRAINED_POSITIONS:
            attention_mask = sharpening_mask(attn, hidden_states, text, powers.value, attention_mask)
        arguments = hidden_states, encoder_hidden_states, attention_mask
        return own(*arguments, **kwargs) if own else class_forward(attn, *arguments, **kwargs)

    masked.value, masked.own = powers, own
    return masked


def attention_logits(attn: Attention, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """q k^T / sqrt(d) of an attention without a mask, [rows * heads, places, positions], at least in float32."""
    keys = attn.to_kv(text).chunk(2, -1)[0] if getattr(attn, "fused_projections", False) else attn.to_k(text)
    q, k = map(attn.head_to_batch_dim, (attn.to_q(hidden_states) * attn.scale, keys))
    logits = q @ k.mT
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sharpening_mask(
    attn: Attention,
    hidden_states: torch.Tensor,
    text: torch.Tensor,
    powers: torch.Tensor | float,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What is added to the logits l, so that softmax gives words P(words) softmax_words(t l), and the others what they
    had: (t - 1) l + log sum_words exp(l) - log sum_words exp(t l) for words, 0 for the others.

    Args:
        hidden_states: [rows, places, width]
        text: [rows, positions, width of the text]
        powers: t of words, and 1 of others, [rows or a divisor, positions]; or t of all positions but the first.
        attention_mask: another mask in diffusers' form, which holds too.

    Returns:
        [rows * heads, places, positions], in the dtype of `hidden_states`.
    """
    rows, length, _ = text.shape
    if not isinstance(powers, torch.Tensor):
        powers = torch.where(torch.arange(length, device=text.device) > 0, powers, 1.0)[None]
    if powers.shape[1] != length or rows % len(powers):
        raise ValueError(f"`words` is {[*powers.shape]}, but the UNet reads {rows} rows of {length} positions.")
    logits, mask = attention_logits(attn, hidden_states, text), 0.0
    if attention_mask is not None:
        mask = attn.prepare_attention_mask(attention_mask, length, rows)
        logits = logits + mask
    # AnimateDiff repeats the text for each frame.
    powers = powers.to(logits).repeat_interleave(attn.heads * rows // len(powers), 0)[:, None]
    words = powers != 1
    own = logits.masked_fill_(~words, -math.inf)
    shift = own.logsumexp(-1, keepdim=True) - (powers * own).logsumexp(-1, keepdim=True)
    return (mask + torch.where(words, (powers - 1) * own + shift, 0)).to(hidden_states.dtype)
