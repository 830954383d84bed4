"""Models with the best set of suppressed text heads, of all blocks that SDXL reads, for their images.

    python -m research.studies.heads [--output runs/heads]
    python -m research reproduce ablation-sdxl --papers research/studies --world toy --root runs/heads

`ablate` searches all blocks, and SDXL does not read the last one. The set that maximises the robust fitness, with beta
0, is written as an ablation that every command takes as a model.
"""

from pathlib import Path

import torch

from debias_diffusion.ablation.heads import Ablation
from debias_diffusion.ablation.saved import FILE
from debias_diffusion.data.retrieval import encode_images
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.eval.caption_edits import edit_caption

from ..ablate.command import write_ablation
from ..ablate.population import Population
from ..ablate.problems import Problem, every_mask
from .harness import read_options

MODELS, EDITS = ("clip", "long-clip", "debias-clip"), ("keep", "move4", "remove")
PAIRS, BATCH = 100, 50


@torch.inference_mode()
def suppress_best_heads(model: str, folder: Path, pairs: int = PAIRS) -> Ablation:
    """Writes the model with its best heads suppressed into `folder`."""
    backbone = load_two_tower(model).eval()
    captions, images = open_data("toy/validation", None)
    records = captions.records[:pairs]
    features, _, _ = encode_images(backbone, records, images, 100, "cpu", f"images, {model}")
    texts = {edit: [edit_caption(record.caption, edit) for record in records] for edit in EDITS}
    starts = range(0, len(records), BATCH)
    batches = {edit: [backbone.tokenize(part[at : at + BATCH]) for at in starts] for edit, part in texts.items()}
    problem = Problem(Population(backbone.text, 0.0), features, batches)
    blocks, heads = problem.shape
    read = every_mask(blocks - 1, heads)
    masks = torch.cat([read, torch.zeros(len(read), heads, dtype=torch.bool)], dim=1)
    best = masks[problem.fitness(problem.encode(masks), None).argmax()].view(blocks, heads)
    ablation = Ablation.of_rows("text", 1.0 - best.double())
    folder.mkdir(parents=True, exist_ok=True)
    write_ablation(folder / FILE, model, backbone, ablation)
    return ablation


if __name__ == "__main__":
    output = read_options(__doc__, output=Path("runs/heads")).output
    for name in MODELS:
        print(f"toy/{name}: {', '.join(suppress_best_heads(f'toy/{name}', output / f'heads-{name}').names) or 'none'}")
