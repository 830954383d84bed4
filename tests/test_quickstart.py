"""The quickstart's numbers against their definitions; its stages, and the whole chain with tiny untrained models."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import ViTConfig, ViTModel

from debias_diffusion.app import quickstart as app
from debias_diffusion.app.quickstart import Models, QuickstartConfig, quickstart, run_quickstart
from debias_diffusion.app.stages import Stage, Stages
from debias_diffusion.errors import UserError
from debias_diffusion.eval.pictures.drawing import how_drawn
from debias_diffusion.eval.pictures.generation import GenerationConfig
from debias_diffusion.eval.quickstart import expectations, objects_correct_by_sentence, paired_bootstrap
from debias_diffusion.interchange import load_text_encoder, to_transformers
from debias_diffusion.toymodels import sdxl
from debias_diffusion.toymodels.clip import new_clip
from debias_diffusion.toymodels.second_text_encoder import new_second_text_encoder
from debias_diffusion.toymodels.vae import SIZE, new_vae
from debias_diffusion.toyworld.checker import objects_correct
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import PLACES, scene
from debias_diffusion.toyworld.vocabulary import learn_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODERS = ("clip", "long-clip", "debias-clip")

# ---- numbers

right_by_place = st.dictionaries(st.sampled_from(list(PLACES)), st.booleans(), max_size=4)


def told_at_random(pictures, seed):
    rng = random.Random(seed)
    return [{place: rng.randint(1, 9) for place in picture} for picture in pictures]


def test_objects_by_sentence_of_a_worked_example():
    right = [{"top": True, "left": False}, {"top": True, "right": True, "centre": False}]
    told = [{"top": 1, "left": 4}, {"top": 4, "right": 3, "centre": 1}]
    assert objects_correct_by_sentence(right, told) == {
        "objects_correct": 0.6,
        "objects_correct_by_sentence": [None, 0.5, None, 1.0, 0.5],
        "objects_by_sentence": [0, 2, 0, 1, 2],
    }
    assert objects_correct_by_sentence([{}], [{}])["objects_correct"] is None
    with pytest.raises(KeyError):
        objects_correct_by_sentence([{"top": True}], [{"left": 1}])


@given(st.lists(right_by_place, max_size=6), st.integers(0, 999))
def test_sentences_add_up_to_the_whole(right, seed):
    totals = objects_correct_by_sentence(right, told_at_random(right, seed))
    counts, shares = totals["objects_by_sentence"], totals["objects_correct_by_sentence"]
    assert sum(counts) == sum(map(len, right))
    assert [count == 0 for count in counts] == [share is None for share in shares]
    if sum(counts):
        assert counts[-1] > 0
        total = sum(count * share for count, share in zip(counts, shares, strict=True) if count)
        assert total / sum(counts) == pytest.approx(totals["objects_correct"])


def coins(rng, share, pictures=200, objects=5):
    """Pictures whose objects all succeed or fail together: as uncertain as one object a picture."""
    return [dict.fromkeys(list(PLACES)[:objects], bool(rng.random() < share)) for _ in range(pictures)]


def test_the_interval_is_that_of_pictures_not_of_objects():
    rng = np.random.default_rng(0)
    a, b = coins(rng, 0.6), coins(rng, 0.5)
    found = paired_bootstrap(a, b)
    differences = np.array([x["top"] - y["top"] for x, y in zip(a, b, strict=True)], float)
    assert found["difference"] == pytest.approx(differences.mean())
    half = 1.96 * differences.std() / np.sqrt(len(a))
    assert found["high"] - found["difference"] == pytest.approx(half, rel=0.06)
    assert found["difference"] - found["low"] == pytest.approx(half, rel=0.06)
    assert paired_bootstrap(a, b) == found != paired_bootstrap(a, b, seed=1)
    # Pictures of one prompt are drawn together: of equal pictures nothing is uncertain.
    assert paired_bootstrap(a, a) == {"difference": 0, "low": 0, "high": 0}


@given(st.lists(right_by_place.filter(len), min_size=1, max_size=8), st.integers(0, 999))
@settings(max_examples=30)
def test_the_bootstrap_is_antisymmetric_and_in_range(a, seed):
    rng = random.Random(seed)
    b = [{place: rng.random() < 0.5 for place in picture} for picture in a]
    found, reverse = paired_bootstrap(a, b, samples=300), paired_bootstrap(b, a, samples=300)
    assert -1 <= found["low"] <= found["high"] <= 1
    assert reverse == pytest.approx({"difference": -found["difference"], "low": -found["high"], "high": -found["low"]})


def test_the_bootstrap_wants_the_same_objects():
    for a, b in (([{"top": True}], [{"left": True}]), ([{}], [{}]), ([], []), ([{"top": True}], [{"top": True}] * 2)):
        with pytest.raises(ValueError, match="same pictures"):
            paired_bootstrap(a, b)


def a_report(**changes) -> dict:
    """Numbers with which all is met; `changes` are by "encoder/edit" or "encoder"."""
    kept = {"clip": 90.0, "long-clip": 95.0, "debias-clip": 94.0}
    moved = {"clip": 15.0, "long-clip": 25.0, "debias-clip": 53.0}
    removed = {"clip": 5.0, "long-clip": 15.0, "debias-clip": 27.0}
    edits = {"keep": kept, "move2": moved, "move4": moved, "remove": removed}
    report = {
        "retrieval": {e: {edit: {"t2i_r1": r1[e], "i2t_r1": r1[e]} for edit, r1 in edits.items()} for e in ENCODERS},
        "generation": {
            e: {
                "objects_correct": sum(shares) / 2,
                "objects_by_sentence": [0, 30, 0, 0, 0, 20, 10],
                "objects_correct_by_sentence": [None, shares[0], None, None, None, shares[1], shares[1]],
            }
            for e, shares in {"clip": (0.6, 0.1), "long-clip": (0.6, 0.4), "debias-clip": (0.7, 0.5)}.items()
        },
        "bootstrap": {"debias-clip - long-clip": {"difference": 0.1, "low": 0.02, "high": 0.18}},
    }
    for path, value in changes.items():
        *parents, last = path.split("/")
        its = report
        for name in parents:
            its = its[name]
        its[last] = value
    return report


@pytest.mark.parametrize(
    ("changes", "verdicts", "found"),
    [
        ({}, [True] * 7, "+40.0 points, and +10.0"),
        ({"retrieval/debias-clip/keep/t2i_r1": 93.9}, [False, True, True, True, True, True, True], "93.9% against 95"),
        ({"retrieval/debias-clip/keep/i2t_r1": 93.9}, [True, False, True, True, True, True, True], "93.9% against 95"),
        # At most 0.6 of 70 points: 94 - 52 = 42 is just allowed, in floating point too.
        ({"retrieval/debias-clip/move4/t2i_r1": 52.0}, [True] * 7, "42.0 points against 70.0: 0.60"),
        ({"retrieval/debias-clip/move4/t2i_r1": 51.9}, [True, True, False, True, True, True, True], "42.1 points"),
        ({"retrieval/debias-clip/remove/t2i_r1": 25.9}, [True, True, True, False, True, True, True], "68.1 points"),
        ({"retrieval/long-clip/move4/t2i_r1": 96.0}, [True, True, None, True, True, True, True], "from 95.0% to 96.0%"),
        ({"generation/clip/objects_correct": 0.6}, [True, True, True, True, False, True, True], "60.0% against 60.0%"),
        (
            {"generation/clip/objects_correct_by_sentence": [None, 0.1, None, None, None, 0.1, 0.5]},
            [True, True, True, True, True, False, True],
            "+26.7 points, and +60.0",
        ),
        (
            {f"generation/{e}/objects_by_sentence": [0, 30, 0, 0, 0, 0, 0] for e in ENCODERS},
            [True, True, True, True, True, None, True],
            "no objects are told on one side",
        ),
        (
            {"bootstrap/debias-clip - long-clip": {"difference": 0.1, "low": -0.01, "high": 0.2}},
            [True, True, True, True, True, True, None],
            "+10.0 points, 95% interval -1.0 to +20.0: no difference shown",
        ),
        (
            {"bootstrap/debias-clip - long-clip": {"difference": -0.1, "low": -0.2, "high": -0.01}},
            [True, True, True, True, True, True, False],
            "-10.0 points",
        ),
    ],
)  # fmt: skip
def test_expectations(changes, verdicts, found):
    lines = expectations(a_report(**changes))
    assert [line["met"] for line in lines] == verdicts
    assert any(line["found"].startswith(found) or found in line["found"] for line in lines)
    assert all(set(line) == {"expectation", "found", "met"} for line in lines)


# ---- stages


class Work:
    """Three stages: a, b after a, and c alone; each writes a file and counts its calls."""

    def __init__(self, output):
        self.output, self.calls = output, []

    def run(self, fail=None, **reads):
        def work(name):
            self.calls.append(name)
            print(f"{name} says")
            folder = self.output / name
            folder.mkdir(exist_ok=True)
            (folder / f"{len(self.calls)}").touch()
            if name == fail:
                raise KeyboardInterrupt
            return {"n": len(self.calls)}

        def stage(name):
            after = ("a",) if name == "b" else ()
            return Stage(name, f"do {name}", lambda: work(name), reads.get(name, {}), after, (name,))

        stages, self.calls = Stages(self.output), []
        with stages.owned("test"):
            stages.run([stage(name) for name in "abc"])
        return self.calls


def test_stages_are_done_once_and_again_when_what_they_depend_on_changes(tmp_path, capsys):
    work = Work(tmp_path)
    assert work.run() == ["a", "b", "c"]
    assert capsys.readouterr().out == "[1/3] do a\n[2/3] do b\n[3/3] do c\n"
    assert (tmp_path / "stages" / "b.txt").read_text() == "b says\n"
    assert work.run() == []
    assert capsys.readouterr().out.startswith("[1/3] do a: already done (0 s)\n")
    assert work.run(c={"x": 1}) == ["c"]
    assert work.run(a={"x": 1}, c={"x": 1}) == ["a", "b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["2"]  # the old output is gone
    (tmp_path / "b" / "2").unlink()
    assert work.run(a={"x": 1}, c={"x": 1}) == ["b"]


def test_a_kill_loses_one_stage_which_goes_on_from_what_it_left(tmp_path):
    work = Work(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run(fail="b")
    assert work.run() == ["b", "c"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["1", "2"]
    with pytest.raises(KeyboardInterrupt):
        work.run(fail="b", b={"x": 1})
    assert work.run(b={"x": 2}) == ["b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["1"]  # nothing of the other work is left


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty, and not made by test"):
        Work(tmp_path).run()
    with pytest.raises(UserError, match="cannot be used"):
        Work(tmp_path / "thesis.tex").run()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    Work(tmp_path / "ours").run()
    with FileLock(tmp_path / "ours" / ".lock"), pytest.raises(UserError, match="Another test is working"):
        Work(tmp_path / "ours").run()


def test_nothing_is_removed_outside_the_output(tmp_path):
    precious = tmp_path / "elsewhere" / "b"
    precious.mkdir(parents=True)
    (precious / "file").touch()
    output = tmp_path / "output"
    stages = Stages(output)
    with stages.owned("test"):
        (output / "link").symlink_to(tmp_path / "elsewhere")
        (output / "b").symlink_to(precious)
        with pytest.raises(UserError, match="leads out of the output folder"):
            stages.run([Stage("a", "do a", dict, leaves=("link/b",))])
        stages.run([Stage("b", "do b", dict, leaves=("b",))])  # the link goes, what it leads to stays
    assert not (output / "b").exists() and (precious / "file").exists()


# ---- the whole chain

TINY = {"scenes": 6, "prompts": 2, "trained_on": 16, "steps": 2, "batch": 8, "drawing_steps": 1, "split": "development"}
STAGES = ["data-training", "data-evaluation"]
for work in ("train", "export"):
    STAGES += [f"{work}-{encoder}" for encoder in ENCODERS[1:]]
for work in ("retrieval", "generate"):
    STAGES += [f"{work}-{encoder}" for encoder in ENCODERS]
STAGES += ["short-prompts", "scores", "report"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    """The toy world's models, untrained."""
    folder = tmp_path_factory.mktemp("models")
    clip = new_clip(learn_tokenizer((caption("train", i).text for i in range(300)), merges=300))
    clip.save(folder / "clip")
    text_encoder, tokenizer = to_transformers(clip)
    sdxl.save(sdxl.assemble(text_encoder, new_second_text_encoder(tokenizer), tokenizer, new_vae()), folder / "sdxl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    ViTModel(ViTConfig(image_size=SIZE, patch_size=8, **sizes), add_pooling_layer=False).save_pretrained(
        folder / "features"
    )
    return Models(*(str(folder / name) for name in ("clip", "sdxl", "features")))


def done_again(output: Path, before: dict[str, float]) -> list[str]:
    """The stages whose file is not the one of `before`."""
    return [name for name, time in times(output).items() if time != before.get(name)]


def times(output: Path) -> dict[str, float]:
    return {name: (output / "stages" / f"{name}.json").stat().st_mtime_ns for name in STAGES}


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("quickstart")
    assert run_quickstart(QuickstartConfig(**TINY, output=str(output)), models) == output / "report.html"
    return output


def test_the_report_has_what_it_promises(finished, models):
    report = json.loads((finished / "report.json").read_text())
    assert set(report) == {
        "retrieval", "generation", "bootstrap", "short_prompts", "expectations", "seconds", "settings", "digests",
        "versions",
    }  # fmt: skip
    for encoder in ENCODERS:
        edits = report["retrieval"][encoder]
        assert list(edits) == ["keep", "move2", "move4", "remove"]
        assert all(0 <= edits[edit][direction] <= 100 for edit in edits for direction in ("t2i_r1", "i2t_r1"))
        its = report["generation"][encoder]
        assert its["fid"] > 0 and -1 <= its["dino"] <= 1 and its["n"] == 2
        assert len(its["objects_by_sentence"]) == len(its["objects_correct_by_sentence"])
        assert sum(its["objects_by_sentence"]) == sum(len(scene("development", i).things) for i in range(2))
        assert 0 <= report["short_prompts"][encoder] <= 1
    assert list(report["bootstrap"]) == ["debias-clip - long-clip", "debias-clip - clip"]
    assert len(report["expectations"]) == 7
    assert list(report["seconds"]) == STAGES[:-1]
    assert report["settings"] == TINY | {
        "output": str(finished), "seed": 0, "learning_rate": 5e-4, "short_weight": None,
    }  # fmt: skip
    assert set(report["digests"]) == {"toy/clip", "toy/sdxl", "toy/features", "long-clip", "debias-clip"}
    assert len(set(report["digests"].values())) == 5
    page = (finished / "report.html").read_text()
    assert caption("development", 0).sentences[3].text in page


