"""`python -m research synthesize`: captions for images, written by a multimodal model on a server and cleaned."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from PIL import Image

from debias_diffusion.app.shards import divide, write_tar
from debias_diffusion.app.written_folder import check_free
from debias_diffusion.data.bad_records import BadRecord, look_up, read_or_bad, report_all
from debias_diffusion.data.captions import fold
from debias_diffusion.data.check import describe_captions
from debias_diffusion.data.image_folder import list_images
from debias_diffusion.data.records import PackedRecords, Record
from debias_diffusion.data.shards import FINISHED
from debias_diffusion.data.sources import data_digest, is_shards, open_data
from debias_diffusion.data.workers import read_records
from debias_diffusion.eval.multimodal import ServerModel
from debias_diffusion.eval.report import image_url, versions
from debias_diffusion.files import atomic_file, bytes_digest, write_json
from debias_diffusion.jobs import Job
from debias_diffusion.text.sentences import split_sentences

from ..options import SynthesizeConfig
from .cleaning import drop_unfinished, fault
from .instructions import draw_instruction
from .sheet import Sheet

CAPTIONS, REMOVED, SETTINGS, REPORT = "captions.jsonl", "removed.jsonl", "synthesize.json", "report.html"

# What became of one image: as captions.jsonl, removed.jsonl or bad-records.jsonl has it.
Row = dict[str, str]


def synthesize(config: SynthesizeConfig) -> Path:
    """Captions all images and writes what is kept and what is removed. Returns the output folder.

    The images are divided into parts, each an item of the job: its rows, and for shards its shard too. A killed run
    continues with the missing parts, and the same answers give the same files.

    Raises:
        UserError: the model or the data cannot be used, there are no images, too many are unreadable, or the output
            has other settings. FailedError: the server does not answer.
    """
    return _Synthesis(config).run()


class Captioner(ServerModel):
    """A model on a server that describes images."""

    def describe(self, asked: Sequence[tuple[Image.Image, str]], max_tokens: int) -> list[str]:
        """The answer to each image and prompt, cut at `max_tokens`."""
        options = {"max_tokens": max_tokens}
        ask = partial(self._ask, options=options, parse=lambda choice: str.strip(choice["message"]["content"] or ""))
        return [*self._pool.map(lambda one: ask(image_url(one[0]), one[1]), asked)]


class _Synthesis:
    """One run.

    Attributes:
        records: of the images; a caption is "" where the data have none.
        bad: records without a usable caption.
        parts: {name: positions of its records} of all parts.
    """

    def __init__(self, config: SynthesizeConfig):
        self.config, self.output = config, Path(config.output)
        self.into_shards = config.data is not None and is_shards(Path(config.data))

    def run(self) -> Path:
        check_free(self.output)
        self.model = Captioner(self.config.server, self.config.model, self.config.batch)
        inputs = {"data": self._read()}
        self.parts = divide(len(self.records), self.config.per_part, "parts/part-{:06}.jsonl")
        names = ("model", "kind", "max_new_tokens", "seed", "per_part")
        settings = {name: getattr(self.config, name) for name in names}
        with Job.open(self.output, "synthesize", settings, inputs) as self.job:
            self._make(self._missing())
            self._finish(settings | inputs)
        return self.output

    def _read(self) -> str:
        """Reads the data. Returns their digest."""
        config, self.bad = self.config, []
        if config.data is None:
            names, self.images = list_images(config.images)
            self.records = PackedRecords.pack(Record(name, name, "") for name in names)
            return bytes_digest(f"{name}\n".encode() for name in names)
        captions, self.images = open_data(config.data, config.images)
        self.records, self.bad = captions.records, captions.bad
        look_up(self.records, self.images, config.max_bad)
        return data_digest(config.data, captions)

    def _missing(self) -> list[str]:
        """The parts to write."""
        items = {part: [part, _shard(part)] if self.into_shards else [part] for part in self.parts}
        missing = [part for part in self.parts if not all(map(self.job.is_whole, items[part]))]
        print(f"{len(items) - len(missing)} of {len(items)} parts are finished.")
        return missing

    def _make(self, missing: Sequence[str]) -> None:
        """Writes the missing parts."""
        indices = [index for part in missing for index in self.parts[part]]
        bar = {"desc": "writing captions", "unit": " images"}
        read = partial(read_or_bad, read=self.images.open)
        with read_records(self.records, read, self.config.workers, indices, **bar) as opened:
            for part in missing:
                rows = self._rows(self.parts[part], opened)
                if self.into_shards:
                    write_tar(self.job, _shard(part), self._members(part, rows))
                with self.job.write(part, kept=sum("caption" in row for row in rows)) as temporary:
                    temporary.write_bytes(b"".join(map(_line, rows)))

    def _rows(self, part: range, opened: Iterator[Image.Image | BadRecord]) -> list[Row]:
        """What becomes of the images of a part, in order."""
        rows: list[Row] = []
        pairs = zip([self.records[index] for index in part], opened, strict=False)
        while group := [*islice(pairs, self.config.batch)]:
            asked = [(image, self._prompt(record)) for record, image in group if not isinstance(image, BadRecord)]
            texts = iter(self.model.describe(asked, self.config.max_new_tokens))
            for record, image in group:
                rows.append(asdict(image) if isinstance(image, BadRecord) else self._judged(record, next(texts)))
        return rows

    def _prompt(self, record: Record) -> str:
        return draw_instruction(self.config.kind, self.config.seed, record.sample_id)

    def _judged(self, record: Record, text: str) -> Row:
        """The row of what the model wrote."""
        kind = self.config.kind
        finished = drop_unfinished(text, kind)
        image, prompt = record.sample_id if self.into_shards else record.image, self._prompt(record)
        if reason := fault(finished, kind):
            encodable = text.strip().encode("utf-8", "replace").decode()
            return {"image": image, "reason": reason, "text": encodable, "prompt": prompt}
        # A model that was asked for one sentence may write more.
        written = fold(finished if kind == "long" else split_sentences(finished)[0])
        if not record.caption:
            return {"image": image, "caption": written, "prompt": prompt}
        caption, short = (written, record.caption) if kind == "long" else (record.caption, written)
        return {"image": image, "caption": caption, "short_caption": short, "prompt": prompt}

    def _members(self, part: str, rows: Sequence[Row]) -> Iterator[tuple[str, bytes]]:
        """The kept pairs of a part with their images, byte for byte. A sample's key is its place in the data."""
        for index, row in zip(self.parts[part], rows, strict=True):
            if "caption" in row:
                image = self.records[index].image  # shard/member@offset+size
                ending = Path(image.rpartition("@")[0]).suffix.lower()
                yield f"{index:09}{ending}", self.images.read(image)
                yield f"{index:09}.json", _line(row)

    def _finish(self, settings: dict) -> None:
        """Joins the parts and writes the report.

        Raises:
            UserError: too many images are unreadable, or a part was changed since it was written.
        """
        job = self.job
        kept, total = {part: job.notes(part)["kept"] for part in self.parts}, len(self.records) + len(self.bad)
        bad, sheet = list(self.bad), Sheet(sum(kept.values()), self.images)
        with ExitStack() as stack:
            names = (REMOVED,) if self.into_shards else (REMOVED, CAPTIONS)
            paths = {name: stack.enter_context(atomic_file(self.output / name)) for name in names}
            files = {name: stack.enter_context(path.open("wb")) for name, path in paths.items()}
            for part, positions in self.parts.items():
                if self.into_shards:
                    job.path(_shard(part))
                for index, line in zip(positions, job.path(part).read_bytes().splitlines(keepends=True), strict=True):
                    row = json.loads(line)
                    if "where" in row:
                        bad.append(BadRecord(**row))
                        continue
                    sheet.add(row, self.records[index])
                    if file := files.get(REMOVED if "reason" in row else CAPTIONS):
                        file.write(line)
            report_all(bad, total, self.config.max_bad, self.output, "Raise --max-bad to go on without them.")
        if self.into_shards:
            self.job.note(FINISHED, samples={_shard(part): count for part, count in kept.items()})
        removed = dict(sorted(sheet.removed.items()))
        counts = {"images": total, "kept": len(sheet.measures), "removed": removed, "unreadable": len(bad)}
        statistics = describe_captions(sheet.measures) if sheet.measures else None
        sheet.write(self.output / REPORT, settings=settings, counts=counts, statistics=statistics)
        content = {"settings": settings, "versions": versions(), "counts": counts}
        write_json(self.output / SETTINGS, content | {"captions": statistics})
        self._tell(counts, statistics)

    def _tell(self, counts: dict, statistics: str | None) -> None:
        removed = ", ".join(f"{count} {kind}" for kind, count in counts["removed"].items()) or "none"
        print(
            f"{counts['images']} images: kept {counts['kept']}; unreadable {counts['unreadable']}; removed {removed}."
        )
        print(f"What they look like: {self.output / REPORT}. What was removed, and why: {self.output / REMOVED}")
        if statistics is not None:
            data = self.output if self.into_shards else f"{self.output / CAPTIONS} --images {self.images.root}"
            print(f"{statistics}\nNext: debias-diffusion train --data {data}")


def _shard(part: str) -> str:
    """The shard of a part."""
    return f"shard-{Path(part).stem.removeprefix('part-')}.tar"


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
