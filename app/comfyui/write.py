"""`debias-diffusion comfyui`: the node's folder for ComfyUI, which needs nothing of this package there."""

import json
import shutil
from importlib.metadata import distribution
from pathlib import Path

from debias_diffusion import chunks, sentences

from ..options import ComfyUIConfig
from ..written_folder import written_folder
from . import long_prompt_node

WORKFLOWS = "example_workflows"  # where ComfyUI looks for them, for its list of templates
WORKFLOW, WORKFLOW_248, SHARPENED = "long_prompt.json", "long_prompt_248.json", "long_prompt_sharpened.json"


def write_node(config: ComfyUIConfig) -> Path:
    """Writes the node's modules, with those that it shares with our pipelines, and what makes them a node pack.

    Returns:
        the folder

    Raises:
        UserError: the folder holds anything but an earlier copy that nobody changed.
    """
    output, node = Path(config.output), Path(long_prompt_node.__file__)
    workflow = json.loads(node.with_name(WORKFLOW).read_text(encoding="utf-8"))
    with written_folder(output, "comfyui") as folder:
        for file in (node.with_name("__init__.py"), node, *(Path(module.__file__) for module in (chunks, sentences))):
            shutil.copyfile(file, folder / file.name)
        texts = {"LICENSE": license_text(), "README.md": README, "pyproject.toml": pyproject()}
        texts[f"{WORKFLOWS}/{WORKFLOW}"] = json.dumps(workflow, indent=2)
        texts[f"{WORKFLOWS}/{SHARPENED}"] = json.dumps(sharpened(workflow), indent=2)
        texts[f"{WORKFLOWS}/{WORKFLOW_248}"] = json.dumps(with_248_positions(workflow), indent=2)
        (folder / WORKFLOWS).mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    print(f"Wrote {output}: restart ComfyUI, and drag {output / WORKFLOWS / WORKFLOW} into its page.")
    return output


def sharpened(workflow: dict) -> dict:
    """The workflow with ComfyUI's own node that multiplies the scale of the UNet's cross-attention."""
    inputs = {"model": ["1", 0], "q": 1.0, "k": 1.5, "v": 1.0, "out": 1.0}
    node = {"class_type": "UNetCrossAttentionMultiply", "inputs": inputs, "_meta": {"title": "Sharpen: k = 1.5"}}
    sampler = workflow["6"] | {"inputs": workflow["6"]["inputs"] | {"model": ["9", 0]}}
    return workflow | {"6": sampler, "9": node}


def with_248_positions(workflow: dict) -> dict:
    """The workflow with the text encoders of two files, CLIP-L of 248 positions, in place of the checkpoint's."""
    inputs = {"clip_name1": "debias_clip_l.safetensors", "clip_name2": "clip_g.safetensors", "type": "sdxl"}
    title = {"title": "DualCLIPLoader: CLIP-L of 248, bigG of 77"}
    for node in workflow.values():
        if "clip" in node["inputs"]:
            node["inputs"]["clip"] = ["2", 0]
    return workflow | {"2": {"class_type": "DualCLIPLoader", "inputs": inputs, "_meta": title}}


def license_text() -> str:
    """The package's licence: of a checkout, or of an installed copy."""
    checkout = Path(__file__).parents[2] / "LICENSE"
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    return distribution("debias-diffusion").read_text("licenses/LICENSE")


def pyproject() -> str:
    """What ComfyUI's registry and manager read."""
    return f"""[project]
name = "long-prompt-encode"
description = "CLIP Text Encode for prompts of any length, in chunks that end with sentences"
version = "{distribution("debias-diffusion").version}"
license = {{ file = "LICENSE" }}
dependencies = []

[tool.comfy]
PublisherId = ""  # yours at registry.comfy.org
DisplayName = "Long prompts"
"""


README = f"""# CLIP Text Encode (long prompt)

A node for ComfyUI that reads prompts of any length: in chunks that end with a sentence, with both text encoders of SDXL
aligned token by token. It takes the place of CLIP Text Encode, and a prompt of up to 75 tokens gives the same image.

Put this folder into ComfyUI's `custom_nodes`, restart ComfyUI, and drag a workflow from `{WORKFLOWS}` into its page:
`{WORKFLOW}` uses an SDXL checkpoint's text encoders; `{SHARPENED}` sharpens its UNet's attention to the
prompt besides. `{WORKFLOW_248}` uses SDXL's `clip_g.safetensors` and a CLIP-L of 248 positions from
`debias-diffusion export --to comfyui`.

Written by `debias-diffusion comfyui`; changes belong into that package.
"""
