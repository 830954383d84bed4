"""How SDXL's two encoders should be read: objects drawn right in the toy world, under one change at a time.

    nice -n 10 python benchmarks/policies.py [--prompts 300] [--short-prompts 120] [--seed 0] [--output runs/policies]

Changes are made to the second encoder (in windows of 77 tokens, stretched to 248 positions, trained at 248 positions),
to the tokens that texts are padded with, and to the layer that the UNet reads, each with three first encoders: the toy
world's CLIP in windows, and its two of 248 positions. Prompts are of the development split, noise is the same in all.

What is drawn is kept in the output folder, so a run that was stopped continues, and one of more prompts adds to what is
there. Prints a table, and writes it to benchmarks/results/ as policies.md, with the numbers as policies.json.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from machine import machine
from torch import nn
from tqdm import tqdm

from debias_diffusion.eval.common.intervals import paired_difference
from debias_diffusion.eval.common.report import digest, versions, weights_digest
from debias_diffusion.eval.pictures.toy_objects import LATE
from debias_diffusion.files import write_json, write_text
from debias_diffusion.interchange import import_text_encoder, stretch_text_encoder, to_transformers
from debias_diffusion.models.backbone import load_backbone
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS, shipped
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.loading import load_sdxl
from debias_diffusion.tokens import clean
from debias_diffusion.toymodels.fine_tuning import VALIDATION, toy_training
from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.grammar import Caption, caption, short_prompt
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.toyworld.scenes import Scene, scene
from debias_diffusion.training import train

RESULTS = Path(__file__).parent / "results"
SPLIT = "development"
FIRST = ("clip", "long-clip", "debias-clip")
_ALL_FIRST = "all three"
_AT_ONCE = 20  # pictures drawn
_PADS = {"EOT": "<|endoftext|>", "0": "!"}
_TRAINED_ON = 4000  # pairs, as in the quickstart
# Peak learning rates: that of the toy world's first encoders, and a fifth of it, which moves the encoder less.
RATES = {"trained": 5e-4, "trained gently": 1e-4}


@dataclass(frozen=True)
class Policy:
    """How prompts are read. The defaults are those of the pipeline.

    Attributes:
        first: one of FIRST.
        second: windows, stretched, or one of RATES.
        pads: of the first and the second encoder.
        last: which encoders give their last layer, after the final norm, in place of the penultimate one.
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

# For each picture, by place, whether the object there was drawn right; or by first encoder and place.
Right = list[dict]


@dataclass(frozen=True)
class Prompts:
    """What is drawn: scenes with their captions."""

    scenes: list[Scene]
    captions: list[Caption]

    @classmethod
    def make(cls, pairs: Sequence[tuple[Scene, Caption]]) -> "Prompts":
        return cls([its for its, _ in pairs], [text for _, text in pairs])


