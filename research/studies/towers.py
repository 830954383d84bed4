"""Is a text tower without a causal mask more biased towards the opening? And a base model of 36 patches for Fix-CLIP.

    python -m research.studies.towers [--seeds 0 1 2 3 4] [--steps 500] [--output runs/causal-mask]
    python -m research.studies.towers --base runs/fix-clip [--steps 1500]

The paper compares CLIP, whose text tower has a causal mask, with SigLIP, whose tower has none (Figures 2, 3, S1 and
S2), but the two also differ in data, loss, tokenizer, pooling and context length. Here nothing but the mask differs:
two text towers with the same first weights learn the same short captions in the same order, against the image features
of toy/clip, which are frozen. EOT is pooled; without the mask it, and every token, sees the whole caption, but no pads.

Each tower is scored on 1,000 scenes that no model has seen, others for each seed: R@1 text to image of whole captions,
of the first two sentences, and with sentences swapped, removed, or behind padding sentences. Finished towers are kept,
and seeds may run side by side. Prints the tables and writes them to research/results/ as causal_mask.md, with the
numbers as .json.

With --base, the base model that `fix_clip.py` trains from, and its pairs. The shipped toy CLIP has nine patches, one an
object; this one has toy/clip's text tower, so that toy/sdxl can read it, and an image tower of six blocks and 36
patches of 8 pixels, which learns toy/clip's image features. An object's place is 2 x 2 patches.
"""

import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.data.retrieval import encode_images, recall_at_k
from debias_diffusion.data.toy_scenes import read_toy_scenes
from debias_diffusion.devices import pick_device
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.caption_edits import edit_caption
from debias_diffusion.eval.report import Table
from debias_diffusion.files import read_json, write_json
from debias_diffusion.jobs import Job
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.toyworld.pairs import write_pairs
from research.toymodels.clip import draw_indices, draw_text, new_clip, render_all
from research.toymodels.scenes import base_scene
from research.toymodels.stage import run_stage

from .harness import CPU, machine_name, publish, read_options

TEACHER = "toy/clip"
SCENES, BATCH = 8000, 64
MASKS = {"causal mask": True, "no mask": False}
EDITS = ("keep", "move4", "remove", "first2", "swap2", "padding1", "padding5")
# What an edit is compared with.
BASES = {"move4": "keep", "remove": "keep", "swap2": "first2", "padding1": "first2", "padding5": "first2"}
VISION, HELD_OUT, TRAINED_ON = {"layers": 6, "patch_size": 8}, 100, 3000  # of Fix-CLIP's base model, and its pairs


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


@torch.inference_mode()
def teacher_features(teacher: Backbone, pixels: Tensor) -> Tensor:
    """toy/clip's features of scenes, [len(pixels), embed_dim], of length 1."""
    return F.normalize(torch.cat([teacher.encode_image(part) for part in pixels.split(250)]), dim=-1).clone()


def train_tower(folder: Path, teacher: Backbone, causal: bool, seed: int, steps: int, features: Tensor) -> Backbone:
    """A text tower learned from nothing, beside toy/clip's image tower."""
    backbone = new_clip(teacher.tokenizer.tokenizer, seed)
    backbone.model.visual.load_state_dict(teacher.model.visual.state_dict())
    backbone.model.visual.requires_grad_(False)

    def loss(step: int) -> Tensor:
        indices = draw_indices(SCENES, BATCH, seed, step)
        captions = [draw_text(index, f"short/{seed}/{step}") for index in indices]
        text = F.normalize(encode(backbone, captions, causal), dim=-1)
        scale = backbone.logit_scale.clamp(max=math.log(100)).exp()
        return contrastive_loss(features[torch.from_numpy(indices)], text, scale)

    run_stage(folder, backbone.model, loss, steps=steps, peak=1e-3, weight_decay=0.1)
    return backbone.eval()


