"""Do the tests notice? Each fault of faults.yaml is put into a copy of the tree, and the tests are run there.

    python tests/mutants/run.py [NAME ...]

A fault is tried against the tests that it names; if these pass, against the whole fast suite. It counts as seen if a
test fails that passes without it. What has been tried is not tried again while no file of the tree changes; the results
lie in build/mutants. Ends with 1 if a fault is not seen, or can no longer be put in.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
SUITE = "tests"
FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*\])?)(?= - |$)", re.MULTILINE)  # the id may hold blanks
TIMEOUT = 1200  # seconds; a fault may make a test hang


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
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),  # before the editable install, in child processes too
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--basetemp={self.folder}.tmp"]
        try:
            tests, of_a_process = shlex.split(tests), dict(cwd=self.folder, env=environment, timeout=TIMEOUT)
            done = subprocess.run([*command, *tests], capture_output=True, text=True, **of_a_process)
        except subprocess.TimeoutExpired:
            return "timeout"
        where = f"debias_diffusion: {self.folder / 'debias_diffusion' / '__init__.py'}"
        if done.returncode not in (0, 1) or where not in done.stdout:
            raise RuntimeError(f"{tests}: not the tests of {self.folder}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
        return FAILED.search(done.stdout)[1] if done.returncode else None

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
            if seen_by := tree.try_fault(fault, tests):
                return {"name": name, "seen_by": seen_by, "lane": "slow" if "tests/slow/" in tests else "fast"}
            seen_by = tree.try_fault(fault, SUITE)
            return {"name": name, "seen_by": seen_by, "lane": "fast, elsewhere" if seen_by else "none"}
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
