"""`reproduce`: one table from end to end on tiny data, settings of all, shared units, claims and their page."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import shared_units
from helpers.ranks import forked
from helpers.small_papers import PAPERS, count_compared, write_small_papers

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce import measuring
from debias_diffusion.app.reproduce.availability import missing_parts, missing_weights
from debias_diffusion.app.reproduce.building import Work
from debias_diffusion.app.reproduce.claims import all_claims, decide, with_epochs
from debias_diffusion.app.reproduce.command import RESULTS
from debias_diffusion.app.reproduce.differences import FAILS, HOLDS, UNDECIDED, UNTESTED, of_numbers, over_seeds
from debias_diffusion.app.reproduce.evidence import evidence_page
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.app.reproduce.papers import (
    Base,
    Claim,
    Claims,
    Column,
    Comparison,
    Model,
    PaperTable,
    Recorded,
    World,
    read_tables,
    read_world,
)
from debias_diffusion.app.reproduce.papers import read_yaml as read
from debias_diffusion.app.reproduce.units import RESULT, result_of
from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.files import read_json_object, write_json
from debias_diffusion.jobs import Job

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


def test_weights_that_are_not_here_are_named_with_a_way_to_get_them():
    base = Base("ViT-B-16-quickgelu", "openai", "nobody/nothing")
    [line] = missing_weights(base)
    assert "The weights ViT-B-16-quickgelu:openai are not in" in line and "hf download nobody/nothing" in line


@pytest.fixture(scope="module")
def written(settings):
    return reproduce(ReproduceConfig(["table-S4"], **settings))


def test_a_table_is_executed_from_end_to_end(written, papers, settings):
    """All of them are in slow/test_reproduce.py."""
    output = Path(settings["output"]) / "toy"
    assert [file.name for file in written] == ["table-S4.md"]
    assert count_compared(read_tables(papers)["table-S4"], read_json_object(output / "table-S4.json")) > 0
    assert "| Shuffle |" in (output / "table-S4.md").read_text()


def test_what_is_done_is_kept_and_what_is_damaged_is_computed_again(written, settings, capsys):
    output = Path(settings["output"]) / "toy"
    before = {file: file.read_bytes() for file in output.rglob(RESULT)}
    assert len(before) > 2
    damaged = next(file for file in before if "retrieval" in str(file))
    damaged.write_bytes(before[damaged][:-10])
    capsys.readouterr()
    assert reproduce(ReproduceConfig(["table-S4"], **settings)) == written
    assert {file: file.read_bytes() for file in output.rglob(RESULT)} == before
    assert "to do: 0 trainings, 1 other pieces" in capsys.readouterr().out
    (training,) = (output / "seed-0" / "training").iterdir()
    assert not list(training.glob("checkpoint-*")) and (training / "last").is_dir()


def test_a_result_is_named_by_all_that_decides_it(papers, tmp_path):
    """Another root, another model under a base's name, another number of pairs: never the old number."""

    def named(root="data", base="toy/clip", **changes):
        world = replace(read_world(papers, "toy"), bases={"b": Base(base)}, **changes)
        work = Work(world, tmp_path / root, tmp_path / "output")
        models = Model("b"), Model("b", training={}), Model("b", ablation={})
        return [unit for model in models for unit in work.add(model, [Column("docci")], 0).values()]

    world = read_world(papers, "toy")
    real = {"docci": world.evaluations["docci"] | {"data": "{root}/docci.json"}}
    plain, others = named(evaluations=real), [named("other", evaluations=real), named(base="ViT-B-32:none")]
    assert named(evaluations=real) == plain and all(not set(plain) & set(other) for other in others)
    pairs = named(pairs=8), named(held_out=3), named()
    assert len({of[1] for of in pairs}) == 3 and len({of[0] for of in pairs}) == 1  # of the training alone


def test_a_method_is_one_training_however_it_is_spelled(settings):
    """Long-CLIP at w = 0.1 is DeBias-CLIP with another short caption."""
    work = Work(read_world(Path(settings["papers"]), "toy"), Path("data"), Path(settings["output"]) / "toy")
    spelled = [
        {"recipe": "long-clip", "short_weight": 0.1},
        {"recipe": "long-clip", "short_weight": 0.1, "sampling": "summary", "epochs": 3},
    ]
    assert len({work.training_name(Model(training=training), 0) for training in spelled}) == 1
    assert work.training_name(Model(training=spelled[0]), 1) != work.training_name(Model(training=spelled[0]), 0)


