"""One training step, ours against a padded one, at ShareGPT4V-like lengths.

    python benchmarks/train_step.py [--model ViT-B-16] [--batch 8] [--repeats 3]

(a) padded    open_clip's own forward passes on rows padded to the window, long and short captions one after the other,
              and an SVD for the components
(b) ours      captions up to their EOT, the shared beginning once

Same weights, samples, dtype, attention kernels (PyTorch's scaled_dot_product_attention) and optimizer. The two take
turns, so that what else the machine does falls on both. Prints a table and writes it to benchmarks/results/.
"""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tqdm import tqdm

from debias_diffusion.backbones import Backbone, load_backbone
from debias_diffusion.data.dataset import Batch
from debias_diffusion.objectives import contrastive_loss
from debias_diffusion.recipes import RECIPES, Recipe
from debias_diffusion.training.step import Optimizer, autocast, backward

RESULTS = Path(__file__).parent / "results"
# ShareGPT4V's captions: 173 tokens and 9 sentences on average.
SENTENCES, SENTENCE_TOKENS = (6, 12), (12, 26)


def make_batch(backbone: Backbone, size: int, seed: int) -> Batch:
    """Random images and token ids, with captions sampled and padded as the recipe does."""
    rng, tokenizer = random.Random(seed), backbone.tokenizer
    long_ids, short_ids = [], []
    for _ in range(size):
        sentences = [
            [rng.randrange(1, 49406) for _ in range(rng.randint(*SENTENCE_TOKENS))]
            for _ in range(rng.randint(*SENTENCES))
        ]
        drawn = rng.sample(sentences[1:], rng.randint(1, len(sentences) - 1))
        for ids, parts in ((long_ids, sentences), (short_ids, drawn)):
            ids.append([token for part in parts for token in part][: tokenizer.context_length - 2])
    n_pre = [0] * size + [rng.randint(0, tokenizer.n_post(ids)) for ids in short_ids]
    side = backbone.model.visual.image_size
    images = torch.randn(size, 3, *side, generator=torch.Generator().manual_seed(seed))
    return Batch([(0, i) for i in range(size)], images, tokenizer.batch(long_ids + short_ids, n_pre), [])


def padded_backward(backbone: Backbone, recipe: Recipe, batch: Batch, rows: torch.Tensor, precision: str) -> None:
    """The step as it stands in the paper, without sparing anything."""
    model, size = backbone.model, len(batch.keys)
    with autocast(precision, batch.images.device):
        image = model.encode_image(batch.images)
        long_text, short_text = model.encode_text(rows[:size]), model.encode_text(rows[size:])
    image, long_text, short_text = (F.normalize(x.float(), dim=-1) for x in (image, long_text, short_text))
    mean = image.mean(0)
    basis = torch.linalg.svd((image - mean).detach(), full_matrices=False).Vh[: recipe.components].T
    rebuilt = mean + (image - mean) @ basis @ basis.T
    scale, w = model.logit_scale.exp(), recipe.short_weight
    short = contrastive_loss(rebuilt, short_text, scale, recipe.label_smoothing)
    long = contrastive_loss(image, long_text, scale, recipe.label_smoothing)
    (w * short + (1 - w) * long).backward()


def seconds(run, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    model = next(names, platform.processor())
    return f"{model}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = parser.parse_args()

    accelerator = Accelerator()
    device, precision = accelerator.device, arguments.precision
    torch.manual_seed(0)
    backbone = load_backbone(arguments.model)
    backbone.stretch()
    backbone.to(device).train()
    debias = RECIPES["debias-clip"]
    components = min(debias.components, arguments.batch - 2)
    recipe = Recipe(debias.sampling, debias.padding, debias.short_weight, components)
    optimizer = Optimizer(backbone, weight_decay=1e-2, betas=(0.9, 0.999), eps=1e-8)

    times = {"padded": [], "ours": []}
    computed, literal = 0, 0
    for repeat in tqdm(range(-1, arguments.repeats), desc="steps, the first uncounted"):
        batch = make_batch(backbone, arguments.batch, seed=repeat + 1).to(device)
        rows = batch.tokens.padded()
        steps = {
            "padded": lambda batch=batch, rows=rows: padded_backward(backbone, recipe, batch, rows, precision),
            "ours": lambda batch=batch: backward(backbone, recipe, batch, accelerator, precision),
        }
        for name, step in steps.items():
            taken = seconds(lambda step=step: (step(), optimizer.step(1e-6)), device)
            if repeat >= 0:
                times[name].append(taken)
        computed += len(batch.tokens.prefix_ids) + len(batch.tokens.ids)
        literal += rows.numel()

    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "machine": machine(device),
        "torch": torch.__version__,
        "model": arguments.model,
        "window": backbone.context_length,
        "batch": arguments.batch,
        "precision": precision,
        "repeats": arguments.repeats,
        "samples_per_second": {name: round(arguments.batch / value, 3) for name, value in medians.items()},
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "text_tokens_computed_share": round(computed / literal, 3),
        "speedup": round(medians["padded"] / medians["ours"], 3),
    }
    RESULTS.mkdir(exist_ok=True)
    name = f"train_step-{arguments.model}-{device.type}-{precision}-batch{arguments.batch}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{result['machine']}, {arguments.model}, batch {arguments.batch}, {precision}")
    for name, speed in result["samples_per_second"].items():
        print(f"  {name:<8}{speed:8.2f} samples/s")
    print(f"  ours computes {100 * computed / literal:.0f}% of the padded text tokens and is {result['speedup']:.2f}x")


if __name__ == "__main__":
    main()
