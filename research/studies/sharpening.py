"""What the toy UNet's cross-attention looks at, by the number of positions and the power of `sharpen`.

    python -m research.studies.sharpening [--prompts 12]

Prompts of development scenes at 77, 152 and 227 positions, by SDXL's own encoders in overlapping chunks, and at 227 by
DeBias-CLIP for SDXL, in one piece. Of the conditional half, means over layers, heads, places of the image and steps:
shares of the attention that BOS, words, EOS and pads get, its entropy in nats and its largest weight; "own": where an
object belongs, the part of the words' share that falls on the sentence of that object.

Writes research/results/sharpening_attention.md and .json, and draws docs/sharpening.png.
"""

from collections import defaultdict
from pathlib import Path

import torch
from diffusers.models.attention_processor import AttnProcessor
from matplotlib.figure import Figure

from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines.rendering.images import encode_batch, render_batch
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.sharpening import attention_logits
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import Caption, caption, short_prompt
from debias_diffusion.toyworld.scenes import PLACES

from .drawing import SAMPLING, pipeline_of
from .harness import publish, read_options

SPLIT, POWERS = "development", (1.0, 2.0)
ROWS = [(77, ORIGINAL), (152, ORIGINAL), (227, ORIGINAL), (227, "toy/debias-clip-sdxl")]
KINDS = {"BOS": "#888888", "words": "#2a6f97", "EOS": "#e09f3e", "pads": "#d9d9d9"}
PICTURE = Path(__file__).parents[2] / "docs" / "sharpening.png"


class Watched(AttnProcessor):
    """diffusers' plain processor, which adds up what cross-attention of the conditional half looks at."""

    def __init__(self, sums: dict, tokens: list[int], sentences: list[dict[str, slice]]):
        self.sums, self.tokens, self.sentences = sums, tokens, sentences

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **arguments):
        if encoder_hidden_states is not None:
            logits = attention_logits(attn, hidden_states, encoder_hidden_states)
            logits = logits if attention_mask is None else logits + attention_mask
            weights = logits.softmax(-1).unflatten(0, (-1, attn.heads))
            conditional = weights[len(weights) // 2 :]
            for row, n, sentences in zip(conditional, self.tokens, self.sentences, strict=True):
                parts = {"BOS": row[..., 0], "words": row[..., 1 : n + 1].sum(-1), "EOS": row[..., n + 1]}
                parts |= {"pads": row[..., n + 2 :].sum(-1), "largest": row.amax(-1)}
                parts["entropy"] = -row.xlogy(row).sum(-1)
                for name, values in parts.items():
                    self.sums[name].append(values.mean().item())
                side = round(row.shape[1] ** 0.5)
                words = row.unflatten(1, (side, side))[..., 1 : n + 1]
                for place, tokens in sentences.items():
                    x, y = (slice(at * side // 3, (at + 1) * side // 3) for at in PLACES[place])
                    here = words[:, y, x]
                    self.sums["own"].append((here[..., tokens].sum() / here.sum()).item())
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, **arguments)


@torch.no_grad()
def measure(positions: int, encoder: str, count: int) -> dict[float, dict[str, float]]:
    """By power, the means over the first so many prompts of this length."""
    pipe = pipeline_of(encoder)
    prompts, tokens, sentences, number = [], [], [], 0
    while len(prompts) < count:
        told = short_prompt(SPLIT, number)[1] if positions == 77 else caption(SPLIT, number)
        prompt, number = ImagePrompt(told.text, number).cleaned(pipe._long_prompt), number + 1
        layout = pipe.prompt_layout(prompt.prompt)
        if layout.positions == positions:
            prompts.append(prompt)
            tokens.append(layout.tokens)
            sentences.append(spans(pipe, told))
    embeddings, results = encode_batch(pipe, prompts, SAMPLING), {}
    for power in POWERS[: 1 if positions == 77 else None]:
        sums = defaultdict(list)
        pipe.unet.set_attn_processor(Watched(sums, tokens, sentences))
        pipe.set_long_prompt(sharpen=power)
        render_batch(pipe, embeddings, [prompt.seed for prompt in prompts], SAMPLING)
        results[power] = {name: sum(values) / len(values) for name, values in sums.items()}
    return results


def spans(pipe, told: Caption) -> dict[str, slice]:
    """{place: the tokens of the sentence that first mentions its object}"""
    texts = [clean(Caption(told.sentences[:end]).text) for end in range(len(told.sentences) + 1)]
    ends = [pipe.prompt_layout(text).tokens for text in texts]
    return {place: slice(ends[number], ends[number + 1]) for place, number in told.first_mentions().items()}


def draw(rows: dict[str, dict[str, float]]) -> Figure:
    figure = Figure(figsize=(7, 0.6 + 0.28 * len(rows)), layout="constrained")
    axes, left = figure.add_subplot(), [0.0] * len(rows)
    for kind, colour in KINDS.items():
        shares = [100 * row[kind] for row in rows.values()]
        axes.barh(list(rows), shares, left=left, color=colour, label=kind, height=0.7)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set(xlabel="share of the attention, %", xlim=(0, 100))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


if __name__ == "__main__":
    count = read_options(__doc__, prompts=12).prompts
    rows = {
        f"{positions} positions{', one piece' * (encoder != ORIGINAL)}, power {power:g}": row
        for positions, encoder in ROWS
        for power, row in measure(positions, encoder, count).items()
    }
    names = [*KINDS, "entropy", "largest", "own"]
    cells = [[name, *(f"{row[part]:.3f}" for part in names)] for name, row in rows.items()]
    table = Table(["cross-attention", *names], cells)
    publish("sharpening_attention", {"prompts": count, "rows": rows}, table)
    draw(rows).savefig(PICTURE, dpi=150)
