"""Zero-shot classification: ImageNet-1k, -V2, -A, -O, CIFAR-10 and CIFAR-100, top-1.

A class is the mean of its name's text features over the usual templates (Radford et al. 2021, section 3.1.4), and an
image is assigned the most similar class.

torchvision's readers do not fit: its CIFAR10 unpickles the files, which could run code. Its ImageFolder ignores files
without an image's suffix, stops at an unreadable image instead of naming it, and sorts folders as text (1, 10, 100).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.bad_records import BadRecord, check_share, print_left_out
from debias_diffusion.data.images import ImageFolder, ImageSource, digest_of
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import TIE, cosines
from debias_diffusion.errors import UserError
from debias_diffusion.eval.image_features import ImageSession
from debias_diffusion.eval.intervals import paired_difference, wilson
from debias_diffusion.eval.report import Table, cell, compared_tables, draw_bars
from debias_diffusion.eval.session import compare_encoders
from debias_diffusion.files import read_file, sha256

from .options import ClassificationConfig

# CLIP's 18 for CIFAR (its notebooks/prompts): nine, each with both articles.
CIFAR_TEMPLATES = [
    form.format(article, "{}")
    for article in ("a", "the")
    for form in (
        "a photo of {} {}.",
        "a blurry photo of {} {}.",
        "a black and white photo of {} {}.",
        "a low contrast photo of {} {}.",
        "a high contrast photo of {} {}.",
        "a bad photo of {} {}.",
        "a good photo of {} {}.",
        "a photo of {} small {}.",
        "a photo of {} big {}.",
    )
]
IMAGENET_TEMPLATES = [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]

CIFAR_SIDE = 32  # pixels

_OPENAI = "open_clip's class names, OpenAI's 80 templates."
NOTES = {
    "imagenet-1k": f"Top-1 of 1000 classes: {_OPENAI}",
    "imagenet-v2": f"Top-1 of 1000 classes: {_OPENAI}",
    "imagenet-a": f"Top-1 of the 200 classes that have a folder, not of 1000: {_OPENAI}",
    "imagenet-o": "ImageNet-O was made to detect images of no ImageNet class (AUPR). Papers on CLIP report, as here "
    "and in CLIP_benchmark, top-1 of its 200 folders' classes: whether models make the confusions its authors chose. "
    f"{_OPENAI}",
    "cifar-10": "Top-1 of 10 classes: CLIP's 18 CIFAR templates.",
    "cifar-100": "Top-1 of the 100 fine classes: CLIP's 18 CIFAR templates, underscores in names as spaces.",
}


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes.

    Attributes:
        records: the images; a record's caption is the name of its class.
        labels: the class of each, from 0.
        classes: the names of all candidate classes.
        templates: prompts of a class, with {} for its name.
        images: opens them.
        bad: the bad records of the data.
        digest: of the data; of image folders, of the files' names and sizes.
    """

    records: list[Record]
    labels: list[int]
    classes: list[str]
    templates: list[str]
    images: ImageSource
    bad: list[BadRecord]
    digest: str


def read_imagenet(data: str, dataset: str) -> LabelledImages:
    """Reads folders of images named by WordNet id, V2's by the position of their class in ImageNet-1k's order.

    Only the classes that have a folder are candidates: of A and O 200.

    Raises:
        UserError: the folders are not these.
    """
    images, count = ImageFolder(data), 200 if dataset in ("imagenet-a", "imagenet-o") else 1000
    # In the order of the labels, which is that of `open_clip.IMAGENET_CLASSNAMES`.
    names, layout = ImageNetInfo("imagenet-1k").label_names(), "named by WordNet id, such as n01440764"
    if dataset == "imagenet-v2":
        names, layout = [str(index) for index in range(1000)], "0 to 999"
    folders = {entry.name for entry in images.root.iterdir() if entry.is_dir() and entry.name[0] != "."}
    known = folders & set(names)
    if len(known) != count or folders != known:
        strange = f", and {min(folders - known)!r}" if folders != known else ""
        raise UserError(
            f"{data!r} holds {len(known)} class folders of {dataset}{strange}. Give the whole folder, as its authors "
            f"publish it: {count} class folders, {layout}. A number of some classes compares with nothing published."
        )
    titles = dict(zip(names, open_clip.IMAGENET_CLASSNAMES, strict=True))
    classes = {name: title for name, title in titles.items() if name in folders}
    records, labels = [], []
    for label, (folder, title) in enumerate(classes.items()):
        # Sorted, because a file system's order is arbitrary.
        for file in sorted(entry.name for entry in (images.root / folder).iterdir() if entry.name[0] != "."):
            records.append(Record(f"{folder}/{file}", f"{folder}/{file}", title))
            labels.append(label)
    digest = digest_of(*(f"{record.image} {(images.root / record.image).lstat().st_size}" for record in records)).hex()
    return LabelledImages(records, labels, list(classes.values()), IMAGENET_TEMPLATES, images, [], digest)


