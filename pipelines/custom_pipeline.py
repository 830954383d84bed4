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
    # One module after the other, the second without its docstring and its import of the first.
    pipeline = inspect.getsource(stable_diffusion_xl).removeprefix(f'"""{stable_diffusion_xl.__doc__}"""')
    source = inspect.getsource(long_prompt) + re.sub(r"^from \.\w+ import .*\n", "", pipeline, flags=re.MULTILINE)
    path.write_text(source, encoding="utf-8")
    return path
