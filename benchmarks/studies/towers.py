"""Is a text tower without a causal mask more biased towards the opening? In the toy world.

    python benchmarks/studies/towers.py [--seeds 0 1 2 3 4] [--steps 500] [--output runs/causal-mask]

The paper compares CLIP, whose text tower has a causal mask, with SigLIP, whose tower has none (Figures 2, 3, S1 and
S2), but the two also differ in data, loss, tokenizer, pooling and context length. Here nothing but the mask differs:
two text towers with the same first weights learn the same short captions in the same order, against the image features
of toy/clip, which are frozen. EOT is pooled; without the mask it, and every token, sees the whole caption, but no pads.

Each tower is scored on 1,000 scenes that no model has seen, others for each seed: R@1 text to image of whole captions,
of the first two sentences, and with sentences swapped, removed, or behind padding sentences. Finished towers are kept,
and seeds may run side by side. Prints the tables and writes them to benchmarks/results/ as causal_mask.md, with the
numbers as .json.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))
from harness import CPU, publish, read_options
from machine import machine

from debias_diffusion.data.toy_scenes import read_toy_scenes
from debias_diffusion.encoders import load_two_tower
from debias_diffusion.eval.report import Table
from debias_diffusion.eval.robustness import edit_caption
from debias_diffusion.files import atomic_file, write_json
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.retrieval import encode_images, recall_ranks
from debias_diffusion.toymodels.clip import draw_indices, draw_text, new_clip, render_all
from debias_diffusion.toymodels.stage import run_stage
from debias_diffusion.toyworld.scenes import base_scene

TEACHER = "toy/clip"
SCENES, BATCH = 8000, 64
LOG_100 = math.log(100)
MASKS = {"causal mask": True, "no mask": False}
EDITS = ("keep", "move4", "remove", "first2", "swap2", "padding1", "padding5")
# What an edit is compared with.
BASES = {"move4": "keep", "remove": "keep", "swap2": "first2", "padding1": "first2", "padding5": "first2"}


def encode(backbone: Backbone, texts: list[str], causal: bool) -> Tensor:
    """Text features [len(texts), embed_dim]."""
    tokens = backbone.tokenize(texts)
    lengths = tokens.n_prefix + tokens.lengths  # SOT and EOT included
    ids = tokens.padded()[:, : lengths.max()]
    model, length = backbone.model, ids.shape[1]
    seen = (torch.arange(length) < lengths[:, None])[:, None].expand(-1, length, -1)
    if causal:
        seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
    # A pad's row may not be empty: softmax over nothing has no gradient.
    seen = seen | torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    mask = mask.repeat_interleave(model.transformer.resblocks[0].attn.num_heads, dim=0)
    hidden_states = model.token_embedding(ids) + model.positional_embedding[:length]
    for block in model.transformer.resblocks:
        hidden_states = block(hidden_states, attn_mask=mask)
    return model.ln_final(hidden_states)[torch.arange(len(ids)), lengths - 1] @ model.text_projection


def image_features(teacher: Backbone, file: Path) -> Tensor:
    """toy/clip's features of the scenes to learn from, [SCENES, embed_dim], of length 1."""
    if not file.is_file():
        pixels = render_all([base_scene(index) for index in range(SCENES)], teacher)
        parts = [teacher.encode_image(part) for part in tqdm(pixels.split(250), desc="image features")]
        with atomic_file(file) as unfinished:
            save_file({"features": F.normalize(torch.cat(parts), dim=-1).contiguous()}, unfinished)
    return load_file(file)["features"]


