"""Rebuilds the toy world's models from nothing: `python -m debias_diffusion.toymodels.build`.

Each stage leaves its model, log and checkpoint in a folder of its own and is not done again; a stage that was killed
goes on from its last checkpoint. On two cores all of it takes some two hours, half of them the UNet's.
"""

import shutil
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, ViTModel

from ..files import atomic_file, atomic_folder, write_json
from ..interchange import to_transformers
from ..models.backbone import Backbone, load_backbone
from ..models.shipped import WEIGHTS
from ..models.weight_difference import save_fine_tuned
from ..toyworld.grammar import caption
from ..toyworld.pairs import write_pairs
from ..toyworld.vocabulary import learn_tokenizer
from ..training import train
from . import sdxl
from .clip import train_clip
from .feature_network import train_features
from .fine_tuning import RECIPES, VALIDATION, toy_training
from .scores import score_checker, score_clip, score_sdxl
from .second_text_encoder import train_second_text_encoder
from .unet import encode_pairs, train_unet, train_unet_on_windows
from .vae import train_vae

_MERGES = 400
_VOCABULARY_FROM = 5000  # captions


@dataclass(frozen=True)
class Sizes:
    """How much each stage does; a test makes them small."""

    clip: dict = field(default_factory=dict)
    second: dict = field(default_factory=dict)
    vae: dict = field(default_factory=dict)
    features: dict = field(default_factory=dict)
    unet: dict = field(default_factory=dict)
    unet_on_windows: dict = field(default_factory=dict)
    fine_tuning: dict = field(default_factory=dict)
    pairs: int = 60_000  # that the UNet learns from; half as many more in two windows
    trained_on: int = 4000  # pairs of the fine-tuning
    scored: int = 1000


class Build:
    """The stages, each a method that returns a model: the one in its folder, or, if there is none, one made now.

    Args:
        output: where checkpoints and logs go.
        sizes: how much each stage does.
    """

    def __init__(self, output: Path, sizes: Sizes):
        self.output, self.sizes = output, sizes

    def _model(self, stage: str) -> Path:
        return self.output / stage / "model"

    def tokenizer(self) -> CLIPTokenizer:
        return learn_tokenizer((caption("train", index).text for index in range(_VOCABULARY_FROM)), _MERGES)

    def clip(self) -> Backbone:
        if not self._model("clip").exists():
            backbone = train_clip(self.output / "clip", self.tokenizer(), **self.sizes.clip)
            with atomic_folder(self._model("clip")) as folder:
                backbone.save(folder)
        return load_backbone(str(self._model("clip")))

    def second(self) -> CLIPTextModelWithProjection:
        if not self._model("second").exists():
            backbone = self.clip()
            model = train_second_text_encoder(
                self.output / "second", backbone, backbone.tokenizer.tokenizer, **self.sizes.second
            )
            self._save(model, "second")
        return CLIPTextModelWithProjection.from_pretrained(self._model("second"))

    def vae(self) -> AutoencoderKL:
        if not self._model("vae").exists():
            self._save(train_vae(self.output / "vae", **self.sizes.vae), "vae")
        return AutoencoderKL.from_pretrained(self._model("vae")).eval()

    def features(self) -> ViTModel:
        if not self._model("features").exists():
            self._save(train_features(self.output / "features", **self.sizes.features), "features")
        return ViTModel.from_pretrained(self._model("features"), add_pooling_layer=False)

    def sdxl(self) -> StableDiffusionXLPipeline:
        text_encoder, tokenizer = to_transformers(self.clip())
        pipe = sdxl.assemble(text_encoder, self.second(), tokenizer, self.vae())
        if not self._model("unet").exists():
            pairs = self._pairs(pipe, 1, 0, self.sizes.pairs)
            train_unet(self.output / "unet", pipe, pairs, **self.sizes.unet)
            both = pairs, self._pairs(pipe, 2, self.sizes.pairs, self.sizes.pairs // 2)
            train_unet_on_windows(self.output / "unet-windows", pipe, both, **self.sizes.unet_on_windows)
            self._save(pipe.unet, "unet")
        pipe.register_modules(unet=UNet2DConditionModel.from_pretrained(self._model("unet")).eval())
        return pipe

    def _pairs(self, pipe: StableDiffusionXLPipeline, windows: int, start: int, count: int) -> dict[str, torch.Tensor]:
        file = self.output / f"pairs-{windows}.safetensors"
        if not file.exists():
            with atomic_file(file) as unfinished:
                save_file(encode_pairs(pipe, count, windows, start=start), unfinished)
        return load_file(file)

    def fine_tuned(self, recipe: str) -> Backbone:
        """`train` continues by itself where it was stopped, and does nothing where it has ended."""
        data, images = write_pairs(self.output / "data", VALIDATION, self.sizes.trained_on)
        base, output = str(self._model("clip")), self.output / recipe
        train(toy_training(recipe, base, data, images, output, **self.sizes.fine_tuning))
        return load_backbone(str(output / "last"))

    def _save(self, model, stage: str) -> None:
        with atomic_folder(self._model(stage)) as folder:
            model.save_pretrained(folder)


def ship(build: Build, weights: Path) -> None:
    """Makes what is not made yet, scores it, and writes all of it to `weights` as fp16, with logs and scores."""
    clip, pipe, features = build.clip(), build.sdxl(), build.features()
    tuned = {recipe: build.fine_tuned(recipe) for recipe in RECIPES}
    count = build.sizes.scored
    scores = {
        "split": "development",
        "toy/clip": score_clip(clip, "development", count),
        **{f"toy/{recipe}": score_clip(backbone, "development", count) for recipe, backbone in tuned.items()},
        "checker": score_checker(pipe.vae, "development", count),
        "toy/sdxl": score_sdxl(pipe, "development", min(count, 300))[0],
    }
    with atomic_folder(weights) as folder:
        clip.model.half()
        clip.save(folder / "clip")
        for recipe, backbone in tuned.items():
            save_fine_tuned(backbone, clip, folder / recipe)
        features.half().save_pretrained(folder / "features")
        sdxl.save(pipe, folder / "sdxl")
        (folder / "logs").mkdir()
        for stage in ("clip", "second", "vae", "features", "unet", "unet-windows", *RECIPES):
            shutil.copy(build.output / stage / "log.jsonl", folder / "logs" / f"{stage}.jsonl")
        write_json(folder / "scores.json", scores)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", default="runs/toyworld", help="checkpoints and logs; a stopped build continues there"
    )
    parser.add_argument("--weights", default=str(WEIGHTS), help="where the finished fp16 models go")
    arguments = parser.parse_args()
    ship(Build(Path(arguments.output), Sizes()), Path(arguments.weights))


if __name__ == "__main__":
    main()
