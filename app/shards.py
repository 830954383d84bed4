"""Writes image-caption pairs as WebDataset shards of small JPEGs, so that training need not decode large images."""

import dataclasses
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.data import BadRecord, ImageSource, Record, data_digest, open_data
from debias_diffusion.data.bad_records import BAD_RECORDS, check_share, read_or_bad, report_bad
from debias_diffusion.data.shards import MANIFEST, read_manifest
from debias_diffusion.data.workers import load_batches
from debias_diffusion.errors import UserError
from debias_diffusion.files import describe_changes, folder_lock, hidden_sibling, new_file, sha256, write_json

from .options import ShardsConfig


def write_shards(config: ShardsConfig) -> Path:
    """Writes the pairs in order as shards, with `shards.json`, and returns the output folder.

    A shard is complete or not there, and the same pairs give the same bytes. Bad records are skipped and listed in
    `bad-records.jsonl`. A killed run continues with the missing shards.

    Raises:
        UserError: the data cannot be used, too many records are bad, or the output has other content.
    """
    output = Path(config.output)
    _check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    with folder_lock(output, f"Another process writes to {config.output!r}. Wait for it, or give another output."):
        writer = _Writer(config, output)
        writer.write()
        writer.finish()
    print(f"Next: debias-diffusion train --data {output}, without --images")
    return output


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
        shards: {name: entry of `shards.json`} of the finished shards.
    """

    def __init__(self, config: ShardsConfig, output: Path):
        self.config, self.output = config, output
        captions, images = open_data(config.data, config.images)
        self.bad, self.records = captions.bad, captions.records
        self.dataset = _Shrunk(self.records, images, config)
        self.settings = {name: getattr(config, name) for name in ("size", "per_shard", "quality")}
        self.settings["data_sha256"] = data_digest(config.data, captions)
        starts = range(0, len(self.records), config.per_shard)
        self.parts = {
            f"shard-{number:06}.tar": range(start, min(start + config.per_shard, len(self.records)))
            for number, start in enumerate(starts)
        }
        self.shards = self._done()

    def _done(self) -> dict[str, dict]:
        """The finished shards of an earlier run. Raises UserError if it had other settings."""
        manifest = read_manifest(self.output) or {"settings": self.settings, "shards": []}
        before, now = manifest["settings"], self.settings
        if before != now:
            raise UserError(
                f"The shards in {str(self.output)!r} were made with other settings: {describe_changes(before, now)}. "
                "Give another output, go back to those settings, or remove the folder."
            )
        return {shard["name"]: shard for shard in manifest["shards"] if _is_whole(self.output, shard)}

    def write(self) -> None:
        """Writes the missing shards."""
        missing = {name: part for name, part in self.parts.items() if name not in self.shards}
        self._save(complete=False)
        indices = [index for part in missing.values() for index in part]
        # Results come in the sampler's order, whichever worker is ready first.
        loader = DataLoader(self.dataset, batch_size=None, sampler=indices, num_workers=self.config.workers)
        done = len(self.records) - len(indices)
        bar = tqdm(desc="writing shards", total=len(self.records), initial=done, unit=" pairs")
        with bar, load_batches(loader) as batches:
            images = _counted(batches, bar)
            for name, part in missing.items():
                self.shards[name] = self._write_shard(name, part, images)
                self._save(complete=False)
                self._require_any()

    def _write_shard(self, name: str, part: range, images: Iterator[bytes | BadRecord]) -> dict:
        """Writes one shard and returns its entry of `shards.json`. A sample's key is its position in the data."""
        temporary, bad = hidden_sibling(self.output / name, ".tmp"), []
        try:
            with new_file(temporary) as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                    for index in part:
                        image, record = next(images), self.records[index]
                        if isinstance(image, BadRecord):
                            bad.append(image)
                            continue
                        caption = {"id": record.sample_id, "caption": record.caption}
                        caption |= {} if record.short is None else {"short_caption": record.short}
                        add_file(tar, f"{index:09}.jpg", image)
                        add_file(tar, f"{index:09}.json", json.dumps(caption).encode())
                file.flush()
                os.fsync(file.fileno())
            entry = {"name": name, "samples": len(part) - len(bad), "bytes": temporary.stat().st_size}
            entry |= {"sha256": sha256(temporary), "left_out": [asdict(record) for record in bad]}
            os.replace(temporary, self.output / name)
        finally:
            temporary.unlink(missing_ok=True)
        return entry

    def _require_any(self) -> None:
        """Raises UserError if no image could be read so far: the image folder is wrong."""
        if not any(shard["samples"] for shard in self.shards.values()):
            first = next(record for shard in self.shards.values() for record in shard["left_out"])
            tried = min(self.config.per_shard, len(self.records))
            raise UserError(
                f"None of the first {tried} images can be read, for example {first['detail']}. Is "
                f"{str(self.dataset.images.root)!r} the folder that the image paths start from?"
            )

    def _save(self, complete: bool) -> None:
        shards = [self.shards[name] for name in self.parts if name in self.shards]
        manifest = {"settings": self.settings, "complete": complete, "shards": shards}
        write_json(self.output / MANIFEST, manifest)

    def finish(self) -> None:
        """Reports bad records and marks the shards as complete. Raises UserError if too many records are bad."""
        shards = self.shards.values()
        bad = [*self.bad, *(BadRecord(**record) for shard in shards for record in shard["left_out"])]
        (self.output / BAD_RECORDS).unlink(missing_ok=True)
        report_bad(bad, self.output)
        pairs = len(self.records) + len(self.bad)
        advice = (
            f"All are named in {str(self.output / BAD_RECORDS)!r}. Mend them and give a new output, or raise --max-bad "
            "to keep the shards that are written."
        )
        check_share(bad, pairs, self.config.max_bad, advice)
        self._save(complete=True)
        samples, size = (sum(shard[name] for shard in shards) for name in ("samples", "bytes"))
        print(f"Wrote {samples} of {pairs} pairs in {len(shards)} shards, {size / 1e6:,.1f} MB, to {self.output}")


def _counted(images: Iterable, bar: tqdm) -> Iterator:
    for image in images:
        bar.update()
        yield image


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file without time and owner, so that the same content gives the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _is_whole(output: Path, shard: dict) -> bool:
    path = output / Path(shard["name"]).name
    if not os.path.isfile(path) or path.stat().st_size != shard["bytes"]:
        return False
    fields = {field.name for field in dataclasses.fields(BadRecord)}
    left_out = shard.get("left_out")
    return isinstance(left_out, list) and all(
        isinstance(record, dict) and record.keys() == fields and all(isinstance(text, str) for text in record.values())
        for record in left_out
    )


def _check_output(output: Path) -> None:
    """Raises UserError if the output is no folder, or has content but no manifest of this command."""
    # Hidden files may be the lock and an unfinished manifest that a kill left.
    used = output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir())
    if used and not (output / MANIFEST).is_file():
        raise UserError(f"The output {str(output)!r} exists and holds something else. Give a new folder.")
    if output.exists() and not output.is_dir():
        raise UserError(f"The output {str(output)!r} is a file. Give a new folder.")
