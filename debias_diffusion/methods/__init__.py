"""Training methods: which captions a model learns from, and which losses. One file a method, one line here.

`docs/extending.md` shows how to add one.
"""

from dataclasses import fields, replace
from types import UnionType
from typing import Any, get_args, get_type_hints

from ..errors import UserError, near_matches
from .base import Batch, Caption, Method, image_features
from .dual_caption import RECIPES as DUAL_CAPTION_RECIPES
from .fix_clip import RECIPES as FIX_CLIP_RECIPES
from .keep_states import KeepStates

__all__ = ["METHODS", "Batch", "Caption", "Method", "find_method", "image_features"]

# What `--recipe` may name.
METHODS: dict[str, Method] = {**DUAL_CAPTION_RECIPES, **FIX_CLIP_RECIPES}


def find_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """The method of that name, with some of its settings changed.

    Raises:
        UserError: there is no such method or setting, or a value cannot be used.
    """
    if name not in METHODS:
        raise UserError(f"Unknown recipe {name!r}.{near_matches(name, METHODS)} Choose one of: {', '.join(METHODS)}.")
    method = METHODS[name]
    known = [setting.name for setting in fields(method) if setting.metadata.get("is_setting", True)]
    for setting, value in (settings or {}).items():
        if setting not in known:
            raise UserError(
                f"The recipe {name!r} has no setting {setting!r}.{near_matches(setting, known)} It has: "
                f"{', '.join(known) or 'none'}."
            )
        kind = _kind(method, setting)
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise UserError(f"{setting} must be of type {kind.__name__}, got {value!r}.")
    method = replace(method, **(settings or {}))
    return KeepStates(method) if method.keep_states else method


def _kind(method: Method, setting: str) -> type:
    """The type of a setting's values; of one that may be None, that of the others."""
    default = getattr(method, setting)
    if default is not None:
        return type(default)
    hint = get_type_hints(type(method))[setting]
    return next(kind for kind in get_args(hint) if kind is not type(None)) if isinstance(hint, UnionType) else hint
