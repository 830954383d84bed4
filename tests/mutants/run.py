"""Do the tests notice? Each fault of faults.yaml is put into a copy of the tree, and the tests are run there.

    python tests/mutants/run.py [NAME ...]

A fault is tried against the tests that it names. It counts as seen if a test fails that passes without it. What has
been tried is not tried again while no file of the tree changes; the results lie in build/mutants. Ends with 1 if a
fault is not seen, or can no longer be put in.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*\])?)(?= - |$)", re.MULTILINE)  # the id may hold blanks
TIMEOUT = 1200  # seconds; a fault may make a test hang
FORKED = multiprocessing.get_context("forkserver")
LIBRARIES = [  # imported once, by a process from which those of the tests are forked: most tests take less time
    *("pytest", "hypothesis", "scipy.stats", "torch", "torchvision", "open_clip", "accelerate", "matplotlib.figure"),
    "transformers.models.clip.modeling_clip",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
]


def run_tests(folder: Path, tests: list[str], log: Path) -> None:
    """In a process of its own, which ends with pytest's exit code."""
    signal.alarm(TIMEOUT)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # before the editable install, in child processes too
    os.environ["PYTHONPATH"] = str(folder)
    sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", f"--basetemp={folder}.tmp", *tests]))


class Tree:
    """A copy of the files that git knows or would add, in which faults are put and tests run."""

    def __init__(self, folder: Path, files: list[str]):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        for name in ("pipelines", "eval", "app"):  # one import name, as when it is installed
            (folder / "debias_diffusion" / name).symlink_to(folder / name)

    def first_failure(self, tests: str) -> str | None:
        """The id of the first test that fails, "timeout", or None if all pass."""
        log = Path(f"{self.folder}.log")
        process = FORKED.Process(target=run_tests, args=(self.folder, shlex.split(tests), log))
        process.start()
        process.join()
        if process.exitcode == -signal.SIGALRM:
            return "timeout"
        printed, where = log.read_text(), f"debias_diffusion: {self.folder / 'debias_diffusion' / '__init__.py'}"
        if process.exitcode not in (0, 1) or where not in printed:
            raise RuntimeError(f"{tests}: not the tests of {self.folder}:\n{printed[-5000:]}")
        return FAILED.search(printed)[1] if process.exitcode else None

    def try_fault(self, fault: dict, tests: str) -> str | None:
        """The id of a test that fails with the fault and passes without it."""
        file = self.folder / fault["file"]
        sound = file.read_text(encoding="utf-8")
        if (count := sound.count(fault["old"])) != 1:
            raise ValueError(f"{fault['file']} has {count} places that read {fault['old']!r}, and must have one")
        file.write_text(sound.replace(fault["old"], fault["new"]), encoding="utf-8")
        try:
            failure = self.first_failure(tests)
        finally:
            file.write_text(sound, encoding="utf-8")
        if failure not in (None, "timeout") and self.first_failure(shlex.quote(failure)):
            raise RuntimeError(f"{failure} fails without any fault")
        return failure


def try_all(faults: dict[str, dict], files: list[str], results: Path) -> dict[str, dict]:
    """{name: result} of all faults, those in the file `results` among them."""
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {result["name"]: result for result in known}
    trees = Queue()
    workers = min(os.cpu_count() or 1, 4)
    for number in range(workers):
        trees.put(Tree(results.parent / f"tree-{number}", files))

    def try_one(name: str) -> dict:
        fault, tree = faults[name], trees.get()
        try:
            tests = " ".join(f"tests/{part}" if ".py" in part else part for part in fault["tests"].split(" "))
            seen_by, lane = tree.try_fault(fault, tests), "slow" if "tests/slow/" in tests else "fast"
            return {"name": name, "seen_by": seen_by, "lane": lane if seen_by else "none"}
        except (ValueError, RuntimeError) as error:
            return {"name": name, "seen_by": None, "lane": "error", "error": str(error)}
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(workers) as pool, results.open("a") as file:
        todo = [name for name in faults if done.get(name, {"lane": "error"})["lane"] == "error"]
        for result in tqdm(pool.map(try_one, todo), total=len(todo), unit="fault"):
            done[result["name"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
    return {name: done[name] for name in faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults to try; without any, all")
    names = parser.parse_args().names
    faults = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
    if unknown := set(names) - faults.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    # As tests/conftest.py has them, before the libraries are imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    FORKED.set_forkserver_preload(LIBRARIES)
    WORK.mkdir(parents=True, exist_ok=True)
    chosen = {name: faults[name] for name in names or faults}
    results = try_all(chosen, files, WORK / f"{digest.hexdigest()[:16]}.jsonl")
    for name, result in results.items():
        print(f"{result['lane']:16} {name:50} {result['seen_by'] or result.get('error', '')}")
    lanes = Counter(result["lane"] for result in results.values())
    print(", ".join(f"{lane}: {count}" for lane, count in lanes.most_common()))
    sys.exit(lanes["none"] + lanes["error"] > 0)


if __name__ == "__main__":
    main()
