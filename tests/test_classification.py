"""Zero-shot classification: the published layouts, the arithmetic, and a brute-force run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import open_clip
import pytest
import torch
from helpers.tiny_clip import save_tiny_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval import classification
from debias_diffusion.eval.classification import (
    BENCHMARKS,
    CIFAR_TEMPLATES,
    IMAGENET_TEMPLATES,
    ClassificationConfig,
    class_features,
    classify,
    evaluate_classification,
    figures,
    imagenet_wnids,
    read_cifar,
    read_imagenet,
    top1,
    wilson_interval,
)
from debias_diffusion.eval.intervals import paired_difference
from debias_diffusion.eval.options import Classification
from debias_diffusion.models.loading import load_backbone

CIFAR_10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """With weights that tell the images apart: most others give all of them the same class."""
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"), seed=14)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8))


def image_folders(root: Path, names: list[str], drawn: int, suffix: str = "JPEG") -> Path:
    """One image in each folder; only the first `drawn` are real images, to save time."""
    for index, name in enumerate(names):
        (root / name).mkdir(parents=True)
        if index < drawn:
            picture(index).save(root / name / f"picture_{index}.{suffix}", format="PNG")
    return root


def make_cifar_10(root: Path, labels: list[int]) -> Path:
    root.mkdir()
    names = "".join(f"{name}\n" for name in CIFAR_10) + "\n"  # the published file ends in an empty line
    (root / "batches.meta.txt").write_text(names)
    rows = [bytes([label]) + np.asarray(picture(i)).transpose(2, 0, 1).tobytes() for i, label in enumerate(labels)]
    (root / "test_batch.bin").write_bytes(b"".join(rows))
    return root


def make_cifar_100(root: Path, labels: list[tuple[int, int]]) -> Path:
    root.mkdir()
    (root / "fine_label_names.txt").write_text("".join(f"class_{i}\n" for i in range(100)))
    (root / "coarse_label_names.txt").write_text("".join(f"coarse_{i}\n" for i in range(20)))
    rows = [bytes(label) + np.asarray(picture(i)).transpose(2, 0, 1).tobytes() for i, label in enumerate(labels)]
    (root / "test.bin").write_bytes(b"".join(rows))
    return root


def run(models: list[str], dataset: str, data: Path, output: Path, **options) -> dict:
    settings = {"encoders": models, "output": str(output), "dataset": dataset, "data": str(data), "device": "cpu"}
    return evaluate_classification(ClassificationConfig(**settings | options))


@pytest.fixture
def few_templates(monkeypatch):
    """Two of the 80: the tests' time goes into prompts."""
    few = replace(BENCHMARKS["imagenet-a"], templates=IMAGENET_TEMPLATES[:2])
    monkeypatch.setitem(classification.BENCHMARKS, "imagenet-a", few)


def by_hand(model: str, pictures: list[Image.Image], classes: list[str], templates) -> list[int]:
    """The class of each picture, one image and one prompt at a time."""
    backbone = load_backbone(model).eval()
    with torch.inference_mode():
        means = []
        for name in classes:
            total = 0
            for template in templates:
                feature = backbone.encode_text(backbone.tokenize([template(name)]))[0].double()
                total = total + feature / feature.norm()
            means.append(total / total.norm())
        guesses = []
        for image in pictures:
            feature = backbone.encode_image(backbone.preprocess(image)[None])[0].double()
            guesses.append(max(range(len(classes)), key=lambda index: float(feature @ means[index])))
    return guesses


def test_the_order_of_the_classes():
    wnids = imagenet_wnids()
    assert len(wnids) == len(set(wnids)) == len(open_clip.IMAGENET_CLASSNAMES) == 1000
    assert wnids == sorted(wnids)
    names = dict(zip(wnids, open_clip.IMAGENET_CLASSNAMES, strict=True))
    assert names["n01440764"] == "tench" and names["n15075141"] == "toilet paper"
    # the pairs that share a word, which lists of names mixed up
    assert names["n02012849"] == "crane bird" and names["n03126707"] == "construction crane"


def test_templates_are_the_published_ones():
    written = [template("X") for template in CIFAR_TEMPLATES]
    assert len(set(written)) == 18
    assert {"a photo of a X.", "a photo of the X.", "a photo of the big X.", "a bad photo of a X."} <= set(written)
    assert len({template("X") for template in IMAGENET_TEMPLATES}) == 80


def test_layouts_of_imagenet(tmp_path):
    wnids, names = imagenet_wnids(), list(open_clip.IMAGENET_CLASSNAMES)
    root = image_folders(tmp_path / "val", wnids[::-1], drawn=3)  # made in reverse order: the last three classes
    data = read_imagenet(str(root), "imagenet-1k")
    assert (data.labels, data.classes) == ([997, 998, 999], names)
    assert [record.caption for record in data.records] == names[-3:]
    root = image_folders(tmp_path / "v2", [str(index) for index in range(1000)], drawn=12, suffix="jpeg")
    data = read_imagenet(str(root), "imagenet-v2")  # folders are numbers, not text
    assert data.labels == [int(record.image.split("/")[0]) for record in data.records] == list(range(12))
    assert [record.caption for record in data.records] == names[:12]
    (root / "517").rmdir()
    with pytest.raises(UserError, match="holds 999 class folders, and imagenet-v2 has 1000, and lacks 517"):
        read_imagenet(str(root), "imagenet-v2")


