"""`reproduce`: one table from end to end on tiny data, names of results, wrong files, claims and their page."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.small_papers import PAPERS, STUDIES, count_compared, write_small_papers
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import make_tiny_data
from PIL import Image

from debias_diffusion.app.ablate import AblateConfig, ablate
from debias_diffusion.data.retrieval import images_digest
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.jobs import Job
from research.options import ReproduceConfig
from research.reproduce import claims, contents, measuring, units
from research.reproduce import papers as files
from research.reproduce.availability import missing_parts
from research.reproduce.building import Work
from research.reproduce.claims import FAILS, HOLDS, UNDECIDED, UNTESTED, compare, decide, of_numbers
from research.reproduce.command import write_table
from research.reproduce.evidence import evidence_page
from research.reproduce.listing import reproduce
from research.reproduce.papers import Base, Claim, Claims, Column, Comparison, Model, PaperTable, Queries, Row, World
from research.reproduce.units import RESULT, commit_of, program

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


def test_a_table_is_executed_from_end_to_end(written, papers, settings):
    """All of them are in slow/test_reproduce.py."""
    output = Path(settings["output"]) / "toy"
    assert [file.name for file in written] == ["table-S4.md"]
    assert count_compared(files.read_tables(papers)["table-S4"], read_json_object(output / "table-S4.json")) > 0
    assert "| Shuffle |" in (output / "table-S4.md").read_text()


def test_what_is_done_is_kept_and_what_is_damaged_or_edited_is_computed_again(written, settings, capsys):
    output = Path(settings["output"]) / "toy"
    before = {file: file.read_bytes() for file in output.rglob(RESULT)}
    cut, edited = [file for file in before if "retrieval" in str(file)][:2]
    cut.write_bytes(before[cut][:-10])
    edited.write_text(json.dumps({score: [100.0] for score in json.loads(before[edited])}))
    assert len(before) > 2 and edited.read_bytes() != before[edited]
    capsys.readouterr()
    assert reproduce(ReproduceConfig(["table-S4"], **settings)) == written
    assert {file: file.read_bytes() for file in output.rglob(RESULT)} == before
    assert "to do: 0 trainings, 2 other pieces" in capsys.readouterr().out


def test_a_result_is_named_by_all_that_decides_it(papers, tmp_path):
    """Another root, another model under a base's name, another number of pairs: never the old number."""
    world = files.read_world(papers, "toy")
    local = tmp_path / "open_clip_config.json"
    real = {"docci": world.evaluations["docci"] | {"data": "{root}/docci.json"}}
    models = Model("b"), Model("b", training={}), Model("b", ablation={})

    def named(root="data", base="toy/clip", **changes):
        work = Work(replace(world, bases={"b": Base(base)}, **changes), tmp_path / root, tmp_path / "output")
        return [work.add(model, "docci", 0) for model in models]

    local.write_text("{}")
    names = [*named(evaluations=real), *named("other", evaluations=real), *named(base=str(tmp_path))]
    local.write_text("{ }")
    names += named(base=str(tmp_path))
    assert len(set(names)) == len(names) and named(evaluations=real) == names[:3]
    pairs = named(pairs=8), named(held_out=3), named()
    assert len({of[1] for of in pairs}) == 3 and len({of[0] for of in pairs}) == 1  # of the training alone
    # Long-CLIP at w = 0.1 is DeBias-CLIP with another short caption: one training, however it is spelled.
    spelled = {"recipe": "long-clip", "short_weight": 0.1}
    work = Work(world, Path("data"), tmp_path)
    trainings = [Model(training=spelled | more) for more in ({}, {"epochs": 3}, {"sampling": "summary"})]
    assert len({work.add(model, "docci", 0) for model in trainings}) == 1
    assert work.add(trainings[0], "docci", 1) != work.add(trainings[0], "docci", 0)


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
    base = {"bases": {"b": Base("{root}/clip")}, "training": world.training | pairs, "pairs": None}
    base["evaluations"] = {
        "pairs": {"kind": "retrieval"} | pairs,
        "captions": {"kind": "attention", "data": "{root}/data.json"},
        "urban1k": {"kind": "retrieval", "dataset": ["urban1k"], "root": "{root}"},
        "images": {"kind": "generation", "base": "{root}/sdxl", "data": "toy/test-{seed}"},
    }

    def names(root=root):
        work = Work(replace(world, **base), root, tmp_path / "output")
        found = {name: work.add(Model("b"), name, 0) for name in base["evaluations"]}
        return found | {"training": work.units[work.add(Model("b", training={}), "images", 0)].needs[0]}

    def changed():
        before["names"], old = names(), before.get("names")
        return {name for name, unit in before["names"].items() if unit != old[name]}

    before = {"names": names()}
    image, everything = Image.new("RGB", (32, 32), (1, 2, 3)), set(before["names"])
    assert names(shutil.copytree(root, tmp_path / "moved")) == before["names"]
    (root / "other.txt").write_text("beside them")
    assert changed() == set()
    image.save(root / "images" / "2.png")
    assert changed() == {"pairs", "training"}
    entries = json.loads((root / "data.json").read_text())
    (root / "data.json").write_text(json.dumps(entries[:2]))
    assert changed() == {"pairs", "training", "captions"}
    image.save(root / "urban1k" / "image" / "1.jpg", "png")
    assert changed() == {"urban1k"}
    (root / "urban1k" / "caption" / "1.txt").write_text("Another caption.")
    assert changed() == {"urban1k"}
    (root / "clip" / "open_clip_config.json").write_text("{}")
    assert changed() == everything
    (root / "sdxl" / "model_index.json").write_text("{ }")
    assert changed() == {"images"}


