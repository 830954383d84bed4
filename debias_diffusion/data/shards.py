"""WebDataset shards: tars of images and captions, read at any place without being unpacked.

Every sample is found by its shard, offset and size, so that a draw stays a pure function of (seed, epoch, index) and a
run can restart anywhere. Only the tars' headers and the captions are read to find them.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image
from tqdm import tqdm

from ..errors import UserError
from ..files import file_stamp, open_regular
from ..jobs import Job
from .bad_records import BadRecord, leave_out
from .captions import LARGEST_FILE, Captions, caption_of, fold, is_text, parse_object, short_of, usable_captions, utf8
from .image_folder import CAPTION, IMAGES, ending
from .images import decode_image, stamp_of
from .records import PackedRecords, Record

FINISHED = "shards"  # what a job notes when its shards, which are items, are finished: samples by their names
_WRITERS = ("shards", "synthesize")  # commands

_ENTRY = "json"  # ending
_LARGEST_IMAGE = 1 << 28  # bytes
_BLOCK = 512  # bytes, a tar's unit
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)  # key.extension, parted as WebDataset parts it
_PLACE = re.compile(r"([^/]+)/.*@(\d+)\+(\d+)", re.DOTALL)  # shard/member@offset+size


class ShardImages:
    """Opens the images of shards by the strings that `read_shards` gives its records.

    Safe for threads and workers, forked or not: each read opens its shard, because an open file has one position.
    """

    def __init__(self, root: str | os.PathLike):
        self.root = Path(os.path.realpath(root))

    def open(self, image: str) -> Image.Image:
        return decode_image(io.BytesIO(self.read(image)))

    def read(self, image: str) -> bytes:
        """The image's file as the shard holds it. Raises OSError or ValueError when it cannot be had."""
        shard, offset, size = _locate(image)
        with open_regular(self.root / shard) as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise OSError(f"{shard!r} ends inside the image, and did not when it was indexed")
        return content

    def stamp(self, image: str) -> bytes:
        shard, offset, size = _locate(image)
        stamp = file_stamp(self.root / shard)
        if stamp[0] < offset + size:
            raise OSError(f"{shard!r} ends before the image")
        return stamp_of(self.root, image, stamp)


def _locate(image: str) -> tuple[str, int, int]:
    """(shard, offset, size) of a record's image. Raises ValueError for a string of another shape."""
    place = _PLACE.fullmatch(image)
    if place is None:
        raise ValueError(f"{image!r} is no place in a shard")
    return place[1], int(place[2]), int(place[3])


def read_shards(data: str | os.PathLike) -> tuple[Captions, ShardImages]:
    """The samples of a folder's `*.tar`, or of one tar, in the order of the shards' names and of their members.

    Members are samples as in WebDataset: one key, the name up to the first dot of its last part. The image is a jpg,
    jpeg, png or webp; the caption a txt, or a json with "caption" or ShareGPT4V's "conversations". A json's "image", or
    else its "id", is the sample id; without one it is "shard/key".

    Bad records are samples without an image or a caption, members that are links or whose names lead elsewhere, and the
    rest of a shard that is damaged or cut short.

    Raises:
        UserError: there are no shards, their writing was not finished, or they hold no usable sample.
    """
    root, names = _shards(Path(data))
    expected = _written_here(root)[1]
    bad: list[BadRecord] = []
    bar = tqdm(names, desc="reading shards", unit=" shards", disable=len(names) < 20)
    records = PackedRecords.pack(record for name in bar for record in _read_shard(root, name, expected.get(name), bad))
    missing = sorted(expected.keys() - set(names)) if Path(data).is_dir() else []
    bad += [BadRecord(name, "missing shard", f"{expected[name]} samples") for name in missing]
    advice = "A sample is an image (key.jpg) and a caption (key.txt or key.json)."
    return usable_captions(f"{os.fspath(data)!r}, {len(names)} shards,", records, bad, advice), ShardImages(root)


def _shards(data: Path) -> tuple[Path, list[str]]:
    """The folder and the names of the shards in `data`, a folder or one shard, in their order."""
    if data.is_dir():
        return data, sorted(path.name for path in data.glob("*.tar") if not path.name.startswith("."))
    shard = Path(os.path.realpath(data))
    return shard.parent, [shard.name]


class _Member(NamedTuple):
    """One member of a sample: `name` is shard/member, `text` the content of a txt or json."""

    extension: str
    name: str
    offset: int
    size: int
    text: bytes