def test_what_is_left_is_ready_to_use(finished):
    encoders = [load_text_encoder(str(finished / name)) for name in ("long-clip", "debias-clip")]
    assert all(encoder.config.max_position_embeddings == 248 for encoder, _ in encoders)
    weights = [encoder.state_dict() for encoder, _ in encoders]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    pictures = [finished / "pictures" / encoder / "images" / "000001.png" for encoder in ENCODERS]
    assert all(Image.open(path).size == (SIZE, SIZE) for path in pictures)
    assert len({path.read_bytes() for path in pictures}) == 3
    assert [how_drawn(finished / "pictures" / e / "images")["cut_at"] for e in ENCODERS] == [77, None, None]
    original = Image.open(finished / "pictures" / "originals" / "000001.png")
    assert all(objects_correct(original, scene("development", 1)).values())


def test_a_second_run_does_nothing_and_shows_the_same(finished, models, capsys):
    before = times(finished)
    page = (finished / "report.html").stat().st_mtime_ns
    run_quickstart(QuickstartConfig(**TINY, output=str(finished)), models)
    assert done_again(finished, before) == [] and (finished / "report.html").stat().st_mtime_ns == page
    out = capsys.readouterr().out
    assert out.count("already done") == len(STAGES) == 15
    assert "[4/15] fine-tune debias-clip: already done" in out
    assert "R@1 in percent, text to image" in out and "objects right, %" in out
    assert sum(out.count(f"{verdict}: ") for verdict in (" met", "not met", "open")) >= 7
    assert out.endswith(f"Report: {finished / 'report.html'}\n")