def test_images_are_read_once_and_by_no_plan(tmp_path, monkeypatch):
    data, images = make_tiny_data(tmp_path / "root", 2)
    settings, read = {"data": data, "images": images}, []
    monkeypatch.setattr(
        contents, "images_digest", lambda records, source: read.append(1) or images_digest(records, source)
    )
    with Job.open(tmp_path / "output", "reproduce", shared=True) as job:
        planned = contents.Contents(job, read=False).of(settings)
        assert not read
        found = [contents.Contents(job).of(settings) for _ in range(2)]
        assert len(read) == 1 and found[0] == found[1] == contents.Contents(job, read=False).of(settings) != planned
        image = next(Path(images).iterdir())
        os.utime(image)  # as a copy would
        assert contents.Contents(job).of(settings) == found[0] and len(read) == 2


def test_a_table_of_several_commits_says_so_and_fails_unless_that_is_asked_for(written, settings, copy_of, monkeypatch):
    output = copy_of(Path(settings["output"]))
    results = {file: read_json_object(file) for file in output.rglob(RESULT)}
    assert results and all(result["made_with"] == [program()] for result in results.values())
    table, given = output / "toy" / "table-S4.md", settings | {"output": str(output)}
    assert "several commits" not in table.read_text()
    cut = next(file for file in results if "retrieval" in str(file))
    cut.unlink()
    monkeypatch.setattr(units, "program", lambda: program() | {"commit": "0123456789ab"})
    with pytest.raises(
        FailedError, match="table-S4: written, but from results of several commits. .*--output, .* or --mixed"
    ):
        reproduce(ReproduceConfig(["table-S4"], **given))
    assert "**Made of results of several commits**: " in table.read_text() and "0123456789ab" in table.read_text()
    assert len(read_json_object(table.with_suffix(".json"))["made_with"]) == 2
    assert len(read_json_object(cut)["made_with"]) == 2  # it went on in a folder that the other had begun
    assert reproduce(ReproduceConfig(["table-S4"], mixed=True, **given)) == [table]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_is_of_the_checkout_that_a_file_belongs_to(tmp_path):
    def git(*arguments):
        names = ["-c", "user.name=n", "-c", "user.email=e"]
        run = subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    file, other = tmp_path / "a.py", tmp_path / "environment.py"
    file.write_text("1")
    other.write_text("1")
    assert commit_of(file) == ""
    git("init")
    git("add", "a.py")
    git("commit", "-m", "a")
    assert commit_of(file) == git("rev-parse", "--short=12", "HEAD") and commit_of(other) == ""
    file.write_text("2")
    assert commit_of(file).endswith("-dirty")


