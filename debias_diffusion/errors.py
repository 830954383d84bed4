"""Errors caused by user input, and how they are worded."""

import difflib
from collections.abc import Iterable

# Optional libraries, by the name of their import: the extra of this package that installs them.
EXTRAS = {
    "open_clip": "train",
    "timm": "train",
    "torchvision": "train",
    "matplotlib": "eval",
    "scipy": "eval",
    "torch_fidelity": "eval",
    "torchmetrics": "eval",
    "gradio": "app",
    "orjson": "app",
}


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is allowed and what to do. The command line prints it without a traceback.

    Attributes:
        exit_code: the command line's.
    """

    exit_code = 2


class FailedError(UserError):
    """Everything given could be used, and some of the work failed all the same; the rest is done."""

    exit_code = 1


class OutOfMemory(UserError):
    """The memory of a device does not suffice."""


def near_matches(name: str, allowed: Iterable[str], most: int = 3) -> str:
    """A hint that names the allowed values closest to `name`, or an empty string where none is close.

    >>> near_matches("ViT-B16", ["ViT-B-16", "RN50"])
    ' Did you mean ViT-B-16?'
    """
    by_lower = {candidate.lower(): candidate for candidate in allowed}
    close = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=0.6)
    return f" Did you mean {' or '.join(by_lower[match] for match in close)}?" if close else ""


def reason(error: Exception) -> str:
    """An error of a library in a line; of an optional one that is missing, what to install."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS:
        return missing_library(error)
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def missing_library(error: ModuleNotFoundError, extra: str = "") -> str:
    """What to install where one of `EXTRAS` is missing.

    Args:
        extra: to install, in place of the library's own.
    """
    library = (error.name or "").partition(".")[0]
    return f'{library} is not installed: run `pip install -e ".[{extra or EXTRAS[library]}]"` in the checkout'
