"""Compares another program's readings of prompts with the vectors of this folder; see README.md.

python conformance/check.py [--file a1111] -- COMMAND [ARGUMENT ...]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("overlap", "separate", "cut", "a1111", "kohya", "kohya_no_norm", "comfyui")
FIELDS = ("chunks", "weights", "groups", "joined", "positions", "second", "states", "pooled")
TOLERANCES = {"weights": 2e-6, "states": 3, "pooled": 3}  # the others are whole numbers


def read(file: str) -> tuple[list[dict], dict[str, dict]]:
    """What a program is asked of each prompt of a file, and the vectors by the prompts' names."""
    prompts, content = (json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")) for name in ("prompts", file))
    vectors, questions = content.pop("vectors"), []
    for name, vector in vectors.items():
        questions.append(content | {"prompt": prompts[name], "encode": "states" in vector})
        if "sentences" in vector:
            questions[-1]["parts"] = vector.pop("parts", [[[prompts[name], 1.0]]])
            questions[-1]["sentences"] = vector.pop("sentences")
    return questions, vectors


def compare(vectors: dict[str, dict], answers: list[dict]) -> Iterator[str]:
    """For each prompt that differs a line: of each field that any answer has, the first place and how it differs."""
    fields = [field for field in FIELDS if any(field in answer for answer in answers)]
    for (name, vector), answer in zip(vectors.items(), answers, strict=True):
        found = [difference(field, field, vector.get(field), answer.get(field)) for field in fields]
        if any(found):
            yield f"{name}: {'; '.join(filter(None, found))}"


def difference(field: str, where: str, expected: Any, given: Any) -> str | None:
    """Where and how two values of a field differ first; None if they are alike."""
    if field == "weights" and isinstance(expected, list) != isinstance(given, list):  # one number stands for all
        expected, given = (
            value if isinstance(value, list) else [value] * len(other)
            for value, other in ((expected, given), (given, expected))
        )
    if isinstance(expected, list) and isinstance(given, list):
        pairs = [(field, f"{where}[{at}]", *pair) for at, pair in enumerate(zip(expected, given, strict=False))]
        pairs.append(("length", f"the length of {where}", len(expected), len(given)))
    elif isinstance(expected, dict) and isinstance(given, dict):
        pairs = [(name, f"{where}.{name}", expected.get(name), given.get(name)) for name in FIELDS[:4]]
    else:
        numbers = isinstance(expected, int | float) and isinstance(given, int | float)
        if expected == given or (numbers and abs(expected - given) <= TOLERANCES.get(field, 0)):
            return None
        return f"{where} is {json.dumps(given)[:60]}, not {json.dumps(expected)[:60]}"
    return next(filter(None, (difference(*pair) for pair in pairs)), None)


def answers_of(command: list[str], asked: list[dict]) -> list[dict]:
    """What a program prints of the prompts.

    Raises:
        ValueError: it cannot be run, fails, or prints anything else.
    """
    lines = "".join(json.dumps(question) + "\n" for question in asked)
    try:
        printed = subprocess.run(command, input=lines.encode(), stdout=subprocess.PIPE, check=True).stdout
        answers = [json.loads(line) for line in printed.splitlines()]
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ValueError(f"{command[0]!r} gave nothing to compare: {error}") from error
    if len(answers) != len(asked) or not all(isinstance(answer, dict) for answer in answers):
        raise ValueError(
            f"{command[0]!r} must print {len(asked)} JSON objects, a line each, and printed {len(answers)}"
        )
    return answers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", choices=FILES, help="the only one to compare")
    parser.add_argument("command", nargs="+", help="reads questions and prints vectors, JSON lines")
    options, status = parser.parse_args(arguments), 0
    for file in [options.file] if options.file else FILES:
        asked, vectors = read(file)
        try:
            answers = answers_of(options.command, asked)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        differences = list(compare(vectors, answers))
        expected, given = (set().union(*those) for those in (vectors.values(), answers))
        missing = [field for field in FIELDS if field in expected - given]
        print(*(f"{file}: {line}" for line in differences), sep="\n", end="\n" * bool(differences))
        print(f"{file}: {len(differences)} of {len(asked)} differ; not compared: {', '.join(missing) or 'nothing'}")
        status |= bool(differences or "chunks" in missing)
    return status


if __name__ == "__main__":
    sys.exit(main())
