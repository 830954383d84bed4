"""Are results still the same, to the last bit? Runs the commands of CASES in this tree and in that of COMMIT.

    python tests/golden/compare.py [CASE ...]

Each tree has a process of its own for each command, on this machine, because bits differ between processors. What the
old tree makes is kept in build/golden. Ends with 1 if a result differs, is missing, or a command fails.

Where the new tree's command line differs, a case has a line of its own for it; where it names a result, a file or a
tensor differently, RENAMES has a line.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "golden"
COMMIT = "5b82b11"  # whose results the tree must give
DATA, PAIRS, HELD_OUT = "pairs", 24, 6  # ShareGPT4V's layout, written by the old tree
SHORT = "A red star above a blue ring."
LONG = " ".join(
    f"The {size} {colour} ring is above the {size} {colour} star, and it is the {place} of all."
    for size, colour, place in zip(
        ("small", "large", "small", "large"),
        ("red", "blue", "green", "yellow"),
        ("first", "second", "third", "last"),
        strict=True,
    )
)

# Paths of values in the old tree's results, FILE/KEY/KEY, as regular expressions, and what stands there now.
RENAMES = {"over_window": "longer_than_context"}
# Parts of such a path whose numbers are not compared.
IGNORED = re.compile(r"/(settings|versions|digests|seconds|samples_per_second)(/|$)")


@dataclass(frozen=True)
class Case:
    """A command of both trees.

    Attributes:
        old: of the old tree; {out}, {data}, {images} and {prompts} are paths.
        files: patterns of the results in the output folder: .safetensors, .json, .jsonl and .png.
        new: of the new tree, where it differs.
        renames: further RENAMES.
        stop: the optimizer's step at which the process ends, before it is run again.
    """

    old: str
    files: tuple[str, ...]
    new: str = ""
    renames: dict[str, str] = field(default_factory=dict)
    stop: int = 0

    def command(self, tree: str) -> list[str]:
        paths = {"data": WORK / DATA / "data.json", "images": WORK / DATA / "images", "prompts": WORK / "prompts.txt"}
        return shlex.split(((tree == "new" and self.new) or self.old).format(out="{out}", **paths))


_TRAIN = (
    "train --model toy/clip --output {{out}} --batch 6 --components {components} --max-steps 5 --epochs 9 --warmup 2 "
    f"--learning-rate 1e-3 --validation {HELD_OUT} --eval-every 3 --checkpoint-every 2 --log-every 1 --workers 0 "
    "--precision fp32 --max-bad 0 "
)
_PAIRS = "--data {data} --images {images} "
_RECIPES = {
    "long-clip": (3, "--data toy/train-2 --recipe long-clip"),
    "debias-clip": (3, _PAIRS + "--recipe debias-clip"),
    "debias-clip-sdxl": (3, _PAIRS + "--recipe debias-clip-sdxl --chunk 4"),
    "fix-clip": (
        *(0, _PAIRS + "--recipe fix-clip --prompts 3 --groups 3 --first-group 2"),
        _PAIRS + "--recipe fix-clip --method.prompts 3 --method.groups 3 --method.first_group 2",
    ),
    "frozen": (3, _PAIRS + "--recipe debias-clip --freeze-image-tower"),
}
_GENERATE = "generate --prompts {prompts} --base toy/sdxl --output {out} --steps 3 --guidance-scale 3 --batch 2 "
_IMAGES = ("0*.png",)  # without contact sheets
_EVALUATE = "--data toy/test --output {out} --limit "
_RENDER = (
    "--base toy/sdxl --own-features toy/features --clip-score toy/clip --steps 2 --images-at-once 2 " + _EVALUATE + "4"
)

CASES = {
    **{
        f"train-{name}{'-resumed' if stop else ''}": Case(
            _TRAIN.format(components=components) + rest,
            ("last/*.safetensors", "log.jsonl"),
            *(_TRAIN.format(components=components) + other for other in renamed),
            stop=stop,
        )
        for name, (components, rest, *renamed) in _RECIPES.items()
        for stop in (0, 4)
    },
    "generate": Case(_GENERATE, _IMAGES),
    "generate-separate": Case(
        _GENERATE + "--overlap false --weighting", _IMAGES, _GENERATE + "--reading separate --weighting"
    ),
    "generate-debias-clip": Case(_GENERATE + "--encoder toy/debias-clip", _IMAGES),
    "generate-stretch": Case(_GENERATE + "--encoder toy/debias-clip --encoder-2 stretch --low-memory", _IMAGES),
    "retrieval": Case(
        f"evaluate retrieval --encoders toy/clip toy/debias-clip {_EVALUATE}40 --batch-size 16", ("retrieval.json",)
    ),
    "robustness": Case(f"evaluate robustness --encoders toy/clip toy/debias-clip {_EVALUATE}20", ("robustness.json",)),
    "attention": Case(
        f"evaluate attention --encoders toy/clip toy/debias-clip --prompt '{SHORT}' {_EVALUATE}10", ("attention.json",)
    ),
    "generation": Case(
        f"evaluate generation --encoders original overlap:original chunks:toy/clip toy/debias-clip {_RENDER}",
        ("generation.json", "*/**/*.png"),
        f"evaluate generation --encoders cut:original original separate:toy/clip toy/debias-clip {_RENDER}",
        renames={
            "^pictures/": "images/",
            "encoders/original/": "encoders/SDXL's own, cut at 77 tokens/",
            "encoders/original in overlapping chunks/": "encoders/SDXL's own, overlapping chunks/",
            "encoders/toy/clip in chunks/": "encoders/toy/clip, separate chunks/",
            "^images/original/": "images/SDXL-s-own-cut-at-77-tokens/",
            "^images/original-in-overlapping-chunks/": "images/SDXL-s-own-overlapping-chunks/",
            "^images/toy-clip-in-chunks/": "images/toy-clip-separate-chunks/",
        },
    ),
    "drift": Case(f"evaluate drift --encoders toy/debias-clip --base toy/sdxl {_EVALUATE}8", ("drift.json",)),
}

DRIVER = """
import os, runpy, sys
import debias_diffusion.app
folder = os.path.dirname(os.path.dirname(debias_diffusion.app.__file__))
assert folder == os.environ["GOLDEN_PACKAGE"], folder  # not what is installed
if stop := int(os.environ["GOLDEN_STOP"]):
    import torch
    step, calls = torch.optim.AdamW.step, []
    def stopped_step(*arguments, **named):
        calls.append(0)
        return os._exit(75) if len(calls) == stop else step(*arguments, **named)
    torch.optim.AdamW.step = stopped_step