@dataclass(frozen=True)
class CifarImages:
    """Opens the images of a CIFAR file of the binary version by their index in it, as text.

    Attributes:
        root: the file, for messages.
        pixels: uint8 [N, 3, 32, 32].
    """

    root: Path
    pixels: np.ndarray

    def open(self, image: str) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self.pixels[int(image)].transpose(1, 2, 0)))

    def stamp(self, image: str) -> bytes:
        return digest_of(image, self.pixels[int(image)].tobytes().hex())


def read_cifar(data: str, dataset: str) -> LabelledImages:
    """The test images of CIFAR-10 or CIFAR-100 (fine labels), from the binary version.

    The Python version is pickled, and a pickle can run code, so it is not read. Class names come from the folder's text
    file, with spaces for underscores.

    Raises:
        UserError: the folder is not of the binary version, or its file does not hold whole images.
    """
    # Bytes before each image's pixels; the last of them is the class.
    file, names, label_bytes = {
        "cifar-10": ("test_batch.bin", "batches.meta.txt", 1),
        "cifar-100": ("test.bin", "fine_label_names.txt", 2),
    }[dataset]
    path, row = Path(data, file), label_bytes + 3 * CIFAR_SIDE**2
    if missing := [name for name in (file, names) if not Path(data, name).is_file()]:
        raise UserError(
            f"{data!r} has no {missing[0]}. Give the unpacked folder of {dataset}-binary.tar.gz (https://www.cs.toronto"
            ".edu/~kriz/cifar.html), which holds it. The Python version is pickled, and a pickle can run code, so it "
            "is not read."
        )
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) % row:
        raise UserError(
            f"{str(path)!r} has {len(content)} bytes, which is no whole number of images of {row} bytes. Download the "
            "binary version again, or give the folder of the other CIFAR."
        )
    lines = read_file(Path(data, names)).decode(errors="replace").splitlines()
    classes = [line.strip().replace("_", " ") for line in lines if line.strip()]
    rows = content.reshape(-1, row)
    records, labels, bad = [], [], []
    for index, label in enumerate(rows[:, label_bytes - 1].tolist()):
        if label < len(classes):
            records.append(Record(str(index), str(index), classes[label]))
            labels.append(label)
        else:
            bad.append(BadRecord(f"{file}, image {index}", "unknown class", f"{label}, and there are {len(classes)}"))
    images = CifarImages(path, rows[:, label_bytes:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE))
    digest = digest_of(sha256(path), *classes).hex()
    return LabelledImages(records, labels, classes, CIFAR_TEMPLATES, images, bad, digest)


