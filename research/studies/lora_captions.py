"""LoRAs of the toy UNet, trained on captions read whole and on captions cut at 77 tokens, drawn with whole prompts.

    python -m research.studies.lora_captions [--seeds 20 21 22 23] [--steps 250] [--rate 3e-4] [--prompts 50]

Each seed has training scenes, prompts and noise of its own; both LoRAs see the same images in the same order. Whole:
SDXL's own encoders in overlapping chunks, all at 227 positions, as `encode --positions 227` gives them. Of the rates
1e-3 and 3e-4 this is the one with the higher sum of both LoRAs' objects right on seed 0, with 40 prompts. It takes ten
minutes on one core.

Writes research/results/lora_captions.md and .json.
"""

import torch
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import trange

from debias_diffusion.encoders.spec import ORIGINAL
from debias_diffusion.eval.report import Table
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import scene
from research.toymodels.unet import denoising_loss, encode_pairs, in_training

from .drawing import SCORES, LongPrompts, draw_texts, pipeline_of
from .harness import publish, read_options

WHOLE = {"reading": "overlap", "positions": 227}
CAPTIONS = {"no LoRA": None, "cut captions": {"reading": "cut"}, "whole captions": WHOLE}
TITLES = {score: title for score, title in SCORES.items() if score != "empty_filled"}
BATCH, RANK = 16, 16


def train_lora(pipe, seed: int, pairs: int, steps: int, rate: float) -> None:
    """Trains a new LoRA on captions as the pipeline reads them, in place."""
    data = encode_pairs(pipe, pairs, draw=lambda at: (scene(f"train-{seed}", at), caption(f"train-{seed}", at)))
    torch.manual_seed(seed)  # of the LoRA's weights
    pipe.unet.requires_grad_(False).add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    )
    optimizer = torch.optim.AdamW([weight for weight in pipe.unet.parameters() if weight.requires_grad], lr=rate)
    loss = denoising_loss(pipe, BATCH, seed, compiled=False)
    with in_training(pipe.unet), sdpa_kernel(SDPBackend.MATH):
        for step in trange(steps, desc="training"):
            loss(data, step).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    options = read_options(__doc__, seeds=[20, 21, 22, 23], pairs=600, steps=250, rate=3e-4, prompts=50)
    shown = {name: [] for name in CAPTIONS}
    for seed in options.seeds:
        prompts = LongPrompts([f"test-{seed}"], options.prompts)
        for name, reading in CAPTIONS.items():
            pipe = pipeline_of(ORIGINAL)
            if reading:
                train_lora(pipe.set_long_prompt(**reading), seed, options.pairs, options.steps, options.rate)
            shown[name] += prompts.read(draw_texts(pipe.set_long_prompt(**WHOLE), prompts.texts))
    prompts = LongPrompts([f"test-{seed}" for seed in options.seeds], options.prompts)
    rows = {name: prompts.scores(of_lora) for name, of_lora in shown.items()}
    cells = [[name, *(f"{row[score]['value']:.1f}" for score in TITLES)] for name, row in rows.items()]
    less = prompts.differences(shown["whole captions"], shown["cut captions"])
    ends = [f"{less[score]['low']:+.1f} to {less[score]['high']:+.1f}" for score in TITLES]
    cells.append(["whole less cut (95%)", *ends])
    table = Table(["LoRA trained on", *TITLES.values()], cells)
    publish("lora_captions", vars(options) | {"rows": rows, "whole less cut": less}, table)
