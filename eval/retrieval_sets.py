"""Retrieval benchmarks: images with their captions, in the layouts of their authors, which docs/evaluation.md shows."""

import csv
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from debias_diffusion.data.bad_records import BadRecord, leave_out
from debias_diffusion.data.captions import answer_of, check_object, fold, is_text, parse_object, usable_captions, utf8
from debias_diffusion.data.images import ImageFolder, ImageSource, is_there
from debias_diffusion.data.records import Record
from debias_diffusion.data.toy_scenes import family
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import bytes_digest, open_regular, read_file, read_json
from debias_diffusion.limits import SHAREGPT4V_HELD_OUT
from debias_diffusion.registry import Registry

SHAREGPT4V_FILE = "share-captioner_coco_lcs_sam_1246k_1107.json"
# Where the images of ImageInWords' three parts lie, and the key of their name.
IIW_PARTS = {"IIW-400": ("images_aar", "image/key"), "DCI_Test": ("photos", "image"), "DOCCI_Test": ("images", "image")}
FLICKR30K, FLICKR_IMAGES = "results_20130124.token", "flickr30k-images"
_FLICKR30K_LINE = re.compile(r"([^\t]+)#[^\t#]*\t(.*)")
HUB, GITHUB = "https://huggingface.co/datasets", "https://github.com"
_AGAIN = "Download it again."


@dataclass(frozen=True)
class Entry:
    """One image with its captions as a benchmark's files have them: anything, or nothing, may stand for either."""

    where: str
    image: object
    captions: Sequence[object]


Entries = Iterator[Entry]


@dataclass(frozen=True)
class Benchmark:
    """How one benchmark is read.

    Attributes:
        read: (the folder, a list to which it adds the entries that cannot be decoded) -> the others.
        needs: the files and folders that must be there.
        images: the folders that images lie in. With several, an image's name begins with its folder. Where the only one
            is not there, images lie in the benchmark's own folder.
        page: where it is downloaded from.
    """

    read: Callable[[Path, list[BadRecord]], Entries]
    needs: tuple[str, ...]
    images: tuple[str, ...]
    page: str


def _lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """(where, line) of each line that is not blank; bytes that are no UTF-8 become U+FFFD."""
    with _open_text(root / name) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{name}, line {number}", line


def matching_lines(root: Path, name: str, pattern: re.Pattern, bad: list[BadRecord]) -> Iterator[tuple[str, tuple]]:
    """(where, groups) of each line that is not blank and matches the pattern of an image and a caption."""
    for where, line in _lines(root, name):
        with leave_out(where, bad):
            if not (match := pattern.match(line)):
                raise ValueError(f"not a line of image, tab, caption: it begins {line[:40]!r}")
            yield where, match.groups()


