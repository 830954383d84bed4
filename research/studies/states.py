"""What of an encoder's drift harms images, and what undoes it without training.

    python -m research.studies.states [--prompts 100]               # the shipped encoders, development scenes
    python -m research.studies.states --seeds 7 8 9 [--prompts 200]  # trained anew, new scenes

toy/sdxl draws the same prompts from the same noise, and one thing at a time is changed in the penultimate states that
the first encoder gives its UNet, the second encoder being the checkpoint's own in overlapping chunks:

- the words, or EOT and the pads, are those of the original encoder in overlapping chunks;
- one shift common to all tokens but SOT is undone (it could be folded into a bias), or one linear map (it could not).
  Both are fitted to the original's states on captions that the images are not drawn from;
- the other way round: the original's states, moved by that shift;
- no guidance.

With seeds, Long-CLIP's recipe, DeBias-CLIP's, and Long-CLIP's with the state term are trained as in the quickstart.
Everything finished is kept. Prints tables and writes them to research/results/ as drift-development.md or
drift-7-8-9.md, with the numbers as JSON.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.app.fine_tuning import VALIDATION, toy_training
from debias_diffusion.app.quickstart import Setup
from debias_diffusion.data.toy_scenes import family
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.eval.images.drift import Moments, StatesReader
from debias_diffusion.eval.images.objects import compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.images.scores import ImageScores, compare_scores
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.files import atomic_file
from debias_diffusion.pipelines.rendering.folder import plan_batches
from debias_diffusion.pipelines.rendering.images import encode_batch, read_layout, render_batch
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.toyworld.render import render as render_scene
from debias_diffusion.toyworld.scenes import scene
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS
from debias_diffusion.training.two_tower import train

from .harness import CPU, publish, read_options

BASE, FEATURES = "toy/sdxl", "toy/features"
FITTED_ON = "train"  # split
ORIGINAL, IN_CHUNKS = "original in overlapping chunks", "original in chunks"
SHIPPED = {
    "Long-CLIP": "toy/long-clip",
    "DeBias-CLIP": "toy/debias-clip",
    "DeBias-CLIP for SDXL": "toy/debias-clip-sdxl",
}
RECIPES = {  # recipe and weight of the state term; the study toy-world has DeBias-CLIP for SDXL on the same scenes
    "Long-CLIP": ("long-clip", 0.0),
    "DeBias-CLIP": ("debias-clip", 0.0),
    "Long-CLIP, state term": ("long-clip", 3.0),
}
DRIFTED = ("Long-CLIP", "DeBias-CLIP")  # whose states are changed
SCORES = {  # title, digits
    "objects_right": ("objects right, %", 1),
    "objects_precision": ("precision, %", 1),
    "empty_filled": ("empty places filled, %", 1),
    "fid_own": ("FID", 1),
    "dino_score": ("DINO", 3),
}
_AT_ONCE = 20  # captions, and images


# ---- what is changed in the states of one prompt


@dataclass(frozen=True)
class States:
    """Penultimate hidden states of one prompt at all positions, [positions, width].

    Attributes:
        drifted: of the encoder.
        original: of the checkpoint's encoder.
        eot: the position of EOT; pads follow.
        moments: of both encoders' states of other captions, which shift and linear map are fitted to.
    """

    drifted: Tensor
    original: Tensor
    eot: int
    moments: Moments

    def unchanged(self) -> Tensor:
        return self.drifted

    def original_words(self) -> Tensor:
        return torch.cat([self.drifted[:1], self.original[1 : self.eot], self.drifted[self.eot :]])

    def original_pads(self) -> Tensor:
        return torch.cat([self.drifted[: self.eot], self.original[self.eot :]])

    def less_shift(self) -> Tensor:
        return self._mapped(*self.moments.shift())

    def less_linear_map(self) -> Tensor:
        return self._mapped(*self.moments.linear())

    def shifted_original(self) -> Tensor:
        _, bias = self.moments.shift()
        return torch.cat([self.original[:1], self.original[1:] - bias.float()])

    def _mapped(self, fitted: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([self.drifted[:1], self.drifted[1:] @ fitted.float() + bias.float()])


AS_THEY_ARE = "as they are"
CHANGES: dict[str, Callable[[States], Tensor]] = {
    AS_THEY_ARE: States.unchanged,
    "the words are the original's": States.original_words,
    "EOT and pads are the original's": States.original_pads,
    "less one shift": States.less_shift,
    "less a linear map": States.less_linear_map,
    "the original's, with that shift": States.shifted_original,
}
COMPARED = {  # what a row is compared with
    "original": ORIGINAL,
    AS_THEY_ARE: "the same encoder's as they are",
    DRIFTED[0]: f"{DRIFTED[0]}'s, changed likewise",
}


@torch.no_grad()
def fit_moments(reader: StatesReader, base: StatesReader, captions: list[str]) -> Moments:
    """Of the states of all positions after SOT, some pads included, against the base's."""
    moments = Moments(base.encoder.config.hidden_size)
    for start in tqdm(range(0, len(captions), _AT_ONCE), desc=f"fitting {reader.name}"):
        texts = base.tokens(captions[start : start + _AT_ONCE])
        for states, expected in zip(reader.states(texts), base.states(texts), strict=True):
            variance = expected[1:].var(dim=0, correction=0).mean().item()
            moments.add(states[1:], expected[1:], variance)
    return moments


