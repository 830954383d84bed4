"""Training methods: which captions a model learns from, and which losses. One file a method, one line here.

`docs/extending.md` shows how to add one.
"""

from dataclasses import fields, replace
from typing import Any

from ..errors import UserError, near_matches
from .base import Batch, Caption, Method, image_features
from .dual_caption import RECIPES
from .keep_states import KeepStates

__all__ = ["METHODS", "Batch", "Caption", "Method", "find_method", "image_features"]

# What `--recipe` may name.
METHODS: dict[str, Method] = {**RECIPES}


def find_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """The method of that name, with some of its settings changed.

    Raises:
        UserError: there is no such method or setting, or a value cannot be used.
    """
    if name not in METHODS:
        raise UserError(f"Unknown recipe {name!r}.{near_matches(name, METHODS)} Choose one of: {', '.join(METHODS)}.")
    method = METHODS[name]
    known = [setting.name for setting in fields(method)]
    for setting, value in (settings or {}).items():
        if setting not in known:
            raise UserError(
                f"The recipe {name!r} has no setting {setting!r}.{near_matches(setting, known)} It has: "
                f"{', '.join(known) or 'none'}."
            )
        kind = type(getattr(method, setting))
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise UserError(f"{setting} must be of type {kind.__name__}, got {value!r}.")
    method = replace(method, **(settings or {}))
    return KeepStates(method) if method.keep_states else method
