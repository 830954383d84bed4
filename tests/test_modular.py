"""diffusers' modular pipelines with the long-prompt text step: the same when short, all read when long, and saved."""

import ast
import json
import sys
from importlib.metadata import requires

import numpy as np
import pytest
import torch
from diffusers import (
    ClassifierFreeGuidance,
    ModularPipelineBlocks,
    StableDiffusionXLAutoBlocks,
    StableDiffusionXLPipeline,
)
from diffusers.utils import dynamic_modules_utils
from helpers import tiny_sdxl
from helpers.draw import LONG, OTHER, SHORT, add_lora
from helpers.tiny_sdxl import assemble

from debias_diffusion.pipelines import (
    LongPromptTextEncoderStep,
    StableDiffusionXLLongPromptBlocks,
    StableDiffusionXLLongPromptPipeline,
    with_long_prompts,
    write_block,
)

GREEN = LONG.replace("yellow bicycle", "green tractor")
NAMES = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")


def build(blocks, parts, guider=None):
    pipe = blocks.init_pipeline()
    pipe.update_components(**parts, guider=guider or ClassifierFreeGuidance(guidance_scale=5.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def stock(parts):
    return build(StableDiffusionXLAutoBlocks(), parts)


@pytest.fixture(scope="module")
def ours(stock):
    return with_long_prompts(stock)


def draw(pipe, prompt, **call):
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np", "output": "images"} | call
    return np.asarray(pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), **call))


def same(first, second, prompt=SHORT, **call):
    return np.array_equal(draw(first, prompt, **call), draw(second, prompt, **call))


def reads_the_end(pipe, **call):
    return not np.array_equal(draw(pipe, LONG, **call), draw(pipe, GREEN, **call))


def test_short_prompts_are_those_of_diffusers_and_long_ones_are_read(stock, ours):
    assert ours.text_encoder is stock.text_encoder and type(ours) is type(stock)
    assert not reads_the_end(stock) and reads_the_end(ours)
    for call in ({}, {"negative_prompt": "grey"}, {"prompt_2": OTHER, "clip_skip": 1}):
        assert same(stock, ours, **call)
    assert same(stock, ours, [SHORT, OTHER], negative_prompt=["grey", ""])


def test_embeddings_are_those_of_the_pipeline(ours, parts):
    pipe = assemble(StableDiffusionXLLongPromptPipeline, parts).set_long_prompt(emphasis="comfyui", reading="separate")
    prompt = f"A (red:1.4) cat. {LONG}"
    step = ours.blocks.sub_blocks["text_encoder"].init_pipeline()
    step.update_components(**{name: part for name, part in parts.items() if "text" in name or "token" in name})
    outputs = step(prompt=prompt, negative_prompt=OTHER, emphasis="comfyui", reading="separate", output=list(NAMES))
    expected = pipe.encode_prompt(prompt, negative_prompt=OTHER)
    assert all(map(torch.equal, outputs.values(), expected))


def test_the_options_are_arguments_of_the_call(ours):
    weighted = LONG.replace("bicycle", "(bicycle:1.5)")
    assert not np.array_equal(draw(ours, weighted, emphasis="comfyui"), draw(ours, weighted))
    assert same(ours, ours, SHORT, reading="cut") and not reads_the_end(ours, reading="cut")
    with pytest.raises(ValueError, match="`strict` allows one"):
        draw(ours, LONG, strict=True)


@pytest.fixture(scope="module")
def adapted():
    """diffusers' pipeline and ours, whose encoders have a LoRA and a textual inversion of several vectors."""
    pipe = assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    tiny_sdxl.add_inversions(pipe, {"<style>": 3})
    add_lora(pipe.text_encoder)
    return [
        build(blocks(), pipe.components) for blocks in (StableDiffusionXLAutoBlocks, StableDiffusionXLLongPromptBlocks)
    ]


def test_the_scale_of_a_lora_and_a_textual_inversion(adapted):
    plain, scaled = draw(adapted[1], SHORT), {"cross_attention_kwargs": {"scale": 0.4}}
    for prompt, call in ((SHORT, scaled), (f"<style> {SHORT}", {})):
        assert same(*adapted, prompt, **call) and not np.array_equal(draw(adapted[1], prompt, **call), plain)


def test_new_components_and_blocks_belong_to_one_of_the_two(stock, parts):
    ours = with_long_prompts(stock)
    ours.update_components(text_encoder=tiny_sdxl.text_encoder_2())
    assert stock.text_encoder is parts["text_encoder"] and ours.text_encoder is not parts["text_encoder"]
    assert stock.get_component_spec("text_encoder").type_hint is type(parts["text_encoder"])
    assert not isinstance(stock.blocks.sub_blocks["text_encoder"], LongPromptTextEncoderStep)


def test_the_written_block_needs_nothing_of_ours_and_survives_saving(ours, parts, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = write_block(tmp_path / "block")
    nodes = list(ast.walk(ast.parse((folder / "block.py").read_text())))
    imported = {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    assert "debias_diffusion" not in imported
    blocks = ModularPipelineBlocks.from_pretrained(str(folder), trust_remote_code=True)
    assert type(blocks).__module__.startswith("diffusers_modules.")
    assert same(build(blocks, parts), ours, LONG)
    assert [param.description for param in blocks.inputs] == [param.description for param in ours.blocks.inputs]
    # A copy of the blocks that diffusers saves, and weights from a folder of SDXL.
    requirements = json.loads((folder / "modular_config.json").read_text())["requirements"]
    blocks.save_pretrained(str(folder))
    if hasattr(StableDiffusionXLAutoBlocks, "_requirements"):  # older ones save none
        assert json.loads((folder / "modular_config.json").read_text())["requirements"] == requirements
    assert set(requires("debias-diffusion")) >= {f"{name}{bound}" for name, bound in requirements.items()}
    assemble(StableDiffusionXLPipeline, parts).save_pretrained(tmp_path / "sdxl")
    again = ModularPipelineBlocks.from_pretrained(str(folder), trust_remote_code=True)
    pipe = again.init_pipeline(str(tmp_path / "sdxl"))
    pipe.load_components()
    pipe.set_progress_bar_config(disable=True)
    assert reads_the_end(pipe)
