"""Names that a package imports on first use, because their modules take seconds to import."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package (PEP 562).

    Args:
        package: its name.
        homes: {name: module that has it, relative to the package}.
    """

    def getattribute(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattribute
