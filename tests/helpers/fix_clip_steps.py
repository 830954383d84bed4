"""Steps of Fix-CLIP's cases on a tiny CLIP."""

from dataclasses import replace

import torch
from helpers.tiny_clip import everyday, tiny_clip
from helpers.tiny_data import caption
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.data.dataset import Collate, Sample
from debias_diffusion.methods import METHODS
from debias_diffusion.models.regional_prompts import PromptSettings

TOKENIZER = tiny_tokenizer(77)
LAYERS, GROUPS, PROMPTS, COMPONENTS = 4, 2, 3, 3
N = 16  # patches
_HIERARCHY = {"groups": GROUPS, "first_group": 1}
_PROMPTS = {"prompts": PROMPTS}
_NONE = {"prompt_mask": "none"}
_ALL = {"mask_ratio": 0.75, "short_positions": "own", **_HIERARCHY, **_PROMPTS}
# (recipe, what is changed in it): the paper's Table 4, and ways that it does not name.
CASES = {
    "0": ("long-clip", {}),
    "1 DB": ("fix-clip", {"groups": 0, "prompts": 0}),
    "2 HF": ("long-clip", _HIERARCHY),
    "3 DB+RP": ("fix-clip", {"groups": 0} | _PROMPTS | _NONE),
    "4 HF+RP": ("long-clip", _HIERARCHY | _PROMPTS | _NONE),
    "5 DB+RP+UM": ("fix-clip", {"groups": 0} | _PROMPTS),
    "6 HF+RP+UM": ("long-clip", _HIERARCHY | _PROMPTS),
    "7 all": ("fix-clip", _HIERARCHY | _PROMPTS),
    "discard": ("fix-clip", _HIERARCHY | _PROMPTS | {"masked_patches": "discard"}),
    "shared": ("fix-clip", _HIERARCHY | _PROMPTS | {"prompt_layers": "shared", "short_positions": "shared"}),
    "short alone": ("long-clip", {"short_weight": 1.0} | _PROMPTS),
    "long alone": ("long-clip", {"short_weight": 0.0} | _PROMPTS),
    "last group": ("fix-clip", {"groups": GROUPS, "first_group": 2, "mask_ratio": 0.0} | _PROMPTS),
}


def method_of(case):
    recipe, changes = CASES[case]
    method = METHODS[recipe]
    return replace(method, **{"components": min(method.components, COMPONENTS)} | changes)


def make_batch(backbone, method, size=6, first=0):
    """Samples `first` to `first + size`."""
    samples = []
    for index in range(first, first + size):
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        drawn_from = caption(index), backbone.tokenizer, 0, 0, str(index)
        captions, views = method.captions(*drawn_from), method.all_views(image, *drawn_from)
        samples.append(Sample((0, index, index), str(index), image, captions, views=views))
    return Collate(backbone.tokenizer, method)(samples)


def setup(case, size=6, first=0):
    """(float64 backbone, bound method, its modules or None, batch), all weights of everyday size."""
    backbone, method = tiny_clip(layers=LAYERS, tokenizer=TOKENIZER).double(), method_of(case)
    method.check_base(backbone, 20, False)
    backbone.stretch()
    torch.manual_seed(1)
    method.prepare(backbone)
    backbone.double()
    method = method.bind(backbone)
    modules = method.modules(backbone)
    if backbone.prompt_settings:
        everyday(backbone.model.visual.regional_prompts)
    if modules is not None:
        modules = everyday(modules.double())
    return backbone, method, modules, make_batch(backbone, method, size, first)


def gradients(*models):
    named = (
        pair for model in models if model is not None for pair in getattr(model, "model", model).named_parameters()
    )
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def pixels(count=3):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def prompted(mask="bands", layers="own", count=PROMPTS):
    """A float64 backbone of four blocks a tower with prompts of everyday size."""
    backbone = tiny_clip(layers=LAYERS)
    torch.manual_seed(2)
    backbone.add_prompts(PromptSettings(count, mask, layers))
    everyday(backbone.model.visual.regional_prompts)
    return backbone.double()
