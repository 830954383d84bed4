"""Writes image-caption pairs as WebDataset shards of small images, so that training need not decode large ones."""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from PIL import Image

from debias_diffusion.data.bad_records import BadRecord, look_up, read_or_bad, report_all
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.shards import FINISHED
from debias_diffusion.data.sources import data_digest, open_data
from debias_diffusion.data.workers import read_records
from debias_diffusion.jobs import Job

from .options import ShardsConfig

_PNG = b"\x89PNG"  # begins the file


def write_shards(config: ShardsConfig) -> Path:
    """Writes the pairs in order as shards, and returns the output folder.

    A shard is complete or not there, and the same pairs give the same bytes. Bad records are skipped and listed in
    `bad-records.jsonl`. A killed run continues with the missing shards.
    """
    captions, images = open_data(config.data, config.images)
    records, pairs = captions.records, len(captions.records) + len(captions.bad)
    look_up(records, images, config.max_bad)
    settings = {name: getattr(config, name) for name in ("size", "per_shard", "quality", "lossless")}
    with Job.open(config.output, "shards", settings, {"data": data_digest(config.data, captions)}) as job:
        shards = divide(len(records), config.per_shard, "shard-{:06}.tar")
        missing = {name: part for name, part in shards.items() if not job.is_whole(name)}
        indices = [index for part in missing.values() for index in part]
        read = partial(_read_small, images, config.size, None if config.lossless else config.quality)
        bar = {"desc": "writing shards", "total": len(records), "initial": len(records) - len(indices)}
        with read_records(records, read, config.workers, indices, unit=" images", **bar) as small:
            for name, part in missing.items():
                _write_shard(job, name, part, records, small)
        left_out = {name: [BadRecord(**bad) for bad in job.notes(name)["left_out"]] for name in shards}
        bad = sum(left_out.values(), start=captions.bad)
        advice = "Mend them and give a new output, or raise --max-bad to keep the shards that are written."
        report_all(bad, pairs, config.max_bad, job.folder, advice)
        job.note(FINISHED, samples={name: len(part) - len(left_out[name]) for name, part in shards.items()})
    size = sum((job.folder / name).stat().st_size for name in shards)
    written = f"{pairs - len(bad)} of {pairs} pairs in {len(shards)} shards"
    print(f"Wrote {written}, {size / 1e6:,.1f} MB, to {job.folder}")
    print(f"Next: debias-diffusion train --data {job.folder}, without --images")
    return job.folder


def divide(count: int, size: int, name: str) -> dict[str, range]:
    """{name with its number: positions} of the parts of `count` records, `size` in each but the last."""
    starts = range(0, count, size)
    return {name.format(number): range(start, min(start + size, count)) for number, start in enumerate(starts)}


def _read_small(images: ImageSource, size: int, quality: int | None, record: Record) -> bytes | BadRecord:
    return read_or_bad(record, lambda image: shrink(images.open(image), size, quality))


def shrink(image: Image.Image, size: int, quality: int | None) -> bytes:
    """An RGB image as JPEG, or as PNG for None, shrunk until its shorter side has `size` pixels.

    It is resized as open_clip's transform for CLIP does, which then finds nothing left to resize.
    """
    if (shorter := min(image.size)) > size:
        image = image.resize([int(size * side / shorter) for side in image.size], Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if quality else "PNG", quality=quality, compress_level=1)
    return buffer.getvalue()


def _write_shard(
    job: Job, name: str, part: range, records: Sequence[Record], images: Iterator[bytes | BadRecord]
) -> None:
    """Writes one shard. A sample's key is its position in the data; bad records are noted when it is written."""
    left_out: list[dict] = []

    def members() -> Iterator[tuple[str, bytes]]:
        for index in part:
            image, record = next(images), records[index]
            if isinstance(image, BadRecord):
                left_out.append(asdict(image))
                continue
            caption = {"id": record.sample_id, "caption": record.caption}
            caption |= {} if record.short is None else {"short_caption": record.short}
            yield f"{index:09}.{'png' if image.startswith(_PNG) else 'jpg'}", image
            yield f"{index:09}.json", json.dumps(caption).encode()

    write_tar(job, name, members(), left_out=left_out)


def write_tar(job: Job, name: str, members: Iterable[tuple[str, bytes]], **notes) -> None:
    """Writes an item of (name, content) without times and owners, so that the same members give the same bytes."""
    with job.write(name, **notes) as temporary, tarfile.open(temporary, "w") as tar:
        for member, content in members:
            header = tarfile.TarInfo(member)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
