"""The long-prompt pipeline as one file, for people who have diffusers but not this package."""

import inspect
import re
from pathlib import Path

from . import long_prompt, stable_diffusion_xl


def write_custom_pipeline(path: str | Path) -> Path:
    """Writes the self-contained `pipeline.py`, which needs only torch, transformers and diffusers.

    `DiffusionPipeline.from_pretrained(base, custom_pipeline="folder/pipeline.py", trust_remote_code=True)` loads it.
    The folder's name works in place of the file's, if the file is called `pipeline.py`.

    Args:
        path: file to write; its folder is made if it is missing.

    Returns:
        the file's path
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = [inspect.getsource(module) for module in (long_prompt, stable_diffusion_xl)]
    source = "\n\n".join(re.sub(r"^from \.\w+ import .*\n", "", source, flags=re.MULTILINE) for source in sources)
    path.write_text(source, encoding="utf-8")
    return path
