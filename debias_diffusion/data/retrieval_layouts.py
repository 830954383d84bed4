"""How each retrieval benchmark is laid out by its authors (docs/evaluation.md shows the layouts)."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..errors import UserError
from ..files import open_regular, read_file, read_json
from .captions import answer_of, is_text, utf8

FIVE = 5  # first captions of each image of COCO, which has five to seven, in Long-CLIP's eval/retrieval/coco.py
SHAREGPT4V_HELD_OUT = 1000  # its first entries, which nobody trains on
SHAREGPT4V_FILE = "share-captioner_coco_lcs_sam_1246k_1107.json"
# Where the images of ImageInWords' three parts lie, and the key of their name.
IIW_PARTS = {"IIW-400": ("images_aar", "image/key"), "DCI_Test": ("photos", "image"), "DOCCI_Test": ("images", "image")}
COCO_CN_FILE = "imageid.human-written-caption.txt"
COCO_2014 = re.compile(r"COCO_(train2014|val2014)_\d{12}")  # an image of COCO-CN, and the folder that it lies in
RECOS_FILE, RECOS_KEYS = "recos_v1.json", ("image", "caption")
_HUB, _GITHUB = "https://huggingface.co/datasets", "https://github.com"
_AGAIN = "Download it again."


@dataclass(frozen=True)
class Entry:
    """One image with its captions as a benchmark's files have them: anything, or nothing, may stand for either."""

    where: str
    image: object
    captions: Sequence[object]


@dataclass(frozen=True)
class Benchmark:
    """How one benchmark is read.

    Attributes:
        parts: the folder -> (where it stands, part) for each part that an entry is made of.
        read: (where, part) -> Entry; ValueError("kind: detail") for one that cannot be read.
        needs: the files and folders that must be there.
        images: the folders that images lie in. With several, an image's name begins with its folder. Where the only one
            is not there, images lie in the benchmark's own folder.
        page: where it is downloaded from.
    """

    parts: Callable[[Path], Iterable[tuple]]
    read: Callable[..., Entry]
    needs: tuple[str, ...]
    images: tuple[str, ...]
    page: str


def _fields(part) -> dict:
    """A part that must be a JSON object. Raises ValueError("kind: detail")."""
    if not isinstance(part, dict):
        raise ValueError(f"not an object: found {type(part).__name__}")
    return part


def _parsed(text: str) -> dict:
    """A JSON object in text. Raises ValueError("kind: detail")."""
    try:
        part = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"bad JSON: {getattr(error, 'msg', error)}, it begins {text[:40]!r}") from None
    return _fields(part)


def _lines(root: Path, name: str) -> Iterator[tuple[str, str]]:
    """(where, line) of each line that is not blank; bytes that are no UTF-8 become U+FFFD."""
    with _open_text(root / name) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{name}, line {number}", line


def _open_text(path: Path, newline: str | None = None) -> TextIO:
    """A file of the benchmark itself; what is no UTF-8 becomes U+FFFD. Raises UserError where it cannot be read."""
    try:
        return io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="replace", newline=newline)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror}). {_AGAIN}") from None


def _text(path: Path) -> str:
    """A text file; empty where there is none. Raises OSError, or ValueError("kind: detail") unless it is UTF-8."""
    return utf8(read_file(path), path.name) if path.exists() else ""


def _objects(path: Path, key: str) -> list[dict]:
    """The list of JSON objects under `key`. Raises UserError when there is none."""
    objects = read_json(path, dict, _AGAIN).get(key)
    if not isinstance(objects, list) or not all(isinstance(part, dict) for part in objects):
        raise UserError(f"{str(path)!r} has no list of objects named {key!r}. {_AGAIN}")
    return objects


# ---- Urban1k


def _urban1k(root: Path) -> Iterator[tuple[str, Path]]:
    # Names from both folders, so that neither an image nor a caption can go missing unnoticed.
    names = {
        path.stem
        for folder, ending in (("caption", ".txt"), ("image", ".jpg"))
        for path in (root / folder).iterdir()
        if path.suffix.lower() == ending and not path.name.startswith(".")
    }
    for name in sorted(names):
        yield f"caption/{name}.txt", root / "caption" / f"{name}.txt"


def _read_urban1k(where: str, path: Path) -> Entry:
    """The caption is the file's first line, as in Long-CLIP's script."""
    return Entry(where, f"{path.stem}.jpg", _text(path).split("\n")[:1])


# ---- DCI and Long-DCI


