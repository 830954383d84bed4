"""The cost of `align`: counted for SDXL, timed for the toy.

    python benchmarks/align.py [--repeats 5]

Counted: SDXL's true configuration without weights, for one pair with a caption of 240 tokens, forward and backward.
Frozen weights take two bytes, those that are fitted sixteen (weight, gradient and AdamW's two averages in float32).
Timed: both passes on 16 pairs of the toy world, in float32, as a ratio to the same without the UNet. The variants take
turns.
Prints Markdown, and writes benchmarks/results/align.json.
"""

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import torch
from generate import random_sdxl
from harness import CPU, by_turns, publish, read_options
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import CLIPTextModelWithProjection

from debias_diffusion.app.align.command import Alignment
from debias_diffusion.app.align.data import AlignBatch, collate
from debias_diffusion.app.align.encoders import recompute_activations
from debias_diffusion.app.align.objective import TERMS, Encoder, Objective, Slot
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.eval.report import Table
from debias_diffusion.machine import seconds
from debias_diffusion.text.chunks import Cut, Tokens
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.logs import make_accelerator
from debias_diffusion.training.stop import StopRequest

TOKENS, PAIRS = 240, 16
META = torch.device("meta")
FITTED = {"the first encoder": (True, False), "the second": (False, True), "both": (True, True)}


def count_cost(backward: Callable[[], None], weights: Iterable[torch.Tensor]) -> tuple[int, int]:
    """(operations of `backward`, which makes both passes, bytes that are kept for the backward pass)

    Args:
        weights: which do not count, though they are kept for the backward pass too.
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
    return counter.get_total_flops(), sum(saved.values())


def slot(encoder: CLIPTextModelWithProjection, tokenizer, fitted: bool) -> Slot:
    """An encoder of 77 positions, or one of 248 in its place."""

    def empty(positions: int, dtype: torch.dtype) -> CLIPTextModelWithProjection:
        config = copy.deepcopy(encoder.config)
        config.max_position_embeddings = positions
        config.projection_dim = config.hidden_size
        with META:
            return CLIPTextModelWithProjection(config).to(dtype).requires_grad_(dtype == torch.float32)

    base = Encoder(empty(77, torch.bfloat16), tokenizer)
    if not fitted:
        return Slot(base)
    return Slot(base, Encoder(empty(248, torch.float32), tokenizer), Encoder(empty(248, torch.bfloat16), tokenizer))


def count(pixels: int, fitted: tuple[bool, bool], recomputed: bool) -> dict:
    """TFLOP and GB of one pair."""
    pipe = random_sdxl(META, torch.bfloat16)
    unet = pipe.unet.requires_grad_(False)
    parts = ((pipe.text_encoder, pipe.tokenizer), (pipe.text_encoder_2, pipe.tokenizer_2))
    slots = [slot(*part, is_fitted) for part, is_fitted in zip(parts, fitted, strict=True)]
    models = [slot.fitted.model.train() for slot in slots if slot.fitted is not None]
    if recomputed:
        unet.enable_gradient_checkpointing()
        for model in models:
            recompute_activations(model)
    objective = Objective(slots, unet, pipe.scheduler, pixels, dict.fromkeys(TERMS, 1.0), "fp32")
    text = Tokens([320] * TOKENS, [Cut.WORD] * TOKENS, [1.0] * TOKENS)
    latents = torch.empty(1, 4, pixels // 8, pixels // 8, device=META)
    batch = AlignBatch(["0"], latents, latents, torch.empty(1, device=META), [(text, text)], [None], [])
    trained = [weight for model in models for weight in model.parameters()]
    frozen = [*unet.parameters(), *(weight for part in slots for weight in part.frozen_parameters())]
    flop, kept = count_cost(lambda: sum(objective.losses(batch).values()).sum().backward(), [*trained, *frozen])
    state = sum(weight.nbytes for weight in frozen) + 16 * sum(weight.numel() for weight in trained)
    return {"tflop": flop / 1e12, "activations_gb": kept / 1e9, "state_gb": state / 1e9}


def time_toy(repeats: int) -> dict:
    """Seconds of both passes on `PAIRS` pairs, and ratios to those without the UNet."""
    encoders = {"encoder": "toy/debias-clip-sdxl", "encoder_2": "stretch"}
    with tempfile.TemporaryDirectory() as folder:
        data, images = write_pairs(Path(folder) / "data", 0, PAIRS)
        shared = dict(base="toy/sdxl", data=str(data), images=str(images), batch=PAIRS, validation=0)
        runs = {}
        for (title, fitted), denoising in product(FITTED.items(), (0.0, 10.0)):
            name = f"{title}{' with the UNet' if denoising else ''}"
            given = {part: encoders[part] for part, is_fitted in zip(encoders, fitted, strict=True) if is_fitted}
            config = AlignConfig(**shared, **given, denoising=denoising, output=str(Path(folder) / name))
            accelerator = make_accelerator(config)
            run = Alignment(config, accelerator)
            run.prepare(StopRequest(accelerator))
            batch = collate([run.dataset[(0, index, index)] for index in range(PAIRS)])
            runs[name] = lambda run=run, batch=batch: (run.backward(batch), run.optimizer.clear())
        times = by_turns(runs, repeats, lambda step: seconds(step, CPU))
    baseline, timed = times[next(iter(times))], {}
    for name, values in times.items():
        ratio = statistics.median(one / other for one, other in zip(values, baseline, strict=True))
        timed[name] = {"seconds": statistics.median(values), "ratio": ratio}
    return timed


def main() -> None:
    arguments, counted = read_options(__doc__, repeats=5), []
    for pixels, (title, fitted), recomputed in tqdm([*product((512, 1024), FITTED.items(), (False, True))]):
        numbers = count(pixels, fitted, recomputed)
        total = {"total_gb": numbers["activations_gb"] + numbers["state_gb"]}
        row = {"pixels": pixels, "fitted": title, "activations": "recomputed" if recomputed else "kept"}
        counted.append(row | numbers | total)
    rows = [[f"{value:.1f}" if isinstance(value, float) else value for value in row.values()] for row in counted]
    timed = time_toy(arguments.repeats)
    parts = "SDXL, one pair at a time, counted:", Table([*counted[0]], rows), f"The toy, {PAIRS} pairs:"
    of_toy = Table(["fitted", "seconds", "to the first row"], [[name, *row.values()] for name, row in timed.items()])
    publish("align", {"tokens": TOKENS, "pairs": PAIRS, "counted": counted, "timed": timed}, *parts, of_toy)


if __name__ == "__main__":
    main()
