"""What a run will do, and an estimate of time, memory and disk, measured before it starts."""

import shutil
import time
from pathlib import Path

import psutil
import torch

from ..devices import autocast
from ..errors import UserError
from ..methods import Batch
from .step import pack, parameters

GB = 1e9
PROBE = 2  # samples that the estimate is measured on


def _measure(run, probe: Batch) -> tuple[float, int]:
    """(seconds of a forward and backward pass, bytes of the activations that it keeps), a sample."""
    device, model = run.accelerator.device, list(parameters(run.backbone, run.modules))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    probe = probe.to(device)
    for _ in range(2):  # the first pass includes one-time costs
        saved.clear()
        started = time.perf_counter()
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with autocast(run.precision, device), hooks:
            features = pack(run.method.encode(run.backbone, probe, run.modules))
        features.float().square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    for parameter in model:
        parameter.grad = None
    return seconds / len(probe), sum(saved.values()) // len(probe)


def free_memory(device: torch.device) -> int:
    """Free bytes of the device, for a CPU of the machine."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def check_disk(folder: Path, needed: int) -> int:
    """Free bytes on the disk of `folder`. Raises UserError if they and the files there already are below `needed`."""
    free = shutil.disk_usage(folder).free
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if free + used < needed:
        raise UserError(
            f"The run needs about {needed / GB:.1f} GB on the disk of {str(folder)!r} for its checkpoints, and "
            f"{free / GB:.1f} GB are free. Make room or give another output folder."
        )
    return free


def print_plan(run, probe: Batch, start: int) -> None:
    """Prints what the steps of a training from `start` on will do, and an estimate of what they need.

    Args:
        run: the training, see `loop`.
        probe: a few of its samples, whose cost is measured.

    Raises:
        UserError: the disk has no room for the checkpoints.
    """
    config, backbone, batches, device = run.config, run.backbone, run.batches, run.accelerator.device
    seconds, activations = _measure(run, probe)
    model = list(parameters(backbone, run.modules))
    weights, trained = sum(p.nbytes for p in model), sum(p.nbytes for p in model if p.requires_grad)
    local = config.batch / run.accelerator.num_processes
    at_once = min(local, config.chunk or local)
    seconds *= local * (4 / 3 if at_once < local else 1)  # the forward pass, one third of a step, is made twice
    if device.type == "cpu":  # AdamW reads and writes seven numbers a parameter, at 10 GB/s
        seconds += 7 * trained / 10e9
    states, activations = weights + 3 * trained, activations * at_once  # gradients and AdamW's two averages
    # Checkpoints, one more than are kept while it is written, and the models.
    disk = (weights + 2 * trained) * (config.keep + 1) + (2 if config.keep_best else 1) * weights
    memory, free = states + activations, free_memory(device)
    free_disk = check_disk(run.folder, disk)
    stretched = backbone.config["debias_diffusion"]
    origin = "RANDOM" if backbone.random_weights else config.pretrained or "its own"
    made = f", {start} of them made" if start else ""
    total = batches.total_steps
    chunks = f" in chunks of {config.chunk}" if config.chunk else ""
    rest = f"; the last {batches.remainder} pairs fill no step" if batches.remainder else ""
    chosen = " (auto: 1,000, of small data a tenth; --validation)" if run.given.validation == "auto" else ""
    fitted = (
        "; as many components as the batch allows (--components)"
        if run.settings["components"] != config.components
        else ""
    )
    choosing = f"; {config.keep_best} more choose the best model" if config.keep_best else ""
    lines = {
        "model": f"{config.model}, {origin} weights; context length {backbone.context_length}: the first "
        f"{stretched['keep']} positions kept, the others times {stretched['factor']}; {backbone.loss} loss",
        "recipe": f"{config.recipe}: {run.method.describe()}{fitted}",
        "trained": "text tower, with cached image features" if config.freeze_image_tower else "both towers",
        "pairs": f"{batches.records} to train on; {len(run.held_out)} held out{chosen}{choosing}",
        "steps": f"{total} of {run.pairs_a_step}{chunks} ({total * config.batch / batches.records:.2f} epochs)"
        f"{made}{rest}; {config.warmup} of warm-up",
        "machine": f"{run.accelerator.num_processes} x {device.type}, {run.precision}",
        "memory": f"about {memory / GB:.1f} GB a process ({states / GB:.1f} weights, gradients and AdamW, "
        f"{activations / GB:.1f} activations); {free / GB:.1f} free",
        "disk": f"about {disk / GB:.1f} GB in {config.output}; {free_disk / GB:.1f} free",
        "time": f"about {duration(seconds * (total - start))} ({seconds:.2g} s a step, from a probe of {len(probe)} "
        "pairs; reading images and measuring R@1 not counted)",
    }
    print("\n".join(f"  {name:<8}{line}" for name, line in lines.items()))
    if memory > free:
        print("  The memory may not be enough: lower --chunk, or --batch.")


def duration(seconds: float) -> str:
    """Seconds in a readable unit: '40 s', '12 min', '5.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
