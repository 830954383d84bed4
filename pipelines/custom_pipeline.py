"""The long-prompt pipeline as one file, for people who have diffusers but not this package."""

import ast
import inspect
from pathlib import Path

from . import long_prompt, weighting, windows
from .stable_diffusion_xl import StableDiffusionXLLongPromptPipeline


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
    # One module after the other. diffusers wants exactly one pipeline class in such a file, so of the last just one.
    parts = [_body(module) for module in (windows, weighting, long_prompt)]
    imports = [line for lines, _ in parts for line in lines] + ["from diffusers import StableDiffusionXLPipeline"]
    bodies = [body for _, body in parts] + [inspect.getsource(StableDiffusionXLLongPromptPipeline)]
    source = "\n".join([f'"""{long_prompt.__doc__}"""', "", *dict.fromkeys(imports), "\n\n", "\n\n\n".join(bodies)])
    path.write_text(source.rstrip() + "\n", encoding="utf-8")
    return path


def _body(module) -> tuple[list[str], str]:
    """A module's imports of other packages, and all that follows its imports."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    nodes = ast.parse(source).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [ast.get_source_segment(source, node) for node in imports if not getattr(node, "level", 0)]
    return others, "\n".join(lines[imports[-1].end_lineno :]).strip()
