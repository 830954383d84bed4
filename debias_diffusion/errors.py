"""Errors caused by user input, and how they are worded."""

import difflib
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Optional libraries, by the name of their import: the extra of this package that installs them.
EXTRAS = {
    "open_clip": "train",
    "timm": "train",
    "torchvision": "train",
    "matplotlib": "eval",
    "scipy": "eval",
    "torch_fidelity": "eval",
    "torchmetrics": "eval",
    "dynamicprompts": "generate",
    "peft": "generate",
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


def reason(error: BaseException) -> str:
    """An error of a library in a line; of an optional one that is missing, what to install."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRAS:
        return missing_library(error)
    message = " ".join(str(error).split())
    if "eights only load failed" in message or "weights_only" in message:  # torch advises to load it anyway
        name = re.search(r"(?:GLOBAL|global|class|operand) ([\w.]+)", message)
        more = f"a pickle with more in it than tensors{f' ({name[1]})' if name else ''}"
        return (
            f"it is damaged, not a file of weights, or {more}, which can be code. It is refused. Get the weights as "
            ".safetensors"
        )
    return textwrap.shorten(message, 300, placeholder=" ...").rstrip(".") or type(error).__name__


def missing_library(error: ModuleNotFoundError, extra: str = "") -> str:
    """What to install where one of `EXTRAS` is missing: `extra`, or the library's own."""
    library = (error.name or "").partition(".")[0]
    return f'{library} is not installed: run `pip install -e ".[{extra or EXTRAS[library]}]"` in the checkout'


@contextmanager
def explain_failure(failure: str, advice: str = "") -> Iterator[None]:
    """Turns every error that a wrong or hostile file causes into a UserError, and no bug of this package.

    Libraries raise errors of any type for such files, even types of their own. But a name or an attribute that is not
    there, and an assertion, are bugs: they pass through, unless the attribute is one of a plain value, which a file can
    hold in the place of another.

    `failure` begins the message: "The text encoder 'runs/a' could not be loaded". `advice` is a sentence on what to do.
    """
    try:
        yield
    except (UserError, NameError, AssertionError):
        raise
    except BaseException as error:
        is_bug = isinstance(error, AttributeError) and not isinstance(error.obj, dict | list | str | float | int | None)
        # Libraries in Rust panic on some files, and a PanicException is not an Exception.
        if is_bug or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise UserError(f"{failure}: {reason(error)}.{advice and f' {advice}'}") from error


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Silences libraries' warnings of missing, unused and random weights, which are checked here or asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
