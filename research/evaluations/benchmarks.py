"""Retrieval benchmarks that papers on Chinese captions use, and ReCoS: how each is laid out by its authors."""

import re
from pathlib import Path

from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval_sets import (
    FLICKR_IMAGES,
    GITHUB,
    HUB,
    Benchmark,
    Entries,
    Entry,
    json_objects,
    matching_lines,
)
from debias_diffusion.files import read_json

COCO_CN_FILE = "imageid.human-written-caption.txt"
# Lines of captions: a key "image#number", in which "#number" may be missing, then the caption. A tab ends the key; in
# some copies of COCO-CN it is a space, and no key of COCO-CN or Flickr30k-CNA holds one.
_COCO_CN_LINE = re.compile(r"\s*((?:COCO_(train2014|val2014))_\d{12})(?:#\S*)?(?:\s+(.*))?$")  # with the image's folder
_CNA_LINE = re.compile(r"\s*(\d+)(?:#\S*)?(?:\s+(.*))?$")
RECOS_FILE, RECOS_KEYS = "recos_v1.json", ("image", "caption")


def _coco_cn(*splits: str) -> Benchmark:
    """The images of these splits with the captions that people wrote, not those that they or a machine translated.

    `coco-cn_SPLIT.txt` names an image a line (18,341 train, 1,000 val, 1,000 test), and
    `imageid.human-written-caption.txt` has a line "COCO_train2014_000000000009#0<tab>caption" for each of 22,218
    captions: version 201805, by the README of https://github.com/li-xirong/coco-cn. The names of the files, and the
    lines' form, are those of public scripts that read `coco-cn-version1805v1.1.tar.gz`; the archive was not seen.
    """
    lists = [f"coco-cn_{split}.txt" for split in splits]

    def read(root: Path, bad: list[BadRecord]) -> Entries:
        entries: dict[str, list[Entry]] = {}
        for where, (image, folder, caption) in matching_lines(root, COCO_CN_FILE, _COCO_CN_LINE, bad):
            entries.setdefault(image, []).append(Entry(where, f"{folder}/{image}.jpg", (caption,)))
        for name in lists:
            for where, (image, folder, _) in matching_lines(root, name, _COCO_CN_LINE, bad):
                # One without a caption is an error that names it.
                yield from entries.pop(image, [Entry(where, f"{folder}/{image}.jpg", (None,))])

    folders = ("train2014", "val2014")
    return Benchmark(read, (COCO_CN_FILE, *lists), folders, f"{HUB}/AIMClab-RUC/COCO-CN")


def _flickr30k_cna(*splits: str) -> Benchmark:
    """The images of these splits.

    `train/flickr30k_cna_train.txt` (148,909 lines) and `val/flickr30k_cna_val.txt` (5,000) have lines
    "6228559981<tab>caption". The test split (5,000) is `test/flickr30k_cn_test.txt`, Flickr30k-CN's human translation,
    with lines "id#zhb#0<tab>caption"; R2D2's own reader names it `flickr30k_cna_test.txt`. From
    https://zero.so.com/detail.html, https://github.com/yuxie11/R2D2, and public scripts that read and count these
    files; the archive was not seen.
    """

    def read(root: Path, bad: list[BadRecord]) -> Entries:
        for split in splits:
            names = [f"{split}/flickr30k_cna_{split}.txt", f"{split}/flickr30k_cn_{split}.txt"]
            name = next((name for name in names if (root / name).exists()), names[1])
            for where, (image, caption) in matching_lines(root, name, _CNA_LINE, bad):
                yield Entry(where, f"{image}.jpg", (caption,))

    page = "https://zero.so.com/download.html"
    return Benchmark(read, (*splits, FLICKR_IMAGES), (FLICKR_IMAGES,), page)


def _recos(root: Path, bad: list[BadRecord]) -> Entries:
    """The pairs of ReCoS-v1, of all its twelve tasks.

    `recos_v1.json` holds the texts, of 1,000 images; those of four tasks come with it in `images`, the rest are COCO's
    and Total-Text's: the README of https://github.com/Bruce-XJChen/ReCos. Neither it nor any public script that could
    be looked up shows the file's keys. Expected is a list of objects with `RECOS_KEYS`, of which "caption" is a text or
    a list of texts.

    Raises:
        UserError: the file has other keys; the message names them.
    """
    expected = f"Expected is a list of objects with {' and '.join(RECOS_KEYS)}."
    entries = read_json(root / RECOS_FILE, list, expected)
    keys = {key for entry in entries if isinstance(entry, dict) for key in entry}
    if not keys >= set(RECOS_KEYS):
        raise UserError(
            f"{str(root / RECOS_FILE)!r} has objects with the keys {', '.join(sorted(keys)[:20])}. {expected} The "
            "published file's keys are not known here: please report them, and write its content under these."
        )
    for where, entry in json_objects(entries, RECOS_FILE, bad):
        image, captions = map(entry.get, RECOS_KEYS)
        yield Entry(where, image, captions if isinstance(captions, list) else (captions,))


BENCHMARKS = {
    "coco-cn-val": _coco_cn("val"),
    "coco-cn-test": _coco_cn("test"),
    "coco-cn-all": _coco_cn("train", "val", "test"),
    "flickr30k-cna-val": _flickr30k_cna("val"),
    "flickr30k-cna-test": _flickr30k_cna("test"),
    "flickr30k-cna-all": _flickr30k_cna("train", "val", "test"),
    "recos-v1": Benchmark(_recos, (RECOS_FILE, "images"), ("images",), f"{GITHUB}/Bruce-XJChen/ReCos"),
}
