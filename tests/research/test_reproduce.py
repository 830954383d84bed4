"""`reproduce`: one table from end to end on tiny data, names of results, wrong files, claims and their page."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.small_papers import count_compared, write_small_papers
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data
from PIL import Image

from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.files import read_json_object
from research.options import ReproduceConfig
from research.reproduce import claims, units
from research.reproduce import papers as files
from research.reproduce.building import Work
from research.reproduce.claims import FAILS, HOLDS, UNDECIDED, compare, decide, of_numbers
from research.reproduce.command import write_table
from research.reproduce.evidence import evidence_page
from research.reproduce.listing import reproduce
from research.reproduce.papers import Base, Claim, Claims, Column, Comparison, Model, PaperTable, Queries, Row, World
from research.reproduce.units import RESULT, program

pytestmark = pytest.mark.usefixtures("coarse_results")
ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "research" / "evidence.md", ROOT / "research" / "results" / "claims.json"


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return write_small_papers(tmp_path_factory.mktemp("repository") / "research" / "papers")


@pytest.fixture(scope="module")
def settings(papers, tmp_path_factory):
    output = tmp_path_factory.mktemp("papers")
    return {"world": "toy", "papers": str(papers), "output": str(output), "device": "cpu"}


@pytest.fixture(scope="module")
def written(settings):
    return reproduce(ReproduceConfig(["table-S4"], **settings))


def test_a_table_is_executed_and_what_is_damaged_or_edited_is_computed_again(written, papers, settings, capsys):
    """All tables are in slow/research/test_reproduce.py."""
    output = Path(settings["output"]) / "toy"
    assert [file.name for file in written] == ["table-S4.md"]
    assert count_compared(files.read_tables(papers)["table-S4"], read_json_object(output / "table-S4.json")) > 0
    assert "| Shuffle |" in (output / "table-S4.md").read_text()
    before = {file: file.read_bytes() for file in output.rglob(RESULT)}
    cut, edited = [file for file in before if "retrieval" in str(file)][:2]
    cut.write_bytes(before[cut][:-10])
    edited.write_text(json.dumps({score: [100.0] for score in json.loads(before[edited])}))
    assert len(before) > 2 and edited.read_bytes() != before[edited]
    capsys.readouterr()
    assert reproduce(ReproduceConfig(["table-S4"], **settings)) == written
    assert {file: file.read_bytes() for file in output.rglob(RESULT)} == before
    assert "to do: 0 trainings, 2 other pieces" in capsys.readouterr().out


def test_results_are_named_by_the_contents_of_data_and_models_not_by_their_places(papers, tmp_path):
    world, root = files.read_world(papers, "toy"), tmp_path / "root"
    make_tiny_data(root, 3)
    save_tiny_clip(root / "clip")
    for name in ("urban1k/image", "urban1k/caption", "sdxl"):
        (root / name).mkdir(parents=True)
    (root / "sdxl" / "model_index.json").write_text("{}")
    shutil.copy(root / "images" / "0.png", root / "urban1k" / "image" / "1.jpg")
    (root / "urban1k" / "caption" / "1.txt").write_text("A caption.")
    pairs = {"data": "{root}/data.json", "images": "{root}/images"}
    evaluations = {
        "pairs": {"kind": "retrieval"} | pairs,
        "captions": {"kind": "attention", "data": "{root}/data.json"},
        "urban1k": {"kind": "retrieval", "dataset": ["urban1k"], "root": "{root}"},
        "images": {"kind": "generation", "base": "{root}/sdxl", "data": "toy/test-{seed}"},
    }
    base = {"bases": {"b": Base("{root}/clip")}, "training": world.training | pairs, "pairs": None}
    world = replace(world, evaluations=evaluations, **base)

    def names(root=root):
        work = Work(world, root, tmp_path / "output")
        found = {name: work.add(Model("b"), name, 0) for name in evaluations}
        return found | {"training": work.units[work.add(Model("b", training={}), "images", 0)].needs[0]}

    before = names()
    assert names(shutil.copytree(root, tmp_path / "moved")) == before
    image = Image.new("RGB", (32, 32), (1, 2, 3))
    entries = json.dumps(json.loads((root / "data.json").read_text())[:2])
    for name, content, changed in (
        ("images/2.png", image, {"pairs", "training"}),
        ("data.json", entries, {"pairs", "training", "captions"}),
        ("urban1k/caption/1.txt", "Another caption.", {"urban1k"}),
        ("clip/open_clip_config.json", "{}", before.keys()),
        ("sdxl/model_index.json", "{ }", {"images"}),
    ):
        image.save(root / name, "png") if content is image else (root / name).write_text(content)
        now = names()
        assert {part for part in now if now[part] != before[part]} == changed
        before = now


def test_a_table_of_several_commits_says_so_and_fails_unless_that_is_asked_for(written, settings, copy_of, monkeypatch):
    output = copy_of(Path(settings["output"]))
    results = {file: read_json_object(file) for file in output.rglob(RESULT)}
    assert results and all(result["made_with"] == [program()] for result in results.values())
    table, given = output / "toy" / "table-S4.md", settings | {"output": str(output)}
    cut = next(file for file in results if "retrieval" in str(file))
    cut.unlink()
    monkeypatch.setattr(units, "program", lambda: program() | {"commit": "0123456789ab"})
    with pytest.raises(FailedError, match="several commits. .* --mixed"):
        reproduce(ReproduceConfig(["table-S4"], **given))
    assert "**Made of results of several commits**: " in table.read_text()
    assert len(read_json_object(table.with_suffix(".json"))["made_with"]) == 2
    assert len(read_json_object(cut)["made_with"]) == 2  # it went on in a folder that the other had begun
    assert reproduce(ReproduceConfig(["table-S4"], mixed=True, **given)) == [table]


# ---- claims


def queries(*values, groups="abc"):
    return Queries(list(values), [1.0] * len(values), list(groups))


UP = {seed: queries(60.0 + seed, 100.0, 80.0) for seed in range(3)}
DOWN = {seed: queries(20.0 - seed, 40.0, 30.0) for seed in range(3)}
NOISY = {0: queries(60.0, 100.0, 80.0), 1: queries(10.0, 40.0, 0.0), 2: queries(20.0, 40.0, 33.0)}
TRAINED = {name: Model(name, training={}) for name in ("up", "down", "noisy")}


def test_a_difference_over_seeds_is_students():
    # Of 1, 2, 3: mean 2, standard error 1/sqrt(3), and Student's 97.5% point of 2 degrees is 4.302653.
    difference, t = of_numbers([1.0, 2.0, 3.0]), 2 * 3**0.5
    half = 4.302653 / 3**0.5
    assert [difference.difference, difference.low, difference.high] == pytest.approx([2, 2 - half, 2 + half], rel=1e-6)
    assert difference.p == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-6)  # as of 2 degrees
    assert compare(UP, DOWN).by_seed == pytest.approx([50.0, 50.0 + 2 / 3, 50.0 + 4 / 3])
    assert compare(UP, DOWN).unit == "seeds"
    for equal in [1.0], [1.0, 1.0]:  # of which nothing is known
        assert (of_numbers(equal).difference, of_numbers(equal).low, of_numbers(equal).p) == (1.0, None, None)
        assert of_numbers(equal).verdict("+") == UNDECIDED


def test_a_row_is_compared_with_the_row_it_names_and_with_what_was_published(tmp_path):
    up = Row("up", training={}, minus="down", published=[70], sets={"docci": "docci-all"})
    columns, rows = {"c": Column("docci")}, {"up": up, "down": Row("down")}
    table, scores = PaperTable("P", "T", "S", columns, rows), {"up": UP, "down": DOWN}

    def page(table, of_papers=True):
        world = World("w", {}, {}, {}, {}, of_papers=of_papers)
        return write_table("t", table, lambda model, *_: scores[model.base], world, [*UP], tmp_path).read_text()

    assert "| up (docci-all, minus down) | 80.33: +50.67 (+49.01 to +52.32) | 70.00 | +10.33 |" in page(table)
    numbers = read_json_object(tmp_path / "t.json")["rows"]["up"]["c"]
    assert numbers["minus"] == {"row": "down"} | compare(UP, DOWN).numbers()
    assert "10.33" not in page(table, of_papers=False)
    # Ours is 80.33; beside what others measured, and by how much it may differ.
    table = replace(table, rows={"up": Row("up", published=[80.2], repeated=[80.3])}, otherwise="Look there.")
    for within, ending in ((0.2, "All numbers are within 0.2 of"), (0.1, "Further than 0.1 .*: up c by \\+0.13. Look")):
        shown = page(replace(table, within=within))
        assert "| 80.33 | 80.20 | 80.30 | +0.13 |" in shown and re.search(ending, shown.splitlines()[-1])
    with pytest.raises(UserError, match="'low', which is none of the rows up, down"):
        page(replace(table, rows=rows | {"up": Row("up", minus="low")}))


def test_queries_are_pooled_where_nothing_is_trained():
    """In whole groups, none of which has a part in two seeds; so they are of a single training."""
    a, b = [100.0, 0.0, 100.0, 100.0] * 20, [0.0, 0.0, 100.0, 0.0] * 20
    names, numbers = [str(at // 4) for at in range(80)], [at // 4 for at in range(80)]
    one = compare({0: queries(*a, groups=names)}, {0: queries(*b, groups=names)})
    halves = [{seed: queries(*part[40 * seed :][:40], groups=names[:40]) for seed in (0, 1)} for part in (a, b)]
    seeds = compare(*halves, trained=False)
    expected = paired_difference(a, b, numbers)
    for difference in one, seeds:
        assert difference.unit == "queries"
        found = [difference.difference, difference.low, difference.high, difference.p]
        assert found == pytest.approx([expected[name] for name in ("difference", "low", "high", "p")], abs=1e-9)
    with pytest.raises(ValueError, match="same queries"):
        compare({0: queries(1.0, groups="a")}, {0: queries(1.0, 2.0, groups="ab")})
    assert not Row("r").is_trained
    assert all(Row("r", **{part: {}}).is_trained for part in ("training", "ablation", "alignment"))


def test_a_verdict_is_the_intervals():
    ranges = {"+": {(1, 2): HOLDS, (-2, -1): FAILS, (-1, 2): UNDECIDED, (None, None): UNDECIDED}}
    ranges |= {"-": {(-2, -1): HOLDS, (1, 2): FAILS}}
    ranges |= {"=": {(-1, 1): HOLDS, (3, 4): FAILS, (-4, -3): FAILS, (1, 4): UNDECIDED}}  # within the margin
    for sign, verdicts in ranges.items():
        for (low, high), verdict in verdicts.items():
            assert claims.Difference(0.0, low, high, None, "seeds", []).verdict(sign, margin=2.0) == verdict


def test_a_claim_holds_if_each_of_its_comparisons_does(tmp_path):
    scores = {"up": UP, "down": DOWN, "noisy": NOISY}

    def decided(*pairs, **more):
        compared = [Comparison(*pair.split(), "docci", **more) for pair in pairs]
        tested = Claims(TRAINED, {"group": [Claim("c", "s", compare=compared)]})
        [entry] = decide(tested, lambda model, evaluation, score: scores[model.base], tmp_path)["group"]
        return entry["verdict"]

    assert [decided("up down"), decided("down up"), decided("up noisy")] == [HOLDS, FAILS, UNDECIDED]
    assert decided("up down", "up noisy") == UNDECIDED and decided("up down", "up noisy", "down up") == FAILS
    # (up - down) - (noisy - noisy) is up - down; (up - down) - (up - down) is 0 for every seed, and has no interval
    assert decided("up down", c="noisy", d="noisy", sign="=", margin=53.0) == HOLDS
    assert decided("up down", c="up", d="down", sign="=", margin=0.1) == UNDECIDED
    with pytest.raises(UserError, match="Unknown model of the claims 'upp'. Did you mean up"):
        decided("upp down")


def test_the_page_is_of_the_committed_results():
    assert evidence_page(read_json_object(RESULTS)) == PAGE.read_text()