class Bench:
    """The combinations, each with the same prompts and the same noise.

    Args:
        output: where what is done is kept.
        prompts: how many long prompts.
        short_prompts: how many in which all is said within 77 tokens.
        seed: of the noise and of the training.
    """

    def __init__(self, output: Path, prompts: int, short_prompts: int, seed: int):
        self.output, self.seed = output, seed
        self.long = Prompts.make([(scene(SPLIT, index), caption(SPLIT, index)) for index in range(prompts)])
        self.short = Prompts.make([short_prompt(SPLIT, index) for index in range(short_prompts)])
        self.digests = {name: digest(shipped(f"toy/{name}")) for name in ("sdxl", *FIRST)}

    def run(self) -> dict[tuple[str, str], dict]:
        """What was drawn, by change and first encoder: see `_cell`."""
        cells = [(change, Policy(first, **its)) for change, its in CHANGES.items() for first in FIRST]
        cells.sort(key=lambda cell: cell[1].second in RATES)  # what needs training comes last
        found = {}
        for number, (change, policy) in enumerate(cells, 1):
            file = self.output / "cells" / f"{change}, {policy.first}.json".replace(" ", "-").replace(",", "")
            found[change, policy.first] = self._cell(file, policy, f"[{number}/{len(cells)}] {change}, {policy.first}")
        return found

    def _cell(self, file: Path, policy: Policy, title: str) -> dict:
        """What the file holds, once what it lacks has been drawn and added.

        Returns:
            "seconds", and for "long" and "short" prompts "right", for each picture, and "positions", how often each
            length of the embeddings occurs.
        """
        second = self._trained(policy.second) if policy.second in RATES else None
        models = {"sdxl": self.digests["sdxl"], "first": self.digests[policy.first]}
        models |= {"second": weights_digest(second)} if second else {}
        settings = {"policy": asdict(policy), "seed": self.seed, "models": models}
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("settings") != settings:
            kept = {"settings": settings, "seconds": 0.0, "long": {}, "short": {}}
        pipe = make_pipeline(policy, second)
        for kind in ("long", "short"):
            self._draw(pipe, kind, kept, file, f"{title}, {kind}")
        found = {"seconds": kept["seconds"]}
        for kind in ("long", "short"):
            pictures = [kept[kind][str(index)] for index in range(len(getattr(self, kind).scenes))]
            counts = Counter(picture["positions"] for picture in pictures)
            found[kind] = {
                "right": [picture["right"] for picture in pictures],
                "positions": dict(sorted(counts.items())),
            }
        return found

    def _draw(self, pipe: StableDiffusionXLLongPromptPipeline, kind: str, kept: dict, file: Path, title: str) -> None:
        """Draws what `kept` lacks, in batches of one length, so that none is padded further than it would be alone."""
        prompts: Prompts = getattr(self, kind)
        texts = [clean(its.text) for its in prompts.captions]
        groups: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            if str(index) not in kept[kind]:
                groups.setdefault(pipe.prompt_layout(text).positions, []).append(index)
        batches = [(n, g[i : i + _AT_ONCE]) for n, g in groups.items() for i in range(0, len(g), _AT_ONCE)]
        with tqdm(desc=title, total=len(texts), initial=len(kept[kind]), unit=" pictures") as bar:
            for positions, batch in batches:
                started = time.monotonic()
                pictures = pipe(
                    [texts[index] for index in batch],
                    generator=[torch.Generator().manual_seed(self.seed + index) for index in batch],
                    num_inference_steps=STEPS,
                    guidance_scale=GUIDANCE_SCALE,
                ).images
                for index, picture in zip(batch, pictures, strict=True):
                    right = objects_correct(picture, prompts.scenes[index])
                    kept[kind][str(index)] = {"positions": positions, "right": right}
                kept["seconds"] = round(kept["seconds"] + time.monotonic() - started, 1)
                write_json(file, kept)
                bar.update(len(batch))

    def _trained(self, name: str) -> nn.Module:
        """The second encoder fine-tuned at 248 positions, as the quickstart does it with the first one.

        It learns against the toy CLIP's image tower, frozen, as it did when it was made.
        """
        base, folder = self.output / "second-two-tower", self.output / f"second-{name.replace(' ', '-')}"
        if not base.exists():
            second = load_sdxl("toy/sdxl", None, torch.device("cpu")).text_encoder_2
            backbone = load_backbone(shipped("toy/clip"))
            import_text_encoder(backbone, second)
            backbone.save(base)
        data, images = write_pairs(self.output / "pairs", VALIDATION, _TRAINED_ON)
        settings = {"learning_rate": RATES[name], "seed": self.seed}
        config = toy_training("debias-clip", str(base), data, images, folder / "run", **settings)
        if not (folder / "done").exists():
            if train(replace(config, freeze_image_tower=True)) is None:
                raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from
            (folder / "done").touch()
        return to_transformers(load_backbone(str(folder / "run" / "last")), projection=True)[0]