if sys.argv[1] == "write-pairs":
    from debias_diffusion.toyworld.pairs import write_pairs
    write_pairs(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    runpy.run_module("debias_diffusion", run_name="__main__", alter_sys=True)
"""
_STOPPED = 75


def run(tree: str, arguments: list[str], stop: int = 0) -> None:
    """Runs a command in one of the trees. Raises RuntimeError if it fails, or does not stop at the step `stop`."""
    package = WORK / tree / "debias_diffusion"
    environment = os.environ | {
        "PYTHONPATH": str(WORK / tree),  # before the editable install, in child processes too
        "GOLDEN_PACKAGE": str(package),
        "GOLDEN_STOP": str(stop),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", DRIVER, *arguments]
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True)
    if done.returncode != (_STOPPED if stop else 0):
        raise RuntimeError(f"{tree} ends with {done.returncode}: {done.stderr.strip()[-1500:]}")


def prepare() -> None:
    """Both trees under one import name each, as when they are installed, and the data of the cases."""
    old, new = WORK / "old", WORK / "new" / "debias_diffusion"
    if not (old / COMMIT).exists():
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract"], cwd=old, input=archive, check=True)
        for name in ("pipelines", "eval", "app"):
            (old / "debias_diffusion" / name).symlink_to(old / name)
        (old / COMMIT).touch()
    new.mkdir(parents=True, exist_ok=True)
    for link in new.iterdir():
        if not link.exists():
            link.unlink()
    for path in [*(ROOT / "debias_diffusion").iterdir(), *(ROOT / name for name in ("pipelines", "eval", "app"))]:
        if not (new / path.name).is_symlink():  # another run may be using it
            (new / path.name).symlink_to(path)
    (WORK / "prompts.txt").write_text(f"{SHORT}\n{LONG}\n")
    run("old", ["write-pairs", str(WORK / DATA), str(HELD_OUT), str(PAIRS)])


def results(name: str, tree: str) -> dict[str, object]:
    """{FILE/KEY: number, tensor or pixels} of a case in one tree, from build/golden where the old tree made them."""
    case = CASES[name]
    command = case.command(tree)
    digest = hashlib.sha256(json.dumps([command, case.stop, LONG, PAIRS]).encode()).hexdigest()[:12]
    folder = WORK / "results" / f"{tree}-{name}-{digest}"
    finished = folder.with_suffix(".finished")
    if tree == "new" or not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        arguments = [argument.format(out=folder) for argument in command]
        if case.stop:
            run(tree, arguments, case.stop)
        run(tree, arguments)
        finished.touch()
    values = {}
    for file in sorted({file for pattern in case.files for file in folder.glob(pattern)}):
        values |= read(file, file.relative_to(folder).as_posix())
    return values


def read(file: Path, name: str) -> dict[str, object]:
    if file.suffix == ".safetensors":
        return {f"{name}/{key}": tensor.numpy() for key, tensor in load_file(file).items()}
    if file.suffix == ".png":
        return {name: np.asarray(Image.open(file))}
    text = file.read_text(encoding="utf-8")
    content = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)
    return {path: number for path, number in numbers(content, name) if not IGNORED.search(path)}


def numbers(content, path: str):
    """(path, number) of all numbers, and of what has none, in JSON."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from numbers(value, f"{path}/{key}")
    elif content is None or (isinstance(content, int | float) and not isinstance(content, bool)):
        yield path, content


def differences(name: str) -> tuple[int, list[str]]:
    """How many values the old tree has, and in words where the new one's differ."""
    old, new = results(name, "old"), results(name, "new")
    if not old:
        return 0, ["the old tree gives no values"]
    different = []
    for path, value in old.items():
        for pattern, replacement in (RENAMES | CASES[name].renames).items():
            path = re.sub(pattern, replacement, path)
        if path not in new:
            different.append(f"{path} is missing")
        elif isinstance(value, np.ndarray):
            now = new[path]
            if (value.dtype, value.shape) != (now.dtype, now.shape):
                different.append(f"{path}: {value.dtype} {value.shape}, now {now.dtype} {now.shape}")
            elif value.tobytes() != now.tobytes():
                most = np.abs(value.astype(np.float64) - now).max()
                different.append(f"{path}: {(value != now).sum()} of {value.size} differ, by up to {most:g}")
        elif value != new[path]:
            different.append(f"{path}: {value!r}, now {new[path]!r}")
    return len(old), different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"without any, all: {', '.join(CASES)}")
    names = parser.parse_args().names
    if unknown := set(names) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}. Choose from: {', '.join(CASES)}")
    prepare()
    failures = 0
    for name in names or CASES:
        started = time.monotonic()
        try:
            count, different = differences(name)
        except RuntimeError as error:
            count, different = 0, [str(error)]
        failures += bool(different)
        verdict = "DIFFERS" if different else "same"
        print(f"{verdict:8} {name:32} {count:5} values  {time.monotonic() - started:4.0f} s", flush=True)
        for line in different[:5]:
            print(f"           {line}")
        if len(different) > 5:
            print(f"           and {len(different) - 5} more")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
