"""What belongs to one call of a pipeline, and no other thread sees: its options, its steps, its view of the UNet."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
    sentences: torch.Tensor | None = None  # gets those of what was encoded, if they are sharpened; see `note_sentences`
    member: torch.Tensor | None = None  # of sentences, see `sharpening.Choice`
    stack: ExitStack = field(default_factory=ExitStack)  # contexts that end with the call


_CALLS = ThreadValue({})  # by the id of the pipeline


def call_of(pipe: Any) -> Call | None:
    """The call of `pipe` that is under way in this thread."""
    return _CALLS.value.get(id(pipe))


@contextmanager
def calling(pipe: Any, options: LongPromptOptions | None = None, steps: int | None = None) -> Iterator[Call]:
    """Within the context, in this thread, a call of `pipe` is under way.

    Args:
        options: None: those of the pipeline.
        steps: see `Call`.
    """
    before, call = _CALLS.value, Call(options or getattr(pipe, "_options", None) or LongPromptOptions(), steps)
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
