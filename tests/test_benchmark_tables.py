"""The tables of benchmarks/toy_world.py, of made-up results."""

import importlib
from pathlib import Path

import pytest

from debias_diffusion.eval.images.objects import BY_KIND
from debias_diffusion.eval.images.references import ACROSS, ALL, ALONE, READERS


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module("toy_world")


def markdown(parts: list) -> str:
    return "\n".join(part if isinstance(part, str) else part.markdown() for part in parts)


def line(a: str, b: str, score: str, difference: float) -> dict:
    return {"a": a, "b": b, "score": score, "difference": difference, "low": difference - 1, "high": difference + 1}


@pytest.fixture
def report():
    """Of an evaluation of three encoders, each with more objects right than the one before."""

    def scores(right):
        ways = [{"told": told, "value": right + place} for place, told in enumerate((ALONE, ACROSS))]
        return {"scores": {"objects_right": {"value": right}, "unknown": {"value": 1.0}, BY_KIND: ways}}

    compared = [line("two", "one", "objects_right", 25), line("three", "two", "fid_own", -7.25)]
    compared += [line("two", "one", "background_right", 3), line("three", "one", "objects_right", 9)]
    readers = dict(zip(READERS, (10, 20, 30, 100), strict=True))
    ceilings = [{"told": told, "objects": 8} | readers for told in (ALL, ALONE, ACROSS)]
    encoders = {label: scores(right) for label, right in (("one", 25.0), ("two", 50.0), ("three", 75.0))}
    return {"encoders": encoders, "compared": compared, "ceilings": ceilings}


def test_scores_and_differences_get_the_names_of_their_rows(benchmark, report):
    rows = [benchmark.IN_CHUNKS, benchmark.OVERLAPPING, benchmark.SDXL]
    drawn = benchmark._drawn(report, rows)
    assert list(drawn["encoders"]) == rows and set(drawn["encoders"][rows[0]]) == {"objects_right", BY_KIND}
    compared = [(its["a"], its["b"], its["score"], its["difference"]) for its in drawn["compared"]]
    assert compared == [  # without scores that no table shows
        (rows[1], rows[0], "objects_right", 25),
        (rows[2], rows[1], "fid_own", -7.25),
        (rows[2], rows[0], "objects_right", 9),
    ]
    swapped = benchmark._drawn(report, [rows[1], rows[0], rows[2]])
    assert all((its["a"], its["b"]) in benchmark.PAIRS for its in swapped["compared"])
    assert (rows[0], rows[1]) not in benchmark.PAIRS and len(swapped["compared"]) == 2


def test_every_seed_stands_in_each_table(benchmark, report):
    rows = [benchmark.IN_CHUNKS, benchmark.OVERLAPPING, benchmark.SDXL]
    edits = {edit: {"t2i_r1": 60.0 - place, "i2t_r1": 40.0 + place} for place, edit in enumerate(benchmark.EDITS)}
    drawn, plain = benchmark._drawn(report, rows), benchmark._drawn(report | {"ceilings": []}, rows)
    result = {
        "retrieval": {"debias-clip": edits},
        "drawn": {"plain UNet, refer back": drawn, "plain UNet, long": plain},
    }
    tables = markdown(benchmark.tables({4: result, 5: result}))
    for seed in (4, 5):
        assert f"| {seed} | debias-clip | 60.0 / 40.0 | 59.0 / 41.0 | 58.0 / 42.0 | 57.0 / 43.0 |" in tables
        assert tables.count(f"| {seed} | {rows[1]} | 50.0 |") == 2  # one of each condition
        assert tables.count(f"| {seed} | {rows[1]} minus {rows[0]} | +25.0 (+24.0 to +26.0) |  |") == 2
        assert tables.count(f"| {seed} | {rows[2]} minus {rows[1]} |  | -7.2 (-8.2 to -6.2) |") == 2
        for place, told in enumerate((ALONE, ACROSS)):
            values = " | ".join(f"{right + place:.1f}" for right in (25, 50, 75))
            assert tables.count(f"| {seed} | {told} | 8 | 10.0 | 20.0 | 30.0 | 100.0 | {values} |") == 1
    assert f"| 4 | {ALL} |" not in tables
    unsure = line(rows[1], rows[0], "objects_right", 25) | {"low": None, "high": None}
    few = {"retrieval": {}, "drawn": {"few": plain | {"compared": [unsure]}}}
    assert f"| 4 | {rows[1]} minus {rows[0]} | +25.0 |" in markdown(benchmark.tables({4: few}))
