"""What every evaluation leaves behind: one JSON of settings, versions, digests and numbers, and a small table."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from debias_diffusion.files import sha256

PACKAGES = ("debias-diffusion", "torch", "transformers", "diffusers", "open_clip_torch")


def versions() -> dict[str, str]:
    """The versions of this package and of the libraries that decide the numbers."""
    return {package: version(package) for package in PACKAGES}


def digest(path: str | os.PathLike) -> str:
    """sha256 of a file, or of a folder: over the names and contents of its files, hidden ones left out."""
    path = Path(path)
    if path.is_file():
        return sha256(path)
    total = hashlib.sha256()
    for name, file in sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in name.split("/")):
            total.update(f"{name}\0{digest(file)}\n".encode())
    return total.hexdigest()


def weights_digest(module: torch.nn.Module) -> str:
    """sha256 over the names, types, shapes and values of a module's state, wherever it was loaded from."""
    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def table(header: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """A plain text table: numbers with two decimals, right-aligned; a missing number is a dash."""
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.2f}"
