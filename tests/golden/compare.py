"""Are results still the same, to the last bit? Runs the commands of CASES in this tree and in that of COMMIT.

    python tests/golden/compare.py [CASE ...]

Each tree has a process of its own for each command, on this machine, because bits differ between processors. What the
old tree makes is kept in build/golden. Ends with 1 if a result differs, is missing, or a command fails. Both trees get
the same command line: a change of options or of results' names comes in a commit of its own, which is then COMMIT.
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
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "golden"
COMMIT = "d245356"  # whose results the tree must give
ROOMS = ("pipelines", "eval", "app")
PROMPTS = (
    "A red star above a blue ring.",
    " ".join(
        f"The {size} ring is above the {colour} star, and it is the {place} of all the rings and stars of this image."
        for size, colour, place in zip(
            ("small", "large") * 2, ("red", "blue", "green", "grey"), ("first", "second", "third", "last"), strict=True
        )
    ),
)
# Parts of a value's path, FILE/KEY/KEY, whose numbers are not compared; growth and ceilings are of research by now.
IGNORED = re.compile(r"/(settings|versions|digests|seconds|samples_per_second|growth|ceilings)(/|$)")

TRAIN = (
    "train --model toy/clip --output {out} --batch 6 --components 3 --max-steps 5 --epochs 9 --warmup 2 "
    "--learning-rate 1e-3 --validation 6 --eval-every 3 --checkpoint-every 2 --log-every 1 --workers 0 "
    "--precision fp32 --max-bad 0 --data toy/train-2 --recipe "
)
TRAININGS = {
    "long-clip": TRAIN + "long-clip",
    "debias-clip": TRAIN + "debias-clip",
    "debias-clip-sdxl": TRAIN + "debias-clip-sdxl --chunk 4",
    "fix-clip": TRAIN.replace("--components 3", "--components 0") + "fix-clip --prompts 3 --groups 3 --first-group 2",
    "frozen": TRAIN + "debias-clip --freeze-image-tower",
}
GENERATE = "generate --prompts {work}/prompts.txt --base toy/sdxl --output {out} --steps 3 --guidance-scale 3 --batch 2"
TEXT_ENCODERS = "--encoders toy/clip toy/debias-clip --data toy/test --output {out} --limit"
RENDER = (
    "--base toy/sdxl --own-features toy/features --clip-score toy/clip --steps 2 --images-at-once 2 "
    "--data toy/test --output {out} --limit 4"
)
# A command, and patterns of its results in the output folder: .safetensors, .json, .jsonl and .png.
CASES = {f"train-{name}": (command, "last/*.safetensors", "log.jsonl") for name, command in TRAININGS.items()}
CASES |= {
    "generate": (GENERATE, "0*.png"),
    "generate-separate": (GENERATE + " --reading separate", "0*.png"),
    "generate-debias-clip": (GENERATE + " --encoder toy/debias-clip", "0*.png"),
    "generate-stretch": (GENERATE + " --encoder toy/debias-clip --encoder-2 stretch --low-memory", "0*.png"),
    "retrieval": (f"evaluate retrieval {TEXT_ENCODERS} 40 --batch-size 16", "retrieval.json"),
    "robustness": (f"evaluate robustness {TEXT_ENCODERS} 40", "robustness.json"),
    "attention": (f"evaluate attention --prompt '{PROMPTS[0]}' {TEXT_ENCODERS} 24", "attention.json"),
    "generation": (
        f"evaluate generation --encoders cut:original original separate:toy/clip toy/debias-clip {RENDER}",
        *("generation.json", "*/**/*.png"),
    ),
    "drift": ("evaluate drift --base toy/sdxl" + f" {TEXT_ENCODERS} 24".replace("toy/clip ", ""), "drift.json"),
}

DRIVER = """
import os, runpy
import debias_diffusion.app
folder = os.path.dirname(os.path.dirname(debias_diffusion.app.__file__))
assert folder == os.environ["GOLDEN_PACKAGE"], folder  # not what is installed
runpy.run_module("debias_diffusion", run_name="__main__", alter_sys=True)
"""


def run(tree: str, arguments: list[str]) -> None:
    """Runs a command in one of the trees. Raises RuntimeError if it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(WORK / tree),  # before the editable install, in child processes too
        "GOLDEN_PACKAGE": str(WORK / tree / "debias_diffusion"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", DRIVER, *arguments]
    done = subprocess.run(command, cwd=WORK, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree} ends with {done.returncode}: {done.stderr.strip()[-1500:]}")


def prepare() -> None:
    """Both trees under one import name each, as when they are installed, and the prompts."""
    old, new = WORK / "old", WORK / "new" / "debias_diffusion"
    if not (old / COMMIT).exists():
        shutil.rmtree(WORK, ignore_errors=True)
        old.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract"], cwd=old, input=archive, check=True)
        for name in ROOMS:
            (old / "debias_diffusion" / name).symlink_to(old / name)
        (old / COMMIT).touch()
    new.mkdir(parents=True, exist_ok=True)
    for path in [*(ROOT / "debias_diffusion").iterdir(), *(ROOT / name for name in ROOMS)]:
        if not (new / path.name).is_symlink():  # another run may be using it
            (new / path.name).symlink_to(path)
    (WORK / "prompts.txt").write_text("\n".join(PROMPTS))


def results(name: str, tree: str) -> dict[str, object]:
    """{FILE/KEY: number, tensor or pixels} of a case in one tree, from build/golden where the old tree made them."""
    line, *patterns = CASES[name]
    digest = hashlib.sha256(json.dumps([line, PROMPTS]).encode()).hexdigest()[:12]
    folder = WORK / "results" / f"{tree}-{name}-{digest}"
    finished = folder.with_suffix(".finished")
    if tree == "new" or not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(tree, shlex.split(line.format(out=folder, work=WORK)))
        finished.touch()
    values = {}
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
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


def difference(old, new) -> str:
    """In words; empty where there is none."""
    if not isinstance(old, np.ndarray):
        return "" if old == new else f"{old!r}, now {new!r}"
    if new is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {old.shape}, now {new if new is None else (new.dtype, new.shape)}"
    return "" if old.tobytes() == new.tobytes() else f"differs by up to {np.abs(old.astype(np.float64) - new).max():g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"without any, all: {', '.join(CASES)}")
    names = parser.parse_args().names
    if unknown := set(names) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}. Choose from: {', '.join(CASES)}")
    prepare()
    failures = 0
    for name in names or CASES:
        started, old = time.monotonic(), {}
        try:
            old, new = results(name, "old"), results(name, "new")
            words = {path: difference(value, new.get(path)) for path, value in old.items()}
            different = [f"{path}: {word}" for path, word in words.items() if word] + ["no values"] * (not old)
        except RuntimeError as error:
            different = [str(error)]
        failures += bool(different)
        verdict = "DIFFERS" if different else "same"
        print(f"{verdict:8} {name:32} {len(old):5} values  {time.monotonic() - started:4.0f} s", flush=True)
        print("".join(f"           {line}\n" for line in different[:5]), end="")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
