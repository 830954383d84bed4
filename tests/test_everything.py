"""All evaluations in one command: what the given things allow, once."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import skimage
from helpers.modules import ROOT
from helpers.reports import check_report
from helpers.tiny_clip import save_tiny_clip

from debias_diffusion.errors import UserError
from debias_diffusion.eval import all as everything
from debias_diffusion.eval.all import AllConfig, evaluate_all
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.jobs import JOB
from debias_diffusion.models.backbone import Backbone

pytestmark = pytest.mark.usefixtures("coarse_results")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


def results(output: Path) -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in output.glob("*.json") if file.name != JOB}


def test_the_toy_world_is_evaluated_without_any_settings_and_once(tmp_path, monkeypatch, capsys):
    assert AllConfig().encoders == [
        "cut:toy/clip",
        "toy/clip",
        "toy/long-clip",
        "toy/debias-clip",
        "toy/debias-clip-sdxl",
    ]
    encoders = ["cut:toy/clip", "toy/clip", "toy/debias-clip"]
    config = AllConfig(encoders=encoders, output=str(tmp_path), limit=4, drawn=2)
    assert evaluate_all(config) == tmp_path / "report.html"
    printed = capsys.readouterr().out
    assert [f"[{n}/5]" in printed for n in (1, 5)] == [True, True] and "5 results in 5 sections" in printed
    found = results(tmp_path)
    assert set(found) == {"retrieval", "robustness", "attention", "drift", "generation"}
    for report in found.values():
        check_report(report)
    labels = {name: list(its["encoders"]) for name, its in found.items()}
    assert labels.pop("drift") == ["toy/debias-clip"]  # toy/clip is the base's own
    assert labels.pop("generation") == [
        "SDXL's own, cut at 77 tokens", "SDXL's own, overlapping chunks", "toy/debias-clip"
    ]  # fmt: skip
    assert set(map(tuple, labels.values())) == {("toy/clip", "toy/debias-clip")}
    compared = {(line["a"], line["b"]) for line in found["generation"]["compared"]}
    assert len(compared) == 3 and ("toy/debias-clip", "SDXL's own, overlapping chunks") in compared
    assert (found["retrieval"]["images"], found["generation"]["images"]) == (4, 2)
    recall = found["retrieval"]["encoders"]["toy/clip"]["recall_percent"]["text_to_image"]["R@1"]
    assert found["robustness"]["encoders"]["toy/clip"]["recall_at_1_percent"]["keep"]["text_to_image"] == recall
    # toy networks stand in, and every table says so
    assert all(found["generation"]["settings"][name] == "toy/features" for name in ("dino", "own_features"))
    page = (tmp_path / "report.html").read_text()
    assert "FID (toy/features)" in page and "DINO score (toy/features)" in page

    assert "Does it read to the end?" in page  # the story of the toy world
    for name in ("encode_image", "encode_text"):
        monkeypatch.setattr(Backbone, name, lambda *_, **__: pytest.fail("done again"))
    evaluate_all(config)
    again = results(tmp_path)
    for name, its in found.items():
        assert (again[name]["encoders"], again[name]["compared"]) == (its["encoders"], its["compared"]), name


def test_data_of_ones_own_are_evaluated_without_a_base_and_benchmarks_if_given(tmp_path):
    clip, entries = save_tiny_clip(tmp_path / "clip"), json.loads(PHOTOGRAPHS.read_text())
    cifar = np.random.default_rng(0).integers(0, 10, (4, 3073), dtype=np.uint8)
    cifar.tofile(tmp_path / "test_batch.bin")
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    first, second = (entry["image"] for entry in entries[:2])
    (tmp_path / "cola.json").write_text(json.dumps([[first, "a cat", second, "a dog"]]))
    benchmarks = {"classification": "cifar-10", "classification_data": str(tmp_path)}
    benchmarks |= {"cola": str(tmp_path / "cola.json"), "cola_images": skimage.data_dir}
    settings = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "limit": 4} | benchmarks
    evaluate_all(AllConfig(encoders=[clip], output=str(tmp_path / "out"), **settings))
    found = results(tmp_path / "out")
    assert set(found) == {"retrieval", "robustness", "attention", "classification", "cola"}
    for report in found.values():
        check_report(report)


def test_dpg_bench_takes_part_with_its_data_and_a_base(tmp_path):
    given = {"dpg_bench": "bench", "vqa": "vilt"}
    settings = everything.settings_of_all(AllConfig(["toy/clip"], str(tmp_path), **given))
    assert (settings["dpg_bench"].data, settings["dpg_bench"].encoders) == ("bench", ["original"])
    assert list(settings) == ["robustness", "retrieval", "attention", "generation", "dpg_bench"]  # as on the page
    with pytest.raises(UserError, match="dpg_bench needs --base"):
        AllConfig(["toy/clip"], str(tmp_path), data=str(PHOTOGRAPHS), **given)


def test_the_docs_list_the_evaluations():
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", (ROOT / "docs" / "evaluation.md").read_text(), re.MULTILINE)
    texts = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, text in rows}
    commands = {name.replace("_", "-"): evaluation for name, evaluation in EVALUATIONS.items()}
    assert [name for name in texts if name in commands] == list(commands)
    assert all(texts[name].startswith(evaluation.summary) for name, evaluation in commands.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classification": "cifar-10"}, "classification_data None"),
        ({"classification_data": "cifar"}, "Give both"),
        ({"encoders": ["toy/clap"]}, "Did you mean"),
        ({"encoders": ["cut:original", "original"]}, "has none for texts: 'original' is for images only"),
        ({"output": ""}, "There is no output"),
        ({"base": "nowhere"}, "The SDXL checkpoint 'nowhere' is not there"),
        ({"dino": "no/such/folder"}, "no/such/folder"),
        ({"inception_weights": "x.pth"}, "x.pth"),
        ({"data": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_encoded(tmp_path, change, message, monkeypatch):
    if "data" not in change and "encoders" not in change:
        module = EVALUATIONS["robustness"].load()
        monkeypatch.setattr(module, "evaluate_robustness", lambda config: pytest.fail("it evaluates"))
    with pytest.raises(UserError, match=message):
        evaluate_all(AllConfig(**({"output": str(tmp_path)} | change)))


def test_images_of_table_s7_are_as_many_as_the_papers(tmp_path, sdxl_folder):
    def limit(**settings):
        return everything.settings_of_all(AllConfig(output=str(tmp_path), **settings))["generation"].limit

    base, clip = str(sdxl_folder), save_tiny_clip(tmp_path / "clip")
    real = {"encoders": [clip], "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": base}
    real["own_features"] = "toy/features"
    assert (limit(), limit(drawn=3), limit(limit=5)) == (200, 3, 5)
    assert (limit(**real), limit(**real, limit=None), limit(**real, drawn=3)) == (1000, 1000, 3)


def test_sdxls_own_encoder_is_for_images_alone(tmp_path, sdxl_folder):
    given = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": str(sdxl_folder)}
    given["own_features"] = "toy/features"
    clip = save_tiny_clip(tmp_path / "clip")
    settings = everything.settings_of_all(
        AllConfig(["cut:original", "original", f"separate:{clip}"], str(tmp_path), **given)
    )
    assert settings["generation"].encoders == ["cut:original", "original", f"separate:{clip}"]
    assert all(config.encoders == [clip] for name, config in settings.items() if name != "generation")


def test_several_processes_are_sent_to_draw_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="evaluate generation` with the same output first"):
        evaluate_all(AllConfig(output=str(tmp_path)))