@torch.no_grad()
def changed(embeds: Tensor, texts: Sequence[str], reader: StatesReader, moments: Moments, change: Callable) -> Tensor:
    """The original's `prompt_embeds`, [prompts, positions, width of both encoders], with the first's changed."""
    tokens, width = reader.tokens(texts), reader.encoder.config.hidden_size
    rows = [
        change(States(states, row[:, :width], len(text.ids) + 1, moments))
        for states, row, text in zip(reader.rows(tokens, embeds.shape[1]), embeds, tokens, strict=True)
    ]
    return torch.cat([torch.stack(rows), embeds[..., width:]], dim=2)


# ---- images and their scores


class Images:
    """Images of the first `count` prompts of a split, kept in `folder`, and their scores."""

    def __init__(self, split: str, count: int, folder: Path):
        self.folder, self.scenes = folder, [scene(split, index) for index in range(count)]
        self.groups = [family(f"{split}/{index:06}") for index in range(count)]
        self.captions = [caption(split, index) for index in range(count)]
        self.prompts = [ImagePrompt(clean(text.text), seed) for seed, text in enumerate(self.captions)]
        self.base, self.pipe = StatesReader.load(EncoderSpec.parse(BASE), CPU), load_pipeline(BASE, None, CPU)
        self.pipe.set_progress_bar_config(disable=True)

    def files(self, row: str) -> list[Path]:
        return [self.folder / re.sub(r"[^\w]+", "-", row) / f"{index:06}.png" for index in range(len(self.prompts))]

    def draw(
        self, row: str, change: Callable | None = None, guidance_scale: float = GUIDANCE_SCALE, reading: str = "overlap"
    ) -> str:
        """Draws what is missing; `change` makes other `prompt_embeds` of the original's and the texts."""
        files = self.files(row)
        wanted = [index for index, file in enumerate(files) if not file.exists()]
        pipe, sampling = (
            self.pipe.set_long_prompt(reading=reading),
            Sampling(steps=STEPS, guidance_scale=guidance_scale),
        )
        layouts = {index: read_layout(pipe, prompt, sampling) for index, prompt in enumerate(self.prompts)}
        for batch in tqdm(plan_batches(self.prompts, layouts, _AT_ONCE, wanted), desc=row):
            [(last, embeddings)] = encode_batch(pipe, [self.prompts[index] for index in batch], sampling)
            if change:
                texts = [self.prompts[index].prompt for index in batch]
                embeddings["prompt_embeds"] = change(embeddings["prompt_embeds"], texts)
            for index, image in zip(batch, render_batch(pipe, [(last, embeddings)], batch, sampling), strict=True):
                with atomic_file(files[index]) as unfinished:
                    image.save(unfinished, format="PNG")
        return row

    def score(self, rows: Sequence[str]) -> dict:
        """By row its scores, and differences from the original in overlapping chunks and from the states as they are;
        and, for each change, those of DeBias-CLIP from Long-CLIP."""
        mentions, texts = [text.first_mentions() for text in self.captions], [text.text for text in self.captions]
        scores = ImageScores({"dino": FEATURES, "own_features": FEATURES}, 100, CPU)
        references = scores.of_references([partial(render_scene, drawn) for drawn in self.scenes], texts, self.groups)
        shown = {row: compare_images(self.files(row), self.scenes) for row in tqdm(rows, desc="scoring")}
        numbers = {row: scores(self.files(row), references) for row in rows}

        def difference(a: str, b: str) -> dict:
            lines = compare_scores(numbers[a], numbers[b]) | compare_objects(shown[a], shown[b], mentions, self.groups)
            return {name: lines[name] for name in SCORES if name in lines}

        scored = {}
        for row in rows:
            values = numbers[row].numbers | objects_numbers(shown[row], mentions, groups=self.groups)
            title, _, change = row.partition(": ")
            compared = {"original": ORIGINAL, AS_THEY_ARE: f"{title}: {AS_THEY_ARE}"}
            if title == DRIFTED[1]:
                compared[DRIFTED[0]] = f"{DRIFTED[0]}: {change}"
            scored[row] = {"scores": {name: values[name] for name in SCORES if name in values}}
            scored[row] |= {
                f"minus {name}": difference(row, b) for name, b in compared.items() if b in rows and b != row
            }
        return scored


