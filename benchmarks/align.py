"""The cost of `align`: counted for SDXL, timed for the toy.

    python benchmarks/align.py [--repeats 5] [--measured] [--pairs 1]

Counted: SDXL's true configuration without weights, for one pair with a caption of 240 tokens, forward and backward.
Frozen weights take two bytes, those that are fitted sixteen (weight, gradient and AdamW's two averages in float32).
Timed: both passes on 16 pairs of the toy world, in float32, as a ratio to the same without the UNet. The variants take
turns.
With --measured, steps at SDXL's size instead, on a GPU with random weights in mixed precision, from a batch of --pairs
to the update (on the CPU those of the toy SDXL): seconds, and the most memory beside weights and AdamW's averages.
Prints Markdown, and writes benchmarks/results/align.json, or align-measured-DEVICE.json.
"""

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import torch
from accelerate import Accelerator
from generate import random_sdxl
from harness import CPU, PeakMemory, by_turns, publish, read_options
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import CLIPTextModelWithProjection

from debias_diffusion.app.align.command import Alignment
from debias_diffusion.app.align.data import AlignBatch, collate
from debias_diffusion.app.align.encoders import recompute_activations
from debias_diffusion.app.align.objective import TERMS, Encoder, Objective, Slot
from debias_diffusion.app.options import AlignConfig
from debias_diffusion.devices import seconds
from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.chunks import Cut, Tokens
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.optimizer import AdamW

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
    """An encoder of 77 positions, or one of 248 in its place, with random weights on the device of `encoder`."""

    def empty(positions: int, dtype: torch.dtype) -> CLIPTextModelWithProjection:
        config = copy.deepcopy(encoder.config)
        config.max_position_embeddings = positions
        config.projection_dim = config.hidden_size
        with encoder.device:
            return CLIPTextModelWithProjection(config).to(dtype).requires_grad_(dtype == torch.float32)

    base = Encoder(empty(77, torch.bfloat16), tokenizer)
    if not fitted:
        return Slot(base)
    return Slot(base, Encoder(empty(248, torch.float32), tokenizer), Encoder(empty(248, torch.bfloat16), tokenizer))


def set_up(
    pipe, pixels: int, fitted: tuple[bool, bool], recomputed: bool, pairs: int = 1, precision: str = "fp32"
) -> tuple[Objective, AlignBatch, dict, list]:
    """What is minimised, random pairs, and the weights that are trained, by name, and frozen."""
    unet = pipe.unet.requires_grad_(False)
    parts = ((pipe.text_encoder, pipe.tokenizer), (pipe.text_encoder_2, pipe.tokenizer_2))
    slots = [slot(*part, is_fitted) for part, is_fitted in zip(parts, fitted, strict=True)]
    models = [slot.fitted.model.train() for slot in slots if slot.fitted is not None]
    if recomputed:
        unet.enable_gradient_checkpointing()
        for model in models:
            recompute_activations(model)
    objective = Objective(slots, unet, pipe.scheduler, pixels, dict.fromkeys(TERMS, 1.0), precision)
    text = Tokens([320] * TOKENS, [Cut.WORD] * TOKENS, [1.0] * TOKENS)
    side = pixels // pipe.vae_scale_factor
    latents = torch.randn(pairs, unet.config.in_channels, side, side, device=unet.device)
    shares = torch.rand(pairs, device=unet.device)
    ids = [str(number) for number in range(pairs)]
    batch = AlignBatch(ids, latents, latents, shares, pairs * [(text, text)], pairs * [None], [])
    trained = dict(torch.nn.ModuleList(models).named_parameters())
    frozen = [*unet.parameters(), *(weight for part in slots for weight in part.frozen_parameters())]
    return objective, batch, trained, frozen


def count(pixels: int, fitted: tuple[bool, bool], recomputed: bool) -> dict:
    """TFLOP and GB of one pair."""
    objective, batch, trained, frozen = set_up(random_sdxl(META, torch.bfloat16), pixels, fitted, recomputed)
    weights = [*trained.values(), *frozen]
    flop, kept = count_cost(lambda: sum(objective.losses(batch).values()).sum().backward(), weights)
    state = sum(weight.nbytes for weight in frozen) + 16 * sum(weight.numel() for weight in trained.values())
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
            run = Alignment(config)
            run.prepare()
            batch = collate([run.dataset[(0, index, index)] for index in range(PAIRS)])
            runs[name] = lambda run=run, batch=batch: (run.backward(batch), run.optimizer.clear())
        times = by_turns(runs, repeats, lambda step: seconds(step, CPU))
    baseline, timed = times[next(iter(times))], {}
    for name, values in times.items():
        ratio = statistics.median(one / other for one, other in zip(values, baseline, strict=True))
        timed[name] = {"seconds": statistics.median(values), "ratio": ratio}
    return timed


def measure(pairs: int, repeats: int) -> None:
    """Publishes seconds and GB of whole steps at SDXL's size."""
    device, rows = Accelerator().device, []
    toy = device.type == "cpu"
    pipe = load_pipeline("toy/sdxl", None, device, torch.bfloat16) if toy else random_sdxl(device, torch.bfloat16)
    memory = PeakMemory(device)
    for pixels, (title, fitted), recomputed in product((48,) if toy else (512, 1024), FITTED.items(), (False, True)):
        objective, batch, trained, _ = set_up(pipe, pixels, fitted, recomputed, pairs, "bf16")
        optimizer = AdamW(trained, 1e-2, (0.9, 0.999), 1e-8, "bf16")

        def step(objective=objective, batch=batch, trained=trained, optimizer=optimizer) -> None:
            loss = sum(objective.losses(batch).values()).sum() / pairs
            loss.backward()
            norm = torch.nn.utils.get_total_norm([weight.grad for weight in trained.values()])
            optimizer.step(1e-6, {"loss": loss.detach(), "gradient_norm": norm})

        def run(step: Callable[[], None]) -> tuple[float, int | None]:
            memory.start()
            return seconds(step, device), memory.read()

        times, peaks = zip(*by_turns({"step": step}, repeats, run)["step"], strict=True)
        pipe.unet.disable_gradient_checkpointing()
        row = {"pixels": pixels, "fitted": title, "activations": "recomputed" if recomputed else "kept"}
        rows.append(row | {"seconds": round(statistics.median(times), 4), "step_gb": round(max(peaks) / 1e9, 2)})
    table = Table([*rows[0]], [[str(value) for value in row.values()] for row in rows])
    publish(f"align-measured-{device.type}", {"tokens": TOKENS, "pairs": pairs, "rows": rows}, table, device=device)


def main() -> None:
    arguments, counted = read_options(__doc__, repeats=5, measured=False, pairs=1), []
    if arguments.measured:
        measure(arguments.pairs, arguments.repeats)
        return
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