@torch.inference_mode()
def score(backbone: Backbone, images: Tensor, captions: list[str], causal: bool) -> dict[str, float]:
    """R@1 text to image in percent, by edit."""
    recall = {}
    for edit in EDITS:
        texts = [edit_caption(caption, edit) for caption in captions]
        parts = [encode(backbone, texts[start : start + 100], causal) for start in range(0, len(texts), 100)]
        recall[edit] = recall_at_k(images, torch.cat(parts), [1])["text_to_image"]["R@1"]
    return recall


def run_seed(job: Job, seed: int, steps: int) -> dict[str, dict]:
    """The scores of both towers of a seed, trained where that is not done, with the share of R@1 that each edit takes.

    Towers that retrieve less have less to lose.
    """
    teacher = load_two_tower(TEACHER)

    def encode_scenes(file: Path) -> None:
        save_tensors({"features": teacher_features(teacher, render_all(map(base_scene, range(SCENES)), teacher))}, file)

    features = load_file(job.ensure("features", encode_scenes))["features"]
    captions, scenes = read_toy_scenes(f"toy/test-{seed}")
    results = {}
    for name, causal in MASKS.items():
        folder = job.folder / f"seed-{seed}" / name.replace(" ", "-")

        def write_scores(file: Path, folder=folder, causal=causal) -> None:
            backbone = train_tower(folder, teacher, causal, seed, steps, features)
            images, _, _ = encode_images(teacher, captions.records, scenes, 250, "cpu")
            write_json(file, score(backbone, images, [record.caption for record in captions.records], causal))

        recall = read_json(job.ensure(f"seed-{seed}/{name}", write_scores))
        lost = {f"lost {edit}": 100 * (1 - recall[edit] / recall[base]) for edit, base in BASES.items()}
        results[name] = {"steps": steps, "machine": machine_name(CPU)} | recall | lost
    return results


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


# ---- Fix-CLIP's base model


def make_base(folder: Path, steps: int, scenes: int = SCENES) -> None:
    """Trains the base model, FOLDER/model, and writes the pairs of its fine-tuning, FOLDER/pairs."""
    write_pairs(folder / "pairs", HELD_OUT, TRAINED_ON, "train-2")
    device = pick_device()
    teacher = load_two_tower(TEACHER)
    backbone = _new_base(teacher)
    for reader in (teacher, backbone):
        reader.to(device)
    pixels = render_all([base_scene(index) for index in range(scenes)], teacher).to(device)
    wanted, scale = teacher_features(teacher, pixels), torch.tensor(20.0, device=device)

    def loss(step: int) -> Tensor:
        indices = torch.from_numpy(draw_indices(scenes, BATCH, 0, step)).to(device)
        features, expected = F.normalize(backbone.encode_image(pixels[indices]), dim=-1), wanted[indices]
        return 10 * (1 - (features * expected).sum(dim=-1)).mean() + contrastive_loss(features, expected, scale)

    run_stage(folder / "stage", backbone.model.visual, loss, steps=steps, peak=1e-3, weight_decay=0.1)
    backbone.save(folder / "model")


def _new_base(teacher: Backbone) -> Backbone:
    """toy/clip with another, untrained image tower."""
    backbone = new_clip(teacher.tokenizer.tokenizer, **VISION)
    state = {name: tensor for name, tensor in teacher.model.state_dict().items() if not name.startswith("visual.")}
    backbone.model.load_state_dict(state, strict=False)
    return backbone


def main() -> None:
    arguments = read_options(__doc__, seeds=[0, 1, 2, 3, 4], steps=0, output=Path("runs/causal-mask"), base=None)
    if arguments.base:
        make_base(Path(arguments.base), arguments.steps or 1500)
        return
    steps = arguments.steps or 500
    with Job.open(arguments.output / f"steps-{steps}", "study", {"steps": steps}) as job:
        scores = {seed: run_seed(job, seed, steps) for seed in arguments.seeds}
    publish("causal_mask", {"steps": steps, "seeds": scores}, *tables(scores))


if __name__ == "__main__":
    main()
