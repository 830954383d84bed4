"""The one-file pipeline, loaded the way diffusers loads custom code."""

import ast
import sys

import numpy as np
import pytest
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils import dynamic_modules_utils
from helpers import tiny_sdxl
from helpers.drawing import draw
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline, write_custom_pipeline

PROMPT = "a red cat on a blue sofa, " * 16  # 128 tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_sdxl.build_tiny_sdxl(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_custom_pipeline(tmp_path_factory.mktemp("custom") / "made" / "pipeline.py")


def test_the_file_needs_nothing_of_ours(file):
    tree = ast.parse(file.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert {"torch", "transformers", "diffusers"} <= imported
    assert imported - {"torch", "transformers", "diffusers", "peft"} <= set(sys.stdlib_module_names)
    bases = {node.name: [ast.unparse(b) for b in node.bases] for node in tree.body if isinstance(node, ast.ClassDef)}
    assert [name for name, names in bases.items() if any("Pipeline" in n for n in names)] == [
        "StableDiffusionXLLongPromptPipeline"
    ]


def test_it_draws_what_the_class_draws(base, file, tmp_path, monkeypatch):
    # diffusers copies custom code there, by default below the home folder
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    replaced = {
        "text_encoder": tiny_sdxl.text_encoder(window=248, seed=5),
        "tokenizer": tiny_tokenizer(248),
        "add_watermarker": False,
    }
    how = {"trust_remote_code": True, **replaced}
    of_folder = DiffusionPipeline.from_pretrained(base, custom_pipeline=str(file.parent), **how)
    custom = DiffusionPipeline.from_pretrained(base, custom_pipeline=str(file), **how)
    ours = StableDiffusionXLLongPromptPipeline(**custom.components)
    for pipe in (of_folder, custom):
        assert type(pipe).__module__.startswith("diffusers_modules.")
    assert of_folder.prompt_layout(PROMPT).positions == 152
    assert np.array_equal(draw(custom, PROMPT), draw(ours, PROMPT))

    custom.save_pretrained(tmp_path / "saved")
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "saved")) is StableDiffusionXLPipeline
