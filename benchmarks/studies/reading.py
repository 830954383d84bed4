"""How SDXL's two encoders should be read: correct objects in generated toy images, under one change at a time.

    nice -n 10 python benchmarks/studies/reading.py [--prompts 300] [--short-prompts 120] [--output runs/policies]

The second encoder reads chunks of 77 tokens, is stretched to 248 positions or trained at 248 positions; prompts are
padded with EOT or 0; the UNet reads the penultimate or the last layer. Each change is measured with three first
encoders: the toy world's CLIP in chunks, and its two of 248 positions. Prompts are of the development split, and all
combinations get the same noise.

Combinations are kept in the output folder: a stopped run resumes. Prints a table, and writes it to benchmarks/results/
as policies.md, with the numbers as policies.json.
"""

import sys
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
from debias_diffusion.files import path_digest
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.interchange.text_encoders import import_text_encoder, to_transformers
from debias_diffusion.jobs import Job
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.models.shipped import GUIDANCE_SCALE, STEPS, shipped
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
Prompts = Sequence[tuple[Scene, Caption]]


def measure(pipe: StableDiffusionXLLongPromptPipeline, prompts: Prompts, seed: int, title: str) -> dict:
    """Generates the images, in batches of one length, so that no prompt gets further padding -> "right" of each."""
    texts = [clean(caption.text) for _, caption in prompts]
    groups: dict[int, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(pipe.prompt_layout(text).positions, []).append(index)
    right = [{} for _ in texts]
    batches = [group[start : start + _AT_ONCE] for group in groups.values() for start in range(0, len(group), _AT_ONCE)]
    for batch in tqdm(batches, desc=title):
        generators = [torch.Generator().manual_seed(seed + index) for index in batch]
        settings = {"generator": generators, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE_SCALE}
        for index, image in zip(batch, pipe([texts[index] for index in batch], **settings).images, strict=True):
            right[index] = checker.compare(image, prompts[index][0]).correct
    return {"right": right}


def measure_all(output: Path, prompts: dict[str, Prompts], seed: int) -> dict[tuple[str, str], dict]:
    """By change and first encoder: what `measure` returns of each kind of prompts."""
    digests = {name: path_digest(shipped(f"toy/{name}")) for name in ("sdxl", *FIRST)}
    counts, cells = {kind: len(pairs) for kind, pairs in prompts.items()}, {}
    with Job.open(output, "study", inputs=digests) as job:
        for change, changes in CHANGES.items():
            for first in FIRST:
                policy, title = Policy(first, **changes), f"{change}, {first}"

                def compute(policy=policy, title=title) -> dict:
                    second = train_second(output, policy.second, seed) if policy.second in RATES else None
                    pipe = make_pipeline(policy, second)
                    return {kind: measure(pipe, pairs, seed, title) for kind, pairs in prompts.items()}

                key = Job.key("cell", {"policy": asdict(policy), "seed": seed, "prompts": counts})
                cells[change, first] = job.json(key, compute)
    return cells


def train_second(output: Path, name: str, seed: int) -> nn.Module:
    """The second encoder fine-tuned at 248 positions, as the quickstart fine-tunes the first one.

    It learns against the frozen image tower of the toy CLIP, as when it was made.
    """
    base, run = output / "second-two-tower", output / f"second-{name.replace(' ', '-')}"
    if not base.exists():
        backbone = load_backbone(shipped("toy/clip"))
        import_text_encoder(backbone, load_pipeline("toy/sdxl", None, torch.device("cpu")).text_encoder_2)
        backbone.save(base)
    pairs = write_pairs(output / "pairs", VALIDATION, _TRAINED_ON)
    config = toy_training("debias-clip", str(base), *pairs, run, learning_rate=RATES[name], seed=seed)
    if train(replace(config, freeze_image_tower=True)) is None:
        raise KeyboardInterrupt  # a stopped training resumes from its checkpoint
    return to_transformers(load_backbone(str(run / "last")), projection=True)[0]


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
            (name, place): correct
            for name, image in zip(by_encoder, images, strict=True)
            for place, correct in image.items()
        }
        for images in zip(*by_encoder.values(), strict=True)
    ]


def compare(right: Right, default: Right) -> dict[str, float]:
    """Correct objects in percent, and the difference from the default in points with its 95% interval."""
    values, default_values = (
        [100 * correct for image in kind for correct in image.values()] for kind in (right, default)
    )
    image_numbers = [number for number, objects in enumerate(right) for _ in objects]
    difference = paired_difference(values, default_values, image_numbers)
    numbers = {"objects": len(values), "right": sum(values) / len(values)}
    numbers |= {name: difference[name] for name in ("difference", "low", "high")}
    return {name: value and round(value, 2) for name, value in numbers.items()}  # None of a single prompt


def compare_all(cells: dict[tuple[str, str], dict], first_mentions: Sequence[dict[str, int]]) -> list[dict]:
    """A row for each change with all first encoders, and with each."""
    kinds: dict[str, Callable[[dict], Right]] = {
        "all": lambda cell: cell["long"]["right"],
        "2 to 4": lambda cell: mentioned_in(cell["long"]["right"], first_mentions, lambda number: number < LATE),
        "later": lambda cell: mentioned_in(cell["long"]["right"], first_mentions, lambda number: number >= LATE),
        "short": lambda cell: cell["short"]["right"],
    }
    rows = []
    for change in CHANGES:
        for name, encoders in {"all three": FIRST, **{first: (first,) for first in FIRST}}.items():
            row = {"change": change, "first": name}
            for kind, pick in kinds.items():
                row[kind] = compare(*(joined({e: pick(cells[c, e]) for e in encoders}) for c in (change, DEFAULT)))
            rows.append(row)
    return rows


def as_table(rows: list[dict]) -> Table:
    kinds = {
        "all": "correct objects, %",
        "2 to 4": "first mentioned in sentences 2 to 4",
        "later": "later",
        "short": "short prompts",
    }
    lines = []
    for row in rows:
        lines.append([row["change"], row["first"]])
        for numbers in (row[kind] for kind in kinds):
            difference = cell(numbers["difference"], numbers["low"], numbers["high"], "+.1f")
            lines[-1].append(f"{numbers['right']:.1f}" + (f": {difference}" if row["change"] != DEFAULT else ""))
    return Table(["change", "first encoder", *kinds.values()], lines)


def main() -> None:
    arguments = read_options(__doc__, prompts=300, short_prompts=120, seed=0, output=Path("runs/policies"))
    torch.set_num_threads(1)  # for tensors as small as these a second thread only waits
    long = [(scene(SPLIT, index), caption(SPLIT, index)) for index in range(arguments.prompts)]
    prompts = {"long": long, "short": [short_prompt(SPLIT, index) for index in range(arguments.short_prompts)]}
    cells = measure_all(arguments.output, prompts, arguments.seed)
    rows = compare_all(cells, [caption.first_mentions() for _, caption in long])
    settings = {"split": SPLIT, "steps": STEPS, "guidance_scale": GUIDANCE_SCALE}
    settings |= {name: value for name, value in vars(arguments).items() if name != "output"}
    publish("policies", {"settings": settings, "rows": rows}, as_table(rows))


if __name__ == "__main__":
    main()
