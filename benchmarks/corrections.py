"""Can drift be undone without training? Correct objects in toy images, once an encoder's states are moved back.

    python benchmarks/corrections.py [--prompts 100] [--fitted-on 400]

For each encoder of 248 positions: as it is; with one shift added to the penultimate states of every token but SOT (it
could be folded into a bias); and with one linear map of them (which could not). Both bring the states nearest to those
of the original in chunks, on captions that the images are not drawn from. Beside them, the original in chunks itself.
Prompts are of the development split, with the same noise for all.

Prints a table and writes it to benchmarks/results/ as corrections.md, with the numbers as corrections.json.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.eval.common.intervals import paired_difference
from debias_diffusion.eval.common.report import Table, versions
from debias_diffusion.eval.pictures.drift import Moments, Reader
from debias_diffusion.files import write_json, write_text
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.loading import load_sdxl
from debias_diffusion.tokens import clean
from debias_diffusion.toyworld.checker import Comparison, compare
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import PLACES, scene

RESULTS = Path(__file__).parent / "results"
DRAWN, FITTED = "development", "train"  # splits
BASE = "toy/sdxl"
ENCODERS = ("toy/long-clip", "toy/debias-clip", "toy/debias-clip-sdxl")
AS_IT_IS = "as it is"
CORRECTIONS: dict[str, Callable[[Moments], tuple[Tensor, Tensor]] | None] = {
    AS_IT_IS: None,
    "less one shift": Moments.shift,
    "less a linear map": Moments.linear,
}
_AT_ONCE = 20  # captions, and images


def fit_moments(encoder: str, captions: list[str]) -> Moments:
    """Of the states of all positions after SOT, pads included, against the base's."""
    reader, base = (Reader.load(name, torch.device("cpu")) for name in (encoder, BASE))
    moments = Moments(base.encoder.config.hidden_size)
    for start in tqdm(range(0, len(captions), _AT_ONCE), desc=f"fitting {encoder}"):
        texts = base.tokens(captions[start : start + _AT_ONCE])
        for states, expected in zip(reader.states(texts), base.states(texts), strict=True):
            variance = expected[1:].var(dim=0, correction=0).mean().item()
            moments.add(states[1:], expected[1:], variance)
    return moments


def corrected(fitted: Tensor, bias: Tensor) -> Callable:
    """A forward hook that moves the penultimate states of all positions but SOT."""
    fitted, bias = fitted.float(), bias.float()

    def move(encoder, inputs, output):
        states = output.hidden_states[-2]
        moved = torch.cat([states[:, :1], states[:, 1:] @ fitted + bias], dim=1)
        output.hidden_states = (*output.hidden_states[:-2], moved, output.hidden_states[-1])
        return output

    return move


def draw(pipe: StableDiffusionXLLongPromptPipeline, count: int, title: str) -> list[Comparison]:
    """What the images of the first `count` prompts show, each batch of one length."""
    pipe.set_long_prompt(overlap=False).set_progress_bar_config(disable=True)
    texts = [clean(caption(DRAWN, index).text) for index in range(count)]
    by_length: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        by_length.setdefault(pipe.prompt_layout(text).positions, []).append(index)
    batches = [group[i : i + _AT_ONCE] for group in by_length.values() for i in range(0, len(group), _AT_ONCE)]
    comparisons = {}
    for batch in tqdm(batches, desc=title):
        noise = [torch.Generator().manual_seed(index) for index in batch]
        images = pipe(
            [texts[index] for index in batch],
            generator=noise,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE_SCALE,
        ).images
        comparisons |= {i: compare(image, scene(DRAWN, i)) for i, image in zip(batch, images, strict=True)}
    return [comparisons[index] for index in range(count)]


def right(comparisons: list[Comparison]) -> tuple[list[float], list[int]]:
    """Of each object, 100 if it is right and else 0; and the number of its image."""
    values = [100.0 * is_right for seen in comparisons for is_right in seen.correct.values()]
    return values, [number for number, seen in enumerate(comparisons) for _ in seen.correct]


def filled(comparisons: list[Comparison]) -> float:
    """In percent, the places that should be empty and are not."""
    empty = sum(len(PLACES) - len(seen.correct) for seen in comparisons)
    return 100 * sum(len(seen.invented) for seen in comparisons) / empty


def score(rows: dict[tuple[str, str], list[Comparison]]) -> list[dict]:
    """The scores of each row, and its difference from the same encoder as it is."""
    scored = []
    for (encoder, correction), comparisons in rows.items():
        values, images = right(comparisons)
        default, _ = right(rows[encoder, AS_IT_IS])
        line = {"encoder": encoder, "correction": correction, "objects_right": sum(values) / len(values)}
        line |= {"empty_filled": filled(comparisons), "gain": paired_difference(values, default, images)}
        scored.append(line)
    return scored


def as_markdown(scored: list[dict]) -> str:
    rows = []
    for line in scored:
        gain = "{difference:+.1f} ({low:+.1f} to {high:+.1f})".format(**line["gain"])
        gain = "" if line["correction"] == AS_IT_IS else gain
        numbers = [f"{line[name]:.1f}" for name in ("objects_right", "empty_filled")]
        rows.append([line["encoder"], line["correction"], *numbers, gain])
    header = ["encoder", "states", "objects right, %", "empty places filled, %", "more objects right than as it is"]
    return Table(header, rows).markdown() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--fitted-on", type=int, default=400, help="captions")
    arguments = parser.parse_args()
    captions = [caption(FITTED, index).text for index in range(arguments.fitted_on)]
    cpu = torch.device("cpu")
    rows = {("the original, in chunks", AS_IT_IS): draw(load_sdxl(BASE, None, cpu), arguments.prompts, "in chunks")}
    for encoder in ENCODERS:
        moments = fit_moments(encoder, captions)
        for name, fit in CORRECTIONS.items():
            pipe = load_sdxl(BASE, encoder, cpu)
            if fit:
                pipe.text_encoder.register_forward_hook(corrected(*fit(moments)))
            rows[encoder, name] = draw(pipe, arguments.prompts, f"{encoder}, {name}")
    scored = score(rows)
    print("\n" + as_markdown(scored))
    measured = {"machine": machine(cpu), "versions": versions(), "settings": vars(arguments)}
    write_json(RESULTS / "corrections.json", measured | {"rows": scored})
    write_text(RESULTS / "corrections.md", as_markdown(scored))


if __name__ == "__main__":
    main()