def _open_text(path: Path, newline: str | None = None) -> TextIO:
    """A file of the benchmark itself; what is no UTF-8 becomes U+FFFD. Raises OSError where it cannot be read."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="replace", newline=newline)


def _json_lines(root: Path, name: str, bad: list[BadRecord]) -> Iterator[tuple[str, dict]]:
    """(where, object) of each line that is not blank and can be decoded."""
    for where, line in _lines(root, name):
        with leave_out(where, bad):
            yield where, parse_object(line)


def json_objects(entries: list, name: str, bad: list[BadRecord]) -> Iterator[tuple[str, dict]]:
    """(where, object) of each entry of a list that is an object."""
    for index, entry in enumerate(entries):
        where = f"{name}, entry {index}"
        with leave_out(where, bad):
            yield where, check_object(entry)


def _objects(path: Path, key: str) -> list[dict]:
    """The list of JSON objects under `key`. Raises UserError when there is none."""
    objects = read_json(path, dict, f"Expected is a list of objects named {key!r} in it. {_AGAIN}").get(key)
    if not isinstance(objects, list) or not all(isinstance(part, dict) for part in objects):
        raise UserError(f"{str(path)!r} has no list of objects named {key!r}. {_AGAIN}")
    return objects


def _urban1k(root: Path, bad: list[BadRecord]) -> Entries:
    """The caption is the file's first line, as in Long-CLIP's script."""
    # Names from both folders, so that neither an image nor a caption can go missing unnoticed.
    files = [*(root / "caption").glob("*.txt"), *(root / "image").glob("*.jpg")]
    for name in sorted({file.stem for file in files if not file.name.startswith(".")}):
        path = root / "caption" / f"{name}.txt"
        with leave_out(f"caption/{name}.txt", bad):
            text = utf8(read_file(path), path.name) if path.exists() else ""
            yield Entry(f"caption/{name}.txt", f"{name}.jpg", text.split("\n")[:1])


def _dci(root: Path, bad: list[BadRecord], as_released: bool = False) -> Entries:
    """Every annotation of every split: 7,805, the whole benchmark.

    Short and extra caption together, as DCI's `get_extended_caption`; a full stop between them where none is.

    Args:
        as_released: join them with nothing in between, as the code of DeBias-CLIP's authors does (by the audit in
            reyuyu/SAID, DATASET_PROTOCOL_AUDIT.json).
    """
    for name in (name for names in read_json(root / "splits.json", dict, _AGAIN).values() for name in names):
        path = root / "annotations" / str(name)
        if not path.is_file():
            raise UserError(f"splits.json of dci names {str(path)!r}, which is not there. Unpack all of it.")
        with leave_out(f"annotations/{name}", bad):
            fields = parse_object(read_file(path))
            captions = [text for key in ("short_caption", "extra_caption") if is_text(text := fields.get(key))]
            parts = [caption.strip() for caption in captions if caption.strip()]
            parts[:-1] = [part if part[-1] in ".!?" else f"{part}." for part in parts[:-1]]
            joined = "".join(captions) if as_released else " ".join(parts)
            yield Entry(f"annotations/{name}", fields.get("image"), (joined,))


def _long_dci(root: Path, bad: list[BadRecord]) -> Entries:
    path = root / "dci_long.csv"
    failure = f"{str(path)!r} cannot be read as tab-separated values"
    with _open_text(path, newline="") as file, explain_failure(failure, _AGAIN):
        for row in csv.DictReader(file, delimiter="\t"):
            yield Entry(f"dci_long.csv, image {row.get('filepath')}", row.get("filepath"), (row.get("title"),))


def _docci(root: Path, bad: list[BadRecord]) -> Entries:
    for where, fields in _json_lines(root, "docci_descriptions.jsonlines", bad):
        if fields.get("split") == "test":
            yield Entry(where, fields.get("image_file"), (fields.get("description"),))


def _iiw(root: Path, bad: list[BadRecord]) -> Entries:
    """The description that a person wrote ("IIW"). DOCCI's images are named there without .jpg."""
    for part, (folder, key) in IIW_PARTS.items():
        for where, fields in _json_lines(root, f"{part}/data.jsonl", bad):
            image = fields.get(key)
            if is_text(image):
                image = f"{folder}/{image if image.lower().endswith('.jpg') else f'{image}.jpg'}"
            yield Entry(where, image, (fields.get("IIW"),))


def _sharegpt4v(root: Path, bad: list[BadRecord]) -> Entries:
    entries = read_json(root / SHAREGPT4V_FILE, list, _AGAIN)[:SHAREGPT4V_HELD_OUT]
    for where, entry in json_objects(entries, SHAREGPT4V_FILE, bad):
        yield Entry(where, entry.get("image"), (answer_of(entry),))


def _coco(*splits: str, captions_an_image: int | None = None) -> Benchmark:
    """The images of these splits, each with its first captions in the file's order; None: all captions."""
    files = {split: f"annotations/captions_{split}.json" for split in splits}

    def read(root: Path, bad: list[BadRecord]) -> Entries:
        for split, name in files.items():
            captions: dict[str, list] = defaultdict(list)
            for annotation in _objects(root / name, "annotations"):
                captions[str(annotation.get("image_id"))].append(annotation.get("caption"))
            for image in _objects(root / name, "images"):
                file = image.get("file_name")
                if len(splits) > 1 and is_text(file):
                    file = f"{split}/{file}"
                number = str(image.get("id"))
                yield Entry(f"{name}, image {number}", file, captions[number][:captions_an_image])

    return Benchmark(read, (*files.values(), *splits), splits, "https://cocodataset.org/#download")


