"""`reproduce`: one table from end to end on tiny data, names of results, wrong files, claims and their page."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.small_papers import PAPERS, STUDIES, count_compared, write_small_papers

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce import claims, measuring
from debias_diffusion.app.reproduce import papers as files
from debias_diffusion.app.reproduce.availability import missing_parts, missing_weights
from debias_diffusion.app.reproduce.building import Work
from debias_diffusion.app.reproduce.claims import FAILS, HOLDS, UNDECIDED, UNTESTED, decide, of_numbers, over_seeds
from debias_diffusion.app.reproduce.command import RESULTS, write_table
from debias_diffusion.app.reproduce.evidence import evidence_page
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.app.reproduce.papers import Base, Claim, Claims, Column, Comparison, Model, PaperTable, Row
from debias_diffusion.app.reproduce.units import RESULT
from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.files import read_json_object, write_json

pytestmark = pytest.mark.usefixtures("coarse_results")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence.md"


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return write_small_papers(tmp_path_factory.mktemp("repository") / "configs" / "papers")


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
    (training,) = (output / "seed-0" / "training").iterdir()
    assert not list(training.glob("checkpoint-*")) and (training / "last").is_dir()


def test_a_result_is_named_by_all_that_decides_it(papers, tmp_path):
    """Another root, another model under a base's name, another number of pairs: never the old number."""

    def named(root="data", base="toy/clip", **changes):
        world = replace(files.read_world(papers, "toy"), bases={"b": Base(base)}, **changes)
        work = Work(world, tmp_path / root, tmp_path / "output")
        models = Model("b"), Model("b", training={}), Model("b", ablation={})
        return [work.add(model, "docci", 0) for model in models]

    world = files.read_world(papers, "toy")
    real = {"docci": world.evaluations["docci"] | {"data": "{root}/docci.json"}}
    plain, others = named(evaluations=real), [named("other", evaluations=real), named(base="ViT-B-32:none")]
    assert named(evaluations=real) == plain and all(not set(plain) & set(other) for other in others)
    local = tmp_path / "local"
    local.mkdir()
    (local / "open_clip_config.json").write_text("{}")
    before = named(base=str(local))
    (local / "open_clip_config.json").write_text("{ }")
    assert not set(before) & set(named(base=str(local)))
    pairs = named(pairs=8), named(held_out=3), named()
    assert len({of[1] for of in pairs}) == 3 and len({of[0] for of in pairs}) == 1  # of the training alone


def test_a_method_is_one_training_however_it_is_spelled(papers, tmp_path):
    """Long-CLIP at w = 0.1 is DeBias-CLIP with another short caption."""
    work = Work(files.read_world(papers, "toy"), Path("data"), tmp_path)
    spelled = [{"recipe": "long-clip", "short_weight": 0.1}, {"recipe": "long-clip", "short_weight": 0.1, "epochs": 3}]
    spelled += [spelled[0] | {"sampling": "summary"}]
    assert len({work.add(Model(training=training), "docci", 0) for training in spelled}) == 1
    assert len({work.add(Model(training=spelled[0]), "docci", seed) for seed in (0, 1)}) == 2


def test_a_reading_and_an_alignment_are_of_the_trained_encoder(tmp_path, monkeypatch):
    world, seen = files.read_world(STUDIES, "toy-test"), []
    monkeypatch.setitem(measuring.KINDS, "generation", lambda settings: seen.append(settings) or {})
    work = Work(world, tmp_path / "root", tmp_path / "output")
    trained = Model("clip", training={"recipe": "long-clip"})
    models = [trained, replace(trained, reading="cut"), replace(trained, alignment={}), Model("original", alignment={})]
    names = [work.add(model, "long", 7) for model in models]
    for name in names:
        work.units[name].work(tmp_path)
    made = [work.units[name].needs[0] for name in names]
    assert [settings["encoders"] for settings in seen] == [
        [str(tmp_path / "output" / made[0])],
        [f"cut:{tmp_path / 'output' / made[0]}"],
        [str(tmp_path / "output" / made[2])],
        [str(tmp_path / "output" / made[3])],
    ]
    assert made[1] == made[0] in work.units[made[2]].needs and made[2] != made[3] and "/alignment/" in made[3]
    assert work.units[made[3]].needs == ("pairs-4000-100-2-styles",) and seen[0]["data"] == "toy/test-7"