@pytest.mark.parametrize("world", ["toy", "real"])
def test_the_budgets_of_a_claim_are_different_trainings(world, tmp_path):
    work, claims = Work(read_world(PAPERS, world), Path("data"), tmp_path), read(PAPERS / "claims.yaml", Claims)
    tested = [claim for claim in all_claims(claims) if len(claim.epochs) > 1]
    assert tested
    for claim in tested:
        for name in claim.compare[0].names:
            models = [with_epochs(claims.models[name], epochs) for epochs in claim.epochs]
            assert len({work.training_name(model, 0) for model in models}) == len(models)


@pytest.mark.parametrize("world", ["toy", "real"])
def test_every_row_has_settings_that_can_be_used(world, tmp_path, capsys):
    reproduce(ReproduceConfig(["all"], world=world, papers=str(PAPERS), output=str(tmp_path / "new"), plan=True))
    printed = capsys.readouterr().out
    assert "to do: " in printed and ("of one core" if world == "toy" else "GPU hours") in printed
    assert not (tmp_path / "new").exists()


def test_a_plan_starts_nothing_and_a_list_names_all(papers, settings, tmp_path, capsys):
    changes = {"output": str(tmp_path / "new"), "seeds": [0, 1], "plan": True}
    reproduce(ReproduceConfig(["table-S4"], **settings | changes))
    printed = capsys.readouterr().out
    assert "to do: 2 trainings" in printed and "sampling shuffle, seed 1" in printed
    assert not (tmp_path / "new").exists()
    reproduce(ReproduceConfig([], **settings | {"list": True, "world": "real", "root": str(tmp_path)}))
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*read_tables(papers), "figure-S10", "aat-table-16"))
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
        ({"rows": {"a": 3}}, "rows: a is 3, but must hold keys of base, training"),
        ({"columns": None}, "columns is None, but must be names with values"),
        ({"rows": {"a": {"trainin": {}}}}, "rows: a: unknown key 'trainin'. Did you mean training"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, change, message):
    table = {"paper": "P", "title": "T", "source": "S", "columns": {"c": {"evaluation": "docci"}}, "rows": {}}
    file = tmp_path / "table.yaml"
    file.write_text(yaml.safe_dump(table))
    assert read(file, PaperTable).columns["c"].score == "t2i"
    file.write_text(yaml.safe_dump(table | change))
    with pytest.raises(UserError, match=message):
        read(file, PaperTable)
    file.write_text(yaml.safe_dump({name: part for name, part in table.items() if name != "source"}))
    with pytest.raises(UserError, match="missing 1 required .* 'source'. Allowed are paper"):
        read(file, PaperTable)
    file.write_text("a: [")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        read(file, PaperTable)


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


# ---- units


def test_two_processes_do_each_unit_once(tmp_path):
    screens = [tmp_path / "0", tmp_path / "1"]
    output = tmp_path / "output"
    output.mkdir()
    forked(2, lambda rank: shared_units.do_all(output, screens[rank]), group=False)
    lines = [screen.read_text().splitlines() for screen in screens]
    assert all(lines) and sum(map(len, lines)) == shared_units.COUNT + 1
    times = [(output / str(number) / "times.txt").read_text() for number in range(shared_units.COUNT)]
    assert times == ["done\n"] * shared_units.COUNT
    assert result_of(Job.read(output), shared_units.SUM) == {"total": sum(range(shared_units.COUNT))}


def test_a_killed_unit_is_done_again(tmp_path):
    with pytest.raises(AssertionError, match=r"exit codes \[9\]"):
        forked(1, lambda _: shared_units.die_within(tmp_path), group=False)
    assert (tmp_path / "0" / "half.txt").exists() and not Job.read(tmp_path).names()
    shared_units.do_all(tmp_path, tmp_path / "screen")
    assert result_of(Job.read(tmp_path), "0") == {"number": 0}


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
    difference = of_numbers([0.0])
    assert type(difference)(0.0, low, high, None, []).verdict(sign, margin=2.0) == verdict


def test_claims_that_must_hold_must_not_and_are_open(tmp_path):
    scores = {"up": UP, "down": DOWN, "noisy": NOISY}
    models = {name: Model(base=name) for name in scores}

    def decided(*compare, **more):
        claims = Claims(models, {"group": [Claim("c", "s", compare=list(compare), **more)]})
        return decide(claims, lambda model, evaluation, score: scores[model.base], tmp_path)["group"][0]

    def part(a, b, **more):
        return Comparison(a, b, "docci", **more)

    assert decided(part("up", "down"))["verdict"] == HOLDS
    assert decided(part("down", "up"))["verdict"] == FAILS
    assert decided(part("up", "noisy"))["verdict"] == UNDECIDED
    assert decided(part("up", "down"), part("up", "noisy"))["verdict"] == UNDECIDED
    assert decided(part("up", "down"), part("up", "noisy"), part("down", "up"))["verdict"] == FAILS
    assert decided(part("up", "down"), not_tested="because")["verdict"] == UNTESTED
    # (up - down) - (up - down) is 0 for every query
    assert decided(part("up", "down", c="up", d="down", sign="=", margin=0.1))["verdict"] == HOLDS
    with pytest.raises(UserError, match="unknown model 'upp'. Did you mean up"):
        decided(part("upp", "down"))


