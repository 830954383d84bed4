"""Evaluation of generated images as a whole: several encoders, finished work, kills, bad data, the toy world."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skimage
from helpers.memory import Watched
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import save_dino
from PIL import Image

from debias_diffusion.data.toy_scenes import read_toy_scenes, toy_scene
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import generation
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation, figures, tables
from debias_diffusion.eval.images.networks import ClsFeatures
from debias_diffusion.eval.images.objects import SCORES, compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.images.rendered import folder_names
from debias_diffusion.eval.images.scores import ImageScores, cosines

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"
CUT = "SDXL's own, cut at 77 tokens"  # label of the first encoder


@pytest.fixture(scope="module")
def dino(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def base(sdxl_folder) -> str:
    return str(sdxl_folder)


def settings(folder, base, **changes) -> dict:
    places = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": base, "output": str(folder / "out")}
    numbers = {"limit": 3, "steps": 1, "batch_size": 2, "device": "cpu"}
    return {"encoders": ["cut:original"], **places, **numbers} | changes


def written_data(folder: Path, missing: int, count: int) -> str:
    """Data whose images with these numbers are not there."""
    entries = json.loads(PHOTOGRAPHS.read_text())[:count]
    entries = [dict(entry, image="no-such.png") if place < missing else entry for place, entry in enumerate(entries)]
    (folder / "data.json").write_text(json.dumps(entries))
    return str(folder / "data.json")


@pytest.fixture(scope="module")
def finished(base, dino, tmp_path_factory) -> dict:
    """The settings of a finished evaluation of four photographs, of which the first is not there."""
    folder = tmp_path_factory.mktemp("finished")
    encoder = save_tiny_clip(folder / "long", context_length=248)
    given = {"data": written_data(folder, 1, 4), "limit": 4, "dino": dino, "own_features": dino}
    config = settings(folder, base, encoders=["cut:original", encoder], clip_score="toy/clip", **given)
    evaluate_generation(GenerationConfig(**config))
    return config


def report_of(config: dict) -> dict:
    return json.loads(Path(config["output"], "generation.json").read_text())


def test_a_whole_evaluation_scores_the_images_it_leaves(finished, dino):
    report, output = report_of(finished), Path(finished["output"])
    assert report["evaluation"] == "generation" and list(report["encoders"]) == [CUT, "long"]
    assert report["images"] == 3 and [bad["where"] for bad in report["left_out"]] == ["no-such.png"]
    digests = report["digests"]
    assert all(len(digests[name]) == 64 for name in ("data", "base", "dino"))
    assert digests["inception_weights"] is None and digests["dino"] == digests["own_features"]
    assert list(digests["encoders"]) == [CUT, "long"] and digests["encoders"][CUT] == digests["base"]
    assert "32 x 32" in report["resize"]["dino"] and any("first 77 tokens" in note for note in report["notes"])
    assert [numbers["cut_at"] for numbers in report["encoders"].values()] == [77, None]
    # An image keeps the number of its record, also where another has no reference image. Scores are of these files.
    names, network, scores = ["000001.png", "000002.png", "000003.png"], ClsFeatures(dino, pick_device("cpu")), {}
    references = [Path(skimage.data_dir) / entry["image"] for entry in json.loads(PHOTOGRAPHS.read_text())[1:4]]
    for label, numbers in report["encoders"].items():
        folder = output / "images" / folder_names([label])[label]
        assert sorted(path.name for path in folder.glob("*.png")) == names
        assert numbers["seconds"] > 0 and {"fid_own", "kid_own"} <= set(numbers["scores"])
        scores[label] = np.mean(cosines(network([folder / name for name in names], 3), network(references, 3)))
        number = numbers["scores"]["dino_score"]
        assert number["value"] == pytest.approx(scores[label]) and number["low"] <= number["value"] <= number["high"]
    assert {(line["a"], line["b"]) for line in report["compared"]} == {("long", CUT)}
    (difference,) = [line["difference"] for line in report["compared"] if line["score"] == "dino_score"]
    assert difference == pytest.approx(scores["long"] - scores[CUT]) and difference != 0
    assert min(side for name in ("generation", "examples") for side in Image.open(output / f"{name}.png").size) > 200
    first = str(tables(report)[0])
    assert first.startswith("3 images, with 95% intervals")
    assert all(title in first for title in ("DINO score (", "CLIPScore (toy/clip)", "sentence 1"))


@pytest.mark.usefixtures("blank_figures")
def test_an_interrupted_evaluation_continues_and_does_nothing_again(finished, tmp_path, monkeypatch):
    config = GenerationConfig(**finished | {"output": str(tmp_path / "out")})
    save, saved = Image.Image.save, []

    def interrupted(image, file, **options):
        if len(saved) == 4:  # the second image of the second encoder
            raise KeyboardInterrupt
        saved.append(file)
        save(image, file, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Image.Image, "save", interrupted)
        evaluate_generation(config)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "images").rglob("0*.png")}
    assert len(written) == 4 and not (tmp_path / "out" / "generation.json").exists()
    resumed, whole = evaluate_generation(config), report_of(finished)
    for label, numbers in resumed["encoders"].items():
        expected = whole["encoders"][label]
        assert (numbers["scores"], numbers["pictures"]) == (expected["scores"], expected["pictures"])
    assert resumed["compared"] == whole["compared"]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    # A result and an image that somebody has changed are made again; nothing else is.
    scored, score = [], ImageScores.__call__
    monkeypatch.setattr(ImageScores, "__call__", lambda *given: scored.append(given) or score(*given))
    assert evaluate_generation(config) == resumed and not scored
    (result,) = [path for path in (tmp_path / "out" / "cache").iterdir() if _dino(path) == _dino(None, resumed)]
    result.write_text(result.read_text().replace('"value": ', '"value": 1'))
    image = tmp_path / "out" / "images" / folder_names([CUT])[CUT] / "000002.png"
    image.write_bytes(image.with_name("000001.png").read_bytes())
    again = evaluate_generation(config)
    assert again["compared"] == whole["compared"] and len(scored) == 1


def _dino(path: Path | None, report: dict | None = None) -> float:
    numbers = json.loads(path.read_text())["numbers"] if path else report["encoders"]["long"]["scores"]
    return numbers["dino_score"]["value"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dino": None}, "None of inception_weights, .*is given.*--dino facebook/dino-vits16"),
        ({"encoders": ["separate:toy/debias-clip"]}, "has width"),
        ({"base": "nowhere"}, "The SDXL checkpoint 'nowhere' is not there"),
        ({"images": "."}, "0 of 3 pairs"),
        ({"limit": 1, "own_features": "toy/features"}, "1 of 1 pairs.*at least 2"),
        ({"own_features": "no/such/folder"}, "no/such/folder.*Give own_features a folder"),
        ({"inception_weights": "x.pth"}, "x.pth"),
        ({"data": "toy/test"}, "hold their images"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_rendered(tmp_path, base, dino, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluate_generation(GenerationConfig(**settings(tmp_path, base, dino=dino) | change))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("blank_figures")
def test_too_many_unreadable_references_stop_it(tmp_path, base, dino, monkeypatch):
    config = settings(tmp_path, base, data=written_data(tmp_path, 2, 4), limit=4, dino=dino)
    with pytest.raises(UserError, match=r"2 of 4 records cannot be used.*no-such\.png"):
        evaluate_generation(GenerationConfig(**config))
    watched = Watched(monkeypatch, ClsFeatures)
    assert evaluate_generation(GenerationConfig(**config | {"max_bad": 0.5}))["images"] == 2
    # Never in memory together; the network is tried before hours of generating.
    assert (watched.generators, watched.networks) == (1, 2)


# ---- the toy world


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict:
    encoders, output = ["cut:toy/clip", "toy/debias-clip"], str(tmp_path_factory.mktemp("toy"))
    config = GenerationConfig(encoders, output, base="toy/sdxl", data="toy/test", limit=6, steps=2, device="cpu")
    return evaluate_generation(config)


def test_the_toy_world_has_scores_of_objects(toy):
    records = read_toy_scenes("toy/test")[0].records[:6]
    scenes, mentions = [toy_scene(record)[0] for record in records], []
    mentions = [toy_scene(record)[1].first_mentions() for record in records]
    assert toy["drawing"] | {"steps": 2, "guidance_scale": 3.0, "images_at_once": 20} == toy["drawing"]
    folders = folder_names(list(toy["encoders"]))
    seen = []
    for label, numbers in toy["encoders"].items():
        files = sorted(Path(toy["settings"]["output"], "images", folders[label]).glob("*.png"))
        seen.append(compare_images(files, scenes))
        assert numbers["scores"] == objects_numbers(seen[-1], mentions)
    compared = {line["score"]: line["difference"] for line in toy["compared"]}
    expected = compare_objects(*reversed(seen), mentions)
    assert compared == {score: line["difference"] for score, line in expected.items()} and set(compared) == set(SCORES)
    shown, by_sentence, compared = map(str, tables(toy))
    for title in SCORES.values():
        assert title in shown and f"toy/debias-clip - toy/clip, cut at 77 tokens, {title}" in compared
    for numbers in toy["encoders"].values():
        line = numbers["scores"]["objects_right_by_sentence"][-1]
        values = [part and part["value"] for part in (line, line["precision"], line["f1"])]
        assert " / ".join("-" if value is None else f"{value:.1f}" for value in values) in by_sentence
    assert toy["ceilings"] == []  # each object is mentioned in one sentence
    assert len(figures(toy)["generation.png"].axes) == len(SCORES) + 2  # and two by sentence


@pytest.mark.usefixtures("blank_figures")
def test_captions_that_refer_back_are_scored_by_how_objects_are_mentioned(tmp_path):
    encoders, data = ["cut:toy/clip", "toy/debias-clip"], "toy/referring-test"
    config = GenerationConfig(encoders, str(tmp_path), base="toy/sdxl", data=data, limit=4, steps=1, device="cpu")
    report = evaluate_generation(config)
    every, *ceilings = report["ceilings"]
    scenes = [toy_scene(record) for record in read_toy_scenes(data)[0].records[:4]]
    assert (every["told"], every["objects"]) == ("all objects", sum(len(scene.things) for scene, _ in scenes))
    assert every["truncated"] < every["whole"] == 100
    assert len(ceilings) == 3 and sum(line["objects"] for line in ceilings) == every["objects"]
    for numbers in report["encoders"].values():
        lines = numbers["scores"]["objects_right_by_telling"]
        assert [(line["told"], line["objects"]) for line in lines] == [(c["told"], c["objects"]) for c in ceilings]
    assert "objects_right_across_cut" in {line["score"] for line in report["compared"]}
    by_kind, compared = map(str, tables(report)[2:])
    assert "symbolic reader, cut at 77 tokens" in by_kind and f"{every['in_chunks']:.1f}" in by_kind
    assert "toy/debias-clip - toy/clip, cut at 77 tokens, objects right, by reference across a cut, %" in compared
    # Text before the prompt moves the cuts.
    prefixed = generation._Generation(replace(config, prefix="a photo of many things, " * 6), None)
    moved = generation.ceilings(prefixed.readings([caption for _, caption in scenes]))
    assert moved[0]["truncated"] < every["truncated"]


def test_examples_show_toy_images_with_their_pixels(toy, tmp_path):
    first, second, *_ = sorted(Path(toy["settings"]["output"], "images", "toy-clip-cut-at-77-tokens").glob("*.png"))
    figure = generation.plot_examples(["Two $ and $ a <b>."], [Image.open(first)], {"a": [second]})
    figure.savefig(tmp_path / "x.png")
    shown = [image for axes in figure.axes for image in axes.images]
    assert [image.get_interpolation() for image in shown] == ["nearest"] * 2
    assert [image.get_array().shape for image in shown] == [(48, 48, 3)] * 2
