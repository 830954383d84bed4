"""Attention that chooses between sentences more sharply, `sharpen_sentences`, and between other groups of words.

    python -m research.studies.choosing [--prompts 100]
    python -m research.studies.choosing --scenes test --tau 4 --sharpen 2 --aligned FOLDER [--seeds 30 31 32]

Of the conditional half's cross-attention, the share of each sentence among the words is raised to the power tau; the
words' share of all, BOS's, EOS's and the pads', and what each word has within its sentence stay as they are. Controls
choose between other groups: as many and as large ones, but of words at random; windows of as many words as a sentence
has on average, that begin in mid-sentence; chunks of 75. Scores are those of the toy world's checker; intervals
resample families of scenes.

Chosen on development scenes: of the settings that fill no more empty places than a sharpening of 1.5, the smallest tau
within a point of the most late objects right, which is 4; all blocks and steps, of which no part does better. Stated
before the test scenes were scored: it is built if, against a sharpening of 1.5 in overlapping chunks, late objects gain
and empty places filled do not grow, one interval clear of 0 on the right side and the other not on the wrong one.

Rows are kept in build/choosing, so that a study that was stopped goes on. Writes choosing.md and .json to
research/results/, or choosing-development.md and .json.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from diffusers.models.attention_processor import AttnProcessor
from tqdm import tqdm

from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.encoders.spec import ORIGINAL, EncoderSpec
from debias_diffusion.eval.images.objects import compare_objects, objects_numbers
from debias_diffusion.eval.report import Table
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.pipelines.rendering.folder import plan_batches
from debias_diffusion.pipelines.rendering.images import encode_batch, render_batch
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.pipelines.sharpening import choose
from debias_diffusion.text.chunks import TRAINED_POSITIONS
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.checker import Comparison, compare, read_image
from debias_diffusion.toyworld.shipped import GUIDANCE_SCALE, STEPS

from .harness import CPU, publish, read_options

KEPT = Path(__file__).parents[2] / "build" / "choosing"
SCORES = {"objects_right": "objects right, %", "objects_right_late": "first mentioned in sentence 5 or later, %"}
SCORES |= {"objects_precision": "precision, %", "empty_filled": "empty places filled, %"}
BATCH, CHUNK = 20, 75


@dataclass(frozen=True)
class Setting:
    """How cross-attention is changed.

    Attributes:
        sharpen: the factor of all logits, see `set_long_prompt`.
        tau: the power of each group's share.
        groups: sentences, random, windows or chunks.
        blocks: the beginning of the names of the UNet's blocks that choose.
        steps: the shares of the steps between which they choose.
    """

    sharpen: float = 1.0
    tau: float = 1.0
    groups: str = "sentences"
    blocks: str = ""
    steps: tuple[float, float] = (0.0, 1.0)

    @property
    def name(self) -> str:
        parts = [f"sharpen {self.sharpen:g}"] * (self.sharpen != 1)
        if self.tau != 1:
            parts.append(f"between {self.groups}, tau {self.tau:g}")
            parts += [f"in {self.blocks}"] * bool(self.blocks)
            parts += [f"steps {self.steps[0]:.0%} to {self.steps[1]:.0%}"] * (self.steps != (0.0, 1.0))
        return ", ".join(parts) or "plain"


PLAIN = Setting()


class Choosing(AttnProcessor):
    """diffusers' plain processor, whose conditional half chooses between groups of words.

    Attributes:
        groups: the number of each position's group, [images, positions], -1 for those that are no words.
        tau: 1: it does not choose.
    """

    groups: torch.Tensor
    tau: float = 1.0

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **arguments):
        if encoder_hidden_states is None or self.tau == 1:
            return super().__call__(attn, hidden_states, encoder_hidden_states, **arguments)
        heads = attn.head_to_batch_dim
        q, k, v = heads(attn.to_q(hidden_states)), *(heads(to(encoder_hidden_states)) for to in (attn.to_k, attn.to_v))
        weights = attn.get_attention_scores(q, k).unflatten(0, (-1, attn.heads))
        half = len(weights) // 2
        member = (self.groups[..., None] == torch.arange(int(self.groups.max()) + 1)).float()
        weights = torch.cat([weights[:half], choose(weights[half:], member, self.tau)]).flatten(0, 1)
        return attn.to_out[0](attn.batch_to_head_dim(weights @ v))


def group_words(kind: str, sentences: Sequence[int], index: int) -> torch.Tensor:
    """The number of each position's group, [positions].

    Args:
        sentences: that of each position, see `PromptLayout`.
        index: of the scene, seeds what is at random.
    """
    words = [number for number in sentences if number >= 0]
    count = len(words)
    if kind == "random":
        random.Random(index).shuffle(words)
    elif kind == "chunks":
        words = [at // CHUNK for at in range(count)]
    elif kind == "windows":
        size = round(count / (max(words) + 1))
        words = [(at + size // 2) // size for at in range(count)]
    groups = torch.tensor(sentences)
    groups[groups >= 0] = torch.tensor(words)
    return groups


@dataclass
class Scenes:
    """The prompts of a split, and its images as scenes."""

    split: str
    count: int
    seed: int

    @property
    def names(self) -> list[str]:
        return [f"{self.split}/{at:06}" for at in range(self.count)]

    @torch.no_grad()
    def draw(self, encoder: str, setting: Setting) -> list[Comparison]:
        """What the image of each prompt shows, drawn now or before."""
        kept = KEPT / f"{self.split}-{self.count}" / f"{Path(encoder).name}, {setting.name}.json"
        if kept.exists():
            return [Comparison(**seen) for seen in read_json_object(kept)["seen"]]
        sampling = Sampling(steps=STEPS, guidance_scale=GUIDANCE_SCALE, height=48, width=48)
        pipe = Renderer("toy/sdxl", sampling, CPU).pipeline(EncoderSpec.parse(encoder))
        pipe.set_long_prompt(sharpen=setting.sharpen)
        processor = Choosing()
        pipe.unet.set_attn_processor(
            {
                name: processor if name.startswith(setting.blocks) else AttnProcessor()
                for name in pipe.unet.attn_processors
            }
        )
        texts = [clean(toy_scene(name)[1].text) for name in self.names]
        prompts = [ImagePrompt(text, self.seed + at) for at, text in enumerate(texts)]
        layouts = {at: pipe.prompt_layout(prompt.prompt) for at, prompt in enumerate(prompts)}
        seen: dict[int, Comparison] = {}
        for batch in tqdm(plan_batches(prompts, layouts, BATCH, layouts), f"{self.split}, {setting.name}"):
            processor.groups = torch.stack([group_words(setting.groups, layouts[at].sentences[0], at) for at in batch])
            is_long = layouts[batch[0]].positions > TRAINED_POSITIONS
            chooses = partial(set_step, processor, setting if is_long else PLAIN)
            chooses(0, STEPS)
            batch_prompts = [prompts[at] for at in batch]
            embeddings, seeds = encode_batch(pipe, batch_prompts, sampling), [prompt.seed for prompt in batch_prompts]
            for at, image in zip(batch, render_batch(pipe, embeddings, seeds, sampling, chooses), strict=True):
                seen[at] = compare(read_image(image), toy_scene(self.names[at])[0])
        result = [seen[at] for at in range(self.count)]
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"seen": [asdict(comparison) for comparison in result]})
        return result


def set_step(processor: Choosing, setting: Setting, done: int, steps: int) -> None:
    first, last = (round(share * steps) for share in setting.steps)
    processor.tau = setting.tau if first <= done < last else 1.0


class Study:
    """Rows of one set of prompts, of all its seeds."""

    def __init__(self, sets: Sequence[Scenes]):
        self.sets = sets
        names = [name for scenes in sets for name in scenes.names]
        self.mentions = [toy_scene(name)[1].first_mentions() for name in names]
        self.families = [family(name) for name in names]

    def draw(self, encoder: str, setting: Setting) -> list[Comparison]:
        return [seen for scenes in self.sets for seen in scenes.draw(encoder, setting)]

    def numbers(self, encoder: str, setting: Setting) -> dict:
        return scores_of(objects_numbers(self.draw(encoder, setting), self.mentions, groups=self.families))

    def less(self, encoder: str, a: Setting, b: Setting) -> dict:
        """Scores of one setting less those of another, paired."""
        drawn = (self.draw(encoder, setting) for setting in (a, b))
        return scores_of(compare_objects(*drawn, self.mentions, groups=self.families))


def scores_of(numbers: dict) -> dict:
    return {score: numbers[score] for score in SCORES if score in numbers}


def value(row: dict) -> list[str]:
    return [f"{row[score]['value']:.1f}" if score in row else "" for score in SCORES]


def ends(row: dict) -> list[str]:
    return ["{difference:+.1f} ({low:+.1f} to {high:+.1f})".format(**row[score]) for score in SCORES]


DEVELOPMENT = {
    ORIGINAL: [
        *(Setting(sharpen=factor) for factor in (1.0, 1.25, 1.5, 2.0)),
        *(Setting(tau=tau) for tau in (2.0, 3.0, 4.0, 6.0, 8.0)),
        *(Setting(tau=4.0, groups=groups) for groups in ("random", "windows", "chunks")),
        *(Setting(tau=4.0, blocks=blocks) for blocks in ("up_blocks", "down_blocks")),
        *(Setting(tau=4.0, steps=steps) for steps in ((0.25, 1.0), (0.5, 1.0), (0.0, 0.5))),
        *(Setting(sharpen=factor, tau=tau) for factor, tau in ((1.25, 2.0), (1.25, 4.0), (1.5, 2.0))),
    ],
    "toy/debias-clip-sdxl": [
        *(Setting(sharpen=factor) for factor in (1.0, 1.5, 2.0)),
        *(Setting(tau=tau) for tau in (3.0, 4.0, 6.0)),
        Setting(tau=4.0, groups="random"),
    ],
}


SHARPER = Setting(sharpen=1.5)


def development(prompts: int) -> None:
    """How the settings were chosen."""
    study = Study([Scenes("development", prompts, 0)])
    rows = [(encoder, setting) for encoder, settings in DEVELOPMENT.items() for setting in settings]
    numbers = [study.numbers(*row) for row in rows]
    cells = [[encoder, setting.name, *value(row)] for (encoder, setting), row in zip(rows, numbers, strict=True)]
    recorded = [
        {"encoder": encoder, **asdict(setting), **row} for (encoder, setting), row in zip(rows, numbers, strict=True)
    ]
    publish("choosing-development", {"rows": recorded}, Table(["encoder", "attention", *SCORES.values()], cells))


def test(chosen: Setting, best: Setting, seeds: Sequence[int], prompts: int, aligned: str | None) -> None:
    """All settings on new scenes.

    Args:
        chosen: on development scenes.
        best: likewise, of those that only sharpen.
        aligned: folder of SDXL's own encoders, fitted to the UNet by `align`.
    """
    dealt, both = replace(chosen, groups="random"), replace(chosen, sharpen=1.25)
    few = [PLAIN, SHARPER, chosen]
    rows = {
        ("long prompts", ORIGINAL): dict.fromkeys(
            [PLAIN, *(Setting(sharpen=factor) for factor in (1.25, 1.5, 2.0)), chosen, dealt, both]
        ),
        ("long prompts", "toy/debias-clip-sdxl"): dict.fromkeys([PLAIN, SHARPER, best, chosen, dealt]),
        ("long prompts", "toy/debias-clip"): few,
        **({("long prompts", aligned): few} if aligned else {}),
        ("prompts that refer back", ORIGINAL): [*few, dealt],
        ("short prompts", ORIGINAL): [PLAIN, chosen],
    }
    kinds = {"long prompts": ("test", prompts), "prompts that refer back": ("referring-test", prompts // 2)}
    kinds |= {"short prompts": ("short-test", prompts // 10)}
    studies = {
        kind: Study([Scenes(f"{split}-{seed}", count, 1000 * seed) for seed in seeds])
        for kind, (split, count) in kinds.items()
    }
    values, differences, recorded = [], [], []
    for (kind, encoder), settings in rows.items():
        study, title = studies[kind], "aligned" if encoder == aligned else encoder
        for setting in settings:
            row = study.numbers(encoder, setting)
            values.append([kind, title, setting.name, *value(row)])
            recorded.append({"prompts": kind, "encoder": title, **asdict(setting), **row})
        for setting in settings:
            if setting not in (PLAIN, SHARPER) and SHARPER in settings:
                less = study.less(encoder, setting, SHARPER)
                differences.append([kind, title, setting.name, *ends(less)])
                recorded[-1].setdefault("less sharpen 1.5", {})[setting.name] = less
        if chosen in settings and dealt in settings:
            less = study.less(encoder, chosen, dealt)
            differences.append([kind, title, f"{chosen.name}, less {dealt.name}", *ends(less)])
            recorded[-1]["less random"] = less
    publish(
        "choosing",
        {"seeds": seeds, "prompts": prompts, "rows": recorded},
        f"# The choice between sentences, sharpened\n\nSeeds {', '.join(map(str, seeds))}, {prompts} long prompts each,"
        " half as many that refer back, a tenth as many short ones; `original` in overlapping chunks.",
        Table(["prompts", "encoder", "attention", *SCORES.values()], values),
        "Less `sharpen=1.5`, or what is named, with 95% intervals:",
        Table(["prompts", "encoder", "attention", *SCORES.values()], differences),
    )


if __name__ == "__main__":
    options = read_options(
        __doc__, scenes=("development", "test"), tau=4.0, sharpen=2.0, seeds=[30, 31, 32], prompts=0, aligned=None
    )
    if options.scenes == "development":
        development(options.prompts or 100)
    else:
        chosen, best = Setting(tau=options.tau), Setting(sharpen=options.sharpen)
        test(chosen, best, options.seeds, options.prompts or 200, options.aligned)
