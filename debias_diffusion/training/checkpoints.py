"""Checkpoints, each one item of the run's job, with everything a run resumes from; and the models it leaves."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..clip.backbone import Backbone
from ..data.seen import Seen, write_seen
from ..errors import explain_failure
from ..files import write_json
from ..jobs import Job
from .optimizer import AdamW

LAST, BEST = "last", "best"  # folders of models: the result of a run, and the best so far
CHECKPOINT = "checkpoint-"  # before the step


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        step: steps made.
        best_r1: with `keep_best`, the best mean of the two R@1 on the pairs that choose, in percent; -1 before the
            first measurement.
        best_step: the step of that measurement.
        replaced: unreadable records that others replaced.
        not_finite: the latest steps in a row that were skipped because their loss was not finite.
        compiled: whether the steps run compiled, which the first of them decides; None: nothing can be compiled.
    """

    step: int = 0
    best_r1: float = -1.0
    best_step: int = 0
    replaced: int = 0
    not_finite: int = 0
    compiled: bool | None = None


def save_checkpoint(
    job: Job, model: nn.Module, optimizer: AdamW, state: TrainState, keep: int, modules: nn.Module | None = None
) -> None:
    """Writes the item `checkpoint-00000500`, one file that torch reads, and removes all but the newest `keep`.

    Args:
        modules: the method's own, saved without frozen parameters.
    """
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": asdict(state)}
    if modules is not None:
        content["modules"] = _restored(modules)
    # Given a path instead, torch does not say that a disk is full.
    with job.write(f"{CHECKPOINT}{state.step:08}") as temporary, open(temporary, "wb") as file:
        torch.save(content, file)
    for old in sorted(job.names(CHECKPOINT))[:-keep]:
        job.remove(old)


def _restored(modules: nn.Module) -> dict[str, torch.Tensor]:
    """What a resumed run cannot make anew: all but frozen parameters."""
    frozen = {name for name, parameter in modules.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in modules.state_dict().items() if name not in frozen}


def load_checkpoint(job: Job, model: nn.Module, optimizer: AdamW, modules: nn.Module | None = None) -> TrainState:
    """Resumes from the newest checkpoint; a fresh state where there is none.

    Raises:
        UserError: it or the best model is damaged. An older one is not used without asking: all processes must use the
            same one, and whoever owns a disk that damages files should know.
    """
    names = sorted(job.names(CHECKPOINT))
    path = job.path(names[-1]) if names else None
    if path is None:
        return TrainState()
    advice = "Remove it, and the same command continues from an older one, or begins anew."
    with explain_failure(f"The checkpoint {str(path)!r} cannot be used", advice):
        content = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        if modules is not None:
            if content["modules"].keys() != _restored(modules).keys():
                raise ValueError("the method has other modules than when it was written")
            modules.load_state_dict(content["modules"], strict=False)
        optimizer.load_state_dict(content["optimizer"])
        state = TrainState(**content["state"])
    if state.best_step and job.path(BEST) is None:  # which refuses a damaged one; a removed one is chosen anew
        state.best_r1, state.best_step = TrainState.best_r1, TrainState.best_step
    return state


def save_model(job: Job, name: str, backbone: Backbone, scores: dict, seen: Seen, *more: Callable) -> None:
    """Writes an open_clip folder, with scores, the record of what it has seen, and what `more` write, or nothing."""
    with job.write(name) as temporary:
        backbone.save(temporary)
        write_seen(temporary, seen)
        write_json(temporary / "scores.json", scores)
        for write in more:
            write(temporary)