def _read_shard(root: Path, shard: str, expected: int | None, bad: list[BadRecord]) -> list[Record]:
    """One shard's usable samples, of `expected` that were written in it; the others are added to `bad`."""
    samples, records, broken, key = {}, [], None, None
    try:
        with open_regular(root / shard) as file:
            for member in _members(file):
                fault, name = _fault(member), _NAME.fullmatch(member.name)
                if fault:
                    bad.append(BadRecord(shard, fault, ascii(member.name)))
                elif member.isfile() and name and (kind := ending(name[2])) in (*IMAGES, CAPTION, _ENTRY):
                    key = name[1].removeprefix("./")
                    size = 0 if kind in IMAGES else min(member.size, LARGEST_FILE + 1)
                    file.seek(member.offset_data)  # tarfile finds its own place again
                    part = (name[2].lower(), f"{shard}/{member.name}", member.offset_data, member.size, file.read(size))
                    samples.setdefault(key, []).append(_Member(*part))
    except (tarfile.ReadError, OSError, ValueError) as error:
        broken = error
    for sample, parts in samples.items():
        # The last one may have been whole before the break.
        with leave_out(f"{shard}/{sample}", bad if broken is None or sample != key else []):
            records.append(_record(f"{Path(shard).stem}/{sample}", parts))
    if broken is not None:
        missing = "" if expected is None else f"; {expected - len(records)} of {expected} samples are missing"
        bad.append(BadRecord(shard, "broken shard", f"{broken}{missing}"))
    return records


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The members of a tar, each when all its bytes are there. Raises tarfile.ReadError where it is cut or damaged."""
    length, end = os.fstat(file.fileno()).st_size, 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="backslashreplace") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # or a large shard's would all be kept
                if tar.offset <= end:
                    raise tarfile.ReadError("a member of negative size")
                if member.isreg() and not member.issparse() and member.offset_data + member.size > length:
                    raise tarfile.ReadError(f"it ends inside {member.name!a}")
                end = tar.offset
                yield member
    except Exception as error:  # a damaged header makes tarfile raise whatever its bytes lead to
        raise tarfile.ReadError(f"byte {end} of {length}: {error}") from error
    # A damaged header that is not the first looks to tarfile like the end.
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError(f"byte {end} of {length}: no header and no closing block")


def _fault(member: tarfile.TarInfo) -> str | None:
    """Why a member is not used: what it is, or where its name leads."""
    if member.name.startswith("/") or ".." in member.name.split("/") or re.search(r"[\x00-\x1f\x7f-\x9f]", member.name):
        return "unsafe member name"
    if not (member.isfile() or member.isdir()) or member.issparse():
        return "member that is no file"
    return None


def _record(sample: str, parts: list[_Member]) -> Record:
    """The record of one sample, "shard/key". Raises ValueError("kind: detail") where there is none."""
    image = _choose(parts, IMAGES, "image")
    if image is None:
        raise ValueError(f"no image: found {', '.join(part.extension for part in parts)}")
    if image.size > _LARGEST_IMAGE:
        raise ValueError(f"absurdly large image: {image.name} has {image.size} bytes")
    txt, entry = _choose(parts, (CAPTION,), "caption"), _choose(parts, (_ENTRY,), "caption")
    if txt is None and entry is None:
        raise ValueError(f"no caption: image {image.name}")
    fields = {} if entry is None else parse_object(utf8(entry.text, entry.name))
    if txt is not None:
        fields["caption"] = utf8(txt.text, txt.name)
    caption = fold(caption_of(fields, f"image {image.name}"))
    names = (fields.get("image"), fields.get("id"), sample)
    sample_id = next(str(name) for name in names if is_text(name) or type(name) is int)
    return Record(sample_id, f"{image.name}@{image.offset}+{image.size}", caption, short_of(fields))


def _choose(parts: Sequence[_Member], kinds: tuple[str, ...], content: str) -> _Member | None:
    """The part of one of these kinds, if any; "jpg" goes before "small.jpg". Raises ValueError("kind: detail")."""
    fitting = sorted((part.extension.count("."), part) for part in parts if ending(part.extension) in kinds)
    if len(fitting) > 1 and fitting[1][0] == fitting[0][0]:
        raise ValueError(f"several {content}s: {fitting[0][1].name} and {fitting[1][1].name}")
    return fitting[0][1] if fitting else None


def _written_here(root: Path) -> tuple[Job, dict[str, int]]:
    """The job that wrote a folder's shards, and their samples by name. Raises UserError if it is not finished."""
    job = Job.read(root)
    if job.command not in _WRITERS:
        return job, {}
    if FINISHED not in job:
        raise UserError(f"The shards in {str(root)!r} are not finished: start the same `{job.command}` command again.")
    return job, job.notes(FINISHED)["samples"]


def verify_shards(data: str | os.PathLike) -> list[BadRecord]:
    """Reads every byte of the shards, and names those that differ from what was written; none of shards from elsewhere.

    Raises UserError if they are not finished.
    """
    root, names = _shards(Path(data))
    job, samples = _written_here(root)
    bad, names = [], list(samples) if Path(data).is_dir() else names
    for name in tqdm(names, desc="checking shards", unit=" shards"):
        if name in samples and not job.is_whole(name):
            is_there = (job.folder / name).exists()
            detail = "its sha256 is not the one it was written with" if is_there else f"{samples[name]} samples"
            bad.append(BadRecord(name, "changed shard" if is_there else "missing shard", detail))
    return bad