def test_a_plan_starts_nothing_and_a_list_names_all(papers, settings, tmp_path, capsys):
    changes = {"output": str(tmp_path / "new"), "seeds": [0, 1], "plan": True}
    reproduce(ReproduceConfig(["table-S4"], **settings | changes))
    printed = capsys.readouterr().out
    assert "to do: 2 trainings" in printed and "sampling shuffle, seed 1" in printed
    assert not (tmp_path / "new").exists()
    reproduce(ReproduceConfig([], **settings | {"list": True, "world": "real", "root": str(tmp_path)}))
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*files.read_tables(papers), "figure-S10", "aat-table-16"))
    assert "share-captioner_coco_lcs_sam_1246k_1107.json' is not there. Get it with: hf download" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": ["table-S14"]}, "There is no 'table-S14'. Did you mean table-S4"),
        ({"target": ["figure-S4"]}, "figure-S4 cannot be reproduced here: TULIP's"),
        ({"target": ["table-S4"], "papers": "configs/paperz"}, "'configs/paperz' holds no world-"),
        ({"target": ["table-S4"], "world": "tiy"}, "There is no world 'tiy'. Did you mean toy"),
        (
            {"target": ["table-S4"], "world": "real", "root": "nowhere"},
            "(?s)is not here.*1246k.*hf download.*docci is in none",
        ),
    ],
)
def test_a_wrong_option_is_explained(settings, given, message):
    with pytest.raises(UserError, match=message):
        reproduce(ReproduceConfig(**settings | given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rowz": {}}, "unknown key 'rowz'. Did you mean rows. Allowed are paper, title"),
        ({"title": 3}, "title is 3, but must be text"),
        ({"rows": {"a": {"published": ["x"]}}}, r"rows: a: published is \['x'\], but must be values, each a number"),
        ({"rows": {"a": 3}}, "rows: a is 3, but must hold keys. Allowed are base, training"),
        ({"columns": None}, "columns is None, but must be names with values"),
        ({"rows": {"a": {"trainin": {}}}}, "rows: a: unknown key 'trainin'. Did you mean training"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, change, message):
    table = {"paper": "P", "title": "T", "source": "S", "columns": {"c": {"evaluation": "docci"}}, "rows": {}}
    file = tmp_path / "table.yaml"
    file.write_text(yaml.safe_dump(table))
    assert files.read_yaml(file, PaperTable).columns["c"].score == "t2i"
    file.write_text(yaml.safe_dump(table | change))
    with pytest.raises(UserError, match=message):
        files.read_yaml(file, PaperTable)
    file.write_text(yaml.safe_dump({name: part for name, part in table.items() if name != "source"}))
    with pytest.raises(UserError, match="missing 1 required .* 'source'. Allowed are paper"):
        files.read_yaml(file, PaperTable)
    file.write_text("a: [")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        files.read_yaml(file, PaperTable)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"training": {"samplin": "random"}}, "train has no setting 'samplin'. Did you mean sampling"),
        ({"training": {"batch": "many"}}, "Settings of TrainConfig cannot be used"),
        ({"training": {"sampling": "randm"}}, "Unknown sampling 'randm'"),
        ({"base": "openai-b61"}, "This world has no base model 'openai-b61'. Did you mean openai-b16"),
        ({"ablation": {"serch": "ga"}}, "ablate has no setting 'serch'. Did you mean search"),
        ({"ablation": {}, "training": {}}, "both a training"),
    ],
)
def test_wrong_settings_of_a_row_are_explained(papers, settings, tmp_path, row, message):
    folder = tmp_path / "papers"
    shutil.copytree(papers, folder)
    table = {"paper": "P", "title": "T", "source": "S", "columns": {"c": {"evaluation": "docci"}}, "rows": {"r": row}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(table))
    with pytest.raises(UserError, match=message):
        reproduce(ReproduceConfig(["mine"], **settings | {"papers": str(folder)}))


# ---- claims

UP = {seed: [60.0 + seed, 100.0, 80.0] for seed in range(3)}
DOWN = {seed: [20.0 - seed, 40.0, 30.0] for seed in range(3)}
NOISY = {0: [60.0, 100.0, 80.0], 1: [10.0, 40.0, 0.0], 2: [20.0, 40.0, 33.0]}


def test_a_difference_over_seeds_is_students():
    # Of 1, 2, 3: mean 2, standard error 1/sqrt(3), and Student's 97.5% point of 2 degrees is 4.302653.
    difference = of_numbers([1.0, 2.0, 3.0])
    assert difference.difference == 2 and difference.high - 2 == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert difference.low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-6)
    # t = 2 sqrt(3); of 2 degrees p is 1 - t / sqrt(2 + t^2)
    t = 2 * 3**0.5
    assert difference.p == pytest.approx(1 - t / (2 + t * t) ** 0.5, rel=1e-6)
    assert over_seeds(UP, DOWN).by_seed == pytest.approx([50.0, 50.0 + 2 / 3, 50.0 + 4 / 3])
    assert of_numbers([0.0, 0.0]).p == 1 and of_numbers([1.0]).low is None


