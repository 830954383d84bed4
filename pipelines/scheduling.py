"""Embeddings that change from step to step, through diffusers' `callback_on_step_end`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

import torch

from .calls import Call, Embeddings, StepEmbeddings

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
