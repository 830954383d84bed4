"""What the tests of the ComfyUI node share: its checkout, our pipeline with the same encoders, a long prompt."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from helpers import tiny_sdxl

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.text.tokens import clip_tokenizer

COMFYUI = os.environ.get("COMFYUI")

SENTENCE = "A small red cat sleeps on a blue sofa, next to a window with white curtains. "
LONG = "  " + SENTENCE * 7 + "It dreams of fish (and birds)?\nThe moon is up; 3.5 stars"  # 142 tokens


@contextlib.contextmanager
def importable_comfyui() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(COMFYUI)
        from comfy.cli_args import args

        args.cpu = True
        yield


def sdxl_pipeline(models):
    """Our pipeline with these two text encoders, and CLIP's own vocabulary, which is ComfyUI's."""
    parts = tiny_sdxl.sdxl_parts() | {"text_encoder": models[0], "text_encoder_2": models[1]}
    parts |= {"tokenizer": clip_tokenizer(77), "tokenizer_2": clip_tokenizer(77, pad_token="!")}
    return tiny_sdxl.assemble(StableDiffusionXLLongPromptPipeline, parts).set_long_prompt(emphasis="comfyui")


def difference(conditioning, embeds, pooled=None):
    ((states, extras),) = conditioning
    assert states.shape == embeds.shape
    worst = (states - embeds).abs().max().item()
    return worst if pooled is None else max(worst, (extras["pooled_output"] - pooled).abs().max().item())