def test_a_row_is_compared_with_the_row_it_names(tmp_path):
    columns, rows = {"c": Column("docci")}, {"up": Row("up", minus="down", published=[70]), "down": Row("down")}
    table, scores = PaperTable("P", "T", "S", columns, rows), {"up": UP, "down": DOWN}
    page = write_table("t", table, lambda model, *_: scores[model.base], "w", [*UP], tmp_path).read_text()
    numbers = read_json_object(tmp_path / "t.json")["rows"]["up"]["c"]
    assert numbers["minus"] == {"row": "down"} | over_seeds(UP, DOWN).numbers() and numbers["difference"] == 10.3333
    assert "| up (minus down) | 80.33: +50.67 (+49.01 to +52.32) | 70.00 | +10.33 |" in page
    assert "| down | 29.67 | - | - |" in page
    with pytest.raises(UserError, match="up is compared with 'low', which is none of the rows up, down"):
        write_table("t", replace(table, rows=rows | {"up": Row("up", minus="low")}), None, "w", [0], tmp_path)


def test_a_single_seed_has_the_interval_of_its_queries():
    a, b = [100.0, 0.0, 100.0, 100.0] * 20, [0.0, 0.0, 100.0, 0.0] * 20
    difference, expected = over_seeds({0: a}, {0: b}), paired_difference(a, b)
    assert (difference.difference, difference.low, difference.high, difference.p) == tuple(
        expected[name] for name in ("difference", "low", "high", "p")
    )
    assert over_seeds({0: 3.0}, {0: 1.0}).low is None
    with pytest.raises(ValueError, match="the same"):
        over_seeds({0: 1.0}, {1: 1.0})
    with pytest.raises(ValueError, match="same queries"):
        over_seeds({0: [1.0]}, {0: [1.0, 2.0]})


@pytest.mark.parametrize(
    ("low", "high", "sign", "verdict"),
    [
        (1, 2, "+", HOLDS),
        (-2, -1, "+", FAILS),
        (-1, 2, "+", UNDECIDED),
        (-2, -1, "-", HOLDS),
        (1, 2, "-", FAILS),
        (-1, 1, "=", HOLDS),
        (3, 4, "=", FAILS),
        (-4, -3, "=", FAILS),
        (1, 4, "=", UNDECIDED),
        (None, None, "+", UNDECIDED),
    ],
)
def test_a_verdict_is_the_intervals(low, high, sign, verdict):
    assert claims.Difference(0.0, low, high, None, []).verdict(sign, margin=2.0) == verdict


def test_claims_that_must_hold_must_not_and_are_open(tmp_path):
    scores = {"up": UP, "down": DOWN, "noisy": NOISY}
    models = {name: Model(base=name) for name in scores}

    def decided(*compare, **more):
        tested = Claims(models, {"group": [Claim("c", "s", compare=list(compare), **more)]})
        return decide(tested, lambda model, evaluation, score: scores[model.base], tmp_path)["group"][0]

    def part(a, b, **more):
        return Comparison(a, b, "docci", **more)

    assert decided(part("up", "down"))["verdict"] == HOLDS
    assert decided(part("down", "up"))["verdict"] == FAILS
    assert decided(part("up", "noisy"))["verdict"] == UNDECIDED
    assert decided(part("up", "down"), part("up", "noisy"))["verdict"] == UNDECIDED
    assert decided(part("up", "down"), part("up", "noisy"), part("down", "up"))["verdict"] == FAILS
    # (up - down) - (up - down) is 0 for every query
    assert decided(part("up", "down", c="up", d="down", sign="=", margin=0.1))["verdict"] == HOLDS
    with pytest.raises(UserError, match="unknown model 'upp'. Did you mean up"):
        decided(part("upp", "down"))


