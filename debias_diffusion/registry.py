"""What others can add to: commands, training methods, families and formats of models, evaluations, benchmarks.

`docs/extending.md` shows how. What only a checkout's `research/` has is added in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from .errors import UserError, near_matches

Entry = TypeVar("Entry")

# What people may look for here and research/ has, and the command that runs it in a checkout.
MOVED = {
    "ablate": "python -m research ablate",
    "showcase": "python -m research showcase",
    "synthesize": "python -m research synthesize",
    "classification": "python -m research evaluate classification",
    "judge": "python -m research evaluate judge",
    "referring-": "python -m research evaluate generation --data toy/referring-test",
    "short-referring-": "python -m research evaluate generation --data toy/short-referring-test",
    "chinese_clip": "python -m research evaluate retrieval",
    "smart-clip": "python -m research train --recipe smart-clip",
    **{
        name: f"python -m research evaluate retrieval --dataset {name}"
        for name in (
            *(f"{data}-{split}" for data in ("coco-cn", "flickr30k-cna") for split in ("val", "test", "all")),
            "recos-v1",
        )
    },
    "masked-retrieval": "python -m research evaluate masked-retrieval",
    "debias-clip-as-released": "debias-diffusion train --config research/debias-clip-as-released.yaml",
}


def named_function(package: str, function: str) -> Callable:
    """A function that a table names as "module:function" in a package; imports its module, which may take seconds."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"{package}.{module}"), name)


@dataclass(frozen=True)
class Command:
    """One command. What runs it is named, not imported, because the import takes seconds.

    Attributes:
        options: its dataclass: the docstring begins with what the command does, the fields are the options.
        function: "module:function" in the package of `options`; takes the options.
        example: arguments to start from.
        extra: the optional dependencies that it needs, as in pyproject.toml; "" for none.
    """

    options: type
    function: str
    example: str
    extra: str = ""

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return self.options.__doc__.partition("\n")[0]

    def load(self, name: str | None = None) -> Callable:
        """What runs it, or another function of its module, by name; imports large libraries."""
        module, _, function = self.function.partition(":")
        package = self.options.__module__.partition(".")[0]
        return named_function(package, f"{module}:{name or function}")


class Registry(dict[str, Entry]):
    """Entries of one kind, by the names that people type.

    Attributes:
        kind: what an entry is, as messages call it: "recipe".
    """

    def __init__(self, kind: str, entries: dict[str, Entry]):
        super().__init__(entries)
        self.kind = kind

    def register(self, name: str, entry: Entry) -> None:
        """Adds an entry. Raises UserError if the name is taken."""
        if name in self:
            raise UserError(f"There is a {self.kind} {name!r} already. Give yours another name.")
        self[name] = entry

    def find(self, name: str) -> Entry:
        """The entry of that name.

        Raises UserError if there is none, which names those that are near, or where it is found.
        """
        if name in self:
            return self[name]
        if name in MOVED:
            raise UserError(f"The {self.kind} {name!r} is found in a checkout of the project: `{MOVED[name]}`.")
        hint = near_matches(name, self)
        raise UserError(f"Unknown {self.kind} {name!r}.{hint} Choose one of: {', '.join(self)}.")
