"""How SDXL's two encoders should be read: correct objects in generated toy images, under one change at a time.

    nice -n 10 python benchmarks/studies/reading.py [--prompts 300] [--short-prompts 120] [--output runs/policies]

The second encoder reads chunks of 77 tokens, is stretched to 248 positions or trained at 248 positions; prompts are
padded with EOT or 0; the UNet reads the penultimate or the last layer. Each change is measured with three first
encoders: the toy world's CLIP in chunks, and its two of 248 positions. Prompts are of the development split, and all
combinations get the same noise.

Results are cached in the output folder: a stopped run resumes, and a run with more prompts adds to them. Prints a
table, and writes it to benchmarks/results/ as policies.md, with the numbers as policies.json.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))
from harness import publish, read_options

from debias_diffusion.eval.images.objects import LATE
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.files import path_digest, write_json
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.interchange.text_encoders import import_text_encoder, to_transformers
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS, shipped
from debias_diffusion.models.weight_files import weights_digest
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering import last_for_penultimate
from debias_diffusion.tokens import clean
from debias_diffusion.toymodels.fine_tuning import VALIDATION, toy_training
from debias_diffusion.toyworld import checker
from debias_diffusion.toyworld.grammar import Caption, caption, short_prompt
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.toyworld.scenes import Scene, scene
from debias_diffusion.training.loop import train

SPLIT = "development"
FIRST = ("clip", "long-clip", "debias-clip")
_ALL_FIRST = "all three"
_AT_ONCE = 20  # images in a batch
_PADS = {"EOT": "<|endoftext|>", "0": "!"}
_TRAINED_ON = 4000  # pairs, as in the quickstart
# Peak learning rates: that of the toy world's first encoders, and a fifth of it, which moves the encoder less.
RATES = {"trained": 5e-4, "trained gently": 1e-4}


@dataclass(frozen=True)
class Policy:
    """How prompts are read. The defaults are the pipeline's.

    Attributes:
        first: one of FIRST.
        second: windows, stretched, or one of RATES.
        pads: of the first and the second encoder.
        last: encoders whose last layer, after the final norm, replaces the penultimate one.
    """

    first: str
    second: str = "windows"
    pads: tuple[str, str] = ("EOT", "0")
    last: tuple[str, ...] = ()


DEFAULT = "windows, EOT and 0, penultimate"
BOTH = ("text_encoder", "text_encoder_2")
CHANGES = {
    DEFAULT: {},
    "second encoder stretched": {"second": "stretched"},
    "second encoder trained": {"second": "trained"},
    "second encoder trained gently": {"second": "trained gently"},
    "both padded with EOT": {"pads": ("EOT", "EOT")},
    "both padded with 0": {"pads": ("0", "0")},
    "last layer of the first": {"last": BOTH[:1]},
    "last layer of both": {"last": BOTH},
    "second stretched, last layer of both": {"second": "stretched", "last": BOTH},  # as Long-CLIP does it
}

# For each image, whether the object at each place is correct; keys are places, or (first encoder, place).
Right = list[dict]


@dataclass(frozen=True)
class Prompts:
    """Scenes and their captions."""

    scenes: list[Scene]
    captions: list[Caption]

    @classmethod
    def make(cls, pairs: Sequence[tuple[Scene, Caption]]) -> "Prompts":
        return cls([scene for scene, _ in pairs], [caption for _, caption in pairs])


class Bench:
    """The combinations, each with the same prompts and the same noise.

    Args:
        output: folder of the cached results.
        prompts: number of long prompts.
        short_prompts: number of prompts within 77 tokens.
        seed: of the noise and of the training.
    """

    def __init__(self, output: Path, prompts: int, short_prompts: int, seed: int):
        self.output, self.seed = output, seed
        self.long = Prompts.make([(scene(SPLIT, index), caption(SPLIT, index)) for index in range(prompts)])
        self.short = Prompts.make([short_prompt(SPLIT, index) for index in range(short_prompts)])
        self.digests = {name: path_digest(shipped(f"toy/{name}")) for name in ("sdxl", *FIRST)}

    def run(self) -> dict[tuple[str, str], dict]:
        """The results by change and first encoder: see `_cell`."""
        policies = [(change, Policy(first, **fields)) for change, fields in CHANGES.items() for first in FIRST]
        policies.sort(key=lambda named: named[1].second in RATES)  # those that need training come last
        cells = {}
        for number, (change, policy) in enumerate(policies, 1):
            name = f"{change}, {policy.first}"
            file = self.output / "cells" / f"{name}.json".replace(" ", "-").replace(",", "")
            cells[change, policy.first] = self._cell(file, policy, f"[{number}/{len(policies)}] {name}")
        return cells

    def _cell(self, file: Path, policy: Policy, title: str) -> dict:
        """The results in `file`, after missing images are generated and added.

        Returns:
            "seconds", and for "long" and "short" prompts "right", for each image, and "positions", how often each
            length of the embeddings occurs.
        """
        second = self._trained(policy.second) if policy.second in RATES else None
        models = {"sdxl": self.digests["sdxl"], "first": self.digests[policy.first]}
        models |= {"second": weights_digest(second)} if second else {}
        settings = {"policy": asdict(policy), "seed": self.seed, "models": models}
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        cache = json.loads(file.read_text()) if file.exists() else {}
        if cache.get("settings") != settings:
            cache = {"settings": settings, "seconds": 0.0, "long": {}, "short": {}}
        pipe = make_pipeline(policy, second)
        for kind in ("long", "short"):
            self._generate(pipe, kind, cache, file, f"{title}, {kind}")
        cell = {"seconds": cache["seconds"]}
        for kind in ("long", "short"):
            images = [cache[kind][str(index)] for index in range(len(getattr(self, kind).scenes))]
            counts = Counter(image["positions"] for image in images)
            cell[kind] = {"right": [image["right"] for image in images], "positions": dict(sorted(counts.items()))}
        return cell

    def _generate(
        self, pipe: StableDiffusionXLLongPromptPipeline, kind: str, cache: dict, file: Path, title: str
    ) -> None:
        """Generates the images missing in `cache`, in batches of one length, so that no prompt gets further padding."""
        prompts: Prompts = getattr(self, kind)
        texts = [clean(caption.text) for caption in prompts.captions]
        groups: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            if str(index) not in cache[kind]:
                groups.setdefault(pipe.prompt_layout(text).positions, []).append(index)
        batches = [(n, g[i : i + _AT_ONCE]) for n, g in groups.items() for i in range(0, len(g), _AT_ONCE)]
        with tqdm(desc=title, total=len(texts), initial=len(cache[kind]), unit=" images") as bar:
            for positions, batch in batches:
                started = time.monotonic()
                images = pipe(
                    [texts[index] for index in batch],
                    generator=[torch.Generator().manual_seed(self.seed + index) for index in batch],
                    num_inference_steps=STEPS,
                    guidance_scale=GUIDANCE_SCALE,
                ).images
                for index, image in zip(batch, images, strict=True):
                    right = checker.compare(image, prompts.scenes[index]).correct
                    cache[kind][str(index)] = {"positions": positions, "right": right}
                cache["seconds"] = round(cache["seconds"] + time.monotonic() - started, 1)
                write_json(file, cache)
                bar.update(len(batch))

    def _trained(self, name: str) -> nn.Module:
        """The second encoder fine-tuned at 248 positions, as the quickstart fine-tunes the first one.

        It learns against the frozen image tower of the toy CLIP, as when it was made.
        """
        base, folder = self.output / "second-two-tower", self.output / f"second-{name.replace(' ', '-')}"
        if not base.exists():
            second = load_pipeline("toy/sdxl", None, torch.device("cpu")).text_encoder_2
            backbone = load_backbone(shipped("toy/clip"))
            import_text_encoder(backbone, second)
            backbone.save(base)
        data, images = write_pairs(self.output / "pairs", VALIDATION, _TRAINED_ON)
        settings = {"learning_rate": RATES[name], "seed": self.seed}
        config = toy_training("debias-clip", str(base), data, images, folder / "run", **settings)
        if not (folder / "done").exists():
            if train(replace(config, freeze_image_tower=True)) is None:
                raise KeyboardInterrupt  # a stopped training resumes from its checkpoint
            (folder / "done").touch()
        return to_transformers(load_backbone(str(folder / "run" / "last")), projection=True)[0]


def make_pipeline(policy: Policy, trained: nn.Module | None) -> StableDiffusionXLLongPromptPipeline:
    """The toy SDXL with this policy; `trained` is its second encoder, None for one that is not trained."""
    encoder = None if policy.first == "clip" else f"toy/{policy.first}"
    pipe = load_pipeline("toy/sdxl", encoder, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    if policy.second != "windows":
        stretched, tokenizer = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
        pipe.register_modules(text_encoder_2=trained or stretched, tokenizer_2=tokenizer)
    pipe.tokenizer.pad_token, pipe.tokenizer_2.pad_token = (_PADS[pad] for pad in policy.pads)
    for name in policy.last:
        getattr(pipe, name).register_forward_hook(last_for_penultimate)
    return pipe


def mentioned_in(right: Right, first_mentions: Sequence[dict[str, int]], wanted: Callable[[int], bool]) -> Right:
    """The objects first mentioned in a sentence whose number, from 0, is wanted."""
    return [
        {place: is_right for place, is_right in objects.items() if wanted(mentions[place])}
        for objects, mentions in zip(right, first_mentions, strict=True)
    ]


def joined(by_encoder: dict[str, Right]) -> Right:
    """Images of one prompt by several encoders as one image with all their objects: one sample."""
    return [
        {
            (name, place): is_right
            for name, objects in zip(by_encoder, images, strict=True)
            for place, is_right in objects.items()
        }
        for images in zip(*by_encoder.values(), strict=True)
    ]


def compare(right: Right, default: Right) -> dict[str, float]:
    """Correct objects in percent, and the difference from the default in points with its 95% interval."""
    values, default_values = (
        [100 * is_right for objects in images for is_right in objects.values()] for images in (right, default)
    )
    image_numbers = [number for number, objects in enumerate(right) for _ in objects]
    difference = paired_difference(values, default_values, image_numbers)
    numbers = {"objects": len(values), "right": sum(values) / len(values)}
    numbers |= {name: difference[name] for name in ("difference", "low", "high")}
    return {name: round(value, 2) for name, value in numbers.items()}


def compare_all(cells: dict[tuple[str, str], dict], first_mentions: Sequence[dict[str, int]]) -> list[dict]:
    """A row for each change and first encoder, and for each change with all of them."""
    kinds: dict[str, Callable[[dict], Right]] = {
        "all": lambda cell: cell["long"]["right"],
        "2 to 4": lambda cell: mentioned_in(cell["long"]["right"], first_mentions, lambda number: number < LATE),
        "later": lambda cell: mentioned_in(cell["long"]["right"], first_mentions, lambda number: number >= LATE),
        "short": lambda cell: cell["short"]["right"],
    }
    rows = []
    for change in CHANGES:
        row = {"change": change, "first": _ALL_FIRST}
        for kind, pick in kinds.items():
            changed, default = ({first: pick(cells[c, first]) for first in FIRST} for c in (change, DEFAULT))
            row[kind] = compare(joined(changed), joined(default))
        rows.append(row)
        for first in FIRST:
            pair = cells[change, first], cells[DEFAULT, first]
            rows.append({"change": change, "first": first} | {kind: compare(*map(kinds[kind], pair)) for kind in kinds})
    return rows


def as_table(rows: list[dict]) -> Table:
    kinds = {
        "all": "correct objects, %",
        "2 to 4": "first mentioned in sentences 2 to 4",
        "later": "later",
        "short": "short prompts",
    }
    cells = [[row["change"], row["first"], *(_cell(row[k], row["change"] == DEFAULT) for k in kinds)] for row in rows]
    return Table(["change", "first encoder", *kinds.values()], cells)


def _cell(numbers: dict[str, float], is_default: bool) -> str:
    difference = cell(numbers["difference"], numbers["low"], numbers["high"], "+.1f")
    return f"{numbers['right']:.1f}" if is_default else f"{numbers['right']:.1f}: {difference}"


def main() -> None:
    arguments = read_options(__doc__, prompts=300, short_prompts=120, seed=0, output=Path("runs/policies"))
    torch.set_num_threads(1)  # for tensors as small as these a second thread only waits
    bench = Bench(arguments.output, arguments.prompts, arguments.short_prompts, arguments.seed)
    cells = bench.run()
    rows = compare_all(cells, [caption.first_mentions() for caption in bench.long.captions])
    result = {
        "settings": {"split": SPLIT, "steps": STEPS, "guidance_scale": GUIDANCE_SCALE}
        | {name: value for name, value in vars(arguments).items() if name != "output"},
        "rows": rows,
        "positions": {
            f"{change}, {first}": {kind: cell[kind]["positions"] for kind in ("long", "short")}
            for (change, first), cell in cells.items()
        },
        "seconds": round(sum(cell["seconds"] for cell in cells.values())),
    }
    publish("policies", result, as_table(rows))


if __name__ == "__main__":
    main()
