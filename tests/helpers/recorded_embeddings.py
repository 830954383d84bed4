"""Embeddings of each reading, reduced to some numbers that were recorded: tests/data/embeddings.jsonl.

    PYTHONPATH=tests python tests/helpers/recorded_embeddings.py > tests/data/embeddings.jsonl

The encoders have SDXL's shape, CLIP's own vocabulary of 49,408 and few, narrow layers. Their weights, and the
directions that embeddings are projected on, are of numpy's frozen generator, so that no version of a library and no
processor changes more than roundings.
"""

import json
import zlib

import numpy as np
import torch
from helpers import tiny_sdxl
from helpers.draw import embed

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.text.chunks import PROGRAMS
from debias_diffusion.text.tokens import clip_tokenizer

READINGS = ("overlap", "separate", "cut", "a1111", "kohya", "comfyui")
PROMPT = (
    "A (small:1.3) red cat sleeps on a blue sofa, next to a window. "
    + "Behind it an old lighthouse stands in the fog, 3.5 miles away; nobody [remembers] who built it (and why). " * 8
    + "BREAK In front of it leans a yellow bicycle, with a café's menu in its basket."
)
NEGATIVE = "blurry, watermark"


def numbers(name: str, *shape: int) -> np.ndarray:
    """Normally distributed, the same for a name everywhere."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


def pipeline() -> StableDiffusionXLLongPromptPipeline:
    parts = tiny_sdxl.sdxl_parts(vocabulary=clip_tokenizer)
    for part in ("text_encoder", "text_encoder_2"):
        for name, weight in parts[part].named_parameters():
            values = numbers(f"{part} {name.removeprefix('text_model.')}", *weight.shape)
            scale = 0.5 if "embedding" in name else weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
            weight.data = torch.tensor(scale * values + ("norm" in name and name.endswith("weight"))).float()
    return tiny_sdxl.assemble(StableDiffusionXLLongPromptPipeline, parts)


@torch.no_grad()
def embeddings(pipe: StableDiffusionXLLongPromptPipeline, reading: str) -> dict[str, torch.Tensor]:
    """The prompt's and the negative prompt's, by their names in diffusers; weights as the program's or ComfyUI's."""
    pipe.set_long_prompt(reading=reading, emphasis=PROGRAMS.get(reading, "comfyui"))
    return {name: value[0] for name, value in embed(pipe, PROMPT, negative_prompt=NEGATIVE).items()}


def projected(name: str, values: torch.Tensor) -> list[float]:
    """On four directions, in which every value counts, each token's differently."""
    directions = numbers(name, 4, *values.shape) / values.numel() ** 0.5
    return [round(float((direction * values.double().numpy()).sum()), 5) for direction in directions]


def record(embeds: dict[str, torch.Tensor]) -> dict:
    return {
        name: {"shape": list(values.shape), "projections": projected(name, values)} for name, values in embeds.items()
    }


if __name__ == "__main__":
    pipe = pipeline()
    print(*(json.dumps([reading, record(embeddings(pipe, reading))]) for reading in READINGS), sep="\n")