def test_a_reading_and_an_alignment_are_of_the_trained_encoder(tmp_path, monkeypatch):
    world, seen = files.read_world(STUDIES, "toy-test"), []
    monkeypatch.setitem(measuring.KINDS, "generation", lambda settings: seen.append(settings["encoders"]) or {})
    work = Work(world, tmp_path / "root", tmp_path / "output")
    trained = Model("clip", training={"recipe": "long-clip"})
    models = [trained, replace(trained, reading="cut"), replace(trained, alignment={})]
    units = [work.units[work.add(model, "long", 7)] for model in models]
    for unit in units:
        unit.work(tmp_path)
    training, same, alignment = (unit.needs[0] for unit in units)
    folder = tmp_path / "output"
    assert seen == [[str(folder / training)], [f"cut:{folder / training}"], [str(folder / alignment)]]
    assert same == training in work.units[alignment].needs and "/alignment/" in alignment


def test_a_plan_starts_nothing_and_a_list_names_all(papers, settings, tmp_path, capsys):
    changes = {"output": str(tmp_path / "new"), "seeds": [0, 1], "plan": True}
    reproduce(ReproduceConfig(["table-S4"], **settings | changes))
    assert "to do: 2 trainings" in capsys.readouterr().out and not (tmp_path / "new").exists()
    reproduce(ReproduceConfig([], **settings | {"list": True, "world": "real", "root": str(tmp_path)}))
    printed = capsys.readouterr().out
    assert all(name in printed for name in files.read_tables(papers)) and "Get it with: hf download" in printed


