"""Zero-shot classification: the published layouts, the arithmetic, and a brute-force run."""

from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from helpers.tiny_clip import save_tiny_clip
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import ImageNetInfo

from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import paired_difference
from research.evaluations.classification import (
    CIFAR_TEMPLATES,
    ClassificationConfig,
    classify,
    evaluate_classification,
    read_cifar,
    read_imagenet,
    top1,
)

WNIDS = ImageNetInfo("imagenet-1k").label_names()
CIFAR_10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """With weights that tell the images apart."""
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


def make_cifar(root: Path, labels: list[tuple[int, ...]]) -> Path:
    """CIFAR-10 with labels of one number, CIFAR-100 with the coarse and the fine one."""
    root.mkdir()
    rows = [bytes(label) + np.asarray(picture(i)).transpose(2, 0, 1).tobytes() for i, label in enumerate(labels)]
    few = len(labels[0]) == 1
    names = CIFAR_10 if few else [f"class_{number}" for number in range(100)]
    (root / ("test_batch.bin" if few else "test.bin")).write_bytes(b"".join(rows))
    # the published file ends in an empty line
    (root / ("batches.meta.txt" if few else "fine_label_names.txt")).write_text("\n".join([*names, "", ""]))
    return root


@torch.inference_mode()
def by_hand(model: str, pictures: list[Image.Image]) -> list[int]:
    """The class of each picture, one image and one prompt at a time."""
    backbone = load_backbone(model).eval()
    images = torch.cat([backbone.encode_image(backbone.preprocess(image)[None]) for image in pictures])
    return (images.double() @ class_means(backbone, CIFAR_10, CIFAR_TEMPLATES).T).argmax(dim=1).tolist()


@torch.inference_mode()
def class_means(backbone, classes: list[str], templates) -> torch.Tensor:
    means = []
    for name in classes:
        prompts = [backbone.tokenize([template.format(name)]) for template in templates]
        encoded = [backbone.encode_text(prompt)[0].double() for prompt in prompts]
        mean = sum(feature / feature.norm() for feature in encoded)
        means.append(mean / mean.norm())
    return torch.stack(means)


def test_layouts_of_imagenet(tmp_path):
    titles = list(open_clip.IMAGENET_CLASSNAMES)
    root = image_folders(tmp_path / "val", WNIDS[::-1], drawn=3)  # the last three classes
    data = read_imagenet(str(root), "imagenet-1k")
    assert (data.labels, data.classes) == ([997, 998, 999], titles)
    assert [record.caption for record in data.records] == titles[-3:]
    root = image_folders(tmp_path / "v2", [str(index) for index in range(1000)], drawn=12, suffix="jpeg")
    data = read_imagenet(str(root), "imagenet-v2")  # folders are numbers, not text
    assert data.labels == [int(record.image.split("/")[0]) for record in data.records] == list(range(12))
    root = image_folders(tmp_path / "a", WNIDS[3::5], drawn=12)
    data = read_imagenet(str(root), "imagenet-a")
    assert (data.labels, data.classes) == (list(range(12)), titles[3::5])  # 200 classes compete


def test_encoders_are_compared_on_cifar_10_and_the_run_equals_brute_force(model, tmp_path):
    models = [model, save_tiny_clip(tmp_path / "other", seed=13)]
    pictures, names = [picture(index) for index in range(20)], [Path(name).name for name in models]
    guesses = [by_hand(name, pictures) for name in models]
    # The first is right on the first 6 images, the second on all on which it differs from that.
    labels = [(first if index < 6 else second) for index, (first, second) in enumerate(zip(*guesses, strict=True))]
    hits = [[100.0 * (guess == label) for guess, label in zip(own, labels, strict=True)] for own in guesses]
    assert 0 < sum(hits[0]) < sum(hits[1])
    root = make_cifar(tmp_path / "cifar", [(label,) for label in [*labels, 200]])
    config = ClassificationConfig(models, str(tmp_path / "out"), dataset="cifar-10", data=str(root), batch_size=7)
    report = evaluate_classification(config)
    assert (report["images"], report["classes"], len(report["templates"])) == (20, 10, 18)
    left_out = [(bad["kind"], bad["where"]) for bad in report["left_out"]]
    assert left_out == [("unknown class", "test_batch.bin, image 20")]
    for name, own in zip(names, hits, strict=True):
        assert report["encoders"][name]["top1_percent"] == pytest.approx(sum(own) / 20)
    [compared] = report["compared"]
    assert compared == {"a": names[1], "b": names[0], "score": "top-1"} | paired_difference(hits[1], hits[0])
    # Other names are other features of classes; the images are the same.
    before = {file.name for file in (tmp_path / "out" / "cache").iterdir()}
    (root / "batches.meta.txt").write_text("".join(f"{name}\n" for name in CIFAR_10[::-1]))
    evaluate_classification(config)
    added = {file.name for file in (tmp_path / "out" / "cache").iterdir()} - before
    assert {name.split("-")[0] for name in added} == {"classes"}


def test_cifar_100_reads_the_fine_label_and_the_colours(tmp_path):
    data = read_cifar(str(make_cifar(tmp_path / "cifar", [(3, 99), (19, 0)])), "cifar-100")
    assert data.labels == [99, 0]
    assert [record.caption for record in data.records] == ["class 99", "class 0"]  # spaces for underscores
    for index, record in enumerate(data.records):
        assert np.array_equal(np.asarray(data.images.open(record.image)), np.asarray(picture(index)))


def test_a_wrong_folder_is_told(tmp_path):
    empty = image_folders(tmp_path / "empty", WNIDS[:200], drawn=0)
    cifar = make_cifar(tmp_path / "cifar", [(1,), (2,)])
    (cifar / "test_batch.bin").write_bytes((cifar / "test_batch.bin").read_bytes()[:-1])
    for dataset, data, message in (
        ("imagenet-o", empty, "no image of a class"),
        ("cifar-10", empty, "no test_batch.bin.*pickle can run code"),
        ("cifar-10", cifar, "6145 bytes"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_classification(ClassificationConfig(["toy/clip"], str(tmp_path), dataset=dataset, data=str(data)))


# Small whole numbers, so that ties and zero vectors are frequent.
rows = st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=9)


@settings(max_examples=100)
@given(rows, rows)
def test_classify_equals_brute_force_with_ties(images, classes):
    images, classes = torch.tensor(images).float(), torch.tensor(classes).float()
    similarities = torch.cosine_similarity(images.double()[:, None], classes.double()[None], dim=-1)
    for guess, row in zip(classify(images, classes).tolist(), similarities.tolist(), strict=True):
        assert guess == next(i for i, value in enumerate(row) if value >= max(row) - 1e-6)


def test_top1_in_a_closed_form():
    numbers = top1([0, 1, 3, 2] * 2, [0, 0, 3, 2] * 2, ["a", "b", "c", "d"])
    assert numbers["top1_percent"] == 75
    assert numbers["top1_interval_percent"] == pytest.approx((40.93, 92.85), abs=0.01)  # Wilson 1927's formula, by hand
    assert numbers["mean_per_class_percent"] == pytest.approx((50 + 100 + 100) / 3)