def _karpathy(*splits: str) -> Benchmark:
    """The images of Flickr30k in these parts of Karpathy's split: 29,000 train, 1,014 val, 1,000 test."""
    name, page = "dataset_flickr30k.json", "https://cs.stanford.edu/people/karpathy/deepimagesent/"

    def read(root: Path, bad: list[BadRecord]) -> Entries:
        for image in _objects(root / name, "images"):
            if image.get("split") in splits:
                file, sentences = image.get("filename"), image.get("sentences") or ()
                raw = [sentence.get("raw") for sentence in sentences if isinstance(sentence, dict)]
                yield Entry(f"{name}, image {file}", file, raw)

    return Benchmark(read, (name, FLICKR_IMAGES), (FLICKR_IMAGES,), page)


def _flickr30k(root: Path, bad: list[BadRecord]) -> Entries:
    """Lines "name.jpg#0<tab>caption". The five of an image are joined afterwards, as all entries of one image are."""
    for where, (image, caption) in matching_lines(root, FLICKR30K, _FLICKR30K_LINE, bad):
        yield Entry(where, image, (caption,))


_IIW_FOLDERS = tuple(folder for folder, _ in IIW_PARTS.values())
_IN_DCI = ("splits.json", "annotations", "photos")
_DCI = Benchmark(_dci, _IN_DCI, ("photos",), f"{GITHUB}/facebookresearch/DCI")

_BENCHMARKS = {
    "urban1k": Benchmark(_urban1k, ("caption", "image"), ("image",), f"{HUB}/BeichenZhang/Urban1k"),
    "dci": _DCI,
    "dci-as-released": replace(_DCI, read=partial(_dci, as_released=True)),
    "long-dci": Benchmark(_long_dci, ("dci_long.csv",), ("photos",), f"{HUB}/mderakhshani/Long-DCI"),
    "docci": Benchmark(
        _docci,
        ("docci_descriptions.jsonlines", "images"),
        ("images",),
        "https://google.github.io/docci/#downloads",
    ),
    "iiw": Benchmark(
        _iiw,
        (*(f"{part}/data.jsonl" for part in IIW_PARTS), *_IIW_FOLDERS),
        _IIW_FOLDERS,
        f"{GITHUB}/google/imageinwords/tree/main/datasets",
    ),
    "sharegpt4v-1k": Benchmark(_sharegpt4v, (SHAREGPT4V_FILE,), (".",), f"{HUB}/Lin-Chen/ShareGPT4V"),
    "coco": _coco("val2017"),
    "coco-five": _coco("val2017", captions_an_image=5),  # of five to seven, as in Long-CLIP's coco.py
    "coco-train": _coco("train2017"),
    "coco-all": _coco("train2017", "val2017"),
    "flickr30k": Benchmark(
        _flickr30k, (FLICKR30K, FLICKR_IMAGES), (FLICKR_IMAGES,), "https://shannon.cs.illinois.edu/DenotationGraph/"
    ),
    "flickr30k-test": _karpathy("test"),
    "flickr30k-karpathy": _karpathy("train", "val", "test"),
}
BENCHMARKS: Registry[Benchmark] = Registry("retrieval benchmark", _BENCHMARKS)


