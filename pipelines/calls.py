"""What belongs to one call of a pipeline, and no other thread sees: its options, its view of the UNet, and its steps,
with embeddings that change from one to the next through diffusers' `callback_on_step_end`."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import BoundArguments
from typing import Any

import torch

from debias_diffusion.text.options import LongPromptOptions

Embeddings = dict[str, torch.Tensor]  # by the name of the pipeline's argument
StepEmbeddings = list[
    tuple[int, Embeddings]
]  # in order: the last call of the UNet, from 0, that reads these embeddings


class ThreadValue(threading.local):
    """A value of each thread, at first the same in all."""

    def __init__(self, value):  # an attribute of the class is what torch 2.8 would compile
        self.value = value


@dataclass
class Call:
    """A call of a pipeline."""

    options: LongPromptOptions
    steps: int | None = None  # calls of the UNet, by which prompts change; None where embeddings cannot change
    parts: StepEmbeddings = field(default_factory=list)  # gets what was encoded for these
    sources: list[str] = field(default_factory=list)  # gets the schedules, as they are written
    view: Callable | None = None  # what the call has for its UNet; None: the UNet
    words: Sequence = ()  # of the embeddings that are passed to the call
    known: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # texts' embeddings, see `note`
    stack: ExitStack = field(default_factory=ExitStack)  # contexts that end with the call

    def note(self, embeds: Iterable[torch.Tensor], words: Iterable[torch.Tensor]) -> None:
        """Says which positions, bool [positions], are words in each text's embeddings [positions, width]."""
        self.known += zip(embeds, words, strict=False)


_CALLS = ThreadValue({})  # by the id of the pipeline


def call_of(pipe: Any) -> Call | None:
    """The call of `pipe` that is under way in this thread."""
    return _CALLS.value.get(id(pipe))


@contextmanager
def calling(pipe: Any, options: LongPromptOptions | None = None, steps: int | None = None) -> Iterator[Call]:
    """Within the context, in this thread, a call of `pipe` is under way; without `options` with the pipeline's.

    What a call around it knows of embeddings, it knows too.
    """
    before, outer = _CALLS.value, call_of(pipe)
    call = Call(options or getattr(pipe, "_options", None) or LongPromptOptions(), steps)
    call.known += outer.known if outer else []
    _CALLS.value = before | {id(pipe): call}
    try:
        with call.stack:
            yield call
    finally:
        _CALLS.value = before


class CallMixin:
    """A pipeline with options and a UNet that are a call's own while one is under way."""

    _long_prompt = LongPromptOptions()

    @property
    def _options(self) -> LongPromptOptions:
        call = call_of(self)
        return self._long_prompt if call is None else call.options

    @property
    def unet(self) -> Any:
        """The UNet; within a call, in the call's thread, the view of it that is sharpened."""
        if "unet" not in vars(self):
            raise AttributeError("unet")
        unet, call = vars(self)["unet"], call_of(self)
        return unet if call is None or call.view is None else call.view(unet)

    @unet.setter
    def unet(self, unet: Any) -> None:
        vars(self)["unet"] = unet

    @unet.deleter
    def unet(self) -> None:
        del vars(self)["unet"]

    @property
    def components(self) -> dict[str, Any]:
        """As in diffusers, with the UNet itself: other pipelines are made of them, and hooks are set on them."""
        caller = sys._getframe(1)
        if (caller.f_globals["__name__"], caller.f_code.co_name) == ("diffusers.pipelines.auto_pipeline", "from_pipe"):
            warnings.warn(
                "AutoPipeline makes a pipeline that cuts prompts: wrap it by with_long_prompts.", stacklevel=3
            )
        return super().components | {"unet": vars(self)["unet"]}  # ty: ignore


# in the order in which `encode_prompt` returns them; Stable Diffusion 1.5 has the first two
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
# tensors of a callback, and the embeddings that they hold
_TENSORS = {"prompt_embeds": EMBEDDINGS[:2], "add_text_embeds": EMBEDDINGS[2:]}


