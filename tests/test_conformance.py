"""The vectors of conformance/: what this package reads, what the programs read, and what a second reader makes."""

import json
import zlib
from pathlib import Path

import pytest
from helpers import second_reader

from conformance import check, make

RECORD = json.loads((Path(__file__).parent / "data" / "readings.json").read_text(encoding="utf-8"))
# A1111's second tokenizer repairs the first two; comments and numbers at the end are taken out before what was run.
NOT_RECORDED = {("chinese", 1), ("html", 1), *((name, number) for name in ("hash", "whole colon") for number in (0, 1))}


@pytest.mark.parametrize("file", check.FILES)
def test_the_files_are_what_the_package_reads(file):
    made, kept = make.content(file), (check.HERE / f"{file}.json").read_text(encoding="utf-8")
    assert set(made.splitlines()) - set(kept.splitlines()) == set(), "run conformance/make.py"
    assert made == kept and made.count("\n") > 240


@pytest.mark.parametrize("file", sorted(RECORD["layouts"].keys() & set(check.FILES)))
def test_prompts_that_the_programs_read_have_their_ids_and_weights(file):
    _, vectors = check.read(file)
    prompts = json.loads((check.HERE / "prompts.json").read_text(encoding="utf-8"))
    names = RECORD["layouts"][file].keys() & {name.partition("programs/")[2] for name in vectors}
    assert len(names) > 40
    for name in names:
        vector = vectors[f"programs/{name}"]
        assert prompts[f"programs/{name}"] == RECORD["prompts"][name] and "second" not in vector
        for number, (counts, crc, weights) in enumerate(RECORD["layouts"][file][name]):
            if file == "a1111" and (name, number) in NOT_RECORDED:
                continue
            rows = [[49406, *row, 49407] + [(49407, 0)[number]] * (75 - len(row)) for row in [*vector["chunks"], []]]
            ids = [token for row, start, count in vector["joined"] for token in rows[row][start : start + count]]
            assert [len(chunk) for chunk in vector["chunks"]] == counts and len(ids) == vector["positions"], name
            assert zlib.crc32(b"".join(token.to_bytes(2, "little") for token in ids)) == crc, name
            expected = iter([weight for weight, count in weights for _ in range(count)])
            of_chunks = [[next(expected) for _ in chunk] for chunk in vector["chunks"]]
            assert check.difference("weights", name, of_chunks, vector["weights"]) is None


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
