"""Attention ablation: a suppressed head, and many ablations at once against one after the other.

    python benchmarks/ablation.py [--model ViT-B-16] [--images 4] [--rounds 9]

Suppression of every head, forward and backward, of one block's attention, as a ratio to plain attention:

(a) closed form   what the package does: a further channel of the values, no matrix of weights
(b) literal       softmax, multiply, normalise again, as the paper has it (AAT, section 4.1)

Features of many ablations of the image tower, with random weights: `Population` against a loop over the ablations. The
loop takes equally long for each, so it is timed on a few of them. Random: a genetic algorithm's first population.
Converged: its last one, in which individuals differ in a few heads. Probe: each head alone. The toy's 12 heads: all
4,096 sets.

All take turns, so that what else the machine does falls on all. Prints tables and writes them to benchmarks/results/.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import median_seconds, publish, read_options
from torch import Tensor

from debias_diffusion.ablation.genetic import FLIP, first_masks, population_size
from debias_diffusion.ablation.heads import Ablation
from debias_diffusion.ablation.population import Population
from debias_diffusion.ablation.problems import every_mask
from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import full_attention
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.report import Table

BETA = 0.1
TOY, TOY_IMAGES = "toy/clip", 64
TIMED = 4  # ablations of the loop


# ---- one block's attention


def literal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Form (b), [..., tokens, heads, head_dim]."""
    query, key, value = (part.transpose(-3, -2) for part in (query, key, value))
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-1)
    weights = torch.cat([weights[..., :1], weights[..., 1:] * BETA], dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) @ value).transpose(-3, -2)


def suppressions(backbone: Backbone, images: int, rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """By form, the median seconds of a forward, and of a forward and backward."""
    attention = backbone.image.visual.transformer.resblocks[0].attn
    heads, tokens = attention.num_heads, backbone.image.visual.positional_embedding.shape[0]
    shape = (images, tokens, heads, attention.embed_dim // heads)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(3)]
    suppressed = Suppressed(torch.full((heads,), BETA))
    forms = {"plain": full_attention, "closed form": suppressed, "literal": literal}
    torch.testing.assert_close(suppressed(*inputs), literal(*inputs), rtol=1e-4, atol=1e-5)

    def forward(attend: Callable) -> None:
        with torch.no_grad():
            attend(*inputs)

    def forward_and_backward(attend: Callable) -> None:
        attend(*inputs).sum().backward()

    runs = {"forward": forward, "forward and backward": forward_and_backward}
    works = {(name, work): partial(runs[work], attend) for name, attend in forms.items() for work in runs}
    medians = median_seconds(works, 20 * rounds, device)
    return {name: {work: medians[name, work] for work in runs} for name in forms}


# ---- many ablations


def converged_population(heads: int) -> Tensor:
    """Copies of one individual with as many other heads as a mutation flips."""
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(heads, generator=generator) < 0.3
    return one ^ (torch.rand(population_size(heads, False), heads, generator=generator) < FLIP)


def loop(backbone: Backbone, pixels: Tensor, masks: Tensor) -> Tensor:
    """The features of one ablation after the other, [ablations, images, embed_dim]."""
    features = []
    for mask in masks:
        ablation = Ablation.of_rows("image", torch.where(mask, BETA, 1.0).tolist())
        betas = enumerate(map(torch.tensor, ablation.beta))
        backbone.image.changes = {block: partial(Suppressed, beta) for block, beta in betas if beta.min() < 1}
        features.append(backbone.image(pixels))
    backbone.image.changes = {}
    return torch.stack(features)


@torch.inference_mode()
def evaluators(backbone: Backbone, kinds: dict[str, Tensor], images: int, rounds: int, device: torch.device) -> dict:
    """By kind of population: its ablations, the blocks computed an image, and seconds, of `Population` and the loop."""
    size = backbone.image.visual.image_size
    pixels = torch.randn(images, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)
    embedded, blocks = backbone.image.embed(pixels), backbone.image.visual.transformer.resblocks
    result = {}
    for kind, masks in kinds.items():
        masks = masks.view(len(masks), len(blocks), blocks[0].attn.num_heads)
        some = torch.linspace(0, len(masks) - 1, TIMED).long()
        population = Population(backbone.image, BETA)
        features = population.features([embedded], masks)
        torch.testing.assert_close(features[some], loop(backbone, pixels, masks[some]), rtol=1e-3, atol=1e-3)
        works = {
            "tree": partial(population.features, [embedded], masks),
            "loop": partial(loop, backbone, pixels, masks[some]),
        }
        computed, medians = population.children, median_seconds(works, rounds, device)
        result[kind] = {
            "ablations": len(masks),
            "blocks": computed,
            "blocks_of_the_loop": len(masks) * len(blocks),
            "seconds": medians["tree"],
            "seconds_of_the_loop": medians["loop"] * len(masks) / TIMED,
        }
    return result


# ---- all of it


def tables(measured: dict) -> list[Table]:
    plain = measured["suppression"]["plain"]
    forms = [
        [form, *(f"{row[work] / plain[work]:.2f}" for work in plain)] for form, row in measured["suppression"].items()
    ]
    counts = ("ablations", "blocks", "blocks_of_the_loop", "seconds")
    populations = [
        [kind, *(row[name] for name in counts), f"{row['seconds_of_the_loop'] / row['seconds']:.1f}"]
        for kind, row in measured["populations"].items()
    ]
    header = ["population", "ablations", "blocks an image", "of a loop", "seconds", "times as fast as a loop"]
    return [Table(["attention, time to plain", *plain], forms), Table(header, populations)]


def main() -> None:
    arguments = read_options(__doc__, model="ViT-B-16", images=4, rounds=3, device=None)
    device = pick_device(arguments.device)
    backbone, toy = load_backbone(arguments.model).to(device).eval(), load_two_tower(TOY).to(device)
    blocks = backbone.image.visual.transformer.resblocks
    shape = len(blocks), blocks[0].attn.num_heads
    heads = shape[0] * shape[1]
    kinds = {
        "random": first_masks(population_size(heads, False), heads, 0),
        "converged": converged_population(heads),
        "probe": torch.eye(shape[0] * shape[1], dtype=torch.bool),
    }
    toy_blocks = toy.image.visual.transformer.resblocks
    every = {"toy, all": every_mask(len(toy_blocks), toy_blocks[0].attn.num_heads)}
    measured = {
        "model": arguments.model,
        "images": arguments.images,
        "suppression": suppressions(backbone, arguments.images, arguments.rounds, device),
        "populations": evaluators(backbone, kinds, arguments.images, arguments.rounds, device)
        | evaluators(toy, every, TOY_IMAGES, arguments.rounds, device),
    }
    publish(f"ablation-{arguments.model}-{device.type}", measured, *tables(measured), device=device)


if __name__ == "__main__":
    main()
