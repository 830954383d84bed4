"""The quickstart: the whole chain with tiny untrained models, what a setting reaches, and folders it must not touch."""

import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers.html_page import Page
from helpers.untrained_toys import save_untrained_toys
from PIL import Image

from debias_diffusion.app import quickstart as app
from debias_diffusion.app.quickstart import Models, QuickstartConfig, quickstart
from debias_diffusion.errors import UserError
from debias_diffusion.eval.merged_report import ReportConfig, evaluate_report
from debias_diffusion.eval.pictures.generation import GenerationConfig
from debias_diffusion.files import write_json
from debias_diffusion.interchange import load_text_encoder
from debias_diffusion.toymodels.vae import SIZE
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.scenes import scene

pytestmark = pytest.mark.usefixtures("coarse_results")
ENCODERS = ("clip", "long-clip", "debias-clip", "debias-clip-sdxl")
ROWS = ("clip", "clip in overlapping chunks", *ENCODERS[1:])  # of images
# More prompts than scenes: the one does not limit the other.
TINY = {"scenes": 2, "prompts": 3, "trained_on": 16, "steps": 1, "batch": 8, "drawing_steps": 1, "split": "development"}
COMMANDS = ["data-training", *(f"{work}-{recipe}" for work in ("train", "export") for recipe in ENCODERS[1:])]
COMMANDS += ["retrieval", "robustness", "attention", "generation", "short-prompts"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    return save_untrained_toys(tmp_path_factory.mktemp("models"))


def report_of(output: Path) -> dict:
    return json.loads((output / "report.json").read_text())


@pytest.fixture(scope="module")
def finished(models, coarse_results, tmp_path_factory) -> Path:
    """The output of one run, which no test changes; what it printed stands beside it as a .txt."""
    output = tmp_path_factory.mktemp("quickstart")
    with output.with_suffix(".txt").open("w") as printed, redirect_stdout(printed):
        assert quickstart(QuickstartConfig(**TINY, output=str(output)), models) == output / "report.html"
    return output


def test_the_report_keeps_its_keys(finished):
    report = report_of(finished)
    assert set(report) == {
        "retrieval", "generation", "differences", "bootstrap", "short_prompts", "expectations", "seconds", "settings",
        "digests", "versions",
    }  # fmt: skip
    results = finished / "evaluation"
    robustness = json.loads((results / "robustness.json").read_text())["encoders"]
    assert list(robustness) == list(ENCODERS)
    for encoder in ENCODERS:
        edits = report["retrieval"][encoder]
        assert list(edits) == ["keep", "move2", "move4", "remove"]
        for edit, recall in edits.items():
            expected = robustness[encoder]["recall_at_1_percent"][edit]
            assert recall == {"t2i_r1": expected["text_to_image"], "i2t_r1": expected["image_to_text"]}
    assert list(report["generation"]) == list(report["short_prompts"]) == list(ROWS)
    for encoder in ROWS:
        scores = report["generation"][encoder]
        assert set(scores) == {
            "fid", "dino", "objects_correct", "precision", "f1", "objects_correct_with_size", "empty_filled",
            "background", "objects_correct_by_sentence", "objects_by_sentence", "n",
        }  # fmt: skip
        assert scores["fid"] > 0 and -1 <= scores["dino"] <= 1 and scores["n"] == TINY["prompts"]
        assert len(scores["objects_by_sentence"]) == len(scores["objects_correct_by_sentence"])
        assert sum(scores["objects_by_sentence"]) == sum(
            len(scene("development", i).things) for i in range(TINY["prompts"])
        )
        assert 0 <= scores["empty_filled"] <= 1 and 0 <= scores["background"] <= 1
        assert 0 <= report["short_prompts"][encoder] <= 1
    for pair in ("debias-clip - long-clip", "debias-clip-sdxl - clip", "debias-clip - clip in overlapping chunks"):
        assert set(report["bootstrap"][pair]) == {"difference", "low", "high"}
    assert [set(line) for line in report["expectations"]] == [{"expectation", "found", "met"}] * 12
    assert list(report["seconds"]) == COMMANDS
    assert report["settings"] == TINY | {
        "output": str(finished), "seed": 0, "learning_rate": 5e-4, "short_weight": None,
    }  # fmt: skip
    assert set(report["digests"]) == {"toy/clip", "toy/sdxl", "toy/features", *ENCODERS[1:]}
    assert len(set(report["digests"].values())) == 6


def test_the_page_tells_the_story_before_the_tables(finished, tmp_path):
    page = Page((finished / "report.html").read_text())
    page.check_is_self_contained()
    assert caption("development", 0).sentences[3].text in page.text
    for title in (
        "Does it find an image by its caption?",
        "How shortsighted?: toy/development",
        "toy/short-development",
    ):
        assert title in page.text
    # `evaluate report` makes the same page of the folder.
    evaluate_report(ReportConfig(str(finished), str(tmp_path)))
    assert (tmp_path / "report.html").read_bytes() == (finished / "report.html").read_bytes()


def test_the_exports_and_images_are_ready_to_use(finished):
    encoders = [load_text_encoder(str(finished / name)) for name in ENCODERS[1:]]
    assert all(encoder.config.max_position_embeddings == 248 for encoder, _ in encoders)
    weights = [encoder.state_dict() for encoder, _ in encoders]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    folders = [finished / "evaluation" / "pictures" / row.replace(" ", "-") for row in ROWS]
    images = [folder / "000001.png" for folder in folders]
    assert all(Image.open(path).size == (SIZE, SIZE) for path in images)
    assert len({path.read_bytes() for path in images}) == len(ROWS)
    generated = json.loads((finished / "evaluation" / "generation.json").read_text())
    assert [its["cut_at"] for its in generated["encoders"].values()] == [77, None, None, None, None]
    seeds = [json.loads(path.with_name("settings.json").read_text())["seed"] for path in images]
    assert seeds == [0] * len(ROWS)


def test_the_summary_is_printed(finished):
    out, report = finished.with_suffix(".txt").read_text(), report_of(finished)
    assert "[3/13] train debias-clip\n" in out and "[13/13] write the report\n" in out
    assert "R@1 in percent, text to image" in out and "short prompts: objects right, %" in out
    filled = report["generation"]["debias-clip"]["empty_filled"]
    (line,) = re.findall(
        "^debias-clip .*", out[out.index("empty places filled, %") :].partition("\n\n")[0], re.MULTILINE
    )
    assert line.split()[4] == f"{100 * filled:.2f}"
    verdicts = {True: "    met", False: "not met", None: "   open"}
    for line in report["expectations"]:
        assert f"{verdicts[line['met']]}: {line['expectation']}\n         {line['found']}\n" in out
    assert out.endswith(f"Report: {finished / 'report.html'}\n")
    assert "held-out pairs" not in out and "held-out pairs" in (finished / "log.txt").read_text()


def test_what_each_setting_reaches(models):
    def made_with(models=models, **changes):
        return app._Quickstart(QuickstartConfig(**TINY | changes), models).made_with()

    def reached(*others, **changes):
        after = made_with(*others, **changes)
        return {folder for folder, settings in before.items() if settings != after[folder]}

    before = made_with()
    trained = {f"{folder}{recipe}" for recipe in ENCODERS[1:] for folder in ("", "training/")}
    drawn = {"evaluation/pictures", "evaluation/short-prompts/pictures"}
    drawn_by = {f"{folder}/{recipe}" for recipe in ENCODERS[1:] for folder in drawn}
    # Evaluations cache their results under everything that decides them, and images of further prompts are added.
    for change in ({"output": "elsewhere"}, {"scenes": 7}, {"prompts": 3}):
        assert reached(**change) == set()
    assert reached(split="test-2") == drawn
    for change in ({"steps": 3}, {"learning_rate": 1e-4}, {"batch": 4}, {"short_weight": 0.1}):
        assert reached(**change) == trained | drawn_by
    assert reached(trained_on=17) == {"data"} | trained | drawn_by
    assert reached(seed=1) == trained | drawn | drawn_by
    assert reached(Models(models.clip, models.sdxl, models.clip)) == set()
    assert reached(Models(models.clip, models.clip, models.features)) == drawn
    assert reached(Models(models.sdxl, models.sdxl, models.features)) == trained | drawn | drawn_by


# ---- folders


def remove_outdated(output: Path, models: Models, **changes) -> None:
    config = QuickstartConfig(**TINY | changes, output=str(output))
    with app._owned(output):
        app._Quickstart(config, models).remove_outdated()


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").touch()
    return folder


def test_a_folder_of_an_earlier_release_is_begun_anew(tmp_path, models, capsys):
    write_json(tmp_path / "quickstart.json", {"made_by": "quickstart", "version": "0.1.0"})
    earlier = [
        filled(tmp_path / name)
        for name in ("stages", "data", "training/long-clip", "long-clip", "retrieval/clip", "pictures/clip/images")
    ]
    notes = filled(tmp_path / "notes")
    remove_outdated(tmp_path, models)
    assert not any(folder.exists() for folder in earlier) and notes.exists()
    assert "made anew: data, training/long-clip, long-clip, stages" in capsys.readouterr().out
    kept = filled(tmp_path / "data")
    remove_outdated(tmp_path, models)
    assert kept.exists() and capsys.readouterr().out == ""
    remove_outdated(tmp_path, models, trained_on=17)
    assert not kept.exists()


def test_folders_of_others_are_refused(tmp_path, models):
    (tmp_path / "thesis.tex").touch()
    for output, message in (
        (tmp_path, "is not empty, and not made by quick"),
        (tmp_path / "thesis.tex", "cannot be used"),
    ):
        with pytest.raises(UserError, match=message):
            quickstart(QuickstartConfig(**TINY, output=str(output)), models)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    output = tmp_path / "ours"
    remove_outdated(output, models)
    with FileLock(output / ".lock"), pytest.raises(UserError, match="Another quickstart is working"):
        quickstart(QuickstartConfig(**TINY, output=str(output)), models)


def test_nothing_is_removed_outside_the_output(tmp_path, models):
    precious, output = filled(tmp_path / "elsewhere" / "long-clip"), tmp_path / "output"
    remove_outdated(output, models)
    (output / "training").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out of the output folder"):
        remove_outdated(output, models, steps=3)
    (output / "training").unlink()
    (output / "long-clip").symlink_to(precious)
    remove_outdated(output, models, steps=3)  # the link goes, what it leads to stays
    assert not (output / "long-clip").is_symlink() and (precious / "file").exists()


def test_every_option_is_explained():
    for options in (QuickstartConfig, GenerationConfig):
        assert all(f"\n        {name}: " in options.__doc__ for name in options.__dataclass_fields__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 1}, "prompts is 1, but must be at least 2"),
        ({"scenes": 1001}, "scenes is 1001, but must be at most 1000"),
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