def test_a_change_redoes_what_depends_on_it_and_a_kill_loses_one_stage(finished, models, monkeypatch):
    last = [name for name in STAGES if name.startswith("generate")] + STAGES[-3:]
    before, changed = times(finished), QuickstartConfig(**TINY | {"drawing_steps": 2}, output=str(finished))
    originals = app._Quickstart._draw_long_prompts

    def interrupted(self, encoder):
        found = originals(self, encoder)
        if encoder == "long-clip":
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(app._Quickstart, "_draw_long_prompts", interrupted)
        run_quickstart(changed, models)
    assert done_again(finished, before) == ["generate-clip", "generate-long-clip"]
    at_kill = times(finished)
    run_quickstart(changed, models)
    assert done_again(finished, before) == last
    assert done_again(finished, at_kill) == last[1:]
    report = json.loads((finished / "report.json").read_text())
    assert report["settings"]["drawing_steps"] == 2


def test_what_each_setting_reaches(finished, models):
    """Without doing it: which keys change."""

    def keys(models=models, **changes):
        work = app._Quickstart(QuickstartConfig(**TINY | {"output": str(finished)} | changes), models)
        keys = {}
        for stage in work.stages():
            keys[stage.name] = work.done._keys[stage.name] = work.done._key(stage)
        return keys

    def reached(**changes):
        before, after = keys(), keys(**changes)
        return [name for name in STAGES if before[name] != after[name]]

    assert list(keys()) == STAGES
    assert reached(output="elsewhere") == []
    evaluation = [name for name in STAGES if name.startswith("retrieval")]
    drawing = [name for name in STAGES if name.startswith("generate")]
    end = ["short-prompts", "scores", "report"]
    assert reached(scenes=7) == ["data-evaluation", *evaluation, "report"]
    assert reached(split="test-2") == ["data-evaluation", *evaluation, *drawing, *end]
    assert reached(prompts=3) == [*drawing, *end]
    trained = [name for name in STAGES[2:-3] if not name.endswith("-clip") or name.split("-", 1)[1] != "clip"]
    for change in ({"steps": 3}, {"learning_rate": 1e-4}, {"batch": 4}, {"short_weight": 0.1}):
        assert reached(**change) == [*trained, *end]
    assert reached(trained_on=17) == ["data-training", *trained, *end]
    assert set(reached(seed=1)) == {*trained, *drawing, *end}
    other = Models(models.clip, models.sdxl, models.clip)
    assert reached(models=other) == ["scores", "report"]


def test_every_option_is_explained():
    for options in (QuickstartConfig, GenerationConfig):
        assert all(f"\n        {name}: " in options.__doc__ for name in options.__dataclass_fields__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 1}, "prompts is 1, but must be at least 2"),
        ({"trained_on": 100}, "trained_on is 100, but must be at least 128, the batch"),
        ({"split": "train"}, "split is 'train', but must be one of development, test"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"short_weight": 2.0}, "short_weight is 2.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_made(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        quickstart(QuickstartConfig(**{"output": str(tmp_path / "new")} | changes))
    assert not (tmp_path / "new").exists()
