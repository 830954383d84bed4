"""What modules there are, and where."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "debias_diffusion"
ROOMS = ("app", "eval", "pipelines")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for room in (PACKAGE, *ROOMS)
    for path in (ROOT / room).rglob("*.py")
    if "space" not in path.parts
}
RESEARCH = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "research").rglob("*.py")
}
