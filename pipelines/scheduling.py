"""Embeddings that change from step to step, through diffusers' `callback_on_step_end`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .sharpening import ThreadValue

# in the order in which `encode_prompt` returns them; Stable Diffusion 1.5 has the first two
EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
# tensors of a callback, and the embeddings that they hold
_TENSORS = {"prompt_embeds": EMBEDDINGS[:2], "add_text_embeds": EMBEDDINGS[2:]}

Embeddings = dict[str, torch.Tensor]  # by the name of the pipeline's argument
Parts = list[tuple[int, Embeddings]]  # in order: the last call of the UNet, from 0, that reads these embeddings


@dataclass
class Schedule:
    """How a pipeline reads scheduled prompts.

    Attributes:
        steps: that shares of a schedule are of, see `steps_of`.
        step: which is read, from 1.
        parts: gets what was encoded.
    """

    steps: int
    step: int = 1
    parts: Parts = field(default_factory=list)


_SCHEDULES = ThreadValue({})  # by the id of the pipeline


def schedule_of(pipe: Any) -> Schedule | None:
    """That of the context, in this thread."""
    return _SCHEDULES.value.get(id(pipe))


@contextmanager
def scheduled(pipe: Any, steps: int) -> Iterator[Schedule]:
    """Within the context, in this thread, `pipe` encodes scheduled prompts for so many steps of its scheduler."""
    before, schedule = _SCHEDULES.value, Schedule(max(1, steps * getattr(pipe.scheduler, "order", 1)))
    _SCHEDULES.value = before | {id(pipe): schedule}
    try:
        yield schedule
    finally:
        _SCHEDULES.value = before


@dataclass
class ExchangeEmbeddings:
    """A `callback_on_step_end` that gives the UNet the embeddings of each of its calls, then calls the user's.

    Attributes:
        parts: may be filled in the first step.
        callback: the user's, which has the last word.
        names: of the tensors that it gets.
        sources: the schedules, for errors.
    """

    parts: Parts
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