def test_recorded_differences_are_read(tmp_path):
    compared = [{"a": "x", "b": "y", "difference": 2.0, "low": 1.0, "high": 3.0, "p": 0.01}]
    seeds = {"0": {"x": 5.0, "y": 1.0, "compared": compared}, "1": {"x": 6.0, "y": 1.5, "compared": compared}}
    write_json(tmp_path / "results.json", {"rows": compared, "seeds": seeds})

    def decided(**part):
        recorded = files.Recorded(**{"file": "results.json", "text": "x - y"} | part)
        [entry] = decide(Claims({}, {"g": [Claim("c", "s", recorded=[recorded])]}), None, tmp_path)["g"]
        return entry

    one = decided(path=["rows", {"a": "x"}])
    assert one["verdict"] == HOLDS and one["parts"][0]["low"] == 1.0 and one["parts"][0]["by_seed"] == []
    two = decided(path=["seeds", "*", "x"], less=["seeds", "*", "y"])
    assert two["parts"][0]["by_seed"] == [4.0, 4.5] and two["parts"][0]["difference"] == 4.25
    three = decided(path=["seeds", "*", "compared", {"a": "x", "b": "y"}])
    assert three["parts"][0]["by_seed"] == [2.0, 2.0]
    absent = decided(file="none.json", path=["rows"])
    assert absent["verdict"] == UNTESTED and "none.json is not here" in absent["reason"]
    for wrong, message in ((["rowz"], "has no rowz"), (["seeds", "2"], "has no seeds > 2")):
        with pytest.raises(UserError, match=message):
            decided(path=wrong)
    with pytest.raises(UserError, match="0 entries"):
        decided(path=["rows", {"a": "z"}])


def test_the_claims_file_finds_every_recorded_number():
    groups = files.read_yaml(PAPERS / "claims.yaml", Claims).claims
    only_recorded = {title: [claim for claim in group if claim.recorded] for title, group in groups.items()}
    entries = [entry for group in decide(Claims({}, only_recorded), None, ROOT).values() for entry in group]
    tested = [entry for entry in entries if entry["verdict"] != UNTESTED]
    assert len(tested) >= 10 and all(
        entry["reason"].endswith("is not here.") for entry in entries if entry not in tested
    )


def test_a_score_that_was_not_measured_is_missing(monkeypatch):
    """Without a network there is no FID, not a perfect one."""
    scores = {"objects_right": {"value": 50.0}, "fid_64": {"value": None}}
    scores["objects_right_by_sentence"] = [{"sentence": 2, "value": 75.0}, {"sentence": 3, "value": None}]
    report = {"encoders": {"toy/clip": {"scores": scores}}}
    monkeypatch.setattr(measuring, "evaluate_generation", lambda config: report)
    settings = {"encoders": ["toy/clip"], "output": "x", "base": "toy/sdxl", "data": "toy/test"}
    expected = {"objects_right": 50.0, "objects_right_by_sentence: 2": 75.0}
    assert measuring.generation_scores(settings) == expected
    scores["fid_own"] = {"value": 3.0}
    assert measuring.generation_scores(settings)["fid"] == 3.0


def test_weights_that_are_not_here_are_named_with_a_way_to_get_them():
    base = Base("ViT-B-16-quickgelu", "openai", "nobody/nothing")
    [line] = missing_weights(base)
    assert "The weights ViT-B-16-quickgelu:openai are not in" in line and "hf download nobody/nothing" in line


def test_data_of_a_row_s_ablation_is_looked_for(tmp_path):
    world = files.World("w", {"b": Base("toy/clip")}, {}, {"data": "{root}/of-the-world.json"}, {})
    models = [Model("b"), Model("b", ablation={"data": "{root}/of-the-row.json"})]
    (line,) = missing_parts(world, tmp_path, models, [])
    assert line.startswith(f"'{tmp_path}/of-the-row.json' is not there")
    # A world may have other data in the place of a row's.
    assert not missing_parts(
        replace(world, substitute={"data": {models[1].ablation["data"]: None}}), tmp_path, models[1:], []
    )


def test_the_slope_of_attention_is_that_of_the_line():
    numbers = {"captions_at_position": [10, 10, 9, 5, 0], "before_softmax": {"positions": [3.0, 2.0, 1.0, 0.0, 90.0]}}
    assert measuring.attention_slope(numbers) == pytest.approx(-100.0)


def test_the_committed_page_is_a_rendering_of_the_committed_results():
    assert evidence_page(read_json_object(ROOT / RESULTS), RESULTS) == PAGE.read_text()


def test_the_readme_points_to_rows():
    named = re.findall(r"docs/evidence\.md#([\w-]+)", (ROOT / "README.md").read_text())
    rows = re.findall(r'<a id="([^"]+)">', PAGE.read_text())
    assert len(named) >= 6 and set(named) <= set(rows) and len(rows) == len(set(rows))
