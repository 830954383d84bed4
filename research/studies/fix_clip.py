"""Fix-CLIP in the toy world: what each part does, as the paper's Table 4 has it, and where the paper is silent.

    python -m research.studies.towers --base runs/fix-clip        # the base model and the pairs, made once
    python -m research.studies.fix_clip [--tables fix-clip-parts fix-clip-more fix-clip-images] [--seeds 0 1 2 3 4]

`python -m research reproduce` of research/studies/fix-clip-*.yaml, with an evaluation that needs more than a model: its
kind "fix-clip" scores a training on 500 scenes that no model has seen, others for each seed: R@1 of long captions, of
short captions, of summaries against whole and against masked images; each group's features alone, by the towers' final
projections ("start") and by the trained heads ("group"), with their losses; and how far hidden states of short captions
are from the base model's, as a share of their variance ("drift").
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.image_tower import MaskedPatches
from debias_diffusion.data.retrieval import recall_ranks
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.retrieval import hits
from debias_diffusion.jobs import Job
from debias_diffusion.methods.fix_clip import GroupHeads, GroupLosses, draw_mask
from debias_diffusion.methods.keep_states import relative_error, without_eot
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import generator, scene
from research.options import ReproduceConfig
from research.reproduce.listing import reproduce
from research.reproduce.measuring import KINDS, Scores
from research.toymodels.clip import render_all
from research.toymodels.scenes import short_caption

from .harness import read_options

HIERARCHY, MASK_RATIO = GroupLosses(groups=3, first=2), 0.75
SCENES, BATCH = 500, 100


@torch.inference_mode()
def fix_clip_scores(settings: dict) -> Scores:
    """Of each query 0 or 100, of each short caption its drift, and the last losses; settings: `split` and `base`."""
    [run], split = settings["encoders"], settings["split"]
    backbone, base = load_two_tower(run), load_two_tower(settings["base"])
    texts = unseen_texts(split)
    modules = method_modules(Path(run))
    discard = Job.read(run).settings.get("masked_patches") == "discard"
    images, masked, image_states = encode_images(backbone, split, modules, discard)
    blocks = HIERARCHY.blocks(len(backbone.text.tower.transformer.resblocks))
    encoded = {name: _batched(of_kind, backbone.tokenize, backbone.encode_text) for name, of_kind in texts.items()}
    scores = {name: _hits(images, encoded[name]) for name in texts} | {"masked": _hits(masked, encoded["summary"])}
    scores["drift"] = _drift(backbone, base, texts["short"])
    text_states = _batched(texts["long"], backbone.tokenize, lambda ids: backbone.text.encode(ids, blocks)[1])
    states = {"image": image_states, "text": text_states}
    for kind, heads in _heads(backbone, modules).items():
        features = [heads[tower](HIERARCHY.aggregate(of_tower)) for tower, of_tower in states.items()]
        for at, group in enumerate(HIERARCHY.numbers):
            scores[f"{kind} {group}"] = _hits(*(part[:, at] for part in features))
    return scores | _last_losses(Path(run))


def unseen_texts(split: str) -> dict[str, list[str]]:
    """Long captions of a split's scenes, short ones, and the first sentences of the long ones."""
    long, scenes = [caption(split, index) for index in range(SCENES)], [scene(split, index) for index in range(SCENES)]
    short = [short_caption(drawn, generator(split, index, "short")) for index, drawn in enumerate(scenes)]
    return {
        "long": [text.text for text in long],
        "short": [text.text for text in short],
        "summary": [text.sentences[0].text for text in long],
    }


def encode_images(backbone: Backbone, split: str, modules: dict[str, Tensor], discard: bool) -> Iterable[Tensor]:
    """Features of whole and of masked images, and CLS after each group's block."""
    tower, parts = backbone.image, []
    images = render_all([scene(split, index) for index in range(SCENES)], backbone)
    is_masked = torch.stack([draw_mask(MASK_RATIO, tower.patches, 0, 0, f"{split}/{at}") for at in range(SCENES)])
    vector = modules.get("mask.vector", torch.zeros_like(backbone.model.visual.class_embedding))
    for pixels, rows in zip(images.split(BATCH), is_masked.split(BATCH), strict=True):
        patches = MaskedPatches(rows, None if discard else vector)
        parts.append(tower.encode_with_masked(backbone.as_floats(pixels), HIERARCHY.blocks(tower.depth), patches))
    return (torch.cat(part) for part in zip(*parts, strict=True))


def method_modules(run: Path) -> dict[str, Tensor]:
    """What the method has trained beside the towers, from the newest checkpoint; none of the base model."""
    files = sorted(run.glob("checkpoint-*"))
    return torch.load(files[-1], weights_only=True).get("modules", {}) if files else {}


def _hits(images: Tensor, texts: Tensor) -> list[float]:
    return hits(recall_ranks(images, texts)["text_to_image"], 1).tolist()


def _batched(texts: Sequence[str], tokenize, encode) -> Tensor:
    return torch.cat([encode(tokenize(texts[start : start + BATCH])) for start in range(0, len(texts), BATCH)])


def _heads(backbone: Backbone, modules: dict[str, Tensor]) -> dict[str, dict[str, GroupHeads]]:
    """ "start": the towers' final projections, which every row has; "group": the trained ones, else those."""
    projections = {"image": backbone.model.visual.proj, "text": backbone.text.tower.text_projection}
    heads = {"start": {}, "group": {}}
    for tower, projection in projections.items():
        for kind in heads:
            heads[kind][tower] = GroupHeads(projection, len(HIERARCHY.numbers))
        prefix = f"{tower}_heads."
        state = {name.removeprefix(prefix): part for name, part in modules.items() if name.startswith(prefix)}
        heads["group"][tower].load_state_dict(state or heads["start"][tower].state_dict())
    return heads


def _drift(backbone: Backbone, base: Backbone, texts: Sequence[str]) -> list[float]:
    errors = []
    for text in texts:
        ids = base.tokenizer.text_ids([text])
        before, after = (
            torch.cat(reader.text.token_states(without_eot(ids, reader.tokenizer))) for reader in (base, backbone)
        )
        errors.append(relative_error(after, before).item())
    return errors


def _last_losses(run: Path) -> Scores:
    """The mean of each logged loss over the last fifth of a run."""
    log = run / "log.jsonl"
    read = map(json.loads, log.read_text().splitlines() if log.is_file() else ())
    lines = [line for line in read if "loss" in line]
    lines = lines[-max(1, len(lines) // 5) :]
    names = [name for name in (lines[0] if lines else {}) if name in ("long", "short") or name.startswith("group_")]
    return {f"loss {name}": float(np.mean([line[name] for line in lines])) for name in names}


KINDS["fix-clip"] = fix_clip_scores

if __name__ == "__main__":
    names, folders = ["fix-clip-parts", "fix-clip-images"], {"root": "runs/fix-clip", "output": "runs/studies"}
    given = read_options(__doc__, tables=names, seeds=[0, 1], **folders)
    options = {"papers": "research/studies", "world": "fix-clip", "device": "cpu"}
    reproduce(ReproduceConfig(given.tables, root=given.root, output=given.output, seeds=given.seeds, **options))
