"""What a run will do, and about what it will need, measured before it starts."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from ..data.dataset import Batch
from ..errors import UserError
from ..methods.dual_caption import Recipe
from ..models.backbone import Backbone
from .batches import GlobalBatches
from .config import TrainConfig
from .step import autocast, encode

GB = 1e9
PROBE = 2  # samples that the estimate is measured on


@dataclass(frozen=True)
class Cost:
    """What a probe of a few samples measured, carried over to the whole batch.

    Attributes:
        state_bytes: weights, gradients and AdamW's two averages.
        activation_bytes: what one process keeps of a batch for the backward pass.
        step_seconds: forward and backward of a batch and AdamW's update.
        disk_bytes: checkpoints (one more than are kept, while it is written), and the best and the last model.
    """

    state_bytes: int
    activation_bytes: int
    step_seconds: float
    disk_bytes: int


def measure(
    backbone: Backbone, probe: Batch, batch: int, chunk: int | None, keep: int, accelerator: Accelerator, precision: str
) -> Cost:
    """Runs the towers forward and backward on `probe` and scales up to `batch` samples over all processes."""
    parameters = sum(p.numel() * p.element_size() for p in backbone.parameters())
    trained = sum(p.numel() * p.element_size() for p in backbone.parameters() if p.requires_grad)
    weights = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    probe = probe.to(accelerator.device)
    seconds = 0.0
    for _ in range(2):  # the first run also pays for what happens only once
        saved.clear()
        started = time.perf_counter()
        with (
            autocast(precision, accelerator.device),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        ):
            features = encode(backbone, probe)
        features.float().square().sum().backward()
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    backbone.zero_grad()
    local = batch / accelerator.num_processes
    again = 4 / 3 if chunk and chunk < local else 1  # of three passes, the forward one is made twice
    return Cost(
        state_bytes=parameters + 3 * trained,
        activation_bytes=int(sum(saved.values()) * min(local, chunk or local) / len(probe)),
        step_seconds=seconds * again * local / len(probe) + _update_seconds(trained),
        disk_bytes=(parameters + 2 * trained) * (keep + 1) + 2 * parameters,
    )


def _update_seconds(parameter_bytes: int) -> float:
    """About how long AdamW takes, which reads and writes seven numbers a parameter: bound by memory, 10 GB/s."""
    return 7 * parameter_bytes / 10e9 if not torch.cuda.is_available() else 0.0


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free (of the machine's memory for a CPU)."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def check_disk(folder: Path, needed: int) -> int:
    """Free bytes on the disk of `folder`. Raises UserError when they and what lies there already are below `needed`."""
    free = shutil.disk_usage(folder).free
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if free + written < needed:
        raise UserError(
            f"The run needs about {needed / GB:.1f} GB on the disk of {str(folder)!r} for its checkpoints, and "
            f"{free / GB:.1f} GB are free. Make room or give another output folder."
        )
    return free


def print_plan(
    config: TrainConfig,
    recipe: Recipe,
    backbone: Backbone,
    probe: Batch,
    accelerator: Accelerator,
    precision: str,
    *,
    batches: GlobalBatches,
    held_out: int,
    start: int,
) -> None:
    """Says what the steps from `start` on will do, and about what they will need.

    Raises:
        UserError: the disk has no room for the checkpoints.
    """
    cost = measure(backbone, probe, config.batch, config.chunk, config.keep, accelerator, precision)
    free_disk = check_disk(Path(config.output), cost.disk_bytes)
    memory, free = cost.state_bytes + cost.activation_bytes, free_memory(accelerator.device)
    stretched = backbone.config["debias_diffusion"]
    weights = config.pretrained or ("RANDOM" if backbone.random_weights else "its own")
    made = f", {start} of them made" if start else ""
    total, samples = batches.total_steps, batches.total_steps * config.batch
    reserve = f", {batches.spare} of them in each epoch's reserve" if batches.spare else ""
    chunks = f" in chunks of {config.chunk}" if config.chunk else ""
    rest = f"; the last {batches.remainder} pairs fill no step" if batches.remainder else ""
    towers = "text tower, with cached image features" if config.freeze_image_tower else "both towers"
    padding = f", {recipe.padding} padding, w = {recipe.short_weight:g}" if recipe.has_short else ""
    components = f", {recipe.components} components" if recipe.has_short and recipe.components else ""
    lines = {
        "model": f"{config.model}, {weights} weights; window {backbone.context_length}: the first {stretched['keep']} "
        f"positions kept, the others times {stretched['factor']}; {backbone.loss} loss",
        "recipe": f"{config.recipe}: {recipe.sampling} sentences{padding}{components}, {recipe.pooling} pooling",
        "trained": towers,
        "pairs": f"{batches.records} to train on{reserve}; {held_out} held out",
        "steps": f"{total} of {config.batch} pairs{chunks} ({samples / batches.an_epoch:.2f} epochs){made}{rest}",
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
    """Seconds as people say them: '40 s', '12 min', '5.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
