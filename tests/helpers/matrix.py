"""What diffusers' pipeline classes do with long prompts: one table of classes and features."""

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import diffusers
import numpy as np
import torch
from diffusers import LCMScheduler, MotionAdapter, T2IAdapter
from helpers import tiny_sdxl
from helpers.draw import LONG, SHORT, add_lora, parameters
from helpers.tiny_sdxl import assemble

from debias_diffusion.pipelines import with_long_prompts

LATE = LONG.replace("yellow bicycle", "green tractor")
IMAGE = {"image": tiny_sdxl.picture()}
CHANGED = IMAGE | {"strength": 0.7, "num_inference_steps": 3}  # of which two are done
MASKED = CHANGED | {"mask_image": tiny_sdxl.mask()}
EDITED = IMAGE | {"image_guidance_scale": 1.5}


def controlled(parts: dict) -> dict:
    return {"controlnet": tiny_sdxl.controlnet(parts["unet"])}


def adapted(parts: dict) -> dict:
    torch.manual_seed(0)
    return {"adapter": T2IAdapter(3, [16, 32], 1, downscale_factor=16, adapter_type="full_adapter_xl").eval()}


def new_unet(parts: dict, **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return type(parts["unet"])(**{**parts["unet"].config, **changes}).eval()


def eight_channels(parts: dict) -> dict:
    """The UNet reads another image's latents, too."""
    return {"unet": new_unet(parts, in_channels=8)}


def moving(parts: dict) -> dict:
    sizes = {"motion_norm_num_groups": 2, "motion_num_attention_heads": 2, "use_motion_mid_block": False}
    config = parts["unet"].config
    sizes |= {"block_out_channels": config.block_out_channels, "motion_layers_per_block": config.layers_per_block}
    return {"motion_adapter": MotionAdapter(**sizes).eval()}


def distilled(parts: dict) -> dict:
    """Guided by an embedding of the scale."""
    scheduler = LCMScheduler.from_config(parts["scheduler"].config)
    return {"unet": new_unet(parts, time_cond_proj_dim=16), "scheduler": scheduler}


class Case(NamedTuple):
    """What a class needs besides the parts of SDXL or SD 1.5, and the arguments of its call besides a prompt.

    `ignores`: features whose argument diffusers' class takes, but ignores or gets wrong.
    """

    more: Callable[[dict], dict] = lambda parts: {}
    call: dict = {}  # noqa: RUF012 - never changed
    ignores: tuple[str, ...] = ()


VIDEO = Case(moving, {"num_frames": 2, "height": 64, "width": 64}, ("several images",))
CASES = {
    "StableDiffusionXLPipeline": Case(),
    "StableDiffusionXLImg2ImgPipeline": Case(call=CHANGED),
    "StableDiffusionXLInpaintPipeline": Case(call=MASKED),
    "StableDiffusionXLControlNetPipeline": Case(controlled, IMAGE),
    "StableDiffusionXLControlNetImg2ImgPipeline": Case(controlled, CHANGED | {"control_image": tiny_sdxl.picture(1)}),
    "StableDiffusionXLControlNetInpaintPipeline": Case(controlled, MASKED | {"control_image": tiny_sdxl.picture(1)}),
    "StableDiffusionXLPAGPipeline": Case(),
    "StableDiffusionXLAdapterPipeline": Case(adapted, IMAGE, ("LoRA scale",)),
    "StableDiffusionXLInstructPix2PixPipeline": Case(eight_channels, EDITED, ("LoRA scale",)),
    "AnimateDiffSDXLPipeline": VIDEO,
    "StableDiffusionPipeline": Case(),
    "StableDiffusionImg2ImgPipeline": Case(call=CHANGED),
    "StableDiffusionInpaintPipeline": Case(call=MASKED),
    "StableDiffusionControlNetPipeline": Case(controlled, IMAGE),
    "StableDiffusionPAGPipeline": Case(),
    "StableDiffusionAdapterPipeline": Case(adapted, IMAGE, ("LoRA scale",)),
    "StableDiffusionInstructPix2PixPipeline": Case(eight_channels, EDITED, ("LoRA scale",)),
    "LatentConsistencyModelPipeline": Case(distilled),
    "AnimateDiffPipeline": VIDEO,
}
# whose prompts are encoded in another way; AltDiffusion's too, but it is seen by its encoder
REFUSED = (
    "LEditsPPPipelineStableDiffusionXL",
    "SemanticStableDiffusionPipeline",
    "StableDiffusionLatentUpscalePipeline",
    "FluxPipeline",
    "StableDiffusion3Pipeline",
)


@functools.cache
def _parts(name: str) -> dict:
    parts = tiny_sdxl.sdxl_parts() if "XL" in name else tiny_sdxl.sd15_parts() | {"requires_safety_checker": False}
    parts |= CASES[name].more(parts)
    return {key: part for key, part in parts.items() if key in parameters(getattr(diffusers, name).__init__)}


class Pipelines:
    """Of one class: `stock`, and `ours` with long prompts. What they draw is an array of images or frames."""

    def __init__(self, name: str, copies: bool = False):
        parts = copy.deepcopy(_parts(name)) if copies else _parts(name)
        self.call, self.stock = CASES[name].call, assemble(getattr(diffusers, name), parts)
        self.ours = with_long_prompts(self.stock)

    def draw(self, pipe, prompt, **call) -> np.ndarray:
        call = {"num_inference_steps": 2, "output_type": "np", "prompt": prompt} | self.call | call
        output = pipe(generator=torch.Generator().manual_seed(0), **call)
        return output.frames if hasattr(output, "frames") else output.images

    def reads(self, pipe, name: str = "prompt", **call) -> bool:
        """Whether the last words of a long text change the image."""
        texts = [{"prompt": SHORT, name: text} for text in (LONG, LATE)]
        return not np.array_equal(*(self.draw(pipe, **call | text) for text in texts))

    def same(self, prompt=SHORT, **call) -> bool:
        return np.array_equal(self.draw(self.stock, prompt, **call), self.draw(self.ours, prompt, **call))


# ---- the columns: each checks a cell


def short_prompt(both: Pipelines) -> None:
    assert both.same()


def long_prompt(both: Pipelines) -> None:
    assert both.reads(both.ours) and not both.reads(both.stock)


def negative_prompt(both: Pipelines) -> None:
    assert both.same(negative_prompt="grey") and both.reads(both.ours, "negative_prompt")


def several_images(both: Pipelines) -> None:
    images = both.draw(both.ours, LONG, num_images_per_prompt=2)
    assert len(images) == 2 and not np.array_equal(*images) and both.same(num_images_per_prompt=2)


def batch(both: Pipelines) -> None:
    pictures = {key: [value] * 2 for key, value in both.call.items() if key.endswith("image")}
    assert both.same([SHORT, SHORT[:20]], **pictures)
    images = both.draw(both.ours, [SHORT, LONG], **pictures)
    late = both.draw(both.ours, [SHORT, LATE], **pictures)
    assert np.array_equal(images[0], late[0]) and not np.array_equal(images[1], late[1])


def lora_scale(both: Pipelines) -> None:
    layer, call = add_lora(both.stock.text_encoder), {"cross_attention_kwargs": {"scale": 0.4}}
    before = layer.scaling["default"]
    scaled = both.draw(both.ours, LONG, **call)
    assert layer.scaling["default"] == before and both.same(**call)
    assert not np.array_equal(scaled, both.draw(both.ours, LONG))


def clip_skip(both: Pipelines) -> None:
    assert not np.array_equal(both.draw(both.ours, LONG, clip_skip=1), both.draw(both.ours, LONG))
    assert both.reads(both.ours, clip_skip=1)


# column: its check, and the argument of the call that a class must have
FEATURES = {
    "short as in diffusers": (short_prompt, None),
    "long read": (long_prompt, None),
    "long negative": (negative_prompt, "negative_prompt"),
    "several images": (several_images, None),
    "batch": (batch, None),
    "LoRA scale": (lora_scale, "cross_attention_kwargs"),
    "`clip_skip`": (clip_skip, "clip_skip"),
}


def check(name: str, feature: str) -> None:
    FEATURES[feature][0](Pipelines(name, copies=feature == "LoRA scale"))


def applies(name: str, feature: str) -> bool:
    needed = FEATURES[feature][1]
    has = needed is None or needed in parameters(getattr(diffusers, name).__call__)
    return has and feature not in CASES[name].ignores


CELLS = [(name, feature) for name in CASES for feature in FEATURES if applies(name, feature)]
ROWS, COLUMNS = list(CASES), list(FEATURES)
# Of the fast tests: each class meets other features in turn.
PART = [(name, at) for name, at in CELLS if at in COLUMNS[:2] or (ROWS.index(name) + COLUMNS.index(at)) % 5 == 0]
