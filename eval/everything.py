"""Every evaluation that the settings allow, in one command, and one page of all results."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from debias_diffusion.data import is_toy_scenes
from debias_diffusion.errors import UserError
from debias_diffusion.models.shipped import TWO_TOWERS

from .common.encoders import OVERLAP, READINGS, split_reading
from .common.inputs import check_output
from .merged_report import ReportConfig, evaluate_report
from .pictures.generation import GenerationConfig, evaluate_generation, load_networks
from .text_image.attention import AttentionConfig, evaluate_attention
from .text_image.classification import ClassificationConfig, evaluate_classification
from .text_image.retrieval import RetrievalConfig, evaluate_retrieval
from .text_image.robustness import RobustnessConfig, evaluate_robustness

EVALUATE = {
    "retrieval": evaluate_retrieval,
    "robustness": evaluate_robustness,
    "attention": evaluate_attention,
    "generation": evaluate_generation,
    "classification": evaluate_classification,
}
TOYS = (TWO_TOWERS[0], OVERLAP + TWO_TOWERS[0], *TWO_TOWERS[1:])
TOY_BASE, TOY_FEATURES = "toy/sdxl", "toy/features"
DRAWN, DRAWN_TOY = 1000, 200  # images of each encoder


@dataclass
class AllConfig:
    """Settings of all evaluations. Without any, the toy world's encoders are evaluated on its scenes.

    Attributes:
        encoders: CLIP models to compare: training runs, folders, files, hub ids, MODEL:PRETRAINED as open_clip names
            them (ViT-B-16-quickgelu:openai), toy/clip, toy/long-clip, toy/debias-clip. For images, their text encoders
            take the place of SDXL's first. overlap:NAME and chunks:NAME are for images only: there NAME, an encoder
            of 77 positions, reads long prompts in overlapping chunks, or in others, instead of cutting them.
        output: Folder for the results, and for report.html. What is finished there is not done again.
        data: JSON file in ShareGPT4V's layout, JSONL file, folder of WebDataset shards, folder of images with captions
            beside them, or toy/test, scenes of the toy world.
        images: Folder that the data file's image paths start from; only for JSON and JSONL.
        limit: Use only the first so many pairs. null uses all.
        drawn: Generate images of only the first so many of these. auto is 1000, as many as Table S7 of the DeBias-CLIP
            paper has, and 200 with toy/sdxl.
        base: SDXL folder in diffusers' layout, or a hub id, to draw with. Without it no pictures are drawn; auto is
            toy/sdxl for scenes of the toy world, and none for other data.
        inception_weights: File of torch-fidelity's Inception weights, for FID and its kin.
        dino: Folder or hub id of DINO ViT-S/16 in transformers' layout (facebook/dino-vits16), for the DINO score.
        own_features: Network in place of Inception: a folder of a transformers vision model. Its scores compare with
            nothing published. Scenes of the toy world have toy/features in place of both.
        clip_score: CLIP model for CLIPScore, named as in encoders.
        classification: A classification benchmark: imagenet-1k, imagenet-v2, imagenet-a, imagenet-o, cifar-10 or
            cifar-100.
        classification_data: Its folder, as its authors publish it.
        batch_size: Images, or captions, encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    output: str = "runs/evaluation"
    data: str = "toy/test"
    images: str | None = None
    limit: int | None = 1000
    drawn: int | Literal["auto"] = "auto"
    base: str | None = "auto"
    inception_weights: str | None = None
    dino: str | None = None
    own_features: str | None = None
    clip_score: str | None = None
    classification: str | None = None
    classification_data: str | None = None
    batch_size: int = 64
    device: str | None = None


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
    check_output(config.output)
    _check(config)
    common = {name: getattr(config, name) for name in ("output", "data", "batch_size", "device")}
    common["encoders"] = _of_texts(config.encoders)
    pairs = common | {"images": config.images, "limit": config.limit}
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
    common = common | {"encoders": config.encoders}
    return GenerationConfig(**common, images=config.images, limit=limit, base=base, **scores)


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
            f"encoders={config.encoders} has none for texts: with {' or '.join(map(repr, READINGS))} an encoder is for "
            "images only. Name one without it, or run `evaluate generation` alone."
        )
    if config.drawn != "auto" and config.drawn < 1:
        raise UserError(f"drawn={config.drawn} is not allowed. Give a number from 1, or --base null to draw none.")


def _of_texts(encoders: list[str]) -> list[str]:
    return [name for name in encoders if not split_reading(name)[0]]
