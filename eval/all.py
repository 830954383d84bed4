"""Every evaluation that the settings allow, in one command, and one page of all results."""

import os
from pathlib import Path
from typing import Any

import torch

from debias_diffusion.data import is_toy_scenes
from debias_diffusion.errors import UserError

from .attention import AttentionConfig, evaluate_attention
from .classification import ClassificationConfig, evaluate_classification
from .images.generation import GenerationConfig, evaluate_generation, load_networks
from .options import AllConfig, ReportConfig
from .page import evaluate_report
from .retrieval import RetrievalConfig, evaluate_retrieval
from .robustness import RobustnessConfig, evaluate_robustness
from .settings import ORIGINAL, READINGS, split_reading

EVALUATE = {
    "retrieval": evaluate_retrieval,
    "robustness": evaluate_robustness,
    "attention": evaluate_attention,
    "generation": evaluate_generation,
    "classification": evaluate_classification,
}
TOY_BASE, TOY_FEATURES = "toy/sdxl", "toy/features"
TOY_CLIP = "toy/clip"  # the text encoder of toy/sdxl
DRAWN, DRAWN_TOY = 1000, 200  # images of each encoder


def evaluate_all(config: AllConfig) -> Path:
    """Runs every evaluation that the settings allow, one after the other, and writes one page of all results.

    Returns:
        The path of report.html.

    Raises:
        UserError: a setting cannot be used.
    """
    settings = settings_of_all(config)
    for number, (name, evaluation) in enumerate(settings.items(), 1):
        print(f"\n[{number}/{len(settings)}] {name}", flush=True)
        EVALUATE[name](evaluation)
    return evaluate_report(ReportConfig(config.output))


def settings_of_all(config: AllConfig) -> dict[str, Any]:
    """The settings of each evaluation that `config` allows, by its name in `EVALUATE`, in the order to run them.

    Raises:
        UserError: a setting cannot be used, or a network cannot be loaded, which should not stop a run later.
    """
    _check(config)
    common = {name: getattr(config, name) for name in ("output", "data", "batch_size", "device")}
    common["encoders"] = _of_texts(config.encoders)
    pairs = common | {"images": config.images, "limit": config.limit, "held_out": config.held_out}
    settings = {
        "retrieval": RetrievalConfig(**pairs),
        "robustness": RobustnessConfig(**pairs),
        "attention": AttentionConfig(**common, limit=config.limit),
    }
    toy_base = TOY_BASE if is_toy_scenes(config.data) else None
    base = toy_base if config.base == "auto" else config.base
    if base is not None:
        settings["generation"] = _generation(config, base, common)
        load_networks(settings["generation"], torch.device("cpu"))
    if config.classification is not None:
        options = {"dataset": config.classification, "data": config.classification_data}
        settings["classification"] = ClassificationConfig(**(common | options))
    return settings


def _generation(config: AllConfig, base: str, common: dict) -> GenerationConfig:
    scores = {name: getattr(config, name) for name in ("inception_weights", "dino", "own_features", "clip_score")}
    if is_toy_scenes(config.data):
        scores = {"dino": TOY_FEATURES, "own_features": TOY_FEATURES} | {k: v for k, v in scores.items() if v}
    drawn = (DRAWN_TOY if base == TOY_BASE else DRAWN) if config.drawn == "auto" else config.drawn
    limit = drawn if config.limit is None else min(drawn, config.limit)
    drawn_by = {
        name: split_reading(name)[0] + ORIGINAL for name in config.encoders if split_reading(name)[1] == TOY_CLIP
    }
    encoders = [drawn_by.get(name, name) if base == TOY_BASE else name for name in config.encoders]
    common = common | {"encoders": list(dict.fromkeys(encoders))}
    return GenerationConfig(**common, images=config.images, limit=limit, held_out=config.held_out, base=base, **scores)


def _check(config: AllConfig) -> None:
    """Raises UserError for settings that would otherwise fail after minutes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "evaluate all runs in one process. To draw on several GPUs, run `accelerate launch -m "
            "debias_diffusion.app.cli evaluate generation` with the same output first; its pictures are then there."
        )
    if (config.classification is None) != (config.classification_data is None):
        raise UserError(
            f"classification is {config.classification!r} and classification_data {config.classification_data!r}. Give "
            "both, the benchmark and its folder, or neither."
        )
    if config.encoders and not _of_texts(config.encoders):
        raise UserError(
            f"encoders={config.encoders} has none for texts: {ORIGINAL!r}, and names that begin with "
            f"{' or '.join(map(repr, READINGS))}, are for images only. Name another one, or run "
            "`evaluate generation` alone."
        )
    if config.drawn != "auto" and config.drawn < 1:
        raise UserError(f"drawn={config.drawn} is not allowed. Give a number from 1, or --base null to draw none.")


def _of_texts(encoders: list[str]) -> list[str]:
    return [name for name in encoders if name != ORIGINAL and not split_reading(name)[0]]
