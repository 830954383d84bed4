"""The toy models that come with the package: all are there, small, and read what they should."""

import json

import pytest

from debias_diffusion.encoders import load_text_encoder
from debias_diffusion.models.shipped import NAMES, WEIGHTS, shipped
from debias_diffusion.toymodels.fine_tuning import RECIPES

MOST_BYTES = 24_000_000


def test_all_names_are_there_in_less_than_24_megabytes():
    assert all(name != shipped(name) for name in NAMES)
    assert sum(file.stat().st_size for file in WEIGHTS.rglob("*.safetensors")) < MOST_BYTES
    scores = json.loads((WEIGHTS / "scores.json").read_text())
    assert scores["checker"]["rendered"]["objects"] >= 0.98
    drawn = scores["toy/sdxl"]["plain"]
    assert drawn["objects"] >= 0.95 and drawn["filled"] <= 0.03 and drawn["background"] >= 0.97


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shipped_encoders_read_248_tokens(recipe):
    text_encoder, tokenizer = load_text_encoder(f"toy/{recipe}")
    assert text_encoder.config.max_position_embeddings == tokenizer.model_max_length == 248
