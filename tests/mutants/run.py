"""Do the tests notice? Each fault of faults.yaml is put into a copy of the tree, and the tests it names are run there.

    python tests/mutants/run.py [NAME ...]

A fault is seen if a test fails that passes without it. Ends with 1 if one is not seen, or can no longer be put in.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?= - |$)", re.MULTILINE)
TIMEOUT = 1200  # seconds; a fault may make a test hang
PROCESSES = min(os.cpu_count() or 1, 4)


def tracked_files() -> list[str]:
    """The files that git knows or would add."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


def installed_name(name: str) -> str:
    """Where a file of the tree lies in an installed package."""
    return f"debias_diffusion/{name}" if name.partition("/")[0] in ("pipelines", "eval", "app") else name


def copy_tree(folder: Path) -> Path:
    """A copy of the tree that is imported as if it were installed."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in tracked_files():
        for place in {name, installed_name(name)}:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / place)
    return folder


def environment(tree: Path) -> dict[str, str]:
    """The folder comes before the editable install, in child processes too; the rest is as in tests/conftest.py."""
    one_thread = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | one_thread | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def first_failure(tree: Path, tests: list[str]) -> str | None:
    """The id of the first test that fails, "timeout", or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--basetemp={tree}.tmp", *tests]
    pipe = {"cwd": tree, "env": environment(tree), "capture_output": True, "text": True, "timeout": TIMEOUT}
    try:
        ended = subprocess.run(command, **pipe)
    except subprocess.TimeoutExpired:
        return "timeout"
    if ended.returncode not in (0, 1) or f"debias_diffusion: {tree / 'debias_diffusion'}" not in ended.stdout:
        raise RuntimeError(f"{tests}: not the tests of {tree}:\n{ended.stdout[-5000:]}{ended.stderr[-5000:]}")
    return FAILED.search(ended.stdout)[1] if ended.returncode else None


def try_fault(tree: Path, fault: dict) -> str:
    """The id of a test that fails with the fault and passes without it.

    Raises:
        RuntimeError: there is none.
    """
    file = tree / installed_name(fault["file"])
    sound = file.read_text(encoding="utf-8")
    if (count := sound.count(fault["old"])) != 1:
        raise RuntimeError(f"{fault['file']} has {count} places that read {fault['old']!r}, and must have one")
    file.write_text(sound.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        failure = first_failure(
            tree, [f"tests/{part}" if ".py" in part else part for part in shlex.split(fault["tests"])]
        )
    finally:
        file.write_text(sound, encoding="utf-8")
    if failure is None:
        raise RuntimeError(f"{fault['tests']} passes")
    if failure != "timeout" and first_failure(tree, [failure]):
        raise RuntimeError(f"{failure} fails without any fault")
    return failure


def main(names: list[str]) -> None:
    faults = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
    if unknown := set(names) - faults.keys():
        sys.exit(f"no such fault: {', '.join(sorted(unknown))}")
    chosen, trees = names or list(faults), Queue()
    for number in range(PROCESSES):
        trees.put(copy_tree(WORK / f"tree-{number}"))

    def try_one(name: str) -> bool:
        tree = trees.get()
        try:
            tqdm.write(f"seen      {name:45} {try_fault(tree, faults[name])}")
            return True
        except RuntimeError as error:
            tqdm.write(f"NOT SEEN  {name:45} {error}")
            return False
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(PROCESSES) as pool:
        seen = sum(tqdm(pool.map(try_one, chosen), total=len(chosen), unit="fault"))
    print(f"{seen} of {len(chosen)} faults are seen")
    sys.exit(seen < len(chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
