"""The time that the attention of suppressed heads takes.

    python benchmarks/ablation.py [--model ViT-B-16] [--images 4] [--rounds 9]

Suppression of every head, forward and backward, of one block's attention, as a ratio to plain attention:

(a) closed form   what the package does: a further channel of the values, no matrix of weights
(b) literal       softmax, multiply, normalise again, as the paper has it (AAT, section 4.1)

All take turns, so that what else the machine does falls on all. Prints tables and writes them to benchmarks/results/.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import median_seconds, publish, read_options
from torch import Tensor

from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.blocks import full_attention
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.eval.report import Table

BETA = 0.1


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


def main() -> None:
    arguments = read_options(__doc__, model="ViT-B-16", images=4, rounds=3, device=None)
    device = pick_device(arguments.device)
    backbone = load_backbone(arguments.model).to(device).eval()
    measured = suppressions(backbone, arguments.images, arguments.rounds, device)
    plain = measured["plain"]
    rows = [[form, *(f"{row[work] / plain[work]:.2f}" for work in plain)] for form, row in measured.items()]
    result = {"model": arguments.model, "images": arguments.images, "suppression": measured}
    table = Table(["attention, time to plain", *plain], rows)
    publish(f"ablation-{arguments.model}-{device.type}", result, table, device=device)


if __name__ == "__main__":
    main()