def _dci(root: Path) -> Iterator[tuple[str, Path]]:
    """Every annotation of every split: 7,805, the whole benchmark."""
    for names in read_json(root / "splits.json", dict, _AGAIN).values():
        for name in names if isinstance(names, list) else []:
            path = root / "annotations" / str(name)
            if not path.is_file():
                raise UserError(f"splits.json of dci names {str(path)!r}, which is not there. Unpack all of it.")
            yield f"annotations/{name}", path


def _read_dci(where: str, path: Path) -> Entry:
    """Short and extra caption together, as DCI's `get_extended_caption`; a full stop between them where none is."""
    fields = _parsed(_text(path))
    captions = (fields.get(key) for key in ("short_caption", "extra_caption"))
    parts = [caption.strip() for caption in captions if is_text(caption) and caption.strip()]
    parts[:-1] = [part if part[-1] in ".!?" else f"{part}." for part in parts[:-1]]
    return Entry(where, fields.get("image"), (" ".join(parts),))


def _long_dci(root: Path) -> Iterator[tuple[str, object, tuple]]:
    path = root / "dci_long.csv"
    try:
        with _open_text(path, newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                yield f"dci_long.csv, image {row.get('filepath')}", row.get("filepath"), (row.get("title"),)
    except csv.Error as error:
        raise UserError(f"{str(path)!r} cannot be read as tab-separated values ({error}). {_AGAIN}") from None


# ---- DOCCI and ImageInWords


def _docci(root: Path) -> Iterator[tuple[str, str]]:
    """Lines of the test split, and those whose split cannot be read."""
    for where, line in _lines(root, "docci_descriptions.jsonlines"):
        with suppress(ValueError):
            if _parsed(line).get("split") != "test":
                continue
        yield where, line


def _read_docci(where: str, line: str) -> Entry:
    fields = _parsed(line)
    return Entry(where, fields.get("image_file"), (fields.get("description"),))


def _iiw(root: Path) -> Iterator[tuple[str, str]]:
    for part in IIW_PARTS:
        yield from _lines(root, f"{part}/data.jsonl")


def _read_iiw(where: str, line: str) -> Entry:
    """The description that a person wrote ("IIW"). DOCCI's images are named there without .jpg."""
    folder, key = IIW_PARTS[where.partition("/")[0]]
    fields = _parsed(line)
    image = fields.get(key)
    if is_text(image):
        image = f"{folder}/{image if image.lower().endswith('.jpg') else f'{image}.jpg'}"
    return Entry(where, image, (fields.get("IIW"),))


# ---- ShareGPT4V


def _sharegpt4v(root: Path) -> Iterator[tuple[str, object]]:
    for index, entry in enumerate(read_json(root / SHAREGPT4V_FILE, list, _AGAIN)[:SHAREGPT4V_HELD_OUT]):
        yield f"{SHAREGPT4V_FILE}, entry {index}", entry


def _read_sharegpt4v(where: str, entry) -> Entry:
    return Entry(where, _fields(entry).get("image"), (answer_of(entry),))


# ---- COCO and Flickr30k


def _coco(*splits: str, captions_an_image: int | None = None) -> Benchmark:
    """The images of these splits, each with its first captions in the file's order; None: all captions."""
    files = {split: f"annotations/captions_{split}.json" for split in splits}

    def parts(root: Path) -> Iterator[tuple[str, object, list]]:
        for split, name in files.items():
            captions: dict[str, list] = {}
            for annotation in _objects(root / name, "annotations"):
                captions.setdefault(str(annotation.get("image_id")), []).append(annotation.get("caption"))
            for image in _objects(root / name, "images"):
                file, texts = image.get("file_name"), captions.get(str(image.get("id")), [])
                if len(splits) > 1 and is_text(file):
                    file = f"{split}/{file}"
                yield f"{name}, image {image.get('id')}", file, texts[:captions_an_image]

    return Benchmark(parts, Entry, (*files.values(), *splits), splits, "https://cocodataset.org/#download")


_FLICKR30K_IMAGES = "flickr30k-images"


def _karpathy(*splits: str) -> Benchmark:
    """The images of Flickr30k in these parts of Karpathy's split: 29,000 train, 1,014 val, 1,000 test."""
    name, page = "dataset_flickr30k.json", "https://cs.stanford.edu/people/karpathy/deepimagesent/"

    def parts(root: Path) -> Iterator[tuple[str, object, list]]:
        for image in _objects(root / name, "images"):
            if image.get("split") in splits:
                sentences = image.get("sentences")
                sentences = sentences if isinstance(sentences, list) else []
                raw = [sentence.get("raw") for sentence in sentences if isinstance(sentence, dict)]
                yield f"{name}, image {image.get('filename')}", image.get("filename"), raw

    return Benchmark(parts, Entry, (name, _FLICKR30K_IMAGES), (_FLICKR30K_IMAGES,), page)


def _read_flickr30k(where: str, line: str) -> Entry:
    """A line "name.jpg#0<tab>caption". The five of an image are joined afterwards, as all entries of one image are."""
    image, tab, caption = line.rstrip("\r\n").partition("\t")
    name, number_sign, _ = image.rpartition("#")
    if not tab or not number_sign:
        raise ValueError(f"not a line of image#number, tab, caption: it begins {line[:40]!r}")
    return Entry(where, name, (caption,))


# ---- COCO-CN and Flickr30k-CNA: Chinese captions of COCO's and Flickr30k's images


def _split_key(line: str) -> tuple[str, str]:
    """(image, caption) of a line "image#number caption", in which "#number" may be missing.

    A tab ends the key; in some copies of COCO-CN it is a space, and no key holds one.
    """
    key, *caption = line.split(maxsplit=1)
    return key.partition("#")[0], caption[0] if caption else ""


def _coco_cn(*splits: str) -> Benchmark:
    """The images of these splits with the captions that people wrote, not those that they or a machine translated.

    `coco-cn_SPLIT.txt` names an image a line (18,341 train, 1,000 val, 1,000 test), and
    `imageid.human-written-caption.txt` has a line "COCO_train2014_000000000009#0<tab>caption" for each of 22,218
    captions: version 201805, by the README of https://github.com/li-xirong/coco-cn. The names of the files, and the
    lines' form, are those of public scripts that read `coco-cn-version1805v1.1.tar.gz`; the archive was not seen.
    """
    lists = [f"coco-cn_{split}.txt" for split in splits]

    def parts(root: Path) -> Iterator[tuple[str, str]]:
        lines: dict[str, list[tuple[str, str]]] = {}
        for where, line in _lines(root, COCO_CN_FILE):
            lines.setdefault(_split_key(line)[0], []).append((where, line))
        yield from (part for image, of_image in lines.items() if not COCO_2014.fullmatch(image) for part in of_image)
        for name in lists:
            for where, line in _lines(root, name):
                image = line.strip()
                yield from lines.pop(image, [(where, image)])  # without a caption: an error that names it

    folders = ("train2014", "val2014")
    return Benchmark(parts, _read_coco_cn, (COCO_CN_FILE, *lists), folders, f"{_HUB}/AIMClab-RUC/COCO-CN")


def _read_coco_cn(where: str, line: str) -> Entry:
    image, caption = _split_key(line)
    name = COCO_2014.fullmatch(image)
    if name is None:
        raise ValueError(f"not a line of COCO image#number, tab, caption: it begins {line[:40]!r}")
    return Entry(where, f"{name[1]}/{image}.jpg", (caption,))


def _flickr30k_cna(*splits: str) -> Benchmark:
    """The images of these splits.

    `train/flickr30k_cna_train.txt` (148,909 lines) and `val/flickr30k_cna_val.txt` (5,000) have lines
    "6228559981<tab>caption". The test split (5,000) is `test/flickr30k_cn_test.txt`, Flickr30k-CN's human translation,
    with lines "id#zhb#0<tab>caption"; R2D2's own reader names it `flickr30k_cna_test.txt`. From
    https://zero.so.com/detail.html, https://github.com/yuxie11/R2D2, and public scripts that read and count these
    files; the archive was not seen.
    """
    page = "https://zero.so.com/download.html"

    def parts(root: Path) -> Iterator[tuple[str, str]]:
        for split in splits:
            names = [f"{split}/flickr30k_cna_{split}.txt", f"{split}/flickr30k_cn_{split}.txt"]
            name = next((name for name in names if (root / name).exists()), None)
            if name is None:
                raise UserError(
                    f"The folder {str(root)!r} has neither {names[0]!r} nor {names[1]!r}, so it is not Flickr30k-CNA "
                    f"as published. They come from {page}."
                )
            yield from _lines(root, name)

    return Benchmark(parts, _read_flickr30k_cna, (*splits, _FLICKR30K_IMAGES), (_FLICKR30K_IMAGES,), page)


def _read_flickr30k_cna(where: str, line: str) -> Entry:
    image, caption = _split_key(line)
    if not image.isdecimal():
        raise ValueError(f"not a line of image, tab, caption: it begins {line[:40]!r}")
    return Entry(where, f"{image}.jpg", (caption,))


# ---- ReCoS


def _recos(root: Path) -> Iterator[tuple[str, object]]:
    """The pairs of ReCoS-v1, of all its twelve tasks.

    `recos_v1.json` holds the texts, of 1,000 images; those of four tasks come with it in `images`, the rest are COCO's
    and Total-Text's: the README of https://github.com/Bruce-XJChen/ReCos. Neither it nor any public script that could
    be looked up shows the file's keys. Expected is a list of objects with `RECOS_KEYS`, of which "caption" is a text or
    a list of texts.

    Raises:
        UserError: the file has other keys; the message names them.
    """
    entries = read_json(root / RECOS_FILE, object, _AGAIN)
    objects = [entry for entry in (entries if isinstance(entries, list) else [entries]) if isinstance(entry, dict)]
    keys = {key for entry in objects for key in entry}
    if not isinstance(entries, list) or not keys >= set(RECOS_KEYS):
        listed = ", ".join(sorted(keys)[:20]) or "none"
        raise UserError(
            f"{str(root / RECOS_FILE)!r} is a {type(entries).__name__} of objects with the keys {listed}. Expected is "
            f"a list of objects with {' and '.join(RECOS_KEYS)}; the published file's keys are not known here. Write "
            "its content under these keys, and please report which it has."
        )
    for index, entry in enumerate(entries):
        yield f"{RECOS_FILE}, entry {index}", entry


def _read_recos(where: str, entry) -> Entry:
    image, captions = (_fields(entry).get(key) for key in RECOS_KEYS)
    return Entry(where, image, captions if isinstance(captions, list) else (captions,))


# ---- all of them

_IIW_FOLDERS = tuple(folder for folder, _ in IIW_PARTS.values())
_IIW_NEEDS = (*(f"{part}/data.jsonl" for part in IIW_PARTS), *_IIW_FOLDERS)
_IIW_PAGE = f"{_GITHUB}/google/imageinwords/tree/main/datasets"
_DCI_NEEDS, _DCI_PAGE = ("splits.json", "annotations", "photos"), f"{_GITHUB}/facebookresearch/DCI"
_DOCCI_NEEDS, _DOCCI_PAGE = ("docci_descriptions.jsonlines", "images"), "https://google.github.io/docci/#downloads"
_FLICKR30K = "results_20130124.token"
_SHAREGPT4V_PAGE = f"{_HUB}/Lin-Chen/ShareGPT4V"

BENCHMARKS: dict[str, Benchmark] = {
    "urban1k": Benchmark(_urban1k, _read_urban1k, ("caption", "image"), ("image",), f"{_HUB}/BeichenZhang/Urban1k"),
    "dci": Benchmark(_dci, _read_dci, _DCI_NEEDS, ("photos",), _DCI_PAGE),
    "long-dci": Benchmark(_long_dci, Entry, ("dci_long.csv",), ("photos",), f"{_HUB}/mderakhshani/Long-DCI"),
    "docci": Benchmark(_docci, _read_docci, _DOCCI_NEEDS, ("images",), _DOCCI_PAGE),
    "iiw": Benchmark(_iiw, _read_iiw, _IIW_NEEDS, _IIW_FOLDERS, _IIW_PAGE),
    "sharegpt4v-1k": Benchmark(_sharegpt4v, _read_sharegpt4v, (SHAREGPT4V_FILE,), (".",), _SHAREGPT4V_PAGE),
    "coco": _coco("val2017"),
    "coco-five": _coco("val2017", captions_an_image=FIVE),
    "coco-train": _coco("train2017"),
    "coco-all": _coco("train2017", "val2017"),
    "flickr30k": Benchmark(
        lambda root: _lines(root, _FLICKR30K),
        _read_flickr30k,
        (_FLICKR30K, _FLICKR30K_IMAGES),
        (_FLICKR30K_IMAGES,),
        "https://shannon.cs.illinois.edu/DenotationGraph/",
    ),
    "flickr30k-test": _karpathy("test"),
    "flickr30k-karpathy": _karpathy("train", "val", "test"),
    "coco-cn-val": _coco_cn("val"),
    "coco-cn-test": _coco_cn("test"),
    "coco-cn-all": _coco_cn("train", "val", "test"),
    "flickr30k-cna-val": _flickr30k_cna("val"),
    "flickr30k-cna-test": _flickr30k_cna("test"),
    "flickr30k-cna-all": _flickr30k_cna("train", "val", "test"),
    "recos-v1": Benchmark(_recos, _read_recos, (RECOS_FILE, "images"), ("images",), f"{_GITHUB}/Bruce-XJChen/ReCos"),
}
