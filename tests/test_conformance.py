"""The vectors of conformance/: what this package reads, and what a second reader makes.

tests/test_readings.py compares the package with what the programs themselves read.
"""

import pytest
from helpers import second_reader

from conformance import check, make


@pytest.mark.parametrize("file", check.FILES)
def test_the_files_are_what_the_package_reads(file):
    made, kept = make.content(file), (check.HERE / f"{file}.json").read_text(encoding="utf-8")
    assert set(made.splitlines()) - set(kept.splitlines()) == set(), "run conformance/make.py"
    assert made == kept and made.count("\n") > 240


@pytest.mark.parametrize("file", check.FILES)
def test_a_second_reader_cuts_alike(file):
    asked, vectors = check.read(file)
    assert list(check.compare(vectors, [second_reader.answer(question) for question in asked])) == []


def test_what_differs_is_named():
    vector = {"chunks": [[5, 6], []], "weights": [1, []], "second": {"chunks": [[5, 7]]}, "states": [[9, 9]] * 3}

    def places(**changes):
        answers = [{name: value for name, value in (vector | changes).items() if value is not None}, vector]
        return [line.partition(" is ")[0] for line in check.compare({"changed": vector, "same": vector}, answers)]

    assert places() == places(weights=[[1, 1 + 1e-6], 1]) == places(states=[[12, 6]] * 3) == []
    for change, place in (
        (dict(chunks=[[5, 8], []]), "chunks[0][1]"),
        (dict(chunks=[[5, 6]]), "the length of chunks"),
        (dict(weights=[[1, 1.01], []]), "weights[0][1]"),
        (dict(second={"chunks": [[5, 8]]}), "second.chunks[0][1]"),
        (dict(states=[[9, 9]] * 2), "the length of states"),
    ):
        assert places(**change) == [f"changed: {place}"]
    assert places(second=None) and places(states=[[9, 13]] * 3)
    assert list(check.compare({"a": vector}, [{"chunks": vector["chunks"]}])) == []  # the others are not given


@pytest.mark.parametrize("command", [["false"], ["/no/such/program"], ["echo", "3"], ["echo", "no JSON"]])
def test_a_command_that_fails_is_no_success(command, capsys):
    assert check.main(command) == 2 and command[0] in capsys.readouterr().err
    assert check.main(["--file", "cut", "cat"]) == 1  # prints objects without chunks
