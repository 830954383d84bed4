"""What a run will do, and an estimate of time, memory and disk, measured before it starts."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from ..devices import autocast
from ..errors import UserError
from ..methods import Batch, Method
from ..models.backbone import Backbone
from .batches import GlobalBatches
from .config import TrainConfig
from .step import pack, parameters

GB = 1e9
PROBE = 2  # samples that the estimate is measured on


@dataclass(frozen=True)
class Cost:
    """Estimated needs of a run, scaled up from a probe of a few samples.

    Attributes:
        state_bytes: weights, gradients and AdamW's two averages.
        activation_bytes: activations that one process keeps for the backward pass.
        step_seconds: forward and backward pass of a batch and AdamW's update.
        disk_bytes: checkpoints (one more than are kept, while it is written), the last model, and the best if it is
            kept.
    """

    state_bytes: int
    activation_bytes: int
    step_seconds: float
    disk_bytes: int


def measure(
    backbone: Backbone,
    method: Method,
    modules: nn.Module | None,
    probe: Batch,
    config: TrainConfig,
    accelerator: Accelerator,
    precision: str,
) -> Cost:
    """Runs the towers forward and backward on `probe` and scales up to the batch over all processes."""
    model = list(parameters(backbone, modules))
    weight_bytes = sum(p.numel() * p.element_size() for p in model)
    trained = sum(p.numel() * p.element_size() for p in model if p.requires_grad)
    weights = {p.untyped_storage().data_ptr() for p in model}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    probe = probe.to(accelerator.device)
    seconds = 0.0
    for _ in range(2):  # the first pass includes one-time costs
        saved.clear()
        started = time.perf_counter()
        with (
            autocast(precision, accelerator.device),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        ):
            features = pack(method.all_features(backbone, probe, modules))
        features.float().square().sum().backward()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    for parameter in model:
        parameter.grad = None
    local = config.batch / accelerator.num_processes
    at_once = min(local, config.chunk or local)
    passes = 4 / 3 if at_once < local else 1  # the forward pass, one third of a step, is made twice
    return Cost(
        state_bytes=weight_bytes + 3 * trained,
        activation_bytes=int(sum(saved.values()) * at_once / len(probe)),
        step_seconds=seconds * passes * local / len(probe) + _update_seconds(trained),
        disk_bytes=(weight_bytes + 2 * trained) * (config.keep + 1) + (2 if config.keep_best else 1) * weight_bytes,
    )


def _update_seconds(parameter_bytes: int) -> float:
    """Estimated time of AdamW, which reads and writes seven numbers per parameter at 10 GB/s."""
    return 7 * parameter_bytes / 10e9 if not torch.cuda.is_available() else 0.0


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


def print_plan(
    config: TrainConfig,
    method: Method,
    backbone: Backbone,
    modules: nn.Module | None,
    probe: Batch,
    accelerator: Accelerator,
    precision: str,
    *,
    batches: GlobalBatches,
    held_out: int,
    start: int,
) -> None:
    """Prints what the steps from `start` on will do, and an estimate of what they need.

    Raises:
        UserError: the disk has no room for the checkpoints.
    """
    cost = measure(backbone, method, modules, probe, config, accelerator, precision)
    free_disk = check_disk(Path(config.output), cost.disk_bytes)
    memory, free = cost.state_bytes + cost.activation_bytes, free_memory(accelerator.device)
    stretched = backbone.config["debias_diffusion"]
    weights = "RANDOM" if backbone.random_weights else config.pretrained or "its own"
    made = f", {start} of them made" if start else ""
    total = batches.total_steps
    epochs = total * config.batch / batches.records
    chunks = f" in chunks of {config.chunk}" if config.chunk else ""
    rest = f"; the last {batches.remainder} pairs fill no step" if batches.remainder else ""
    towers = "text tower, with cached image features" if config.freeze_image_tower else "both towers"
    chosen = " (auto: 1,000, of small data a tenth; --validation)" if config.validation == "auto" else ""
    choosing = f"; {config.keep_best} more choose the best model" if config.keep_best else ""
    lines = {
        "model": f"{config.model}, {weights} weights; context length {backbone.context_length}: the first "
        f"{stretched['keep']} positions kept, the others times {stretched['factor']}; {backbone.loss} loss",
        "recipe": f"{config.recipe}: {method.describe_all()}",
        "trained": towers,
        "pairs": f"{batches.records} to train on; {held_out} held out{chosen}{choosing}",
        "steps": f"{total} of {config.batch} pairs{chunks} ({epochs:.2f} epochs){made}{rest}",
        "machine": f"{accelerator.num_processes} x {accelerator.device.type}, {precision}",
        "memory": f"about {memory / GB:.1f} GB a process ({cost.state_bytes / GB:.1f} weights, gradients and AdamW, "
        f"{cost.activation_bytes / GB:.1f} activations); {free / GB:.1f} free",
        "disk": f"about {cost.disk_bytes / GB:.1f} GB in {config.output}; {free_disk / GB:.1f} free",
        "time": f"about {duration(cost.step_seconds * (total - start))} ({cost.step_seconds:.2g} s a step, from a "
        f"probe of {len(probe)} pairs; reading images and measuring R@1 not counted)",
    }
    print("\n".join(f"  {name:<8}{line}" for name, line in lines.items()))
    if memory > free:
        print("  The memory may not be enough: lower --chunk, or --batch.")


def duration(seconds: float) -> str:
    """Seconds in a readable unit: '40 s', '12 min', '5.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