def draw_rows(images: Images, encoders: dict[str, str], fitted_on: int) -> list[str]:
    """Draws all rows, and returns their names."""
    rows = [
        images.draw(IN_CHUNKS, reading="separate"),
        images.draw(ORIGINAL),
        images.draw(f"{ORIGINAL}, no guidance", guidance_scale=1),
    ]
    captions = [caption(FITTED_ON, index).text for index in range(fitted_on)]
    for title, name in encoders.items():
        reader = StatesReader.load(EncoderSpec.parse(name), CPU)
        moments = fit_moments(reader, images.base, captions)
        edit = partial(partial, changed, reader=reader, moments=moments)
        for change, of_states in CHANGES.items():
            if title in DRIFTED or change == AS_THEY_ARE:
                rows.append(images.draw(f"{title}: {change}", edit(change=of_states)))
        if title in DRIFTED:
            rows.append(images.draw(f"{title}: {AS_THEY_ARE}, no guidance", edit(change=States.unchanged), 1))
    return rows


def trained(seed: int, output: Path) -> dict[str, str]:
    """By title, the runs of a seed."""
    pairs, runs = write_pairs(output / "data", VALIDATION, Setup.pairs), {}
    for title, (recipe, weight) in RECIPES.items():
        runs[title] = str(output / f"{recipe}-{weight:g}")
        settings = toy_training(recipe, "toy/clip", *pairs, Path(runs[title]), seed=seed)
        if train(replace(settings, keep_states=weight)) is None:
            raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
    return runs


def tables(seeds: dict[str, dict]) -> list[Table | str]:
    """A table of the scores of all seeds, and tables of their differences with intervals."""

    def values(row: str, name: str) -> str:
        return ", ".join(f"{of_seed[row]['scores'][name]['value']:.{SCORES[name][1]}f}" for of_seed in seeds.values())

    def difference(line: dict, name: str) -> str:
        return cell(line["difference"], line["low"], line["high"], f"+.{SCORES[name][1]}f")

    rows, titles = list(next(iter(seeds.values()))), [title for title, _ in SCORES.values()]
    scores = [[row, *(values(row, name) for name in SCORES)] for row in rows]
    parts = [Table(["states of the first encoder", *titles], scores)]
    for name, title in COMPARED.items():
        lines = [
            [row, seed, *(difference(results[row][f"minus {name}"][score], score) for score in SCORES)]
            for row in rows
            for seed, results in seeds.items()
            if f"minus {name}" in results[row]
        ]
        parts += [f"Minus {title}:", Table(["states", "seed", *titles], lines)]
    return parts


def main() -> None:
    arguments = read_options(__doc__, seeds=[], prompts=100, fitted_on=400, output=Path("runs/drift"))
    splits = {f"test-{seed}": seed for seed in arguments.seeds} or {"development": None}
    results = {}
    for split, seed in splits.items():
        name = split if seed is None else f"seed-{seed}"
        folder = arguments.output / name
        encoders = SHIPPED if seed is None else trained(seed, folder)
        images = Images(split, arguments.prompts, folder / f"images-{arguments.prompts}")
        results[name] = images.score(draw_rows(images, encoders, arguments.fitted_on))
    settings = {"prompts": arguments.prompts, "fitted_on": arguments.fitted_on}
    names = "-".join(map(str, arguments.seeds or ["development"]))
    publish(f"drift-{names}", {"settings": settings, "seeds": results}, *tables(results))


if __name__ == "__main__":
    main()
