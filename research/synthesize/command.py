"""`python -m research synthesize`: captions for images, written by a multimodal model and cleaned."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from math import ceil
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
from debias_diffusion.devices import pick_precision
from debias_diffusion.eval.report import versions
from debias_diffusion.files import atomic_file, bytes_digest, write_json
from debias_diffusion.jobs import Job
from debias_diffusion.processes import Processes
from debias_diffusion.text.sentences import split_sentences

from .chat_model import Asked, ChatModel, Server, answers, model_digest
from .cleaning import drop_unfinished, fault
from .instructions import draw_instruction
from .options import SynthesizeConfig
from .sheet import Sheet

CAPTIONS, REMOVED, SETTINGS, REPORT = "captions.jsonl", "removed.jsonl", "synthesize.json", "report.html"

# What became of one image: as captions.jsonl, removed.jsonl or bad-records.jsonl has it.
Row = dict[str, str]


def synthesize(config: SynthesizeConfig) -> Path:
    """Captions all images and writes what is kept and what is removed. Returns the output folder.

    The images are divided into parts, each an item of the job: its rows, and for shards its shard too. Started by
    `accelerate launch`, the processes share the parts. A killed run continues with the missing parts, and the same
    command gives the same files, whatever the number of processes.

    Raises:
        UserError: the model or the data cannot be used, there are no images, too many are unreadable, or the output
            has other settings.
    """
    return _Synthesis(config).run()


class _Synthesis:
    """One run.

    Attributes:
        records: of the images; a caption is "" where the data have none.
        bad: records without a usable caption.
        parts: {name: positions of its records} of all parts.
    """

    def __init__(self, config: SynthesizeConfig):
        self.config, self.output = config, Path(config.output)
        self.processes = Processes.connect(config.device)
        self.precision = pick_precision(config.precision, self.processes.device)
        self.into_shards = config.data is not None and is_shards(Path(config.data))

    def run(self) -> Path:
        processes = self.processes
        with processes.only_main_prints():
            processes.from_main(lambda: check_free(self.output))
            model = processes.from_main(lambda: model_digest(self.config.model, self.config.server))
            inputs = {"data": self._read(), "model": model}
            self.parts = divide(len(self.records), self.config.per_part, "parts/part-{:06}.jsonl")
            names = ("kind", "max_new_tokens", "seed", "per_part")
            settings = {name: getattr(self.config, name) for name in names} | {"precision": self.precision}
            opened = Job.open(self.output, "synthesize", settings, inputs) if processes.is_main else nullcontext()
            with opened as self.job:
                missing = processes.from_main(self._missing)
                for made in processes.gathered_by_round(self._made(missing), ceil(len(missing) / processes.count)):
                    if processes.is_main:
                        self._write(made)
                processes.from_main(lambda: self._finish(settings | inputs))
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
        missing = [part for part in self.parts if not all(self.job.path(item, "absent") for item in items[part])]
        print(f"{len(items) - len(missing)} of {len(items)} parts are finished.")
        return missing

    def _made(self, missing: Sequence[str]) -> Iterator[list[tuple[str, list[Row]]]]:
        """This process's share of the missing parts, one after the other."""
        mine, config, count = missing[self.processes.index :: self.processes.count], self.config, self.processes.count
        if not mine:
            return
        if config.server:
            model = Server(config.server, config.model, config.batch)
        else:
            model = ChatModel(config.model, self.processes.device, self.precision, config.batch)
        indices = [index for part in mine for index in self.parts[part]]
        shared = f", each of {count} processes" if count > 1 else ""
        bar = {"desc": f"writing captions{shared}", "unit": " images", "disable": not self.processes.is_main}
        read = partial(read_or_bad, read=self.images.open)
        with read_records(self.records, read, config.workers, indices, **bar) as opened:
            for part in mine:
                yield [(part, self._rows(model, self.parts[part], opened))]

    def _write(self, made: Sequence[tuple[str, list[Row]]]) -> None:
        for part, rows in made:
            if self.into_shards:
                write_tar(self.job, _shard(part), self._members(part, rows))
            with self.job.write(part, kept=sum("caption" in row for row in rows)) as temporary:
                temporary.write_bytes(b"".join(map(_line, rows)))

    def _rows(self, model: ChatModel | Server, part: range, opened: Iterator[Image.Image | BadRecord]) -> list[Row]:
        """What becomes of the images of a part, in order."""
        rows: dict[int, Row] = {}

        def asked() -> Iterator[Asked]:
            for index, image in zip(part, islice(opened, len(part)), strict=True):
                record, shapes = self.records[index], image
                if not isinstance(image, BadRecord):  # the processor refuses some, such as one of a single pixel
                    shapes = read_or_bad(record, lambda _, size=image.size: model.shapes(size))
                if isinstance(shapes, BadRecord):
                    rows[index] = asdict(shapes)
                else:
                    yield Asked(image, self._prompt(record), index)

        for index, text in answers(model, asked(), self.config.max_new_tokens):
            rows[index] = self._judged(self.records[index], text)
        return [rows[index] for index in part]

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
        removed = ", ".join(f"{count} {kind}" for kind, count in counts["removed"].items())
        print(
            f"Kept {counts['kept']} captions of {counts['images']} images; removed {sum(counts['removed'].values())}"
            f"{f' ({removed})' if removed else ''}, unreadable {counts['unreadable']}."
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
