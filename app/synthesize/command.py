"""`debias-diffusion synthesize`: captions for images, written by a multimodal model and cleaned."""

import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TextIO

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from debias_diffusion.app.shards import add_file
from debias_diffusion.data import (
    BadRecord,
    ImageSource,
    PackedRecords,
    Record,
    ShardImages,
    data_digest,
    is_shards,
    open_data,
)
from debias_diffusion.data.bad_records import (
    BAD_RECORDS,
    check_share,
    read_or_bad,
    report_bad,
    unreadable,
)
from debias_diffusion.data.caption_statistics import summarise
from debias_diffusion.data.captions import fold
from debias_diffusion.data.image_folder import list_images
from debias_diffusion.data.shards import FINISHED, file_ending
from debias_diffusion.data.workers import load_batches
from debias_diffusion.devices import pick_precision
from debias_diffusion.errors import UserError
from debias_diffusion.eval.report import versions
from debias_diffusion.eval.session import Processes
from debias_diffusion.files import (
    atomic_file,
    bytes_digest,
    folder_lock,
    write_json,
)
from debias_diffusion.jobs import Job
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

from ..options import SynthesizeConfig
from ..written_folder import check_free
from .captioner import Asked, Captioner, model_digest
from .cleaning import drop_unfinished, fault
from .instructions import draw_instruction
from .parts import Outcome, Parts, json_line
from .sheet import Summary, write_sheet

CAPTIONS, REMOVED, SETTINGS, REPORT = "captions.jsonl", "removed.jsonl", "synthesize.json", "report.html"
_CONTEXT_LENGTH = 248  # of the tokenizer that counts for the report


def synthesize(config: SynthesizeConfig) -> Path:
    """Captions all images and writes what is kept and what is removed. Returns the output folder.

    Started by `accelerate launch`, the processes share the parts. A killed run continues with the missing parts, and
    the same command gives the same files, whatever the number of processes.

    Raises:
        UserError: the model or the data cannot be used, there are no images, too many are unreadable, or the output
            has other settings.
    """
    return _Synthesis(config).run()


class _Opened(Dataset):
    """Each record's image, or a BadRecord."""

    def __init__(self, records: Sequence[Record], images: ImageSource):
        self.records, self.images = records, images

    def __getitem__(self, index: int) -> Image.Image | BadRecord:
        return read_or_bad(self.records[index], self.images.open)


