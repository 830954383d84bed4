"""Long prompts as a single file of code, for environments with diffusers but without this package."""

import ast
import inspect
import json
from importlib.metadata import version
from pathlib import Path

from debias_diffusion.text import chunks, encoding, options, prompt, prompt_tokens, schedules, sentences, weighting

from . import calls, long_prompt, sharpening
from .classes import StableDiffusionXLLongPromptPipeline


def write_custom_pipeline(path: str | Path) -> Path:
    """Writes the self-contained `pipeline.py`, which needs only torch, transformers and diffusers.

    `DiffusionPipeline.from_pretrained(base, custom_pipeline="folder/pipeline.py", trust_remote_code=True)` loads it.
    If the file is called `pipeline.py`, the name of its folder works too.

    Args:
        path: file to write; its folder is created if missing.

    Returns:
        the file's path
    """
    # diffusers wants exactly one pipeline class in the file, so of the last module only that class.
    pipeline = inspect.getsource(StableDiffusionXLLongPromptPipeline)
    return _write(Path(path), ["from diffusers import StableDiffusionXLPipeline"], pipeline)


def write_block(folder: str | Path) -> Path:
    """Writes the modular blocks of SDXL with long prompts: a self-contained `block.py`, and `modular_config.json`.

    `ModularPipelineBlocks.from_pretrained(folder, trust_remote_code=True).init_pipeline(base)` loads them. Needs only
    torch, transformers and diffusers.

    Args:
        folder: created if missing.

    Returns:
        the folder
    """
    from . import modular  # an experimental part of older diffusers

    path = _write(Path(folder) / "block.py", *_body(modular))
    name = modular.StableDiffusionXLLongPromptBlocks.__name__
    config = {"_class_name": name, "_diffusers_version": version("diffusers")}
    config["auto_map"] = {"ModularPipelineBlocks": f"{path.stem}.{name}"}
    config["requirements"] = modular.LongPromptTextEncoderStep._requirements
    (path.parent / "modular_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path.parent


def _write(path: Path, imports: list[str], last: str) -> Path:
    """A file of all that long prompts need, in the order of their imports, and at the end the source `last`."""
    texts = sentences, chunks, weighting, schedules, prompt_tokens, options, prompt, encoding
    parts = [_body(module) for module in (*texts, calls, sharpening, long_prompt)]
    lines = [line for lines, _ in parts for line in lines] + imports
    bodies = [*(body for _, body in parts), last]
    source = "\n".join([f'"""{long_prompt.__doc__}"""', "", *dict.fromkeys(lines), "\n\n", "\n\n\n".join(bodies)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source.rstrip() + "\n", encoding="utf-8")
    return path


def _body(module) -> tuple[list[str], str]:
    """The lines of a module that import other packages, and everything after its imports."""
    source = inspect.getsource(module)
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    texts = [ast.get_source_segment(source, node) or "" for node in imports]
    foreign = [text for text in texts if not text.startswith(("from .", "from debias_diffusion"))]
    return foreign, "\n".join(source.splitlines()[imports[-1].end_lineno :]).strip()
