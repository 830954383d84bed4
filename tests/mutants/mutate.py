"""What do the tests of a file not notice? mutmut changes the file, a place at a time, and runs them.

    python tests/mutants/mutate.py FILE [--tests "tests/test_a.py ..."] [--limit 50]

Prints the changes that no test noticed, and how many were noticed. A run that was stopped is continued by the same
command, as long as no file of the tree changes. mutmut leaves out functions with decorators.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

from run import PROCESSES, ROOT, WORK, copy_tree, environment, installed_name, tracked_files

UNNOTICED = (0, 5, 33)  # mutmut's codes: all tests pass, or none runs the function
SETTINGS = """
[tool.mutmut]
source_paths = ["debias_diffusion"]
only_mutate = ["{file}"]
do_not_mutate_patterns = ['raise \\w+']
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider"]
also_copy = {others}
"""


def tests_of(file: Path) -> list[str]:
    """The file of tests that has the module's name, or the files of fast tests that import the module."""
    if (ROOT / "tests" / f"test_{file.stem}.py").exists():
        return [f"tests/test_{file.stem}.py"]
    imports = re.compile(rf"^(from|import) .*\b{file.stem}\b", re.MULTILINE)
    found = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if imports.search(path.read_text())]
    return [path.relative_to(ROOT).as_posix() for path in found]


def prepare_tree(file: str, tests: list[str]) -> Path:
    """A copy of the tree with mutmut's settings. One that an earlier run of the same has left is used again."""
    digest = hashlib.sha256(repr((file, tests)).encode())
    for name in tracked_files():
        digest.update(name.encode() + (ROOT / name).read_bytes())
    tree = WORK / f"mutmut-{digest.hexdigest()[:16]}"
    if not (tree / "prepared").exists():
        for old in WORK.glob("mutmut-*"):
            shutil.rmtree(old)
        others = sorted({name.partition("/")[0] for name in tracked_files()} - {"debias_diffusion"})
        settings = SETTINGS.format(file=file, tests=json.dumps(tests), others=json.dumps(others))
        with (copy_tree(tree) / "pyproject.toml").open("a") as project:
            project.write(settings)
        (tree / "mutants").mkdir()  # or Python remembers that nothing can be imported from there
        (tree / "prepared").touch()
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="eval/intervals.py")
    parser.add_argument("--tests", default="", help="by default those of the module's name, or that import it")
    parser.add_argument("--limit", type=int, default=50, help="most changes to try, drawn at random")
    args = parser.parse_args()
    tests = args.tests.split() or tests_of(args.file)
    if not tests:
        parser.error(f"no file of tests imports {args.file.stem}: name some")
    file = installed_name(args.file.as_posix())
    tree = prepare_tree(file, tests)
    mutmut = [Path(sys.executable).with_name("mutmut").as_posix()]
    options = {"cwd": tree, "env": environment(tree / "mutants"), "check": True}
    start = [*mutmut, "run", "--max-children", str(PROCESSES)]
    results = tree / "mutants" / f"{file}.meta"
    if not results.exists():  # the first change of each function; which others there are is known from then on
        subprocess.run([*start, "*__mutmut_1"], **options)
    names = list(json.loads(results.read_text())["exit_code_by_key"])
    random.Random(0).shuffle(names)
    names.sort(key=lambda name: not name.endswith("__mutmut_1"))
    chosen = names[: args.limit]
    codes = json.loads(results.read_text())["exit_code_by_key"]
    if todo := [name for name in chosen if codes[name] is None]:
        subprocess.run([*start, *todo], **options)
    codes = json.loads(results.read_text())["exit_code_by_key"]
    unnoticed = sorted(name for name in chosen if codes[name] in UNNOTICED)
    for name in unnoticed:
        subprocess.run([*mutmut, "show", name], **options)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} changes are noticed; the file has {len(names)}")


if __name__ == "__main__":
    main()
