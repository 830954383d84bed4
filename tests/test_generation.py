"""Evaluation of generated images as a whole: several encoders, bad data, the toy world."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from helpers.tiny_features import PHOTOGRAPHS, save_dino
from PIL import Image

from debias_diffusion.data.toy_scenes import read_toy_scenes, toy_scene
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.generation import GenerationConfig, evaluate_generation
from debias_diffusion.eval.images.networks import ClsFeatures
from debias_diffusion.eval.images.objects import compare_images, compare_objects, objects_numbers
from debias_diffusion.eval.images.rendered import folder_names
from debias_diffusion.eval.images.scores import cosines
from debias_diffusion.pipelines.rendering import renderer as rendering

CUT = "SDXL's own, cut at 77 tokens"  # label of the first encoder
ENTRIES = json.loads(PHOTOGRAPHS.read_text())


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return save_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def settings(sdxl_folder, dino, tmp_path_factory):
    """A configuration of four photographs, of which the first is not there, with changes."""
    data = tmp_path_factory.mktemp("data") / "data.json"
    data.write_text(json.dumps([ENTRIES[0] | {"image": "no-such.png"}, *ENTRIES[1:4]]))

    def make(output, **changes):
        values = {"data": str(data), "images": skimage.data_dir, "base": str(sdxl_folder), "output": str(output)}
        values |= {"encoders": ["cut:original"], "limit": 4, "steps": 1, "batch_size": 2, "device": "cpu", "dino": dino}
        return GenerationConfig(**values | changes)

    return make


def test_a_whole_evaluation_scores_the_images_it_leaves(settings, dino, long_clip_folder, tmp_path):
    encoders = ["cut:original", str(long_clip_folder)]
    config = settings(tmp_path, encoders=encoders, own_features=dino, clip_score="toy/clip")
    report = evaluate_generation(config)
    cut, long = report["encoders"]
    assert json.loads(Path(config.output, "generation.json").read_text()) == report and cut == CUT
    assert report["images"] == 3 and [bad["where"] for bad in report["left_out"]] == ["no-such.png"]
    digests = report["digests"]
    assert all(len(digests[name]) == 64 for name in ("data", "base", "dino")) and digests["inception_weights"] is None
    assert digests["encoders"][CUT] == digests["base"] != digests["encoders"][long]
    assert [numbers["cut_at"] for numbers in report["encoders"].values()] == [77, None]
    # An image keeps the number of its record, also where another has no reference image. Scores are of these files.
    names, network, scores = ["000001.png", "000002.png", "000003.png"], ClsFeatures(dino, torch.device("cpu")), {}
    references = [Path(skimage.data_dir) / entry["image"] for entry in ENTRIES[1:4]]
    for label, numbers in report["encoders"].items():
        folder = Path(config.output, "images", folder_names([label])[label])
        assert sorted(path.name for path in folder.glob("*.png")) == names
        assert {"fid_own", "kid_own", "clip_score"} <= set(numbers["scores"])
        scores[label] = np.mean(cosines(network([folder / name for name in names], 3), network(references, 3)))
        assert np.mean(numbers["by_image"]["dino_score"]) == pytest.approx(scores[label])
        number = {"value": pytest.approx(scores[label]), "low": None, "high": None}  # of three images
        assert numbers["scores"]["dino_score"] == number
    assert {(line["a"], line["b"]) for line in report["compared"]} == {(long, CUT)}
    (difference,) = [line["difference"] for line in report["compared"] if line["score"] == "dino_score"]
    assert difference == pytest.approx(scores[long] - scores[CUT]) and difference != 0
    assert all(Image.open(Path(config.output, f"{name}.png")).height > 200 for name in ("generation", "examples"))


def test_unusable_settings_are_refused_before_anything_is_rendered(tmp_path, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for change, message in (
        ({"dino": None}, "None of inception_weights"),
        ({"images": "."}, "0 of 4 pairs"),
        ({"data": "toy/test"}, "hold their images"),
        ({"max_bad": 0}, "1 of 4 records cannot be used.*no-such"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_generation(settings(tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("blank_figures")
def test_generators_and_networks_are_never_in_memory_together(tmp_path, settings, monkeypatch):
    generators, nets, load, init = [], [], rendering.load_pipeline, ClsFeatures.__init__

    def load_watched(*arguments):
        assert not any(model() for model in nets), "a network is still in memory"
        pipe = load(*arguments)
        generators.append(weakref.ref(pipe.unet))
        return pipe

    def init_watched(network, *arguments, **options):
        assert not any(model() for model in generators), "a generator is still in memory"
        init(network, *arguments, **options)
        nets.append(weakref.ref(network.model))

    monkeypatch.setattr(rendering, "load_pipeline", load_watched)
    monkeypatch.setattr(ClsFeatures, "__init__", init_watched)
    evaluate_generation(settings(tmp_path))
    assert (len(generators), len(nets)) == (1, 2)  # the network is tried before hours of generating


def test_the_toy_world_has_scores_of_objects(tmp_path):
    encoders, settings = ["cut:toy/clip", "toy/debias-clip"], {"base": "toy/sdxl", "device": "cpu", "steps": 1}
    toy = evaluate_generation(GenerationConfig(encoders, str(tmp_path), data="toy/test", limit=6, **settings))
    scenes = [toy_scene(record.image) for record in read_toy_scenes("toy/test")[0].records[:6]]
    families = toy["records"]["group"]
    assert families == ["test/000000"] * 4 + ["test/000004"] * 2
    seen, mentions = [], [caption.first_mentions() for _, caption in scenes]
    for label, numbers in toy["encoders"].items():
        files = sorted((tmp_path / "images" / folder_names(list(toy["encoders"]))[label]).glob("*.png"))
        seen.append(compare_images(files, [scene for scene, _ in scenes]))
        assert numbers["scores"] == objects_numbers(seen[-1], mentions, families)
    expected = compare_objects(*reversed(seen), mentions, families)
    numbers = [{name: line[name] for name in ("difference", "low", "high", "p")} for line in toy["compared"]]
    assert numbers == list(expected.values()) and len(numbers) == 7
