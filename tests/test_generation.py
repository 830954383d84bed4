"""Evaluation of generated images as a whole: several encoders, finished work, kills, bad data, the toy world."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from helpers.memory import Watched
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import save_dino
from PIL import Image

from debias_diffusion.data import toy_scene
from debias_diffusion.data.toy_scenes import read_toy_scenes
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import generation
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation, figures, tables
from debias_diffusion.eval.images.networks import ClsFeatures
from debias_diffusion.eval.images.objects import SCORES, compare_images
from debias_diffusion.eval.images.rendered import folder_names
from debias_diffusion.eval.images.scores import ImageScores, cosines
from debias_diffusion.toyworld.scenes import PLACES

CPU = torch.device("cpu")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


@pytest.fixture(scope="module")
def dino(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def base(sdxl_folder) -> str:
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("encoders") / "long", context_length=248)


def settings(tmp_path, base, **changes) -> dict:
    return {
        "encoders": ["cut:original"], "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": base,
        "output": str(tmp_path / "out"), "limit": 3, "steps": 1, "batch_size": 2, "device": "cpu",
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def finished(base, encoder, dino, tmp_path_factory) -> dict:
    """The settings of a finished evaluation of four photographs, of which one is not there."""
    folder = tmp_path_factory.mktemp("finished")
    entries = json.loads(PHOTOGRAPHS.read_text())[:3]
    data = folder / "data.json"
    data.write_text(json.dumps([entries[0], dict(entries[1], image="no-such.png"), *entries[1:]]))
    networks = {"dino": dino, "own_features": dino, "clip_score": "toy/clip"}
    config = settings(folder, base, encoders=["cut:original", encoder], data=str(data), limit=4, **networks)
    evaluate_generation(GenerationConfig(**config))
    return config


def report_of(config: dict) -> dict:
    return json.loads(Path(config["output"], "generation.json").read_text())


def test_what_a_whole_evaluation_leaves(finished, encoder, dino, capsys):
    report, output = report_of(finished), Path(finished["output"])
    assert report["evaluation"] == "generation" and list(report["encoders"]) == ["SDXL's own, cut at 77 tokens", "long"]
    assert report["images"] == 3 and [bad["where"] for bad in report["left_out"]] == ["no-such.png"]
    # An image keeps the number of its record, also where another has no original.
    names = ["000000.png", "000002.png", "000003.png"]
    for label, its in report["encoders"].items():
        assert sorted(path.name for path in (output / "images" / folder_names([label])[label]).glob("*.png")) == names
        assert its["seconds"] > 0 and len(its["pictures"]) == 64
        assert {"fid_own", "kid_own", "dino_score"} <= set(its["scores"])
    digests = report["digests"]
    assert all(len(digests[name]) == 64 for name in ("data", "base", "dino", "own_features"))
    assert digests["inception_weights"] is None and digests["dino"] == digests["own_features"]
    assert (
        list(digests["encoders"]) == ["SDXL's own, cut at 77 tokens", "long"]
        and digests["encoders"]["SDXL's own, cut at 77 tokens"] == digests["base"]
    )
    assert "32 x 32" in report["resize"]["dino"]
    assert {(line["a"], line["b"]) for line in report["compared"]} == {("long", "SDXL's own, cut at 77 tokens")}
    assert [its["cut_at"] for its in report["encoders"].values()] == [77, None]
    assert any("first 77 tokens" in note for note in report["notes"])
    # The scores are those of the named files, and what is compared is their difference.
    network, scores = ClsFeatures(dino, CPU), {}
    originals = [Path(skimage.data_dir) / entry["image"] for entry in json.loads(PHOTOGRAPHS.read_text())[:3]]
    for label in report["encoders"]:
        drawn = [output / "images" / folder_names([label])[label] / name for name in names]
        scores[label] = np.mean(cosines(network(drawn, 3), network(originals, 3)))
        number = report["encoders"][label]["scores"]["dino_score"]
        assert number["value"] == pytest.approx(scores[label]) and number["low"] <= number["value"] <= number["high"]
    (difference,) = [line["difference"] for line in report["compared"] if line["score"] == "dino_score"]
    assert difference == pytest.approx(scores["long"] - scores["SDXL's own, cut at 77 tokens"]) and difference != 0
    for name in ("generation.png", "examples.png"):
        assert min(Image.open(output / name).size) > 200
    assert str(tables(report)[0]).startswith("3 images, with 95% intervals")
    assert all(title in str(tables(report)[0]) for title in ("DINO score (", "CLIPScore (toy/clip)", "sentence 1"))
    assert list(figures(report)) == ["generation.png"] and figures(report)["generation.png"].axes


@pytest.mark.usefixtures("blank_figures")
def test_an_interrupted_evaluation_continues_and_ends_equal(finished, tmp_path, monkeypatch):
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
    for label in ("SDXL's own, cut at 77 tokens", "long"):
        assert resumed["encoders"][label]["scores"] == whole["encoders"][label]["scores"]
        assert resumed["encoders"][label]["pictures"] == whole["encoders"][label]["pictures"]
    assert resumed["compared"] == whole["compared"]
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.usefixtures("blank_figures")
def test_what_is_finished_is_not_done_again(finished, tmp_path, monkeypatch):
    before = report_of(finished)
    output = Path(shutil.copytree(finished["output"], tmp_path / "out"))
    config = finished | {"output": str(output)}
    before["settings"]["output"] = str(output)
    files = {
        path: path.stat().st_mtime_ns for pattern in ("images/*/*.png", "cache/*") for path in output.glob(pattern)
    }

    def work(*_):
        raise AssertionError("pictures are scored again")

    monkeypatch.setattr(ImageScores, "__call__", work)
    monkeypatch.setattr(ImageScores, "of_references", work)
    assert evaluate_generation(GenerationConfig(**config)) == before == report_of(config)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    # One encoder fewer: its numbers are those of before.
    alone = evaluate_generation(GenerationConfig(**config | {"encoders": config["encoders"][:1]}))
    assert (
        alone["encoders"]["SDXL's own, cut at 77 tokens"] == before["encoders"]["SDXL's own, cut at 77 tokens"]
        and alone["compared"] == []
    )
    # An image that another one has replaced is rendered again, and is the one that was scored.
    image = output / "images" / "SDXL-s-own-cut-at-77-tokens" / "000002.png"
    image.write_bytes(image.with_name("000000.png").read_bytes())
    assert evaluate_generation(GenerationConfig(**config))["compared"] == before["compared"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dino": None}, "None of inception_weights, .*is given.*--dino facebook/dino-vits16"),
        ({"output": ""}, "There is no output"),
        ({"encoders": []}, r"encoders=\[\]"),
        ({"encoders": ["original", "overlap:original"]}, "none twice"),
        ({"encoders": ["original", "nowhere"]}, "'nowhere' is not there"),
        ({"encoders": ["toy/nothing"]}, "Unknown toy model 'toy/nothing'"),
        ({"encoders": ["separate:toy/clp"]}, "Unknown toy model 'toy/clp'. Did you mean toy/clip"),
        ({"encoders": ["overlaps:toy/clip"]}, "how an encoder reads long prompts: overlap, separate, cut"),
        ({"encoders": ["separate:toy/debias-clip"]}, "has width"),
        ({"base": "nowhere"}, "The SDXL checkpoint 'nowhere' is not there"),
        ({"images": "."}, "0 of 3 pairs"),
        ({"limit": 1, "own_features": "toy/features"}, "1 of 1 pairs.*at least 2"),
        ({"own_features": "no/such/folder"}, "no/such/folder.*Give own_features a folder"),
        ({"dino": "toy/nothing"}, "Unknown toy model 'toy/nothing'"),
        ({"inception_weights": "x.pth"}, "x.pth"),
        ({"dino": "no/such/folder"}, "no/such/folder"),
        ({"data": "toy/test"}, "hold their images"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_drawn(tmp_path, base, dino, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluate_generation(GenerationConfig(**settings(tmp_path, base, dino=dino) | change))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("blank_figures")
def test_too_many_originals_that_cannot_be_read_stop_it(tmp_path, base, dino):
    entries = json.loads(PHOTOGRAPHS.read_text())[:4]
    entries = [dict(entry, image="no-such.png") if place < 2 else entry for place, entry in enumerate(entries)]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    config = settings(tmp_path, base, data=str(tmp_path / "data.json"), limit=4, dino=dino)
    with pytest.raises(UserError, match=r"2 of 4 records cannot be used.*no-such\.png"):
        evaluate_generation(GenerationConfig(**config))
    assert evaluate_generation(GenerationConfig(**config | {"max_bad": 0.5}))["images"] == 2


@pytest.mark.usefixtures("blank_figures")
def test_the_generator_and_the_networks_are_not_in_memory_together(tmp_path, base, dino, monkeypatch):
    watched = Watched(monkeypatch, ClsFeatures)
    evaluate_generation(GenerationConfig(**settings(tmp_path, base, dino=dino)))
    assert (watched.generators, watched.networks) == (1, 2)  # the network is tried before hours of generating


# ---- the toy world


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> dict:
    encoders, output = ["cut:toy/clip", "toy/debias-clip"], str(tmp_path_factory.mktemp("toy"))
    config = GenerationConfig(encoders, output, base="toy/sdxl", data="toy/test", limit=6, steps=2, device="cpu")
    return evaluate_generation(config)


def test_the_toy_world_tells_which_objects_are_right(toy):
    records = read_toy_scenes("toy/test")[0].records[:6]
    scenes = [toy_scene(record)[0] for record in records]
    told = [toy_scene(record)[1].first_mentions() for record in records]
    assert toy["drawing"] | {"steps": 2, "guidance_scale": 3.0, "images_at_once": 20} == toy["drawing"]
    for label, its in toy["encoders"].items():
        folder = Path(toy["settings"]["output"], "images", re.sub(r"[/, ]+", "-", label))
        comparisons = compare_images([folder / f"{index:06}.png" for index in range(6)], scenes)
        by_sentence = {}
        for seen, sentences in zip(comparisons, told, strict=True):
            for place, is_right in seen.correct.items():
                by_sentence.setdefault(sentences[place] + 1, []).append(100 * is_right)
        every = [value for values in by_sentence.values() for value in values]
        assert its["scores"]["objects_right"]["value"] == pytest.approx(np.mean(every))
        lines = its["scores"]["objects_right_by_sentence"]
        assert [line["sentence"] for line in lines] == sorted(by_sentence)
        for line in lines:
            values = by_sentence[line["sentence"]]
            assert (line["objects"], line["value"]) == (len(values), pytest.approx(np.mean(values)))
        filled, right = (sum(map(len, (s.drawn for s in comparisons))), sum(map(np.sum, by_sentence.values())) / 100)
        scores = {name: number["value"] for name, number in its["scores"].items() if isinstance(number, dict)}
        assert scores["objects_precision"] == pytest.approx(100 * right / filled)
        assert scores["objects_f1"] == pytest.approx(200 * right / (filled + len(every)))
        assert scores["empty_filled"] == pytest.approx(
            100 * sum(len(seen.invented) for seen in comparisons) / (6 * len(PLACES) - len(every))
        )
        assert scores["background_right"] == pytest.approx(100 * np.mean([seen.background for seen in comparisons]))
    assert {line["score"] for line in toy["compared"]} == scores.keys() == set(SCORES)
    shown, by_sentence, compared = map(str, tables(toy))
    for title in SCORES.values():
        assert title in shown and f"toy/debias-clip - toy/clip, cut at 77 tokens, {title}" in compared
    last = {label: its["scores"]["objects_right_by_sentence"][-1] for label, its in toy["encoders"].items()}
    for line in last.values():
        numbers = [line["value"]] + [line[name] and line[name]["value"] for name in ("precision", "f1")]
        assert " / ".join("-" if number is None else f"{number:.1f}" for number in numbers) in by_sentence
    assert toy["ceilings"] == []  # each object is told in one sentence
    assert len(figures(toy)["generation.png"].axes) == len(SCORES) + 2  # and two by sentence


@pytest.mark.usefixtures("blank_figures")
def test_captions_that_refer_back_are_scored_by_how_objects_are_told(tmp_path):
    encoders = ["cut:toy/clip", "separate:toy/clip", "toy/debias-clip"]
    of_toy = {"base": "toy/sdxl", "data": "toy/referring-test"}
    config = GenerationConfig(encoders, str(tmp_path), **of_toy, limit=4, steps=1, device="cpu")
    report = evaluate_generation(config)
    every, *ceilings = report["ceilings"]
    objects = sum(len(toy_scene(record)[0].things) for record in read_toy_scenes("toy/referring-test")[0].records[:4])
    assert (every["told"], every["objects"], every["whole"]) == ("all objects", objects, 100)
    assert every["truncated"] < 100
    for its in report["encoders"].values():
        lines = its["scores"]["objects_right_by_telling"]
        assert [(line["told"], line["objects"]) for line in lines] == [(c["told"], c["objects"]) for c in ceilings]
        right = sum(line["objects"] * line["value"] for line in lines)
        assert right / objects == pytest.approx(its["scores"]["objects_right"]["value"])
    assert len(ceilings) == 3 and sum(line["objects"] for line in ceilings) == objects
    ways = [line for line in report["compared"] if line["score"] == "objects_right_across_cut"]
    assert len(ways) == 3 and {"difference", "low", "high", "p"} <= ways[0].keys()
    told, compared = map(str, tables(report)[2:])
    assert "symbolic reader, cut at 77 tokens" in told and f"{every['in_chunks']:.1f}" in told
    assert "toy/debias-clip - toy/clip, separate chunks, objects right, by reference across a cut, %" in compared
    # Text before the prompt moves the cuts.
    captions = [toy_scene(record)[1] for record in read_toy_scenes("toy/referring-test")[0].records[:4]]
    prefixed = generation._Generation(replace(config, prefix="a photo of many things, " * 6), None)
    assert generation.ceilings(prefixed.readings(captions))[0]["truncated"] < every["truncated"]


def test_examples_show_toy_pictures_with_their_pixels(toy, tmp_path):
    folder = Path(toy["settings"]["output"], "images", "toy-clip-cut-at-77-tokens")
    figure = generation.plot_examples(
        ["Two $ and $ a <b>."], [Image.open(folder / "000000.png")], {"a": [folder / "000001.png"]}
    )
    figure.savefig(tmp_path / "x.png")
    shown = [image for axes in figure.axes for image in axes.images]
    assert [image.get_interpolation() for image in shown] == ["nearest"] * 2
    assert [image.get_array().shape for image in shown] == [(48, 48, 3)] * 2
