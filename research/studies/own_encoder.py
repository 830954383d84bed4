"""Toy checkpoints whose first text encoder was trained with its UNet: which encoder for long prompts do they need?

    python -m research.studies.own_encoder [--output runs/own-encoder] [--distances near far] [--steps 800]
    python -m research reproduce own-encoder --papers research/studies --world own-encoder --root runs/own-encoder/near

toy/sdxl is trained further as people fine-tune SDXL: its UNet and, through the penultimate hidden states that the UNet
reads, its first encoder, on captions cut at 77 tokens, at two rates. Leaves for each `sdxl`, the checkpoint, and
`clip`, toy/clip with the checkpoint's text tower, and prints how far its hidden states are from toy/clip's: 1 is what
replacing each state by the mean of its caption's states would give. A second a step on one core; it continues where it
was killed.
"""

import copy
from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline

from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.encoders.text_encoders import import_text_encoder
from debias_diffusion.files import write_json
from debias_diffusion.methods.keep_states import relative_error
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.shipped import shipped
from research.toymodels import sdxl
from research.toymodels.fine_tuned import encode_for_both, train_both
from research.toymodels.unet import draw_pair

from .harness import read_options

RATES = {"near": 2e-4, "far": 1e-3}
PAIRS, FIRST = 8000, 500_000  # captions that no other toy model has learned from


@torch.no_grad()
def state_error(before: torch.nn.Module, after: torch.nn.Module, tokenizer, count: int = 100) -> float:
    """The mean over captions of `relative_error` between two encoders' penultimate states of SOT and the words."""
    texts = [clean(draw_pair(index)[1].text) for index in range(FIRST - count, FIRST)]
    rows = [torch.tensor([ids[:-1]]) for ids in tokenizer(texts, truncation=True).input_ids]
    pairs = ([each(ids, output_hidden_states=True).hidden_states[-2][0] for each in (after, before)] for ids in rows)
    return sum(float(relative_error(*pair)) for pair in pairs) / count


def make(folder: Path, rate: float, steps: int) -> float:
    """Leaves the checkpoint of a rate, and the two-tower with its text tower; returns its `state_error`."""
    pipe = StableDiffusionXLPipeline.from_pretrained(shipped("toy/sdxl"))
    before, clip = copy.deepcopy(pipe.text_encoder), load_two_tower("toy/clip")
    train_both(folder / "stage", pipe, encode_for_both(pipe, PAIRS, FIRST), steps=steps, peak=rate)
    error = state_error(before, pipe.text_encoder, pipe.tokenizer)
    write_json(folder / "made.json", {"rate": rate, "steps": steps, "state_error": error})
    import_text_encoder(clip, pipe.text_encoder)
    clip.save(folder / "clip")
    sdxl.save(pipe, folder / "sdxl")
    return error


if __name__ == "__main__":
    options = read_options(__doc__, output="runs/own-encoder", distances=[*RATES], steps=800)
    for name in options.distances:
        print(f"{name}: state error {make(Path(options.output, name), RATES[name], options.steps):.2f}")
