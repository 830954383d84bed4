"""Rebuilds the toy world's models from nothing: `python -m research toymodels`.

Each stage leaves its model, log and checkpoint in a folder of its own and is not done again; a stage that was killed
goes on from its last checkpoint. On two cores all of it takes some two hours, half of them the UNet's.
"""

import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, ViTModel

from debias_diffusion.app.fine_tuning import RECIPES, VALIDATION, toy_training
from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.encoders.loading import DIFFERENCE, STEPS, load_backbone
from debias_diffusion.encoders.text_encoders import to_transformers
from debias_diffusion.files import atomic_folder, write_json
from debias_diffusion.toyworld.pairs import write_pairs
from debias_diffusion.training.two_tower import train

from ..options import ToyModelsConfig
from ..referring.grammar import STYLES, caption
from . import sdxl
from .clip import train_clip
from .feature_network import train_features
from .prepared_unet import disturbed, encode_pairs_in_chunks
from .scores import score_checker, score_clip, score_sdxl
from .second_text_encoder import train_second_text_encoder
from .unet import Pairs, encode_pairs, saved_pairs, train_unet
from .vae import train_vae
from .vocabulary import learn_tokenizer

_MERGES = 400
_VOCABULARY_FROM = 5000  # captions
_PAIRS = 60_000  # that the UNet learns from; the prepared one, from half as many more in two chunks
_TRAINED_ON = 4000  # pairs of the fine-tuning
_SCORED, _DRAWN = 1000, 300  # scenes
_MOST = 127  # of 8 bits with a sign