def test_only_what_a_row_reads_is_missing(papers, tmp_path):
    world = files.read_world(papers, "real")
    lines = "\n".join(missing_parts(world, tmp_path, [Model(training={})], [Column("coco")]))
    assert "1246k_1107.json' is not there. Get it with: hf download" in lines and "coco" in lines
    assert "dino" not in lines and "COLA" not in lines
    assert "COLA" in "\n".join(missing_parts(world, tmp_path, [Model()], [Column("cola-gqa")]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": ["table-S14"]}, "There is no 'table-S14'. Did you mean table-S4"),
        ({"papers": "research/paperz"}, "'research/paperz' holds no world-"),
        ({"world": "real", "root": "nowhere"}, "(?s)is not here.*1246k.*hf download.*docci is in none"),
    ],
)
def test_a_wrong_option_is_explained(settings, given, message):
    with pytest.raises(UserError, match=message):
        reproduce(ReproduceConfig(**{"target": ["table-S4"]} | settings | given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rowz": {}}, "unknown key 'rowz'. Did you mean rows. Allowed are paper, title"),
        ({"rows": {"a": {"published": ["x"]}}}, r"rows: a: published is \['x'\], but must be values, each a number"),
        ({"rows": {"a": {"training": {"samplin": "random"}}}}, "train has no setting 'samplin'. Did you mean sampling"),
        ({"rows": {"a": {"base": "openai-b61"}}}, "no base model 'openai-b61'. Did you mean openai-b16"),
        ({"rows": {"a": {"ablation": {}, "training": {}}}}, "both a training"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_a_wrong_table_is_explained(settings, tmp_path, change, message):
    shutil.copy(Path(settings["papers"]) / "world-toy.yaml", tmp_path)
    table = {"paper": "P", "title": "T", "source": "S", "columns": {"c": {"evaluation": "docci"}}, "rows": {}}
    (tmp_path / "mine.yaml").write_text(change if isinstance(change, str) else yaml.safe_dump(table | change))
    with pytest.raises(UserError, match=message):
        reproduce(ReproduceConfig(["mine"], **settings | {"papers": str(tmp_path), "plan": True}))


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


def test_a_row_is_compared_with_the_row_it_names(tmp_path):
    up = Row("up", training={}, minus="down", published=[70], sets={"docci": "docci-all"})
    columns, rows = {"c": Column("docci")}, {"up": up, "down": Row("down")}
    table, scores, asked = PaperTable("P", "T", "S", columns, rows), {"up": UP, "down": DOWN}, []

    def look_up(model, evaluation, score):
        asked.append((model.base, evaluation))
        return scores[model.base]

    world = World("w", {}, {}, {}, {}, of_papers=True)
    page = write_table("t", table, look_up, world, [*UP], tmp_path).read_text()
    numbers = read_json_object(tmp_path / "t.json")["rows"]["up"]["c"]
    assert numbers["minus"] == {"row": "down"} | compare(UP, DOWN).numbers()
    assert "| up (docci-all, minus down) | 80.33: +50.67 (+49.01 to +52.32) | 70.00 | +10.33 |" in page
    assert "| down | 29.67 | - | - |" in page and "Sets: c: docci." in page
    assert set(asked) == {("up", "docci-all"), ("down", "docci-all"), ("down", "docci")}
    toy = write_table("t", table, look_up, replace(world, of_papers=False), [*UP], tmp_path).read_text()
    assert "| row | c | published |\n" in toy and "10.33" not in toy
    # Ours is 80.33; beside what others measured, and by how much it may differ.
    near = {"up": Row("up", published=[80.2], repeated=[80.3], sets={"docci": "docci-all"})}
    for within, ending in (
        (0.2, "All numbers are within 0.2 of"),
        (0.1, "Further than 0.1 from the published: up c by +0.13. Look"),
    ):
        checked = replace(table, rows=near, within=within, otherwise="Look there.")
        page = write_table("t", checked, look_up, world, [*UP], tmp_path).read_text()
        assert "| row | c | published | repeated | difference |" in page and "| 80.33 | 80.20 | 80.30 | +0.13 |" in page
        assert ending in page.splitlines()[-1]
    with pytest.raises(UserError, match="up is compared with 'low', which is none of the rows up, down"):
        write_table("t", replace(table, rows=rows | {"up": Row("up", minus="low")}), None, world, [0], tmp_path)


def test_queries_are_pooled_where_nothing_is_trained():
    """In whole groups, none of which has a part in two seeds; so they are of a single training."""
    a, b = [100.0, 0.0, 100.0, 100.0] * 20, [0.0, 0.0, 100.0, 0.0] * 20
    names, numbers = [str(at // 4) for at in range(80)], [at // 4 for at in range(80)]
    one = compare({0: queries(*a, groups=names)}, {0: queries(*b, groups=names)})
    seeds = compare(
        *({0: queries(*part[:40], groups=names[:40]), 1: queries(*part[40:], groups=names[:40])} for part in (a, b)),
        trained=False,
    )
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
    with pytest.raises(UserError, match="unknown model 'upp'. Did you mean up"):
        decided("upp down")


def test_recorded_differences_are_read(tmp_path):
    numbers = {"difference": 2.0, "low": 1.0, "high": 3.0, "p": 0.01, "unit": "queries", "by_seed": []}
    compared = [{"a": "x", "b": "y"} | numbers]
    seeds = {"0": {"x": 5.0, "y": 1.0, "compared": compared}, "1": {"x": 6.0, "y": 1.5, "compared": compared}}
    write_json(tmp_path / "results.json", {"rows": compared, "seeds": seeds})

    def decided(*path, **more):
        recorded = files.Recorded(**{"file": "results.json", "text": "x - y", "path": list(path)} | more)
        [entry] = decide(Claims({}, {"g": [Claim("c", "s", recorded=[recorded])]}), None, tmp_path)["g"]
        return entry

    one = decided("rows", {"a": "x"})
    assert one["verdict"] == HOLDS and one["parts"][0]["low"] == 1.0 and one["parts"][0]["by_seed"] == []
    two = decided("seeds", "*", "x", less=["seeds", "*", "y"])["parts"][0]
    assert two["by_seed"] == [4.0, 4.5] and two["difference"] == 4.25
    assert decided("seeds", "*", "compared", {"a": "x"})["parts"][0]["by_seed"] == [2.0, 2.0]
    absent = decided("rows", file="none.json")
    assert absent["verdict"] == UNTESTED and "none.json is not here" in absent["reason"]
    with pytest.raises(UserError, match="has no seeds > 2"):
        decided("seeds", "2")


def test_the_claims_file_finds_every_recorded_number():
    groups = files.read_yaml(PAPERS / "claims.yaml", Claims).claims
    only_recorded = {title: [claim for claim in group if claim.recorded] for title, group in groups.items()}
    entries = [entry for group in decide(Claims({}, only_recorded), None, ROOT).values() for entry in group]
    tested = [entry for entry in entries if entry["verdict"] != UNTESTED]
    assert len(tested) >= 10 and all(
        entry["reason"].endswith("is not here.") for entry in entries if entry not in tested
    )


def test_a_score_that_was_not_measured_is_missing(monkeypatch):
    """Without a network there is no FID, not a perfect one. Scores of images keep each image's counts and group."""
    scores = {"objects_right": {"value": 75.0}, "fid_64": {"value": None}, "clip_score_4": {"value": 0.5}}
    scores["objects_right_by_sentence"] = [{"sentence": 2, "value": 75.0}, {"sentence": 3, "value": None}]
    by_image = {"objects_right": {"above": [2, 1], "below": [2, 2]}, "clip_score_4": [None, 0.5]}
    encoder = {"scores": scores, "by_image": by_image}
    report = {"encoders": {"toy/clip": encoder}, "records": {"image": ["a", "b"], "group": ["a", "a"]}}
    monkeypatch.setattr(measuring, "evaluate_generation", lambda config: report)
    settings = {"encoders": ["toy/clip"], "output": "x", "base": "toy/sdxl", "data": "toy/test"}
    expected = {"objects_right": Queries([200.0, 100.0], [2, 2], ["a", "a"]), "objects_right_by_sentence: 2": 75.0}
    expected["clip_score_4"] = Queries([0.5], [1.0], ["a"])
    measured = measuring.generation_scores(settings)
    assert {name: Queries(**part) if isinstance(part, dict) else part for name, part in measured.items()} == expected
    assert expected["objects_right"].mean == 75.0
    scores["fid_own"] = {"value": 3.0}
    assert measuring.generation_scores(settings)["fid"] == 3.0


def test_a_search_has_its_time_and_its_heads_by_layer(tmp_path):
    settings = {"data": "toy/validation-1", "limit": 40, "search": "naive"}
    folder = ablate(AblateConfig("toy/clip", str(tmp_path / "search"), **settings))
    content, nothing = read_json_object(folder / "ablation.json"), tmp_path / "nothing"
    counts = [sum(name.startswith(f"{block}-") for name in content["heads"]) for block in range(3)]
    scores = measuring.ablation_scores({"encoders": [str(folder)]})
    assert [scores[f"a layer, {third} third"] for third in measuring.THIRDS] == counts and sum(counts) > 0
    assert scores["a layer"] == sum(counts) / 3 and scores["ratio"] == sum(counts) / np.size(content["beta"])
    assert scores["minutes"] == content["seconds"] / 60 > 0
    with Job.open(nothing, "ablate") as job:  # of a search in which no head helps
        job.note("search", seconds=90.0)
    assert measuring.ablation_scores({"encoders": [str(nothing)]}) == dict.fromkeys(scores, 0.0) | {"minutes": 1.5}


def test_recalls_and_top_1_are_those_of_the_evaluations(tmp_path):
    given = {"encoders": ["toy/clip"], "data": "toy/test-9", "limit": 60}
    scores = measuring.retrieval_scores(given | {"output": str(tmp_path / "a")})
    [encoder] = evaluate_retrieval(RetrievalConfig(output=str(tmp_path / "b"), **given))["encoders"].values()
    found = [scores[name] for name in ("t2i", "R@5 t2i", "R@10 t2i", "i2t", "R@5 i2t", "R@10 i2t")]
    found = [Queries(**part).mean for part in found]
    assert found == pytest.approx([recall for way in encoder["recall_percent"].values() for recall in way.values()])
    assert found[3] < found[4] < found[5]
    rows = b"".join(bytes([label]) + bytes([20 * label]) * 3072 for label in range(10))
    (tmp_path / "test_batch.bin").write_bytes(rows)
    (tmp_path / "batches.meta.txt").write_text("\n".join(["white", "black"] * 5))
    given = {"encoders": ["toy/clip"], "data": str(tmp_path), "dataset": "cifar-10"}
    top_1 = measuring.classification_scores(given | {"output": str(tmp_path / "c")})
    assert top_1 == {
        "t2i": read_json_object(tmp_path / "c" / "classification.json")["encoders"]["toy/clip"]["top1_percent"]
    }


def test_short_positions_and_drawn_data_are_part_of_a_row(tmp_path, monkeypatch):
    world, seen = files.read_world(PAPERS, "toy"), []
    monkeypatch.setitem(measuring.KINDS, "retrieval", lambda settings: seen.append(settings["encoders"]) or {})
    work = Work(world, tmp_path / "root", tmp_path / "output")
    long = Model("openai-l14", training={"recipe": "fix-clip"})
    units = [work.units[work.add(model, "coco", 0)] for model in (long, replace(long, positions="short"))]
    for unit in units:
        unit.work(tmp_path)
    assert units[0].name != units[1].name and units[0].needs == units[1].needs
    assert seen[1] == [f"short:{seen[0][0]}"]
    sft = files.read_tables(PAPERS)["aat-figure-5"].rows["SFT, 1 epoch"]
    elsewhere = Work(world, tmp_path / "elsewhere", tmp_path / "output")
    assert work.add(sft, "coco", 0) == elsewhere.add(sft, "coco", 0)  # the toy world draws its pairs
    assert missing_parts(world, tmp_path, [sft], [Column("imagenet-1k")]) == []
    real = files.read_world(PAPERS, "real")
    lines = "\n".join(missing_parts(real, tmp_path, [sft], [Column("imagenet-1k")]))
    assert (
        "coco-train-1k.jsonl' is not there. Get it with: python -m research pairs" in lines and "imagenet/val" in lines
    )


def test_the_slope_of_attention_is_that_of_the_line():
    numbers = {"captions_at_position": [10, 10, 9, 5, 0], "before_softmax": {"positions": [3.0, 2.0, 1.0, 0.0, 90.0]}}
    assert measuring.attention_slope(numbers) == pytest.approx(-100.0)


def test_the_committed_pages_are_renderings_of_the_committed_results_of_the_committed_claims():
    content, known = read_json_object(RESULTS), files.read_yaml(PAPERS / "claims.yaml", Claims).claims
    written = {
        title: [(entry["claim"], entry["main"]) for entry in group] for title, group in content["claims"].items()
    }
    assert written == {title: [(claim.claim, claim.main) for claim in group] for title, group in known.items()}
    assert 10 < sum(claim.main for group in known.values() for claim in group) <= 25
    assert evidence_page(content) == PAGE.read_text()
    assert evidence_page(content, every=True) == RESULTS.with_suffix(".md").read_text()
