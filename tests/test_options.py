"""Allowed ranges of options: the ranges of their annotations, and the rules between them, by class."""

import re
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest

from debias_diffusion.app import options as app
from debias_diffusion.app import prompt_options as prompts
from debias_diffusion.errors import UserError
from debias_diffusion.eval import options as evaluate
from debias_diffusion.eval.all_options import AllConfig, ReportConfig
from debias_diffusion.limits import Checked, NonNegativeInt, PositiveInt, Side
from debias_diffusion.methods import METHODS
from debias_diffusion.training.config import TrainConfig
from research.evaluations.options import ClassificationConfig, ColaConfig, ExamplesConfig, GrowthConfig, MapsConfig
from research.options import AblateConfig, JudgeConfig, ReproduceConfig, ShowcaseConfig, SynthesizeConfig

NAN, INFINITY = float("nan"), float("inf")
CLIP = {"encoders": ["toy/clip"], "output": "o"}
# Of each class, options that can be used.
USABLE = {
    AblateConfig: {"model": "m", "output": "runs/o", "data": "d"},
    app.AlignConfig: {"base": "b", "data": "d", "output": "o", "encoder": "e"},
    AllConfig: {},
    prompts.AppConfig: {},
    evaluate.AttentionConfig: CLIP | {"prompt": "a star"},
    prompts.CheckConfig: {"base": "toy/sdxl"},
    ClassificationConfig: CLIP | {"dataset": "cifar-10", "data": "d"},
    ColaConfig: CLIP | {"data": "d", "images": "i"},
    evaluate.DriftConfig: CLIP | {"base": "toy/sdxl", "data": "d"},
    app.ExportConfig: {"model": "m", "output": "o"},
    ExamplesConfig: CLIP | {"data": "d"},
    GrowthConfig: CLIP | {"data": "d"},
    MapsConfig: CLIP | {"image": "i", "text": "t"},
    evaluate.FollowingConfig: CLIP | {"prompts": "p.txt", "judge": "j", "server": "http://s", "base": "toy/sdxl"},
    prompts.GenerateConfig: {"prompt": "a star", "base": "toy/sdxl"},
    evaluate.GenerationConfig: CLIP | {"base": "toy/sdxl", "data": "d"},
    JudgeConfig: {"labels": "l", "judge": "toy/checker", "output": "o"},
    app.QuickstartConfig: {},
    ReportConfig: {"folder": "f"},
    ReproduceConfig: {"target": ["table-S4"]},
    evaluate.RetrievalConfig: CLIP | {"data": "d"},
    evaluate.RobustnessConfig: CLIP | {"data": "d"},
    app.ShardsConfig: {"data": "d", "output": "o"},
    ShowcaseConfig: {"base": "b"},
    SynthesizeConfig: {"model": "m", "server": "http://s", "output": "o", "images": "i"},
    TrainConfig: {"data": "d", "output": "o", "model": "toy/clip"},
}
# Rules between options, and what an option may be; ranges of numbers are below.
REFUSED = [
    (AblateConfig, {"limit": 0}, "limit is 0, but must be a whole number, at least 1, or null."),
    (AblateConfig, {"search": "bp", "tower": "text"}, "bp suppresses the image tower's heads"),
    (app.AlignConfig, {"denoising": 0.0, "keep_states": 0.0}, "nothing would be learned"),
    (AllConfig, {"encoders": ["original", "cut:original"]}, "has none for texts"),
    (AllConfig, {"dino": "no/such/folder"}, "dino is 'no/such/folder', which is not there"),
    (evaluate.AttentionConfig, {"prompt": None}, "no data and no benchmark"),
    (prompts.CheckConfig, {"base": "toy/sdx"}, "Did you mean toy/sdxl"),
    (evaluate.FollowingConfig, {"judge": "toy/checker"}, "judges toy scenes"),
    (evaluate.FollowingConfig, {"server": None}, "'j' needs a server"),
    (evaluate.FollowingConfig, {"image": "i.png"}, "Given: image, prompts, base, encoders, output. Give image and"),
    (evaluate.FollowingConfig, {"encoders": []}, "Given: prompts, base, output. Give image and prompt"),
    (evaluate.DriftConfig, {"encoders": ["toy/clip", "separate:toy/clip"]}, "none twice"),
    (evaluate.GenerationConfig, {"layer": "first"}, "layer is 'first', but must be penultimate or last."),
    (evaluate.GenerationConfig, {"encoders": ["chunks:toy/clip"]}, "reads long prompts: overlap, separate, cut"),
    (evaluate.RetrievalConfig, {"data": None, "dataset": ["coco"]}, "Given is dataset ['coco']"),
    (app.ExportConfig, {"to": "modular"}, "Leave out --model"),
    (prompts.GenerateConfig, {"encoder": "cut:toy/clip", "reading": "separate"}, "both say how prompts are read"),
    (prompts.GenerateConfig, {"prompt": None}, "not neither"),
    (ReproduceConfig, {"target": []}, "Give a table"),
    (SynthesizeConfig, {"images": None}, "Neither data nor images"),
    (SynthesizeConfig, {"data": "toy/test"}, "are no files"),
    (TrainConfig, {"seed": 2**32}, "seed is 4294967296, but must be a whole number, from 0 to 4294967295."),
    (TrainConfig, {"betas": (0.9, 1.0)}, "betas is (0.9, 1.0), but must be 2 values, each a number, at least 0 and"),
    (TrainConfig, {"recipe": "debiased"}, "Did you mean debias-clip"),
]


@pytest.mark.parametrize(("options", "changes", "message"), REFUSED)
def test_options_that_cannot_be_used_are_explained(options, changes, message):
    options(**USABLE[options])
    with pytest.raises(UserError, match=re.escape(message)):
        options(**USABLE[options] | changes)


MAY_BE_ZERO = set(
    "seed seeds workers validation keep_best warmup weight_decay eps betas max_bad beta guidance_scale "
    "denoising keep_states keep_features keep_positions components short_weight label_smoothing".split()
)
FIX_CLIPS = {part.name for part in fields(METHODS["fix-clip"])} - {part.name for part in fields(METHODS["debias-clip"])}
MAY_BE_ZERO |= {"mask_ratio", "prompts", "groups"} & FIX_CLIPS


@pytest.mark.parametrize("options", USABLE)
def test_every_number_has_a_range(options):
    for name in (name for name, hint in get_type_hints(options).items() if re.search(r"\b(int|float)\b", str(hint))):
        recipe = {"recipe": "fix-clip"} if options is TrainConfig and name in FIX_CLIPS else {}
        may_be_zero = name in MAY_BE_ZERO and (recipe or name not in FIX_CLIPS)
        for value in (NAN, *[-1] * (name != "guidance_scale"), *[0] * (not may_be_zero)):
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


def test_values_are_held_to_annotations():
    assert Options(number=1, share=1, sides=[8, 8], counts=[0], names={"a": 1}).number == 1
    for name, values in {
        "number": (1.0, INFINITY, True),
        "share": ("half",),
        "sides": ((8,), (8, 12)),
        "counts": (3, [0, -1]),
        "names": (["a"],),
    }.items():
        for value in values:
            with pytest.raises(UserError, match=f"{name} is .*, but must be "):
                Options(**{name: value})