class Build:
    """The stages, each a method that returns a model: the one in its folder, or, if there is none, one made now.

    Args:
        output: where checkpoints and logs go.
    """

    def __init__(self, output: Path):
        self.output = output

    def _model(self, stage: str, make: Callable[[], nn.Module]) -> Path:
        """The folder of a stage's model, which is made if it is not there."""
        place = self.output / stage / "model"
        if not place.exists():
            model = make()
            with atomic_folder(place) as folder:
                (model.save if isinstance(model, Backbone) else model.save_pretrained)(folder)
        return place

    def tokenizer(self) -> CLIPTokenizer:
        styles = [*STYLES]
        texts = (caption("train", index, styles[index % len(styles)]).text for index in range(_VOCABULARY_FROM))
        return learn_tokenizer(texts, _MERGES)

    def clip(self) -> Backbone:
        place = self._model("clip", lambda: train_clip(self.output / "clip", self.tokenizer()))
        return load_backbone(str(place))

    def second(self) -> CLIPTextModelWithProjection:
        def make() -> CLIPTextModelWithProjection:
            folder, clip = self.output / "second", self.clip()
            return train_second_text_encoder(folder, clip, clip.tokenizer.tokenizer)

        return CLIPTextModelWithProjection.from_pretrained(self._model("second", make))

    def vae(self) -> AutoencoderKL:
        place = self._model("vae", lambda: train_vae(self.output / "vae"))
        return AutoencoderKL.from_pretrained(place).eval()

    def features(self) -> ViTModel:
        place = self._model("features", lambda: train_features(self.output / "features"))
        return ViTModel.from_pretrained(place, add_pooling_layer=False)

    def sdxl(self) -> StableDiffusionXLPipeline:
        text_encoder, tokenizer = to_transformers(self.clip())
        pipe = sdxl.assemble(text_encoder, self.second(), tokenizer, self.vae())

        def make() -> UNet2DConditionModel:
            train_unet(self.output / "unet", pipe, [self._pairs(pipe)])
            return pipe.unet

        return self._with_unet(pipe, self._model("unet", make))

    def prepared_sdxl(self) -> StableDiffusionXLPipeline:
        """The same with a UNet that was prepared for joined chunks and shifted states."""
        pipe = self.sdxl()

        def make() -> UNet2DConditionModel:
            file = self.output / "pairs-in-chunks.safetensors"
            chunks = saved_pairs(file, lambda: encode_pairs_in_chunks(pipe, _PAIRS // 2, start=_PAIRS))
            change = partial(disturbed, width=pipe.text_encoder.config.hidden_size)
            settings = {"steps": 8000, "seed": 1, "peak": 5e-4, "warmup": 200, "change": change}
            by_turns = self._pairs(pipe), chunks
            train_unet(self.output / "prepared-unet", pipe, by_turns, **settings)
            return pipe.unet

        return self._with_unet(pipe, self._model("prepared-unet", make))

    def _with_unet(self, pipe: StableDiffusionXLPipeline, place: Path) -> StableDiffusionXLPipeline:
        pipe.register_modules(unet=UNet2DConditionModel.from_pretrained(place).eval())
        return pipe

    def _pairs(self, pipe: StableDiffusionXLPipeline) -> Pairs:
        return saved_pairs(self.output / "pairs.safetensors", lambda: encode_pairs(pipe, _PAIRS))

    def fine_tuned(self, recipe: str) -> Backbone:
        """`train` continues by itself where it was stopped, and does nothing where it has ended."""
        data, images = write_pairs(self.output / "data", VALIDATION, _TRAINED_ON)
        base, output = str(self.output / "clip" / "model"), self.output / recipe
        train(toy_training(recipe, base, data, images, output))
        return load_backbone(str(output / "last"))


def ship(build: Build, weights: Path) -> None:
    """Makes what is not made yet, scores it, and writes all of it to `weights` as fp16, with logs and scores.

    The SDXL with the prepared UNet is not shipped: it goes to the folder `prepared-sdxl` beside the stages.
    """
    clip, pipe, prepared, features = build.clip(), build.sdxl(), build.prepared_sdxl(), build.features()
    tuned = {recipe: build.fine_tuned(recipe) for recipe in RECIPES}
    scores = {
        "split": "development",
        "toy/clip": score_clip(clip, "development", _SCORED),
        **{f"toy/{recipe}": score_clip(backbone, "development", _SCORED) for recipe, backbone in tuned.items()},
        "checker": score_checker(pipe.vae, "development", _SCORED),
        "toy/sdxl": _score_drawing(pipe),
        "prepared-sdxl": _score_drawing(prepared),
    }
    with atomic_folder(build.output / "prepared-sdxl") as folder:
        sdxl.save(prepared, folder)
    with atomic_folder(weights) as folder:
        clip.model.half()
        clip.save(folder / "clip")
        for recipe, backbone in tuned.items():
            save_fine_tuned(backbone, clip, folder / recipe)
        features.half().save_pretrained(folder / "features")
        sdxl.save(pipe, folder / "sdxl")
        (folder / "logs").mkdir()
        for stage in ("clip", "second", "vae", "features", "unet", *RECIPES):
            shutil.copy(build.output / stage / "log.jsonl", folder / "logs" / f"{stage}.jsonl")
        write_json(folder / "scores.json", scores)


def _score_drawing(pipe: StableDiffusionXLPipeline) -> dict[str, dict[str, float]]:
    return {style: score_sdxl(pipe, "development", _DRAWN, style=style)[0] for style in STYLES}


def build(config: ToyModelsConfig) -> None:
    """Makes and ships all models."""
    ship(Build(Path(config.output)), Path(config.weights))


def save_fine_tuned(tuned: Backbone, base: Backbone, folder: Path) -> None:
    """Writes each weight's difference from the stretched base model, in 8 bits, with a step size for each tensor.

    Fine-tuning changes weights little, so 8 bits hold the difference nearly as well as 16 bits hold the weight.

    Args:
        tuned: the base model after `train`, stretched by `Backbone.stretch`.
        base: "toy/clip" as shipped, in any precision; not changed.
        folder: is created.
    """
    start = deepcopy(base).float()
    start.stretch()
    before, after = (dict(sorted(backbone.model.state_dict().items())) for backbone in (start, tuned))
    change = {name: tensor - before[name] for name, tensor in after.items()}
    # At least the smallest float, for a weight that has not changed.
    steps = [(tensor.abs().max() / _MOST).clamp(min=torch.finfo(tensor.dtype).tiny) for tensor in change.values()]
    counts = {
        name: (tensor / step).round().to(torch.int8) for (name, tensor), step in zip(change.items(), steps, strict=True)
    }
    folder.mkdir(parents=True)
    save_tensors(counts | {STEPS: torch.stack(steps)}, folder / DIFFERENCE)