@pytest.mark.usefixtures("blank_figures", "few_templates")
def test_200_classes_compete_and_the_run_equals_brute_force(model, tmp_path, monkeypatch):
    wnids = imagenet_wnids()[3::5]
    root = image_folders(tmp_path / "data", wnids, drawn=12)
    (root / "README.txt").write_text("as in the published archive")
    for number in range(2):
        (root / wnids[1] / f"broken_{number}.JPEG").write_bytes(b"no image")
    with pytest.raises(UserError, match="2 of 14 records cannot be used.*0.01 that --max-bad"):
        run([model], "imagenet-a", root, tmp_path / "out")
    assert not (tmp_path / "out" / "classification.json").exists()
    report = run([model], "imagenet-a", root, tmp_path / "out", batch_size=7, max_bad=0.2)
    assert (report["images"], report["classes"]) == (12, 200)
    assert [record["where"] for record in report["left_out"]] == [f"{wnids[1]}/broken_{n}.JPEG" for n in range(2)]
    classes = list(open_clip.IMAGENET_CLASSNAMES[3::5])
    guesses = by_hand(model, [picture(index) for index in range(12)], classes, IMAGENET_TEMPLATES[:2])
    assert len(set(guesses)) > 1
    right = [100.0 * (guess == label) for label, guess in enumerate(guesses)]
    [numbers] = report["encoders"].values()
    assert [row["top1_percent"] for row in numbers["per_class"]] == right
    assert numbers["top1_percent"] == pytest.approx(sum(right) / 12)
    assert "200" in report["notes"][0] and report["compared"] == []
    listed = Path.iterdir  # the order of the files does not matter
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    again = run([model], "imagenet-a", root, tmp_path / "again", max_bad=0.2)
    assert (again["encoders"], again["digests"]) == (report["encoders"], report["digests"])


def test_encoders_are_compared_on_cifar_10_and_the_run_equals_brute_force(model, tmp_path, capsys):
    models = [model, save_tiny_clip(tmp_path / "other", seed=13)]
    pictures, names = [picture(index) for index in range(20)], [Path(name).name for name in models]
    guesses = [by_hand(name, pictures, CIFAR_10, CIFAR_TEMPLATES) for name in models]
    # The first is right on the first 6 images, the second on all on which it differs from that.
    labels = [(first if index < 6 else second) for index, (first, second) in enumerate(zip(*guesses, strict=True))]
    hits = [[100.0 * (guess == label) for guess, label in zip(own, labels, strict=True)] for own in guesses]
    assert 0 < sum(hits[0]) < sum(hits[1])
    root = make_cifar_10(tmp_path / "cifar", [*labels, 200])
    report = run(models, "cifar-10", root, tmp_path / "out", batch_size=7)
    assert report == json.loads((tmp_path / "out" / "classification.json").read_text())
    assert report["images"] == 20 and report["classes"] == 10 and len(report["templates"]) == 18
    assert [(bad["kind"], bad["where"]) for bad in report["left_out"]] == [
        ("unknown class", "test_batch.bin, image 20")
    ]
    for name, own in zip(names, hits, strict=True):
        assert report["encoders"][name]["top1_percent"] == pytest.approx(sum(own) / 20)
        assert sum(row["images"] for row in report["encoders"][name]["per_class"]) == 20
    [compared] = report["compared"]
    assert compared == {"a": names[1], "b": names[0], "score": "top-1"} | paired_difference(hits[1], hits[0])
    printed = capsys.readouterr().out
    assert f"{names[1]} - {names[0]}, top-1" in printed and "Left out: test_batch.bin, image 20" in printed
    assert Image.open(tmp_path / "out" / "classification.png").size[0] > 100
    # Other names are other features of classes; the images are the same.
    before = {file.name for file in (tmp_path / "out" / "cache").iterdir()}
    (root / "batches.meta.txt").write_text("".join(f"{name}\n" for name in CIFAR_10[::-1]))
    run(models[:1], "cifar-10", root, tmp_path / "out")
    added = {file.name for file in (tmp_path / "out" / "cache").iterdir()} - before
    assert [name.split("-")[0] for name in added] == ["classes"]


