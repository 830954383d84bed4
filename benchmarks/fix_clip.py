"""Fix-CLIP in the toy world: what each part does, as the paper's Table 4 has it, and where the paper is silent.

    python benchmarks/fix_clip.py [--seeds 0 1 2 3 4] [--steps 150] [--more] [--output runs/fix-clip]

The shipped toy CLIP has nine patches, one an object. So the study makes a base model of its own, which is not shipped:
toy/clip's text tower, so that toy/sdxl can read it, and an image tower of six blocks and 36 patches of 8 pixels, which
learns toy/clip's image features. An object's place is 2 x 2 patches, G = 3, K = 2, and with M = 3 a band is a row of
places.

Rows, trained on the same pairs with the same budget: the eight of Table 4 (DB the masked view with its positions, HF
the hierarchy, RP regional prompts without, UM with their mask), and ours: "states kept", all with --keep-states; and
all with other rates of the new parameters. --more adds Table 5 and shared prompts. Ours and these are trained with two
of the seeds.

Each row is scored on scenes that no model has seen, 500 for each seed: R@1 of long captions, of short captions, of
summaries against whole and against masked images; each group's features alone; hidden states against the base model's;
and, of some rows, short prompts drawn by toy/sdxl. Differences are paired by query, over all seeds, with 95% intervals.
Everything finished is kept, and seeds may run side by side once the base model is made (--seeds without a number makes
it alone). Prints the tables and writes them to benchmarks/results/ as fix_clip.md, with the numbers as .json.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from harness import CPU, publish, read_options
from machine import machine
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.files import write_json
from debias_diffusion.methods.fix_clip import GroupHeads, Hierarchy, MaskedView
from debias_diffusion.methods.keep_states import relative_error, without_eot
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.models.image_tower import MaskedPatches
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.retrieval import recall_ranks
from debias_diffusion.toymodels.clip import draw_indices, render_all
from debias_diffusion.toymodels.stage import run_stage
from debias_diffusion.toyworld.grammar import caption, short_caption
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.toyworld.scenes import base_scene, generator, scene
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.loop import train

TEACHER, UNET = "toy/clip", "toy/sdxl"
VISION = {"layers": 6, "patch_size": 8}
GROUPS, FIRST, PROMPTS, RATIO = 3, 2, 3, 0.75
HELD_OUT, TRAINED_ON, BATCH = 100, 3000, 32
SCENES = 500

_HF = {"groups": GROUPS, "first_group": FIRST}
_RP = {"prompts": PROMPTS}
_NO_MASK = {"prompt_mask": "none"}
_NO_PARTS = {"groups": 0, "prompts": 0}
FIX, LONG = {"recipe": "fix-clip"}, {"recipe": "long-clip"}
TABLE_4 = {
    "0": LONG,
    "1 DB": FIX | _NO_PARTS,
    "2 HF": LONG | _HF,
    "3 DB+RP": FIX | {"groups": 0} | _RP | _NO_MASK,
    "4 HF+RP": LONG | _HF | _RP | _NO_MASK,
    "5 DB+RP+UM": FIX | {"groups": 0} | _RP,
    "6 HF+RP+UM": LONG | _HF | _RP,
    "7 all": FIX | _HF | _RP,
    "states kept": FIX | _HF | _RP | {"keep_states": 3.0},
    "rate 10": FIX | _HF | _RP | {"new_rate": 10.0},
    "rate 100": FIX | _HF | _RP | {"new_rate": 100.0},
}
MORE = {
    "T5 Init.": FIX | _NO_PARTS | {"short_positions": "shared", "mask_ratio": 0.0},
    "T5 Pos.": FIX | _NO_PARTS | {"mask_ratio": 0.0},
    "T5 Dis.": FIX | _NO_PARTS | {"masked_patches": "discard"},
    "shared prompts": FIX | _HF | _RP | {"prompt_layers": "shared"},
}
DRAWN = ("0", "1 DB", "7 all", "states kept")  # rows whose encoders draw,
DRAWN_SEEDS = 2  # with so many of the seeds, the first
FIRST_SEEDS = ("states kept", "rate 10", "rate 100", *MORE)  # rows trained with these seeds alone
BASE = "base"
COLUMNS = {
    "long": "long captions",
    "short": "short captions",
    "summary": "summaries",
    "masked": "summaries, masked images",
    "drift": "drift, short captions",
}


@dataclass(frozen=True)
class Expectation:
    """What the paper leads one to expect: that a score of row `a` is higher than of row `b` (`lower`: lower)."""

    part: str
    score: str
    a: str
    b: str
    lower: bool = False
    text: str = field(default="", compare=False)


EXPECTED = (
    Expectation("DB", "masked", "1 DB", "0", text="summaries find masked images more often"),
    Expectation("DB", "short", "1 DB", "0", text="short captions find their images more often"),
    Expectation("DB", "drift", "1 DB", "0", lower=True, text="hidden states stay nearer the base model's"),
    Expectation("DB", "long", "1 DB", "0", text="long captions, too (Table 4, 0 to 1)"),
    Expectation("DB", "long", "7 all", "6 HF+RP+UM", text="the same beside the other parts"),
    Expectation("HF", "long", "2 HF", "0", text="long captions (Table 4, 0 to 2)"),
    Expectation("HF", "long", "7 all", "5 DB+RP+UM", text="long captions (5 to 7)"),
    Expectation("HF", f"group {GROUPS - 1}", "7 all", "5 DB+RP+UM", text="the middle group's features alone"),
    Expectation("RP", "long", "3 DB+RP", "1 DB", text="long captions (1 to 3)"),
    Expectation("UM", "long", "5 DB+RP+UM", "3 DB+RP", text="long captions (3 to 5)"),
    Expectation("UM", "short", "5 DB+RP+UM", "3 DB+RP", text="short captions (3 to 5)"),
)


# ---- the study's base model


def make_base(folder: Path, steps: int, scenes: int = 8000, batch: int = 64) -> str:
    """The folder of the base model, trained or finished where it is not."""
    model = folder / "model"
    if (model / "done.json").is_file():
        return str(model)
    device = pick_device()
    teacher = load_backbone(TEACHER).eval()
    backbone = _new_base(teacher)
    for reader in (teacher, backbone):
        reader.to(device)
    pictures = render_all([base_scene(index) for index in range(scenes)], teacher).to(device)
    with torch.inference_mode():
        parts = [teacher.encode_image(part) for part in tqdm(pictures.split(250), desc="the teacher's features")]
    wanted = F.normalize(torch.cat(parts), dim=-1).clone()
    scale = torch.tensor(20.0, device=device)

    def loss(step: int) -> Tensor:
        indices = torch.from_numpy(draw_indices(scenes, batch, 0, step)).to(device)
        features, expected = F.normalize(backbone.encode_image(pictures[indices]), dim=-1), wanted[indices]
        return 10 * (1 - (features * expected).sum(dim=-1)).mean() + contrastive_loss(features, expected, scale)

    run_stage(folder / "stage", backbone.model.visual, loss, steps=steps, peak=1e-3, weight_decay=0.1)
    backbone.save(model)
    write_json(model / "done.json", {"steps": steps})
    return str(model)


def _new_base(teacher: Backbone) -> Backbone:
    """toy/clip with another, untrained image tower."""
    config = deepcopy(teacher.config)
    config["model_cfg"]["vision_cfg"] |= VISION
    torch.manual_seed(0)
    model = open_clip.CLIP(**deepcopy(config["model_cfg"]))
    state = {name: tensor for name, tensor in teacher.model.state_dict().items() if not name.startswith("visual.")}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():  # as toymodels.clip, so that places are not drowned
        model.visual.positional_embedding.mul_(5)
    open_clip.model.set_model_preprocess_cfg(model, config["preprocess_cfg"])
    return Backbone(model, teacher.tokenizer, config)


# ---- one row


def row_folder(output: Path, seed: int, row: str) -> Path:
    return output / f"seed-{seed}" / row.replace(" ", "-").replace("+", "-")


def train_row(base: str, folder: Path, flags: dict, seed: int, steps: int, output: Path) -> None:
    """A row's run, trained or continued where it is not finished."""
    data, images = write_pairs(output / "pairs", HELD_OUT, TRAINED_ON, "train-2")
    components = min(32, BATCH // 4) if flags["recipe"] == "long-clip" else None
    config = TrainConfig(
        data=str(data),
        images=str(images),
        output=str(folder),
        model=base,
        components=components,
        validation=HELD_OUT,
        batch=BATCH,
        epochs=steps,  # more than enough; max_steps ends the run
        max_steps=steps,
        learning_rate=5e-4,
        warmup=steps // 10,
        seed=seed,
        precision="fp32",
        max_bad=0,
        workers=0,
        eval_every=steps,
        checkpoint_every=50,
        keep=1,
        recipe=flags["recipe"],
        keep_states=flags.get("keep_states"),
        method={name: value for name, value in flags.items() if name not in ("recipe", "keep_states")},
    )
    if not (folder / "last" / "scores.json").is_file() and train(config) is None:
        raise KeyboardInterrupt  # asked to stop, it has left a checkpoint to go on from


@dataclass(frozen=True)
class Unseen:
    """Scenes that no model has learned from, with their texts: images uint8 [scenes, 3, side, side]."""

    split: str
    images: Tensor
    texts: dict[str, list[str]]

    @classmethod
    def draw(cls, seed: int, reader: Backbone) -> "Unseen":
        split = f"test-fix-{seed}"
        scenes = [scene(split, index) for index in range(SCENES)]
        long = [caption(split, index) for index in range(SCENES)]
        short = [short_caption(drawn, generator(split, index, "short")) for index, drawn in enumerate(scenes)]
        texts = {
            "long": [text.text for text in long],
            "short": [text.text for text in short],
            "summary": [text.sentences[0].text for text in long],
        }
        return cls(split, render_all(scenes, reader), texts)


@torch.inference_mode()
def score(model: str, base: Backbone, unseen: Unseen, modules: dict[str, Tensor], discards: bool) -> dict:
    """Of each query 0 or 100, and of each short caption its drift; by the names in `COLUMNS`, and of the groups.

    Args:
        modules: what training leaves behind, of the last checkpoint.
        discards: whether the row left masked patches out.
    """
    backbone = load_two_tower(model)
    hierarchy = Hierarchy(GROUPS, FIRST)
    images, masked, states = _encode_images(backbone, hierarchy, unseen, modules, discards)
    texts = {name: _encode_texts(backbone, these) for name, these in unseen.texts.items()}
    scores = {name: _hits(images, texts[name]) for name in ("long", "short", "summary")}
    scores["masked"] = _hits(masked, texts["summary"])
    scores["drift"] = _drift(backbone, base, unseen.texts["short"])
    heads = _heads(backbone, hierarchy, modules)
    text_states = _text_states(backbone, hierarchy, unseen.texts["long"])
    for kind, (of_images, of_texts) in heads.items():
        features = of_images(hierarchy.aggregate(states)), of_texts(hierarchy.aggregate(text_states))
        for at, group in enumerate(hierarchy.numbers):
            scores[f"{kind} {group}"] = _hits(*(part[:, at] for part in features))
    return scores


def _hits(images: Tensor, texts: Tensor) -> list[float]:
    ranks = recall_ranks(images, texts)["text_to_image"]
    return [100.0 * (rank == 1) for rank in np.asarray(ranks).tolist()]


def _encode_images(backbone: Backbone, hierarchy: Hierarchy, unseen: Unseen, modules: dict, discards: bool):
    tower, view = backbone.image, MaskedView(RATIO)
    is_masked = torch.stack([view.draw(tower.patches, 0, 0, f"{unseen.split}/{at}") for at in range(SCENES)])
    zeros = torch.zeros_like(backbone.model.visual.class_embedding)
    vector = None if discards else modules.get("mask_vector", zeros)
    blocks, parts = hierarchy.blocks(tower.depth), []
    for pixels, rows in zip(unseen.images.split(100), is_masked.split(100), strict=True):
        parts.append(tower.encode_with_masked(backbone.as_floats(pixels), blocks, MaskedPatches(rows, vector)))
    return (torch.cat(part) for part in zip(*parts, strict=True))


def _encode_texts(backbone: Backbone, texts: Sequence[str]) -> Tensor:
    return torch.cat(
        [backbone.encode_text(backbone.tokenize(texts[at : at + 100])) for at in range(0, len(texts), 100)]
    )


def _text_states(backbone: Backbone, hierarchy: Hierarchy, texts: Sequence[str]) -> Tensor:
    blocks = hierarchy.blocks(len(backbone.text.tower.transformer.resblocks))
    parts = [
        backbone.text.encode(backbone.tokenize(texts[at : at + 100]), blocks)[1] for at in range(0, len(texts), 100)
    ]
    return torch.cat(parts)


def _heads(backbone: Backbone, hierarchy: Hierarchy, modules: dict) -> dict[str, tuple[GroupHeads, GroupHeads]]:
    """ "start": the towers' final projections, which every row has; "group": the trained ones, else those."""
    count = len(hierarchy.numbers)
    projections = {"image": backbone.model.visual.proj, "text": backbone.text.tower.text_projection}
    start = {tower: GroupHeads(projection, count) for tower, projection in projections.items()}
    trained = {tower: GroupHeads(projection, count) for tower, projection in projections.items()}
    for tower, heads in trained.items():
        prefix = f"{tower}_heads."
        state = {name.removeprefix(prefix): part for name, part in modules.items() if name.startswith(prefix)}
        if state:
            heads.load_state_dict(state)
    return {"start": tuple(start.values()), "group": tuple(trained.values())}


def _drift(backbone: Backbone, base: Backbone, texts: Sequence[str]) -> list[float]:
    """How far `hidden_states[-2]` of each caption are from the base model's, as a share of their variance."""
    errors = []
    for text in texts:
        ids = base.tokenizer.text_ids([text])
        before, after = (
            torch.cat(reader.text.token_states(without_eot(ids, reader.tokenizer))) for reader in (base, backbone)
        )
        errors.append(relative_error(after, before).item())
    return errors


# ---- all of it


def run_seed(base: str, rows: dict[str, dict], seed: int, steps: int, prompts: int, output: Path) -> dict:
    """The scores of all rows of a seed, and of what some of them draw; what is there is not made again."""
    backbone = load_two_tower(base)
    unseen, results = None, {}
    for row, flags in {BASE: None, **rows}.items():
        folder = row_folder(output, seed, row)
        file = folder / "study.json"
        if not file.is_file():
            if flags is not None:
                train_row(base, folder, flags, seed, steps, output)
            unseen = unseen or Unseen.draw(seed, backbone)
            folder.mkdir(parents=True, exist_ok=True)
            modules = _left_behind(folder)
            model = base if flags is None else str(folder / "last")
            discards = bool(flags) and flags.get("masked_patches") == "discard"
            result = {"machine": machine(CPU), "log": _last_losses(folder)}
            result["scores"] = score(model, backbone, unseen, modules, discards)
            write_json(file, result)
        results[row] = json.loads(file.read_text())
    file = output / f"seed-{seed}" / f"drawn-{prompts}.json"
    if prompts and not file.is_file():
        for row in DRAWN:
            train_row(base, row_folder(output, seed, row), rows[row], seed, steps, output)
        write_json(file, _draw({row: row_folder(output, seed, row) for row in DRAWN}, seed, prompts, output))
    return {"rows": results, "drawn": json.loads(file.read_text()) if prompts else {}}


def _left_behind(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("checkpoint-*"))
    state = torch.load(files[-1], weights_only=True).get("modules", {}) if files else {}
    return {name.removeprefix("method."): tensor for name, tensor in state.items()}


def _last_losses(folder: Path) -> dict[str, float]:
    """The mean of each logged loss over the last fifth of a run."""
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    lines = [line for line in lines if "loss" in line]
    lines = lines[-max(1, len(lines) // 5) :]
    names = [name for name in (lines[0] if lines else {}) if name in ("long", "short") or name.startswith("group_")]
    return {name: float(np.mean([line[name] for line in lines])) for name in names}


def _draw(folders: dict[str, Path], seed: int, prompts: int, output: Path) -> dict:
    """Objects right in images of short prompts, in percent, by row, and the rows' differences from long-clip's."""
    encoders = {"original": "cut:original"} | {row: str(folder) for row, folder in folders.items()}
    folder = str(output / f"seed-{seed}" / "drawn")
    data = f"toy/short-test-fix-{seed}"
    settings = GenerationConfig(list(encoders.values()), folder, base=UNET, data=data, limit=prompts, images_at_once=20)
    report = evaluate_generation(settings)
    rows = dict(zip(report["encoders"], encoders, strict=True))
    values = {rows[label]: entry["scores"]["objects_right"]["value"] for label, entry in report["encoders"].items()}
    compared = [
        {"a": rows[line["a"]], "b": rows[line["b"]]} | {name: line[name] for name in ("difference", "low", "high")}
        for line in report["compared"]
        if line["score"] == "objects_right"
    ]
    return {"objects_right": values, "compared": compared}


def difference(seeds: dict[int, dict], name: str, a: str, b: str) -> dict[str, float]:
    """The mean of a score of row `a` less that of row `b`, paired by query over all seeds that have both."""
    results = [result["rows"] for result in seeds.values() if {a, b} <= result["rows"].keys()]
    values = [np.concatenate([np.asarray(rows[row]["scores"][name]) for rows in results]) for row in (a, b)]
    return paired_difference(*values)


def verdict(low: float, high: float, lower: bool = False) -> str:
    """Whether an interval of a difference says what was expected."""
    low, high = (-high, -low) if lower else (low, high)
    return "met" if low > 0 else "not met" if high < 0 else "undecided"


def tables(seeds: dict[int, dict]) -> list[Table | str]:
    rows = list(next(iter(seeds.values()))["rows"])
    return [
        "## R@1 in %, and drift as a share of the variance (means over seeds)",
        _score_table(seeds, rows),
        "## Expected, and measured",
        _expectation_table(seeds, rows),
        "## Features of one group alone: R@1 in % of long captions",
        _group_table(seeds, rows),
        *_drawn_tables(seeds),
    ]


def _mean(seeds: dict[int, dict], row: str, name: str) -> float:
    results = [result["rows"][row] for result in seeds.values() if row in result["rows"]]
    return float(np.mean([np.mean(result["scores"][name]) for result in results]))


def _score_table(seeds: dict[int, dict], rows: Sequence[str]) -> Table:
    lines = [[row, *(f"{_mean(seeds, row, name):.{3 if name == 'drift' else 1}f}" for name in COLUMNS)] for row in rows]
    return Table(["row", *COLUMNS.values()], lines)


def _expectation_table(seeds: dict[int, dict], rows: Sequence[str]) -> Table:
    lines = []
    for expected in EXPECTED:
        if expected.a not in rows or expected.b not in rows:
            continue
        line = difference(seeds, expected.score, expected.a, expected.b)
        said = cell(line["difference"], line["low"], line["high"], "+.3f" if expected.score == "drift" else "+.1f")
        pair = f"{expected.a} less {expected.b}"
        lines.append([expected.part, expected.text, pair, said, verdict(line["low"], line["high"], expected.lower)])
    return Table(["part", "expected", "rows", "difference", ""], lines)


def _group_table(seeds: dict[int, dict], rows: Sequence[str]) -> Table:
    numbers = list(Hierarchy(GROUPS, FIRST).numbers)
    lines = []
    for row in rows:
        losses = [result["rows"][row]["log"] for result in seeds.values() if row in result["rows"]]
        has_heads = all(f"group_{numbers[0]}" in line for line in losses)
        cells = [f"{_mean(seeds, row, f'start {group}'):.1f}" for group in numbers]
        cells += [f"{_mean(seeds, row, f'group {group}'):.1f}" if has_heads else "" for group in numbers]
        cells += [
            f"{np.mean([line[f'group_{group}'] for line in losses]):.3f}" if has_heads else "" for group in numbers
        ]
        lines.append([row, *cells])
    titles = [f"{title} {group}" for title in ("final projection,", "trained head,", "loss,") for group in numbers]
    return Table(["row", *titles], lines)


def _drawn_tables(seeds: dict[int, dict]) -> list[Table | str]:
    drawn = {seed: result["drawn"] for seed, result in seeds.items() if result["drawn"]}
    if not drawn:
        return []
    names = list(next(iter(drawn.values()))["objects_right"])
    lines = [[seed, *(f"{result['objects_right'][row]:.1f}" for row in names)] for seed, result in drawn.items()]
    pairs = [
        [seed, f"{line['a']} less {line['b']}", cell(line["difference"], line["low"], line["high"], "+.1f")]
        for seed, result in drawn.items()
        for line in result["compared"]
        if line["low"] is not None and line["b"] in ("original", "0")
    ]
    return [
        "## Short prompts drawn by toy/sdxl: objects right, %",
        Table(["seed", *names], lines),
        Table(["seed", "encoders", "difference"], pairs),
    ]


def main() -> None:
    arguments = read_options(
        __doc__,
        seeds=[0, 1, 2, 3, 4],
        steps=150,  # of each row
        base_steps=1500,  # of the base model
        prompts=100,  # that each of some rows draws; 0: none
        more=False,
        output=Path("runs/fix-clip"),
    )
    rows = TABLE_4 | (MORE if arguments.more else {})
    output = arguments.output / f"steps-{arguments.steps}-base-{arguments.base_steps}"
    base = make_base(arguments.output / f"base-{arguments.base_steps}", arguments.base_steps)
    write_pairs(output / "pairs", HELD_OUT, TRAINED_ON, "train-2")  # before any seed, so that none sees half of them
    if not arguments.seeds:
        return
    seeds = {}
    for number, seed in enumerate(arguments.seeds):
        draws = number < DRAWN_SEEDS
        of_seed = {row: flags for row, flags in rows.items() if draws or row not in FIRST_SEEDS}
        seeds[seed] = run_seed(base, of_seed, seed, arguments.steps, arguments.prompts if draws else 0, output)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    machines = sorted({row["machine"] for result in seeds.values() for row in result["rows"].values()})
    summary = {
        seed: {"drawn": result["drawn"], "rows": {row: _shortened(of_row) for row, of_row in result["rows"].items()}}
        for seed, result in seeds.items()
    }
    publish("fix_clip", {"machines": machines, "settings": settings, "seeds": summary}, *tables(seeds))


def _shortened(result: dict) -> dict:
    """A row's result with the means of its scores in the place of every query's."""
    return result | {"scores": {name: round(float(np.mean(values)), 4) for name, values in result["scores"].items()}}


if __name__ == "__main__":
    main()