def test_a_claim_is_decided_by_the_seeds_that_all_its_models_have(tmp_path):
    scores = {"up": UP, "down": {seed: DOWN[seed] for seed in [*DOWN][1:]}, "none": {}}
    models = {name: Model(base=name) for name in scores}

    def decided(b, fewest):
        claims = Claims(models, {"group": [Claim("c", "s", compare=[Comparison("up", b, "docci")])]})
        return decide(claims, lambda model, *_: scores[model.base], tmp_path, fewest)["group"][0]

    entry = decided("down", len(DOWN) - 1)
    assert entry["verdict"] == HOLDS and len(entry["parts"][0]["by_seed"]) == len(DOWN) - 1
    for open_entry in (decided("down", len(DOWN)), decided("none", 1)):
        assert open_entry["verdict"] == UNTESTED and open_entry["reason"] == "Not run yet." and not open_entry["parts"]


def test_recorded_differences_are_read(tmp_path):
    compared = [{"a": "x", "b": "y", "difference": 2.0, "low": 1.0, "high": 3.0, "p": 0.01}]
    seeds = {"0": {"x": 5.0, "y": 1.0, "compared": compared}, "1": {"x": 6.0, "y": 1.5, "compared": compared}}
    write_json(tmp_path / "results.json", {"rows": compared, "seeds": seeds})

    def decided(**part):
        recorded = Recorded(**{"file": "results.json", "text": "x - y"} | part)
        [entry] = decide(Claims({}, {"g": [Claim("c", "s", recorded=[recorded])]}), None, tmp_path)["g"]
        return entry

    one = decided(path=["rows"], where={"a": "x"})
    assert one["verdict"] == HOLDS and one["parts"][0]["low"] == 1.0 and one["parts"][0]["by_seed"] == []
    two = decided(path=["seeds", "*", "x"], less=["seeds", "*", "y"])
    assert two["parts"][0]["by_seed"] == [4.0, 4.5] and two["parts"][0]["difference"] == 4.25
    three = decided(path=["seeds", "*", "compared"], where={"a": "x"})
    assert three["parts"][0]["by_seed"] == [2.0, 2.0]
    absent = decided(file="none.json", path=["rows"])
    assert absent["verdict"] == UNTESTED and "none.json is not here" in absent["reason"]
    for wrong, message in ((["rowz"], "has no rowz"), (["seeds", "2"], "has no seeds > 2")):
        with pytest.raises(UserError, match=message):
            decided(path=wrong)
    with pytest.raises(UserError, match="0 entries"):
        decided(path=["rows"], where={"a": "z"})


def test_the_claims_file_finds_every_recorded_number():
    claims = read(PAPERS / "claims.yaml", Claims)
    only_recorded = {title: [claim for claim in group if claim.recorded] for title, group in claims.claims.items()}
    entries = [entry for group in decide(Claims({}, only_recorded), None, ROOT).values() for entry in group]
    tested = [entry for entry in entries if entry["verdict"] != UNTESTED]
    assert len(tested) >= 10 and all(
        entry["reason"].endswith("is not here.") for entry in entries if entry not in tested
    )


def test_a_score_that_was_not_measured_is_missing(monkeypatch, tmp_path):
    """Without a network there is no FID, not a perfect one."""
    report = {"encoders": {"toy/clip": {"scores": {"objects_right": {"value": 50.0}, "fid_64": {"value": None}}}}}
    monkeypatch.setattr(measuring, "evaluate_generation", lambda config: report)
    settings = {"base": "toy/sdxl", "data": "toy/test"}
    assert measuring.generation_scores("toy/clip", tmp_path, settings) == {"objects_right": 50.0}
    report["encoders"]["toy/clip"]["scores"]["fid_own"] = {"value": 3.0}
    assert measuring.generation_scores("toy/clip", tmp_path, settings)["fid"] == 3.0


def test_data_of_a_row_s_ablation_is_looked_for(tmp_path):
    world = World("w", {"b": Base("toy/clip")}, {}, {"data": "{root}/of-the-world.json"}, {})
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