def make_pipeline(policy: Policy, trained: nn.Module | None) -> StableDiffusionXLLongPromptPipeline:
    """The toy SDXL, reading prompts as the policy says; `trained` is its second encoder where the policy wants it."""
    encoder = None if policy.first == "clip" else f"toy/{policy.first}"
    pipe = load_sdxl("toy/sdxl", encoder, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    if policy.second != "windows":
        stretched, tokenizer = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
        pipe.register_modules(text_encoder_2=trained or stretched, tokenizer_2=tokenizer)
    pipe.tokenizer.pad_token, pipe.tokenizer_2.pad_token = (_PADS[pad] for pad in policy.pads)
    for name in policy.last:
        getattr(pipe, name).register_forward_hook(_last_for_penultimate)
    return pipe


def _last_for_penultimate(encoder, inputs, output):
    """Puts the last layer after the final norm where a pipeline looks for the penultimate one."""
    output.hidden_states = (*output.hidden_states[:-2], output.last_hidden_state, output.hidden_states[-1])
    return output


def told_in(right: Right, told: Sequence[dict[str, int]], wanted: Callable[[int], bool]) -> Right:
    """The objects that are first told in a sentence whose number, from 0, is wanted."""
    return [
        {place: is_right for place, is_right in its.items() if wanted(its_told[place])}
        for its, its_told in zip(right, told, strict=True)
    ]


def together(of_each: dict[str, Right]) -> Right:
    """Pictures of the same prompts with several encoders, as if each prompt's were one with the objects of all."""
    return [
        {
            (name, place): is_right
            for name, its in zip(of_each, pictures, strict=True)
            for place, is_right in its.items()
        }
        for pictures in zip(*of_each.values(), strict=True)
    ]


def compare(right: Right, default: Right) -> dict[str, float]:
    """Objects drawn right, in percent, and how many points more than by default, with the ends of a 95% interval."""
    values, default_values = ([100 * x for its in pictures for x in its.values()] for pictures in (right, default))
    pictures = [number for number, its in enumerate(right) for _ in its]
    difference = paired_difference(values, default_values, pictures)
    numbers = {"objects": len(values), "right": sum(values) / len(values)}
    numbers |= {name: difference[name] for name in ("difference", "low", "high")}
    return {name: round(value, 2) for name, value in numbers.items()}


def compare_all(found: dict[tuple[str, str], dict], told: Sequence[dict[str, int]]) -> list[dict]:
    """A row for each change and first encoder, and for each change with all of them."""
    kinds: dict[str, Callable[[dict], Right]] = {
        "all": lambda cell: cell["long"]["right"],
        "2 to 4": lambda cell: told_in(cell["long"]["right"], told, lambda number: number < LATE),
        "later": lambda cell: told_in(cell["long"]["right"], told, lambda number: number >= LATE),
        "short": lambda cell: cell["short"]["right"],
    }
    rows = []
    for change in CHANGES:
        row = {"change": change, "first": _ALL_FIRST}
        for kind, pick in kinds.items():
            ours, default = ({f: pick(found[c, f]) for f in FIRST} for c in (change, DEFAULT))
            row[kind] = compare(together(ours), together(default))
        rows.append(row)
        for first in FIRST:
            pair = found[change, first], found[DEFAULT, first]
            rows.append({"change": change, "first": first} | {kind: compare(*map(kinds[kind], pair)) for kind in kinds})
    return rows


def as_table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    lines = [
        "| read so | first encoder | objects right, % | told in sentences 2 to 4 | told later | short prompts |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [_in_words(row[kind], row["change"] == DEFAULT) for kind in ("all", "2 to 4", "later", "short")]
        lines.append("| " + " | ".join([row["change"], row["first"], *numbers]) + " |")
    return "\n".join(lines) + "\n"


def _in_words(its: dict[str, float], is_default: bool) -> str:
    if is_default:
        return f"{its['right']:.1f}"
    return f"{its['right']:.1f}: {its['difference']:+.1f} ({its['low']:+.1f} to {its['high']:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300, help="long prompts")
    parser.add_argument("--short-prompts", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/policies"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # for tensors as small as these a second thread only waits
    bench = Bench(arguments.output, arguments.prompts, arguments.short_prompts, arguments.seed)
    found = bench.run()
    rows = compare_all(found, [its.first_told() for its in bench.long.captions])
    result = {
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "settings": {"split": SPLIT, "steps": STEPS, "guidance_scale": GUIDANCE_SCALE}
        | {name: value for name, value in vars(arguments).items() if name != "output"},
        "rows": rows,
        "positions": {
            f"{change}, {first}": {kind: cell[kind]["positions"] for kind in ("long", "short")}
            for (change, first), cell in found.items()
        },
        "seconds": round(sum(cell["seconds"] for cell in found.values())),
    }
    print("\n" + as_table(rows))
    write_json(RESULTS / "policies.json", result)
    write_text(RESULTS / "policies.md", as_table(rows))


if __name__ == "__main__":
    main()