@dataclass(frozen=True)
class Pairs:
    """Captions and their images.

    Attributes:
        records: the images, each with its first caption, [N].
        images: opens them; None if only captions were read.
        captions: all captions, white space folded in a benchmark's, [M].
        image_of: the position in `records` of each caption's image, [M]; every image has a caption.
        bad: the bad records of all the data.
        digest: of all the data: of a benchmark its captions and the images' names.
        trained_on: by label of an encoder whose record names the data, how many of these images it has seen.
    """

    records: Sequence[Record]
    images: ImageSource | None
    captions: list[str]
    image_of: list[int]
    bad: list[BadRecord]
    digest: str
    trained_on: dict[str, int] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        """The name of each caption's group, see `toy_scenes.family`, [M]."""
        return [family(self.records[image].image) for image in self.image_of]

    def select(self, positions: Sequence[int], trained_on: dict[str, int]) -> "Pairs":
        """The images at these positions, in ascending order, with all their captions."""
        rows = {position: row for row, position in enumerate(positions)}
        kept = [(caption, rows[at]) for caption, at in zip(self.captions, self.image_of, strict=True) if at in rows]
        captions, image_of = map(list, zip(*kept, strict=True))
        records = [self.records[position] for position in positions]
        return replace(self, records=records, captions=captions, image_of=image_of, trained_on=trained_on)


def read_retrieval_set(name: str, root: str | os.PathLike) -> Pairs:
    """A benchmark of `BENCHMARKS` from the folder that `find_root` finds, in the order of its files.

    Entries with the same image file become one image with several captions. An entry that cannot be decoded, and an
    empty caption of an image that has others, are bad records. Images are not opened.

    Raises:
        UserError: there is no such benchmark, the folder has another layout, a file is damaged as a whole, or an
            entry is without its image or without a caption, by the file's name.
    """
    root = find_root(name, root)
    benchmark, source, label = BENCHMARKS[name], ImageFolder(root), f"{name} in {str(root)!r}"
    advice = f"Download it again, from {benchmark.page}."
    if len(benchmark.images) == 1 and (root / benchmark.images[0]).is_dir():
        source = ImageFolder(root / benchmark.images[0])
    bad: list[BadRecord] = []
    by_image: dict[str, list[Entry]] = {}
    for entry in benchmark.read(root, bad):
        if not is_text(entry.image):
            raise UserError(f"{entry.where} of {label} names no image, found {entry.image!r}. {advice}")
        by_image.setdefault(entry.image, []).append(entry)
    usable_captions(label, list(by_image), bad, advice)
    missing = [image for image in by_image if not is_there(source, image)]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(by_image)} images of {label} are not in {str(source.root)!r}. The first is "
            f"{missing[0]!r}, of {by_image[missing[0]][0].where}. A benchmark is evaluated whole: unpack all of it."
        )
    records, captions, image_of = [], [], []
    for position, (image, entries) in enumerate(by_image.items()):
        where, given = entries[0].where, [caption for entry in entries for caption in entry.captions]
        texts = [fold(caption) for caption in given if is_text(caption) and caption.strip()]
        if not texts:
            raise UserError(f"{where} of {label} has no caption for the image {image!r}. {advice}")
        bad += [BadRecord(where, "empty caption", f"image {image}")] * (len(given) - len(texts))
        records.append(Record(image, image, texts[0]))
        captions += texts
        image_of += [position] * len(texts)
    digest = bytes_digest(json.dumps(part).encode() + b"\n" for part in (list(by_image), captions, image_of))
    return Pairs(records, source, captions, image_of, bad, digest)


def find_root(name: str, root: str | os.PathLike) -> Path:
    """The folder of a benchmark below a folder of several.

    It is named after the benchmark (`coco-five`) or the data set that it is a part of (`coco`); or `root` itself holds
    the benchmark.

    Raises:
        UserError: there is no such benchmark, or none of these folders has its files.
    """
    benchmark, parts = BENCHMARKS.find(name), name.removeprefix("long-").split("-")
    folders = dict.fromkeys([name, *("-".join(parts[:count]) for count in range(len(parts), 0, -1)), "."])
    places = [Path(root) / folder for folder in folders]
    for place in places:
        if all((place / part).exists() for part in benchmark.needs):
            return place
    raise UserError(
        f"{name} is in none of {', '.join(map(repr, map(str, places)))}. A folder of it must hold "
        f"{', '.join(benchmark.needs)}; they come from {benchmark.page}."
    )
