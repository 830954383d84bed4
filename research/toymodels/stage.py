"""One resumable piece of building the toy world: a loss, a number of steps, and a log."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from debias_diffusion.files import append
from debias_diffusion.jobs import Job
from debias_diffusion.training.optimizer import learning_rate, parameter_groups
from debias_diffusion.training.progress import LOG, cut_log

CHECKPOINT_EVERY = 500
_LOG_EVERY = 100
_STATE = "state.pt"


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

    Leaves `log.jsonl` and the item `state.pt` in `folder`. Killed and started again, it ends with the same weights,
    provided that `loss` draws what it draws from its argument alone.

    Args:
        loss: number of the step, from 0, to a scalar to minimise.
        peak: learning rate after the warm-up, from where half a cosine leads to 0.
        weight_decay: on matrices only.
    """
    with Job.open(folder, "toy model") as job:
        optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), weight_decay), lr=peak, fused=True)
        start = 0
        if path := job.path(_STATE):
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start = saved["step"]
        cut_log(folder / LOG, start)
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
                append(folder / LOG, json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}))
                losses = []
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                with job.write(_STATE) as temporary, open(temporary, "wb") as file:
                    torch.save(content, file)