@dataclass
class ExchangeEmbeddings:
    """A `callback_on_step_end` that gives the UNet the embeddings of each of its calls, then calls the user's.

    Attributes:
        parts: may be filled in the first step.
        callback: the user's, which has the last word.
        names: of the tensors that it gets.
        sources: the schedules, for errors.
    """

    parts: StepEmbeddings
    callback: Callable | None
    names: Sequence[str]
    sources: Sequence[str] = ()

    def inputs(self, pipe: Any) -> list[str]:
        """`callback_on_step_end_tensor_inputs`."""
        held = [name for name in _TENSORS if name in pipe._callback_tensor_inputs]
        return [*dict.fromkeys([*self.names, *held])]

    def __call__(self, pipe: Any, index: int, timestep: Any, tensors: dict) -> dict:
        """What the pipeline goes on with. Raises ValueError if it does not hold embeddings as is expected."""
        changed = self._exchange(pipe, index, tensors) if len(self.parts) > 1 else {}
        if self.callback is not None:
            changed |= self.callback(pipe, index, timestep, {name: tensors[name] for name in self.names})
        return changed

    def _exchange(self, pipe: Any, index: int, tensors: dict) -> dict:
        embeddings, later = (self._at(call) for call in (index, index + 1))
        if index == 0:
            self._check(pipe, embeddings, tensors)
        if later is embeddings:
            return {}
        tensors["prompt_embeds"] = _held(later, "prompt_embeds", tensors)
        if "add_text_embeds" in tensors:  # in place: some pipelines go on with what they had before the first step
            tensors["add_text_embeds"].copy_(_held(later, "add_text_embeds", tensors))
        return {"prompt_embeds": tensors["prompt_embeds"]}

    def _at(self, call: int) -> Embeddings:
        return next((embeddings for last, embeddings in self.parts if call <= last), self.parts[-1][1])

    def _check(self, pipe: Any, embeddings: Embeddings, tensors: dict) -> None:
        for name in _TENSORS.keys() & tensors.keys():
            expected = _held(embeddings, name, tensors)
            if expected.shape != tensors[name].shape or not torch.allclose(expected, tensors[name], 0, 0, True):
                raise ValueError(
                    f"{', '.join(self.sources)} changes from step to step, for which {type(pipe).__name__} cannot be"
                    " used: it arranges embeddings in a way of its own. Write one of the texts."
                )


def _held(embeddings: Embeddings, name: str, tensors: dict) -> torch.Tensor:
    """Embeddings as a pipeline holds them now: negative and positive, positive ones alone, or, for PAG, these twice."""
    positive, negative = (embeddings.get(part) for part in _TENSORS[name])
    copies = len(tensors[name]) // len(positive)
    first = positive if negative is None or copies < 2 else negative
    return torch.cat([first, *[positive] * (copies - 1)]).to(tensors[name])


def count_calls(pipe: Any, steps: int | None) -> int:
    """How often the UNet is called in so many steps, by which A1111 counts."""
    return max(1, (steps or 0) * getattr(pipe.scheduler, "order", 1))


def exchange_embeddings(pipe: Any, call: Call, bound: BoundArguments) -> tuple[tuple, dict]:
    """The arguments of a pipeline's call that exchanges embeddings for scheduled prompts, if its callback can."""
    needed = {"prompt_embeds", "add_text_embeds"} if hasattr(pipe, "text_encoder_2") else {"prompt_embeds"}
    # A ControlNet with PAG goes on with the embeddings of the first step.
    goes_on = hasattr(pipe, "controlnet") and hasattr(type(pipe), "set_pag_applied_layers")
    if needed <= {*getattr(pipe, "_callback_tensor_inputs", ())} and not goes_on:
        given = {name: bound.arguments.get(name, each.default) for name, each in bound.signature.parameters.items()}
        listed = next((given[name] for name in ("timesteps", "sigmas") if given.get(name) is not None), None)
        call.steps = count_calls(pipe, given["num_inference_steps"] if listed is None else len(listed))
        callback, names = given["callback_on_step_end"], given["callback_on_step_end_tensor_inputs"]
        exchange = ExchangeEmbeddings(call.parts, callback, getattr(callback, "tensor_inputs", names), call.sources)
        bound.arguments |= {
            "callback_on_step_end": exchange,
            "callback_on_step_end_tensor_inputs": exchange.inputs(pipe),
        }
    return bound.args[1:], bound.kwargs
