"""Writes image-caption pairs as WebDataset shards of small JPEGs, so that training need not decode large images."""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.data.bad_records import BAD_RECORDS, BadRecord, check_share, read_or_bad, report_bad
from debias_diffusion.data.captions import Captions
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.shards import FINISHED
from debias_diffusion.data.sources import data_digest, open_data
from debias_diffusion.data.workers import load_batches
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job

from .options import ShardsConfig


def write_shards(config: ShardsConfig) -> Path:
    """Writes the pairs in order as shards, and returns the output folder.

    A shard is complete or not there, and the same pairs give the same bytes. Bad records are skipped and listed in
    `bad-records.jsonl`. A killed run continues with the missing shards.

    Raises:
        UserError: the data cannot be used, too many records are bad, or the output has other content.
    """
    captions, images = open_data(config.data, config.images)
    settings = {name: getattr(config, name) for name in ("size", "per_shard", "quality")}
    with Job.open(config.output, "shards", settings, {"data": data_digest(config.data, captions)}) as job:
        writer = _Writer(config, job, captions, images)
        writer.write()
        writer.finish()
    print(f"Next: debias-diffusion train --data {job.folder}, without --images")
    return job.folder


def shrink(image: Image.Image, size: int, quality: int) -> bytes:
    """An RGB image as JPEG, shrunk until its shorter side has `size` pixels."""
    scale = size / max(1, min(image.size))
    if scale < 1:
        sides = [max(size, round(side * scale)) for side in image.size]
        image = image.resize(sides, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


class _Shrunk(Dataset):
    """Each record's image as a small JPEG, or a BadRecord."""

    def __init__(self, records: Sequence[Record], images: ImageSource, config: ShardsConfig):
        self.records, self.images, self.config = records, images, config

    def __getitem__(self, index: int) -> bytes | BadRecord:
        return read_or_bad(self.records[index], self._shrink)

    def _shrink(self, image: str) -> bytes:
        return shrink(self.images.open(image), self.config.size, self.config.quality)


class _Writer:
    """One run: the shards to write, and those already written.

    Attributes:
        bad: records without a usable caption.
        parts: {name: positions of its records} of all shards.
    """

    def __init__(self, config: ShardsConfig, job: Job, captions: Captions, images: ImageSource):
        self.config, self.job = config, job
        self.bad, self.records = captions.bad, captions.records
        self.dataset = _Shrunk(self.records, images, config)
        starts = range(0, len(self.records), config.per_shard)
        self.parts = {
            f"shard-{number:06}.tar": range(start, min(start + config.per_shard, len(self.records)))
            for number, start in enumerate(starts)
        }

    def write(self) -> None:
        """Writes the missing shards."""
        missing = {name: part for name, part in self.parts.items() if self.job.path(name, damaged="absent") is None}
        indices = [index for part in missing.values() for index in part]
        # Results come in the sampler's order, whichever worker is ready first.
        loader = DataLoader(self.dataset, batch_size=None, sampler=indices, num_workers=self.config.workers)
        done = len(self.records) - len(indices)
        bar = tqdm(desc="writing shards", total=len(self.records), initial=done, unit=" pairs")
        with bar, load_batches(loader) as batches:
            images = _counted(batches, bar)
            for name, part in missing.items():
                self._write_shard(name, part, images)
                self._require_any()

    def _write_shard(self, name: str, part: range, images: Iterator[bytes | BadRecord]) -> None:
        """Writes one shard. A sample's key is its position in the data."""
        left_out: list[dict] = []  # noted when the shard is written
        with (
            self.job.write(name, left_out=left_out) as temporary,
            tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for index in part:
                image, record = next(images), self.records[index]
                if isinstance(image, BadRecord):
                    left_out.append(asdict(image))
                    continue
                caption = {"id": record.sample_id, "caption": record.caption}
                caption |= {} if record.short is None else {"short_caption": record.short}
                add_file(tar, f"{index:09}.jpg", image)
                add_file(tar, f"{index:09}.json", json.dumps(caption).encode())

    def _left_out(self) -> dict[str, list[BadRecord]]:
        """The bad records of each shard that is written."""
        notes = {name: self.job.notes(name)["left_out"] for name in self.parts if name in self.job}
        return {name: [BadRecord(**record) for record in left_out] for name, left_out in notes.items()}

    def _require_any(self) -> None:
        """Raises UserError if no image could be read so far: the image folder is wrong."""
        left_out = self._left_out()
        if all(len(bad) == len(self.parts[name]) for name, bad in left_out.items()):
            first = next(iter(left_out.values()))[0]
            tried = min(self.config.per_shard, len(self.records))
            raise UserError(
                f"None of the first {tried} images can be read, for example {first.detail}. Is "
                f"{str(self.dataset.images.root)!r} the folder that the image paths start from?"
            )

    def finish(self) -> None:
        """Reports bad records and notes that the shards are finished. Raises UserError if too many records are bad."""
        output, left_out = self.job.folder, self._left_out()
        bad = [*self.bad, *chain(*left_out.values())]
        (output / BAD_RECORDS).unlink(missing_ok=True)
        report_bad(bad, output)
        pairs = len(self.records) + len(self.bad)
        advice = (
            f"All are named in {str(output / BAD_RECORDS)!r}. Mend them and give a new output, or raise --max-bad "
            "to keep the shards that are written."
        )
        check_share(bad, pairs, self.config.max_bad, advice)
        samples = {name: len(part) - len(left_out[name]) for name, part in self.parts.items()}
        self.job.note(FINISHED, samples=samples)
        size = sum((output / name).stat().st_size for name in samples)
        written = f"{sum(samples.values())} of {pairs} pairs in {len(samples)} shards"
        print(f"Wrote {written}, {size / 1e6:,.1f} MB, to {output}")


def _counted(images: Iterable, bar: tqdm) -> Iterator:
    for image in images:
        bar.update()
        yield image


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file without time and owner, so that the same content gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
