"""Allowed ranges of options: the ranges of their annotations, and the rules between them, by class."""

import re
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest

from debias_diffusion.app.options import (
    AblateConfig,
    AlignConfig,
    AppConfig,
    CheckConfig,
    ExportConfig,
    GenerateConfig,
    QuickstartConfig,
    ShardsConfig,
    ShowcaseConfig,
    SynthesizeConfig,
)
from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import (
    AllConfig,
    AttentionConfig,
    ClassificationConfig,
    DriftConfig,
    FollowingConfig,
    GenerationConfig,
    JudgeConfig,
    ReportConfig,
    RetrievalConfig,
    RobustnessConfig,
)
from debias_diffusion.limits import Checked, NonNegativeInt, PositiveInt, Side
from debias_diffusion.methods import METHODS
from debias_diffusion.training.config import TrainConfig
from research.options import ColaConfig, ReproduceConfig

NAN, INFINITY = float("nan"), float("inf")
CLIP = {"encoders": ["toy/clip"], "output": "o"}
# Of each class, options that can be used.
USABLE = {
    AblateConfig: {"model": "m", "output": "runs/o", "data": "d"},
    AlignConfig: {"base": "b", "data": "d", "output": "o", "encoder": "e"},
    AllConfig: {},
    AppConfig: {},
    AttentionConfig: CLIP | {"prompt": "a star"},
    CheckConfig: {"base": "b"},
    ClassificationConfig: CLIP | {"dataset": "cifar-10", "data": "d"},
    ColaConfig: CLIP | {"data": "d", "images": "i"},
    DriftConfig: CLIP | {"base": "toy/sdxl", "data": "d"},
    ExportConfig: {"model": "m", "output": "o"},
    FollowingConfig: CLIP | {"prompts": "p.txt", "judge": "j", "base": "toy/sdxl"},
    GenerateConfig: {"prompt": "a star", "base": "b"},
    GenerationConfig: CLIP | {"base": "toy/sdxl", "data": "d"},
    JudgeConfig: {"labels": "l", "judge": "j", "output": "o"},
    QuickstartConfig: {},
    ReportConfig: {"folder": "f"},
    ReproduceConfig: {"target": ["table-S4"]},
    RetrievalConfig: CLIP | {"data": "d"},
    RobustnessConfig: CLIP | {"data": "d"},
    ShardsConfig: {"data": "d", "output": "o"},
    ShowcaseConfig: {"base": "b"},
    SynthesizeConfig: {"model": "m", "output": "o", "images": "i"},
    TrainConfig: {"data": "d", "output": "o", "model": "toy/clip"},
}
REFUSED = [
    (AblateConfig, {"beta": 1.5}, "beta is 1.5, but must be a number, from 0 to 1."),
    (AblateConfig, {"generations": 0}, "generations is 0, but must be a whole number, at least 1."),
    (AblateConfig, {"learning_rate": 0.0}, "learning_rate is 0.0, but must be a number, above 0, at most 1."),
    (
        AblateConfig,
        {"seed": 2**64},
        "seed is 18446744073709551616, but must be a whole number, from 0 to 2^63 - 1.",
    ),
    (AblateConfig, {"limit": 0}, "limit is 0, but must be a whole number, at least 1, or null."),
    (AblateConfig, {"search": "bp", "tower": "text"}, "bp suppresses the image tower's heads"),
    (AblateConfig, {"search": "bp", "way": "mean"}, "bp suppresses the image tower's heads"),
    (AblateConfig, {"data": None}, "Give either --data"),
    (AlignConfig, {"encoder": None}, "Nothing is to be fitted. Give --encoder"),
    (AlignConfig, {"denoising": -1.0}, "denoising is -1.0, but must be a number, at least 0."),
    (AlignConfig, {"denoising": 0.0, "keep_states": 0.0}, "nothing would be learned"),
    (AlignConfig, {"pixels": 100}, "pixels is 100, but must be a whole number, a positive multiple of 8, or null."),
    (AllConfig, {"images_per_encoder": 0}, "images_per_encoder is 0, but must be a whole number, at least 1, or auto."),
    (AllConfig, {"classification": "cifar-11"}, "classification is 'cifar-11', but must be imagenet-1k or"),
    (AllConfig, {"encoders": ["original", "cut:original"]}, "has none for texts"),
    (AttentionConfig, {"prompt": None}, "Given is no data and no benchmark"),
    (AttentionConfig, {"root": "r"}, "Given is root 'r'. Give either --data"),
    (CheckConfig, {"sharpen": 0.0}, "sharpen is 0.0, but must be a number, above 0, at most 4."),
    (CheckConfig, {"base": "toy/sdx"}, "Did you mean toy/sdxl"),
    (ClassificationConfig, {"dataset": "imagenet_a"}, "dataset is 'imagenet_a', but must be imagenet-1k or"),
    (FollowingConfig, {"judge": "toy/checker"}, "judges toy scenes. Give --prompts toy/test"),
    (FollowingConfig, {"images_per_prompt": 10**9}, "images_per_prompt is 1000000000, but must be"),
    (DriftConfig, {"encoders": ["toy/clip", "separate:toy/clip"]}, "Name at least one encoder, and none twice"),
    (GenerationConfig, {"steps": 1001}, "steps is 1001, but must be a whole number, from 1 to 1000, or null."),
    (GenerationConfig, {"layer": "first"}, "layer is 'first', but must be penultimate or last."),
    (GenerationConfig, {"encoders": ["chunks:toy/clip"]}, "how an encoder reads long prompts: overlap, separate, cut"),
    (RetrievalConfig, {"limit": 0}, "limit is 0, but must be a whole number, at least 1, or auto, or null."),
    (RetrievalConfig, {"data": None, "dataset": "coco"}, "dataset is 'coco', but must be values, each text."),
    (RetrievalConfig, {"data": None, "dataset": ["coco"]}, "Given is dataset ['coco']. Give either --data"),
    (AppConfig, {"port": 0}, "port is 0, but must be a whole number, from 1 to 65535, or null."),
    (AppConfig, {"encoders": ["toy/clap"]}, "Did you mean toy/clip"),
    (ExportConfig, {"to": "modular"}, "--to modular writes code alone. Leave out --model"),
    (ExportConfig, {"model": None}, "Give --model. Only --to modular"),
    (ExportConfig, {"to": "onnx"}, "to is 'onnx', but must be transformers or diffusers or comfyui or open_clip or"),
    (GenerateConfig, {"steps": 10**9}, "steps is 1000000000, but must be a whole number, from 1 to 1000, or null."),
    (GenerateConfig, {"guidance_scale": NAN}, "guidance_scale is nan, but must be a number, from -1000.0 to 1000.0,"),
    (
        GenerateConfig,
        {"reading": "chunks"},
        "reading is 'chunks', but must be overlap or separate or cut or a1111 or kohya or comfyui, or null.",
    ),
    (GenerateConfig, {"encoder": "cut:toy/clip", "reading": "separate"}, "but both say how prompts are read"),
    (GenerateConfig, {"prompt": None}, "either a prompt or a file of prompts, not neither"),
    (GenerateConfig, {"prompts": "p.txt"}, "either a prompt or a file of prompts, not both"),
    (QuickstartConfig, {"prompts": 1}, "prompts is 1, but must be a whole number, from 2 to 1000."),
    (QuickstartConfig, {"split": "train"}, "split is 'train', but must be text, development or test, or"),
    (ReproduceConfig, {"target": []}, "Give a table, such as `reproduce table-S4`"),
    (ReproduceConfig, {"seeds": []}, "There are no seeds"),
    (
        ReproduceConfig,
        {"seeds": [0, -1]},
        "seeds is [0, -1], but must be values, each a whole number, from 0 to 4294967295.",
    ),
    (ShowcaseConfig, {"limit": 101}, "limit is 101, but must be a whole number, from 1 to 100."),
    (ShardsConfig, {"size": 0}, "size is 0, but must be a whole number, from 1 to 65500."),
    (ShardsConfig, {"quality": 101}, "quality is 101"),
    (SynthesizeConfig, {"images": None}, "Neither data nor images is given"),
    (SynthesizeConfig, {"data": "toy/test"}, "are no files and have long captions"),
    (TrainConfig, {"seed": 2**32}, "seed is 4294967296, but must be a whole number, from 0 to 4294967295."),
    (TrainConfig, {"betas": (0.9, 1.0)}, "betas is (0.9, 1.0), but must be 2 values, each a number, at least 0 and"),
    (TrainConfig, {"validation": "all"}, "validation is 'all', but must be a whole number, at least 0, or auto."),
    (TrainConfig, {"initial_scale": 0}, "initial_scale is 0, but must be a number, above 0, at most 100, or auto"),
    (TrainConfig, {"precision": "fp8"}, "precision is 'fp8', but must be auto or fp32 or bf16 or fp16."),
    (TrainConfig, {"trackers": ["tensorbord"]}, "trackers is ['tensorbord'], but must be values, each tensorboard or"),
    (TrainConfig, {"recipe": "debiased"}, "Unknown recipe 'debiased'. Did you mean debias-clip"),
]