def class_features(backbone: Backbone, data: LabelledImages, batch_size: int, device: torch.device | str) -> Tensor:
    """[C, D] normalised mean, over the templates, of the normalised text features of each class's name."""
    model = SimpleNamespace(encode_text=lambda tokens, normalize: F.normalize(backbone.encode_text(tokens), dim=1))
    classes = max(1, batch_size // len(data.templates))  # in a batch
    given = (model, backbone.tokenize, data.classes, data.templates, classes)
    return open_clip.build_zero_shot_classifier(*given, device=device, use_tqdm=True).T.contiguous().cpu()


def classify(image_features: Tensor, class_features: Tensor) -> Tensor:
    """The class of each image, int64 [N], by the cosine of [N, D] with [C, D]; of equal ones (within 1e-6) the first.

    Raises UserError if a feature is not finite.
    """
    if not (image_features.isfinite().all() and class_features.isfinite().all()):
        raise UserError("Features are NaN or infinite, so no class is nearest. Check the model's weights.")
    similarity = cosines(image_features, class_features)
    return (similarity >= similarity.amax(dim=1, keepdim=True) - TIE).int().argmax(dim=1)


def top1(predicted: Sequence[int], labels: Sequence[int], classes: Sequence[str]) -> dict:
    """Top-1 in percent, its 95% interval (Wilson's), the mean over classes, and the number of each class, by label.

    Top-1 weighs all images equally, as published numbers do.
    """
    rows: dict[int, list[bool]] = {}
    for label, guess in zip(labels, predicted, strict=True):
        rows.setdefault(label, []).append(guess == label)
    right = sum(map(sum, rows.values()))
    per_class = [
        {"class": classes[label], "label": label, "images": len(row), "top1_percent": 100 * sum(row) / len(row)}
        for label, row in sorted(rows.items())
    ]
    return {
        "top1_percent": 100 * right / len(labels),
        "top1_interval_percent": wilson(right, len(labels)),
        "mean_per_class_percent": sum(row["top1_percent"] for row in per_class) / len(per_class),
        "per_class": per_class,
    }


def evaluate_classification(config: ClassificationConfig) -> dict:
    """Zero-shot top-1 of each encoder; writes `classification.json` and `classification.png` and prints tables.

    Returns:
        The content of the file, see `Session.report`, with numbers of images and classes, and templates; by encoder
        top-1 in percent with its interval and by class. Encoders are compared in points, paired by image.

    Raises:
        UserError: the data or an encoder cannot be used, or more of the images are bad than the share `max_bad`.
    """
    data = (read_cifar if config.dataset.startswith("cifar") else read_imagenet)(config.data, config.dataset)
    if not data.records:
        raise UserError(f"{config.data!r} holds no image of a class of {config.dataset}. Give the folder of images.")
    print_left_out(data.bad)
    check_share(data.bad, len(data.records) + len(data.bad), config.max_bad)
    session = ImageSession("classification", config, data)

    def classify_all(label: str, backbone: Backbone) -> tuple[list[int], list[int]]:
        """The classes that one encoder assigns to the readable images, and their true ones."""
        features, good = session.encode(label, backbone)
        compute = partial(class_features, backbone, data, config.batch_size, session.device)
        depends = {"encoder": session.digests["encoders"][label], "classes": data.classes, "templates": data.templates}
        classes = session.cache.tensors("classes", depends, lambda: {"features": compute()})["features"]
        return classify(features, classes).tolist(), [data.labels[index] for index in good]

    results = session.by_encoder(classify_all)
    # 100 for each correct image, else 0: their mean is top-1 in percent.
    hits = {label: {"top-1": 100.0 * np.equal(*result)} for label, result in results.items()}
    return session.report(
        tables,
        figures,
        {label: top1(*result, data.classes) for label, result in results.items()},
        compare_encoders(hits, lambda a, b, _: paired_difference(a, b)),
        [NOTES[config.dataset]],
        images=len(next(iter(results.values()))[0]),
        classes=len(data.classes),
        templates=data.templates,
    )


def tables(report: dict) -> list[Table]:
    """The numbers of a report, and the encoders compared."""
    name = f"{report['settings']['dataset']}, percent of {report['images']} images in {report['classes']} classes"
    rows = [
        [label, cell(numbers["top1_percent"], *numbers["top1_interval_percent"]), numbers["mean_per_class_percent"]]
        for label, numbers in report["encoders"].items()
    ]
    return [Table([name, "top-1 (95% interval)", "mean of classes"], rows), *compared_tables(report["compared"])]


def figures(report: dict) -> dict[str, Figure]:
    """Bars of top-1 of all images and of its mean over classes, which has no interval."""
    figure = Figure(figsize=(6, 3.5), layout="constrained", dpi=150)
    axes, groups = figure.subplots(), {}
    for label, numbers in report["encoders"].items():
        values = numbers["top1_percent"], numbers["mean_per_class_percent"]
        groups[label] = values, [numbers["top1_interval_percent"], [None, None]]
    draw_bars(axes, groups, ["top-1", "mean of classes"], digits=1)
    axes.set(title=report["settings"]["dataset"], ylabel="%")
    axes.legend(fontsize="small")
    return {"classification.png": figure}
