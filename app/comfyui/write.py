"""`debias-diffusion comfyui`: the node's folder for ComfyUI, which needs nothing of this package there."""

import json
import shutil
from importlib.metadata import distribution
from pathlib import Path

from debias_diffusion import chunks

from ..options import ComfyUIConfig
from ..written_folder import written_folder
from . import long_prompt_node

WORKFLOWS = "example_workflows"  # where ComfyUI looks for them, for its list of templates
WORKFLOW, WORKFLOW_248 = "long_prompt.json", "long_prompt_248.json"
_DISTRIBUTION = "debias-diffusion"


def write_node(config: ComfyUIConfig) -> Path:
    """Writes the node's modules, with the one that it shares with our pipelines, and what makes them a node pack.

    Returns:
        the folder

    Raises:
        UserError: the folder holds anything but an earlier copy that nobody changed.
    """
    output, node = Path(config.output), Path(long_prompt_node.__file__)
    workflow = json.loads(node.with_name(WORKFLOW).read_text(encoding="utf-8"))
    with written_folder(output, "comfyui") as folder:
        for file in (node.with_name("__init__.py"), node, Path(chunks.__file__)):
            shutil.copyfile(file, folder / file.name)
        texts = {"LICENSE": license_text(), "README.md": README, "pyproject.toml": pyproject()}
        texts[f"{WORKFLOWS}/{WORKFLOW}"] = json.dumps(workflow, indent=2)
        texts[f"{WORKFLOWS}/{WORKFLOW_248}"] = json.dumps(with_248_positions(workflow), indent=2)
        (folder / WORKFLOWS).mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    print(
        f"Wrote {output}: restart ComfyUI, and look for 'CLIP Text Encode (long prompt)'. "
        f"{output / WORKFLOWS / WORKFLOW} is a workflow: drag it into ComfyUI's page."
    )
    return output


def with_248_positions(workflow: dict) -> dict:
    """The workflow with the text encoders of two files, CLIP-L of 248 positions, in place of the checkpoint's."""
    files = {"clip_name1": "debias_clip_l.safetensors", "clip_name2": "clip_g.safetensors"}
    loader = {
        "class_type": "DualCLIPLoader",
        "inputs": files | {"type": "sdxl", "device": "default"},
        "_meta": {"title": "DualCLIPLoader: CLIP-L of 248, bigG of 77"},
    }
    nodes = {
        number: node | {"inputs": node["inputs"] | {"clip": ["2", 0]}} if "clip" in node["inputs"] else node
        for number, node in workflow.items()
    }
    return nodes | {"2": loader}


def license_text() -> str:
    """The package's licence: of a checkout, or of an installed copy."""
    checkout = Path(__file__).parents[2] / "LICENSE"
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    return distribution(_DISTRIBUTION).read_text("licenses/LICENSE")


def pyproject() -> str:
    """What ComfyUI's registry and manager read."""
    package = distribution(_DISTRIBUTION)
    lines = [
        "[project]",
        'name = "long-prompt-encode"',
        'description = "CLIP Text Encode for prompts of any length, in chunks that end with sentences"',
        f'version = "{package.version}"',
        'license = { file = "LICENSE" }',
        "dependencies = []",
    ]
    urls = dict(url.split(", ", 1) for url in package.metadata.get_all("Project-URL") or [])
    if "Repository" in urls:
        lines += ["", "[project.urls]", f'Repository = "{urls["Repository"]}"']
    lines += ["", "[tool.comfy]", 'PublisherId = ""  # yours at registry.comfy.org', 'DisplayName = "Long prompts"']
    return "\n".join(lines) + "\n"


README = f"""# CLIP Text Encode (long prompt)

A node for ComfyUI that reads prompts of any length: in chunks that end with a sentence, with both text encoders of SDXL
aligned token by token. It takes the place of CLIP Text Encode, and a prompt of up to 75 tokens gives the same image.

Install: put this folder into ComfyUI's `custom_nodes` and restart ComfyUI. It needs nothing but ComfyUI.

Workflows, in `{WORKFLOWS}`: drag one into ComfyUI's page.

- `{WORKFLOW}`: an SDXL checkpoint with its own text encoders.
- `{WORKFLOW_248}`: with a CLIP-L of 248 positions, as `debias-diffusion export --to comfyui` writes it, and SDXL's
  `clip_g.safetensors`.

Written by `debias-diffusion comfyui`; changes belong into that package.
"""
