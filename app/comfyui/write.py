"""The node pack for ComfyUI: `debias-diffusion comfyui`, or `python app/comfyui/write.py [OUTPUT]` in a checkout.

The latter needs the standard library alone.
"""

import argparse
import re
import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..options import ComfyUIConfig

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]  # of a checkout; the package's folder, where it is installed
WORKFLOWS = "example_workflows"  # where ComfyUI looks for them, for its list of templates
WROTE = f"Wrote {{0}}: restart ComfyUI, and drag {{0}}/{WORKFLOWS}/long_prompt.json into its page."
HELP = "web/docs"  # where it looks for a node's page: `WEB_DIRECTORY` of `__init__.py`, then `docs`


def write_pack(folder: Path) -> None:
    """Writes the node's modules, with those that it shares with our pipelines, and what makes them a node pack."""
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        package, examples = _ROOT / "debias_diffusion", _ROOT / "examples" / "comfyui"
        license_text = (_ROOT / "LICENSE").read_text(encoding="utf-8")
        version = re.search(r'^version = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)[1]
    else:
        package, examples, installed = _ROOT, _HERE / "examples", distribution("debias-diffusion")
        license_text, version = installed.read_text("licenses/LICENSE"), installed.version
    node = [_HERE / name for name in ("__init__.py", "schema.py", "long_prompt_node.py")]
    shared = [package / "text" / name for name in ("chunks.py", "sentences.py")]
    for place, files in (
        (".", [*node, *shared, examples / "README.md", examples / "icon.svg"]),
        (WORKFLOWS, sorted(examples.glob("*.json"))),
        (HELP, [examples / "DebiasLongPromptEncode.md"]),
    ):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, folder / place / file.name)
    (folder / "LICENSE").write_text(license_text, encoding="utf-8")
    (folder / "pyproject.toml").write_text(PYPROJECT.format(version=version), encoding="utf-8")


def write_node(config: "ComfyUIConfig") -> Path:
    """Writes the pack, in place of an earlier one that nobody changed, and returns the folder."""
    from ..written_folder import written_folder  # needs the package

    output = Path(config.output)
    with written_folder(output, "comfyui") as folder:
        write_pack(folder)
    print(WROTE.format(output))
    return output


# What ComfyUI's registry and manager read.
PYPROJECT = """[project]
name = "long-prompt-encode"
description = "CLIP Text Encode for prompts of any length, in chunks that end with sentences"
version = "{version}"
license = {{ file = "LICENSE" }}
dependencies = []

[tool.comfy]
PublisherId = ""  # yours at registry.comfy.org
DisplayName = "Long prompts"
Icon = ""  # the address at which icon.svg is published
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", default=_ROOT / "build" / "long_prompt", help="a new folder")
    output = parser.parse_args().output
    if output.exists():
        parser.error(f"{output} exists. Move it away, or give a new folder.")
    write_pack(output)
    print(WROTE.format(output))
