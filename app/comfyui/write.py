"""`debias-diffusion comfyui`: the node's folder for ComfyUI, which needs nothing of this package there."""

import shutil
from pathlib import Path

from debias_diffusion import chunks

from ..options import ComfyUIConfig
from ..written_folder import written_folder
from . import long_prompt_node

WORKFLOW = "long_prompt_workflow.json"


def write_node(config: ComfyUIConfig) -> Path:
    """Writes the node's modules, with the one that it shares with our pipelines, and a workflow.

    Returns:
        the folder

    Raises:
        UserError: the folder holds anything but an earlier copy that nobody changed.
    """
    output, node = Path(config.output), Path(long_prompt_node.__file__)
    files = [node.with_name("__init__.py"), node, Path(chunks.__file__), node.with_name(WORKFLOW)]
    with written_folder(output, "comfyui") as folder:
        for file in files:
            shutil.copyfile(file, folder / file.name)
    print(
        f"Wrote {output}: restart ComfyUI, and look for 'CLIP Text Encode (long prompt)'. {output / WORKFLOW} is a "
        "workflow: drag it into ComfyUI's page."
    )
    return output
