"""One resumable piece of building the toy world: a loss, a number of steps, and a log."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from ..files import atomic_file
from ..training.optimizer import decay_groups, learning_rate

CHECKPOINT_EVERY = 500
_LOG_EVERY = 100


def run_stage(
    folder: Path,
    model: nn.Module,
    loss: Callable[[int], torch.Tensor],
    *,
    steps: int,
    peak: float,
    warmup: int = 200,
    weight_decay: float = 0.01,
) -> None:
    """Trains `model` in place for `steps` steps of AdamW, from the last checkpoint in `folder` if there is one.

    Leaves `log.jsonl` and `checkpoint.pt` in `folder`. Killed and started again, it ends with the same weights,
    provided that `loss` draws what it draws from its argument alone.

    Args:
        loss: number of the step, from 0, to a scalar to minimise.
        peak: learning rate after the warm-up, from where half a cosine leads to 0.
        weight_decay: on matrices only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(decay_groups(model.parameters(), weight_decay), lr=peak, fused=True)
    start = _restore(folder / "checkpoint.pt", model, optimizer)
    _keep_log(folder / "log.jsonl", start)
    started, losses = time.monotonic(), []
    for step in tqdm(range(start, steps), desc=folder.name, initial=start, total=steps, unit=" steps"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak, warmup)
        with sdpa_kernel(SDPBackend.MATH):  # on CPUs the fused kernels' gradient takes several times as long here
            value = loss(step)
            value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        if (step + 1) % _LOG_EVERY == 0 or step + 1 == steps:
            line = {"step": step + 1, "loss": round(sum(losses) / len(losses), 5)}
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}) + "\n")
            losses = []
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            _save(folder / "checkpoint.pt", model, optimizer, step + 1)


def _keep_log(path: Path, steps: int) -> None:
    """Drops the lines of steps behind the checkpoint, which are made again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= steps))


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with atomic_file(path) as unfinished:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)


def _restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps made."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]