def train_tower(folder: Path, teacher: Backbone, causal: bool, seed: int, steps: int, features: Tensor) -> Backbone:
    """A text tower learned from nothing, beside toy/clip's image tower."""
    backbone = new_clip(teacher.tokenizer.tokenizer, seed)
    backbone.model.visual.load_state_dict(teacher.model.visual.state_dict())
    backbone.model.visual.requires_grad_(False)

    def loss(step: int) -> Tensor:
        indices = draw_indices(SCENES, BATCH, seed, step)
        captions = [draw_text(index, f"short/{seed}/{step}") for index in indices]
        text = F.normalize(encode(backbone, captions, causal), dim=-1)
        return contrastive_loss(
            features[torch.from_numpy(indices)], text, backbone.logit_scale.clamp(max=LOG_100).exp()
        )

    run_stage(folder, backbone.model, loss, steps=steps, peak=1e-3, weight_decay=0.1)
    return backbone.eval()


@torch.inference_mode()
def score(backbone: Backbone, images: Tensor, captions: list[str], causal: bool) -> dict[str, float]:
    """R@1 text to image in percent, by edit."""
    recall = {}
    for edit in EDITS:
        texts = [edit_caption(caption, edit) for caption in captions]
        parts = [encode(backbone, texts[start : start + 100], causal) for start in range(0, len(texts), 100)]
        ranks = recall_ranks(images, torch.cat(parts))["text_to_image"]
        recall[edit] = 100 * (ranks == 1).double().mean().item()
    return recall


def run_seed(output: Path, seed: int, steps: int) -> None:
    """Trains and scores both towers of a seed, where that is not done."""
    teacher = load_two_tower(TEACHER)
    output.mkdir(parents=True, exist_ok=True)
    features = image_features(teacher, output / "features.safetensors")
    captions, scenes = read_toy_scenes(f"toy/test-{seed}")
    images, _, _ = encode_images(teacher, captions.records, scenes, 250, "cpu")
    texts = [record.caption for record in captions.records]
    for name, causal in MASKS.items():
        folder = output / f"seed-{seed}" / name.replace(" ", "-")
        if not (folder / "scores.json").is_file():
            backbone = train_tower(folder, teacher, causal, seed, steps, features)
            write_json(
                folder / "scores.json",
                {"steps": steps, "machine": machine(CPU)} | score(backbone, images, texts, causal),
            )


def with_shares(scores: dict) -> dict:
    """Recalls with the share of R@1 that each edit takes, in percent: towers that retrieve less have less to lose."""
    lost = {f"lost {edit}": 100 * (1 - scores[edit] / scores[base]) for edit, base in BASES.items()}
    return {name: scores[name] for name in ("steps", "machine", *EDITS)} | lost


def tables(scores: dict[int, dict[str, dict]]) -> list[Table]:
    """R@1 by edit, and the share lost: means over seeds, with the standard deviation."""

    def row(name: str, keys: tuple[str, ...]) -> list[str]:
        by_key = ([of_seed[name][key] for of_seed in scores.values()] for key in keys)
        spread = statistics.stdev if len(scores) > 1 else lambda values: 0.0
        return [name, *(f"{statistics.mean(values):.1f} ± {spread(values):.1f}" for values in by_key)]

    shares = tuple(f"lost {edit}" for edit in BASES)
    header = ["share of R@1 lost, %", *(f"{edit}, of {base}" for edit, base in BASES.items())]
    recall = Table(["R@1, %", *EDITS], [row(name, EDITS) for name in MASKS])
    return [recall, Table(header, [row(name, shares) for name in MASKS])]


def main() -> None:
    arguments = read_options(__doc__, seeds=[0, 1, 2, 3, 4], steps=500, output=Path("runs/causal-mask"))
    output, scores = arguments.output / f"steps-{arguments.steps}", {}
    for seed in arguments.seeds:
        run_seed(output, seed, arguments.steps)
        files = {name: output / f"seed-{seed}" / name.replace(" ", "-") / "scores.json" for name in MASKS}
        scores[seed] = {name: with_shares(json.loads(file.read_text())) for name, file in files.items()}
    publish("causal_mask", {"steps": arguments.steps, "seeds": scores}, *tables(scores))


if __name__ == "__main__":
    main()
