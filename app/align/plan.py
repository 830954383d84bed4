"""What an alignment will do and need, before it starts: counted and timed on two pairs."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from debias_diffusion.encoders.spec import READINGS
from debias_diffusion.training.plan import GB, check_disk, duration, free_memory

PROBE = 2  # pairs that the estimate is measured on


class Cost(NamedTuple):
    """Of `PROBE` pairs, forward and backward: operations counted, seconds taken, bytes kept for the backward pass."""

    flop: int
    seconds: float
    activation_bytes: int


def measure_cost(backward: Callable[[], None], weights: Iterable[torch.Tensor], device: torch.device) -> Cost:
    """Runs `backward`, which makes both passes on the probe, twice: once to count, once to take the time.

    Args:
        weights: which activations do not count, though they are kept for the backward pass too.
    """
    # Not by their addresses, which are all 0 on the meta device.
    known, saved = {weight.untyped_storage()._cdata for weight in weights}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks:
        backward()
    started = time.perf_counter()
    backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Cost(counter.get_total_flops(), time.perf_counter() - started, sum(saved.values()))


def print_plan(run, start: int) -> None:
    """Prints what the steps of an alignment from `start` on will do, and an estimate of what they need.

    Raises:
        UserError: the disk has no room for the checkpoints.
    """
    config, accelerator, batches = run.config, run.accelerator, run.batches
    fitted = list(run.model.parameters())
    frozen = [*run.objective.unet.parameters(), *(weight for slot in run.slots for weight in slot.frozen_parameters())]
    cost = measure_cost(run.probe, [*fitted, *frozen], accelerator.device)
    samples = config.batch // accelerator.num_processes
    at_once = min(samples, config.chunk or samples)
    fitted_bytes, frozen_bytes = (sum(weight.nbytes for weight in weights) for weights in (fitted, frozen))
    activations = cost.activation_bytes * at_once // PROBE
    memory, free = frozen_bytes + 4 * fitted_bytes + activations, free_memory(accelerator.device)
    free_disk = check_disk(Path(config.output), disk := 3 * fitted_bytes * (config.keep + 1) + fitted_bytes)
    left = batches.total_steps - start
    chunks, names = READINGS[config.reading], (config.encoder, config.encoder_2)
    encoders = [
        f"{name} (in {'one piece' if slot.reads_on else chunks}, {slot.reader.context_length} positions)"
        for name, slot in zip(names, run.slots, strict=True)
        if name
    ]
    made = f", {start} of them made" if start else ""
    lines = {
        "encoder": " and ".join(encoders),
        "unet": f"{config.base}, frozen; images of {run.pixels} x {run.pixels} pixels",
        "loss": f"denoising {config.denoising:g}, states {config.keep_states:g}, features {config.keep_features:g}",
        "pairs": f"{batches.records} to train on; {len(run.held_out)} held out",
        "steps": f"{batches.total_steps} of {run.pairs_a_step}{made}; {config.warmup} of warm-up",
        "machine": f"{accelerator.num_processes} x {accelerator.device.type}, {run.precision}",
        "work": f"{cost.flop / PROBE / 1e12:.3g} TFLOP a pair, {cost.flop / PROBE * config.batch * left / 1e15:.3g} "
        f"PFLOP in the {left} steps left (counted on a probe of {PROBE} pairs)",
        "memory": f"about {memory / GB:.1f} GB a process ({frozen_bytes / GB:.1f} frozen, {4 * fitted_bytes / GB:.1f} "
        f"weights, gradients and AdamW, {activations / GB:.1f} activations); {free / GB:.1f} free",
        "disk": f"about {disk / GB:.1f} GB in {config.output}; {free_disk / GB:.1f} free",
        "time": f"about {duration(cost.seconds / PROBE * samples * left)}, from the probe",
    }
    print("\n".join(f"  {name:<8}{line}" for name, line in lines.items()))
    if memory > free:
        print("  The memory may not be enough: lower --chunk, or give --checkpoint-activations.")