class _Synthesis:
    """One run.

    Attributes:
        records: of the images; a caption is "" where the data have none.
        bad: records without a usable caption.
    """

    def __init__(self, config: SynthesizeConfig):
        self.config, self.output = config, Path(config.output)
        self.processes = Processes(config.device)
        self.precision = pick_precision(config.precision, self.processes.device)
        self.into_shards = config.data is not None and is_shards(Path(config.data))

    def run(self) -> Path:
        with self.processes.only_main_prints():
            model = self.processes.from_main(self._check)
            self._read()
            names = ("kind", "max_new_tokens", "seed", "per_part")
            settings = {name: getattr(self.config, name) for name in names} | {"precision": self.precision}
            inputs = {"data": self.data_sha256, "model": model}
            busy = f"Another process is writing to {str(self.output)!r}. Wait for it, or give another output."
            self.output.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                self.processes.from_main(lambda: stack.enter_context(folder_lock(self.output, busy)))
                self.job = stack.enter_context(Job.open(self.output, "synthesize", settings, inputs, shared=True))
                self.parts = Parts(self.job, len(self.records), self.config.per_part)
                missing = self.processes.from_main(self._missing)
                self._write(missing)
                self.processes.gathered([])  # all have written
                self.processes.from_main(lambda: self._finish(settings | inputs))
        return self.output

    def _check(self) -> str:
        """The digest of the model, once the output can be used."""
        check_free(self.output)
        return model_digest(self.config.model)

    def _read(self) -> None:
        config, self.bad = self.config, []
        if config.data is None:
            names, self.images = list_images(config.images)
            self.records = PackedRecords(Record(name, name, "") for name in names)
            self.data_sha256 = bytes_digest(f"{name}\n".encode() for name in names)
            return
        captions, self.images = open_data(config.data, config.images)
        self.records, self.bad = captions.records, captions.bad
        self.data_sha256 = data_digest(config.data, captions)

    def _missing(self) -> list[int]:
        """The parts to write."""
        numbers = range(len(self.parts.ranges))
        missing = [number for number in numbers if not self._is_whole(number)]
        if len(missing) < len(numbers):
            print(f"{len(numbers) - len(missing)} of {len(numbers)} parts are finished.")
        return missing

    def _is_whole(self, number: int) -> bool:
        shard = not self.into_shards or self.job.path(_shard(number), damaged="absent")
        return bool(shard) and self.parts.is_whole(number)

    def _write(self, missing: Sequence[int]) -> None:
        """Writes this process's share of the missing parts. Raises UserError if too many images are unreadable."""
        mine = missing[self.processes.index :: self.processes.count]
        if not mine:
            return
        config, device = self.config, self.processes.device
        captioner = Captioner(config.model, device, self.precision, config.max_new_tokens, config.batch)
        indices = [index for number in mine for index in self.parts.ranges[number]]
        # Results come in the sampler's order, whichever worker is ready first.
        loader = DataLoader(
            _Opened(self.records, self.images), batch_size=None, sampler=indices, num_workers=config.workers
        )
        shared = f", each of {self.processes.count} processes" if self.processes.count > 1 else ""
        bar = tqdm(
            desc=f"writing captions{shared}", total=len(indices), unit=" images", disable=not self.processes.is_main
        )
        bad = list(self.bad)
        with bar, load_batches(loader) as opened:
            for number in mine:
                part = self.parts.ranges[number]
                outcomes = self._outcomes(captioner, part, islice(opened, len(part)), bar)
                bad += [outcome.bad for outcome in outcomes if outcome.bad]
                if number == 0 and all(outcome.bad for outcome in outcomes):
                    raise UserError(
                        f"None of the first {len(part)} images can be read, for example {outcomes[0].bad}. Is "
                        f"{str(self.images.root)!r} the folder that the image paths start from?"
                    )
                if self.into_shards:
                    self._write_shard(number, outcomes)
                self.parts.write(number, outcomes)
                self._check_share(bad)

    def _outcomes(
        self, captioner: Captioner, part: range, opened: Iterator[Image.Image | BadRecord], bar: tqdm
    ) -> list[Outcome]:
        """What becomes of the images of a part, in order."""
        outcomes: dict[int, Outcome] = {}

        def asked() -> Iterator[Asked]:
            for index, image in zip(part, opened, strict=True):
                bad = image if isinstance(image, BadRecord) else _bad_shape(captioner, image, self.records[index])
                if bad is None:
                    yield Asked(index, image, self._prompt(self.records[index]))
                else:
                    outcomes[index] = Outcome(self._name(self.records[index]), bad=bad)
                    bar.update()

        for index, text in captioner.captions(asked()):
            outcomes[index] = self._judged(self.records[index], text)
            bar.update()
        return [outcomes[index] for index in part]

    def _prompt(self, record: Record) -> str:
        return draw_instruction(self.config.kind, self.config.seed, record.sample_id)

    def _judged(self, record: Record, text: str) -> Outcome:
        """The outcome of what the model wrote."""
        kind = self.config.kind
        finished = drop_unfinished(text, kind)
        reason = fault(finished, kind)
        name, prompt = self._name(record), self._prompt(record)
        if reason:
            return Outcome(name, prompt, text=text.strip(), reason=reason)
        # A model that was asked for one sentence may write more.
        written = fold(finished if kind == "long" else split_sentences(finished)[0])
        if not record.caption:
            return Outcome(name, prompt, caption=written)
        caption, short = (written, record.caption) if kind == "long" else (record.caption, written)
        return Outcome(name, prompt, caption=caption, short_caption=short)

    def _name(self, record: Record) -> str:
        """The image as the result names it: its path, or the sample's id in shards."""
        return record.sample_id if self.into_shards else record.image

    def _write_shard(self, number: int, outcomes: Sequence[Outcome]) -> None:
        """Writes the kept pairs of a part with their images, byte for byte. A sample's key is its place in the data."""
        images: ShardImages = self.images
        kept = sum(outcome.caption is not None for outcome in outcomes)
        with (
            self.job.write(_shard(number), samples=kept) as temporary,
            tarfile.open(temporary, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for index, outcome in zip(self.parts.ranges[number], outcomes, strict=True):
                if outcome.caption is not None:
                    image = self.records[index].image
                    add_file(tar, f"{index:09}.{file_ending(image)}", images.read(image))
                    add_file(tar, f"{index:09}.json", json_line(outcome.kept()).encode())

    def _check_share(self, bad: Sequence[BadRecord]) -> None:
        advice = f"{str(self.output / BAD_RECORDS)!r} names them at the end; raise --max-bad to go on without them."
        check_share(bad, len(self.records) + len(self.bad), self.config.max_bad, advice)

    def _finish(self, settings: dict) -> None:
        """Joins the parts and writes the report. Raises UserError if too many images are unreadable."""
        (self.output / BAD_RECORDS).unlink(missing_ok=True)
        summary = Summary(self.parts.kept(), CaptionTokenizer(clip_tokenizer(_CONTEXT_LENGTH), _CONTEXT_LENGTH))
        with ExitStack() as stack:
            removed = stack.enter_context(self._lines(REMOVED))
            captions = None if self.into_shards else stack.enter_context(self._lines(CAPTIONS))
            for index, outcome in enumerate(self.parts.outcomes()):
                summary.add(index, outcome)
                if outcome.reason is not None:
                    removed.write(json_line(outcome.removed()))
                elif captions and outcome.caption is not None:
                    captions.write(json_line(outcome.kept()))
            bad = [*self.bad, *summary.bad]
            report_bad(bad, self.output)
            self._check_share(bad)
        if self.into_shards:
            shards = [_shard(number) for number in range(len(self.parts.ranges))]
            self.job.note(FINISHED, samples={name: self.job.notes(name)["samples"] for name in shards})
        counts = {
            "images": len(self.records) + len(self.bad),
            "kept": summary.kept,
            "removed": dict(sorted(summary.removed.items())),
            "unreadable": len(bad),
        }
        statistics = summarise(summary.measures) if summary.kept else None
        write_sheet(self.output / REPORT, summary, self.records, self.images, settings, counts, statistics)
        given = {name: getattr(self.config, name) for name in ("model", "data", "images")}
        content = {"settings": settings, "given": given, "versions": versions(), "counts": counts}
        write_json(self.output / SETTINGS, content | {"captions": statistics and asdict(statistics)})
        self._tell(counts, statistics)

    @contextmanager
    def _lines(self, name: str) -> Iterator[TextIO]:
        """A file of the output to write, which is there once it is complete."""
        with atomic_file(self.output / name) as temporary, open(temporary, "w", encoding="utf-8") as file:
            yield file

    def _tell(self, counts: dict, statistics) -> None:
        removed = ", ".join(f"{count} {kind}" for kind, count in counts["removed"].items())
        print(
            f"Kept {counts['kept']} captions of {counts['images']} images; removed {sum(counts['removed'].values())}"
            f"{f' ({removed})' if removed else ''}, unreadable {counts['unreadable']}."
        )
        print(f"What they look like: {self.output / REPORT}. What was removed, and why: {self.output / REMOVED}")
        if not counts["kept"]:
            print("Nothing is left to train on. Look at what the model wrote, and try another one.")
            return
        print(statistics)
        if self.into_shards:
            print(f"Next: debias-diffusion train --data {self.output}, without --images")
        else:
            print(f"Next: debias-diffusion train --data {self.output / CAPTIONS} --images {self.images.root}")


def _shard(number: int) -> str:
    return f"shard-{number:06}.tar"


def _bad_shape(captioner: Captioner, image: Image.Image, record: Record) -> BadRecord | None:
    """The bad record of an image that the model's processor refuses, such as one of a single pixel."""
    try:
        captioner.shapes(image)
    except Exception as error:
        return unreadable(record, error)
    return None