def test_cifar_100_reads_the_fine_label_and_the_colours(tmp_path):
    data = read_cifar(str(make_cifar_100(tmp_path / "cifar", [(3, 99), (19, 0)])), "cifar-100")
    assert data.labels == [99, 0]
    assert [record.caption for record in data.records] == ["class 99", "class 0"]  # spaces for underscores
    for index, record in enumerate(data.records):
        assert np.array_equal(np.asarray(data.images.open(record.image)), np.asarray(picture(index)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "n00000000").mkdir(), "'n00000000'.*200 folders named by WordNet id"),
        (lambda root: next(root.iterdir()).rmdir(), "holds 199 class folders, and imagenet-o has 200"),
        (lambda root: None, "class folders of .* are empty"),
    ],
)
def test_a_wrong_folder_is_told(spoil, message, tmp_path):
    root = image_folders(tmp_path / "data", imagenet_wnids()[:200], drawn=0)
    spoil(root)
    with pytest.raises(UserError, match=message):
        read_imagenet(str(root), "imagenet-o")
    for folder, message in (("none", "is no folder"), (".", "holds no folders")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            read_imagenet(str(tmp_path / "empty" / folder), "imagenet-1k")


def test_cifar_pickles_are_not_opened(tmp_path):
    (tmp_path / "test_batch").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (tmp_path / "batches.meta").write_bytes(b"x")
    with pytest.raises(UserError, match="no test_batch.bin.*cifar-10-binary.tar.gz.*pickle can run code"):
        read_cifar(str(tmp_path), "cifar-10")


def test_a_cifar_file_cut_short_or_of_the_other_cifar_is_told(tmp_path):
    root = make_cifar_10(tmp_path / "cifar", [1, 2])
    (root / "test_batch.bin").write_bytes((root / "test_batch.bin").read_bytes()[:-1])
    with pytest.raises(UserError, match="6145 bytes"):
        read_cifar(str(root), "cifar-10")
    root = make_cifar_100(tmp_path / "cifar-100", [(1, 2)])
    (root / "fine_label_names.txt").write_text("apple\n")
    with pytest.raises(UserError, match="names 1 classes, and cifar-100 has 100"):
        read_cifar(str(root), "cifar-100")


def test_class_features_are_means_of_normalised_features(model):
    backbone = load_backbone(model).eval()
    templates = CIFAR_TEMPLATES[:3]
    got = class_features(backbone, ["cat", "dog", "cat"], templates, 2, "cpu")
    assert torch.equal(got[0], got[2])
    with torch.inference_mode():
        encoded = [backbone.encode_text(backbone.tokenize([template("dog")]))[0].double() for template in templates]
    mean = sum(feature / feature.norm() for feature in encoded)
    assert torch.allclose(got[1], mean / mean.norm(), atol=1e-6)
    # Not the mean of the features as they are: their lengths differ.
    plain = sum(encoded)
    assert not torch.allclose(got[1], plain / plain.norm(), atol=1e-6)


# Small whole numbers, so that ties and zero vectors are frequent.
rows = st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=9)


@settings(max_examples=150)
@given(rows, rows, st.integers(1, 10))
def test_classify_equals_brute_force_with_ties_for_any_block(images, classes, block):
    def unit(row):
        row = torch.tensor(row, dtype=torch.float64)
        return row / row.norm() if row.norm() > 0 else row

    got = classify(torch.tensor(images).float(), torch.tensor(classes).float(), block).tolist()
    for guess, image in zip(got, images, strict=True):
        similarities = [float(unit(image) @ unit(row)) for row in classes]
        assert guess == next(i for i, value in enumerate(similarities) if value >= max(similarities) - 1e-6)


def test_classify_and_top1_in_a_closed_form():
    classes = torch.eye(4)
    images = torch.tensor([[9.0, 1, 0, 0], [0, 2, 1, 0], [0, 0, 0, 5], [0, 0, 3, 1]])
    guesses = classify(images, classes).tolist()
    assert guesses == [0, 1, 3, 2]
    numbers = top1(guesses, [0, 0, 3, 2], ["a", "b", "c", "d"])
    assert numbers["top1_percent"] == 75
    assert numbers["mean_per_class_percent"] == pytest.approx((50 + 100 + 100) / 3)
    assert [(row["class"], row["images"], row["top1_percent"]) for row in numbers["per_class"]] == [
        ("a", 2, 50.0),
        ("c", 1, 100.0),
        ("d", 1, 100.0),
    ]
    encoders = {"mine": numbers, "other": top1([3], [3], ["a", "b", "c", "d"])}
    report = {"encoders": encoders, "settings": {"dataset": "imagenet-a"}}
    lines = figures(report)["classification.png"].axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[50, 100, 100], [75, 75], [100], [100, 100]]
    assert len({line.get_color() for line in lines}) == 2


def test_of_classes_equal_up_to_rounding_the_first_is_taken():
    images, classes = torch.tensor([[1.0, 0]]), torch.tensor([[1, 1e-5], [1, 0]])
    assert classify(images, classes).tolist() == [0]
    assert classify(images, torch.tensor([[1, 1e-2], [1, 0]])).tolist() == [1]
    with pytest.raises(UserError, match="NaN"):
        classify(torch.tensor([[float("nan"), 1]]), torch.eye(2))


def test_wilson_interval_of_known_counts():
    assert wilson_interval(8, 10) == pytest.approx((49.02, 94.33), abs=0.01)  # Wilson 1927's formula, by hand
    assert wilson_interval(0, 10)[0] == 0 and wilson_interval(10, 10)[1] == 100


def test_the_options_name_every_benchmark():
    assert tuple(BENCHMARKS) == get_args(Classification)