@pytest.mark.parametrize(("options", "changes", "message"), REFUSED)
def test_options_that_cannot_be_used_are_explained(options, changes, message):
    options(**USABLE[options])
    with pytest.raises(UserError, match=re.escape(message)):
        options(**USABLE[options] | changes)


@pytest.mark.parametrize("options", USABLE)
def test_every_option_is_explained(options):
    text = "".join(cls.__doc__ or "" for cls in options.__mro__)
    assert [name for name in options.__dataclass_fields__ if f"\n        {name}: " not in text] == []


MAY_BE_ZERO = set(
    "seed seeds workers validation keep_best examples warmup weight_decay eps betas max_bad beta guidance_scale "
    "denoising keep_states keep_features keep_positions components short_weight label_smoothing".split()
)
MAY_BE_ZERO_IN_FIX_CLIP = {"mask_ratio", "prompts", "groups"}


FIX_CLIPS = {part.name for part in fields(METHODS["fix-clip"])} - {part.name for part in fields(METHODS["debias-clip"])}


@pytest.mark.parametrize("options", USABLE)
def test_every_number_has_a_range(options):
    for name in (name for name, hint in get_type_hints(options).items() if re.search(r"\b(int|float)\b", str(hint))):
        recipe = {"recipe": "fix-clip"} if options is TrainConfig and name in FIX_CLIPS else {}
        may_be_zero = MAY_BE_ZERO_IN_FIX_CLIP if recipe else MAY_BE_ZERO
        wrong = [NAN, *[-1] * (name != "guidance_scale"), *[0] * (name not in may_be_zero)]
        for value in (*wrong, *[1e300] * (name == "learning_rate")):
            value = {"seeds": [value], "betas": (value, 0.9)}.get(name, value)
            with pytest.raises(UserError, match=f"^{name} is .*, but must be "):
                options(**USABLE[options] | recipe | {name: value})


@dataclass
class Options(Checked):
    number: PositiveInt | None = None
    share: float = 0.5
    sides: tuple[Side, Side] = (8, 16)
    counts: list[NonNegativeInt] | None = None
    names: dict[str, int] | None = None


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"number": 1, "share": 1, "sides": [8, 8], "counts": [0], "names": {"a": 1}}, True),
        ({"number": 1.0}, False),
        ({"number": INFINITY}, False),
        ({"share": "half"}, False),
        ({"sides": (8,)}, False),
        ({"sides": (8, 12)}, False),
        ({"counts": 3}, False),
        ({"counts": [0, -1]}, False),
        ({"names": ["a"]}, False),
    ],
)
def test_values_are_held_to_annotations(values, fits):
    if fits:
        assert Options(**values).number == 1
        return
    with pytest.raises(UserError, match=f"{next(iter(values))} is .*, but must be "):
        Options(**values)
