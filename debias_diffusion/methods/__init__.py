"""Training methods: which captions a model learns from, and which losses. One file a method, one line here.

`docs/extending.md` shows how to add one.
"""

import sys
from dataclasses import fields, replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ..data.batch import Batch, Caption
from ..errors import UserError, near_matches
from ..registry import Registry
from .base import Method, Term, image_features
from .dual_caption import RECIPES as DUAL_CAPTION_RECIPES
from .fix_clip import RECIPES as FIX_CLIP_RECIPES
from .keep_states import KeepStates

__all__ = ["METHODS", "Batch", "Caption", "KeepStates", "Method", "Term", "find_method", "image_features"]
__all__ += ["import_methods"]

# What `--recipe` may name.
METHODS: Registry[Method] = Registry("recipe", {**DUAL_CAPTION_RECIPES, **FIX_CLIP_RECIPES})


@cache
def import_methods(file: str) -> None:
    """Runs a Python file that adds methods to METHODS, once in a process.

    Args:
        file: its absolute path.

    Raises:
        UserError: there is no such file.
    """
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"There is no Python file {file!r} to import. Give the file that adds your method to METHODS.")
    spec: Any = spec_from_file_location(f"imported_{path.stem}", path)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def find_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """The method of that name, with some of its settings changed.

    Raises:
        UserError: there is no such method or setting, or a value cannot be used.
    """
    method, changes = METHODS.find(name), settings or {}
    known = [part.name for part in fields(method) if part.metadata.get("is_setting", True)]
    for setting in changes:
        if setting not in known:
            raise UserError(
                f"The recipe {name!r} has no setting {setting!r}.{near_matches(setting, known)} It has: "
                f"{', '.join(known)}."
            )
    return replace(method, **changes)
