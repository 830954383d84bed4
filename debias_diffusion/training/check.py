"""Checks of the data, before and during training, and the report of bad records."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data import BadRecord, ImageSource, Record, is_shards, open_data, verify_shards
from ..data.dataset import read_or_bad
from ..data.workers import load_batches
from ..errors import UserError
from ..sentences import split_sentences
from ..tokens import CaptionTokenizer
from .config import TrainConfig

BAD_RECORDS = "bad-records.jsonl"
_LOOKED_UP = 200  # images whose presence is checked before a run
_PRINTED = 10  # bad records printed; all are in the file


class _CheckedRecords(Dataset):
    """(sentences, tokens of the whole caption, BadRecord or None) of every record."""

    def __init__(self, records: Sequence[Record], images: ImageSource, tokenizer: CaptionTokenizer):
        self.records, self.images, self.tokenizer = records, images, tokenizer

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[int, int, BadRecord | None]:
        record = self.records[index]
        image = read_or_bad(record, self.images.open)
        bad = image if isinstance(image, BadRecord) else None
        return len(split_sentences(record.caption)), self.tokenizer.count(record.caption), bad


def check_data(config: TrainConfig, tokenizer: CaptionTokenizer) -> dict:
    """Decodes every image, tokenizes every caption, prints statistics, and lists every bad record in a file.

    Shards are also compared with their checksums.

    Returns:
        {"pairs", "usable", "bad": {kind: count}, "sentences_mean", "tokens_mean", "tokens_p95", "over_window"}

    Raises:
        UserError: more than `config.max_bad` of the records are unusable.
    """
    captions, images = open_data(config.data, config.images)
    records = _CheckedRecords(captions.records, images, tokenizer)
    loader = DataLoader(records, batch_size=None, num_workers=config.workers)
    with load_batches(loader) as rows:
        checked = list(tqdm(rows, desc="reading", unit=" pairs", total=len(records)))
    sentences, tokens = np.array([row[0] for row in checked]), np.array([row[1] for row in checked])
    bad = [*captions.bad, *(row[2] for row in checked if row[2] is not None)]
    changed = verify_shards(config.data) if is_shards(Path(config.data)) else []
    report = {
        "pairs": len(captions.records) + len(captions.bad),
        "usable": len(captions.records) + len(captions.bad) - len(bad),
        "bad": dict(Counter(record.kind for record in bad)),
        "sentences_mean": round(float(sentences.mean()), 1),
        "tokens_mean": round(float(tokens.mean()), 1),
        "tokens_p95": round(float(np.percentile(tokens, 95)), 1),
        "over_window": int((tokens > tokenizer.context_length).sum()),
    }
    print(
        f"{report['usable']} of {report['pairs']} pairs can be used.\n"
        f"Captions: {report['sentences_mean']} sentences and {report['tokens_mean']} tokens on average, 95% within "
        f"{report['tokens_p95']:.0f}; {report['over_window']} are longer than the context length of "
        f"{tokenizer.context_length} and would be cut."
    )
    report_bad(bad + changed, Path(config.output))
    check_share(len(bad), report["pairs"], config)
    return report


def look_for_images(records: Sequence[Record], images: ImageSource, max_bad: float) -> int:
    """How many of a sample of the images, spread evenly over the data, are missing.

    Raises:
        UserError: all of them are missing, or a larger share than `max_bad`.
    """
    sample = records[:: max(1, len(records) // _LOOKED_UP)]
    missing = [record.image for record in sample if not images.is_there(record.image)]
    if len(missing) == len(sample):
        raise UserError(
            f"The image folder {str(images.root)!r} holds none of the images, for example {missing[0]!r}. Give the "
            "folder that the data file's image paths start from. Links that lead out of it are not followed."
        )
    if len(missing) > max(1, max_bad * len(sample)):
        raise UserError(
            f"Of {len(sample)} images looked up in {str(images.root)!r}, {len(missing)} are missing, for example "
            f"{missing[0]!r}; --max-bad allows a share of {max_bad:g}. `train --check-data` names them all."
        )
    return len(missing)


def report_bad(bad: list[BadRecord], output: Path) -> None:
    """Prints how many bad records there are of each kind, and the first ten; adds all to the output folder's file."""
    if not bad:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(record.kind for record in bad).most_common())
    print(f"{len(bad)} records cannot be used ({kinds}):")
    for record in bad[:_PRINTED]:
        print(f"  {record}")
    BadRecordsFile(output).add(bad)
    print(f"  all of them: {output / BAD_RECORDS}")


class BadRecordsFile:
    """The list of bad records in an output folder, each of them once, however often it is met."""

    def __init__(self, output: Path):
        self.path = output / BAD_RECORDS
        self._lines: set[bytes] = set()
        self._end = 0  # bytes read so far; other processes may append

    def add(self, bad: Sequence[BadRecord]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            file.seek(self._end)
            written = file.read()
            self._end += len(written)
            self._lines.update(written.splitlines())
            lines = dict.fromkeys(json.dumps(vars(record), ensure_ascii=False).encode() for record in bad)
            new = [line for line in lines if line not in self._lines]
            if new and written and not written.endswith(b"\n"):  # a kill cut the last line short
                file.write(b"\n")
            file.write(b"".join(line + b"\n" for line in new))


def check_share(bad: int, records: int, config: TrainConfig) -> None:
    """Raises UserError if more than the allowed share of the records is bad."""
    if bad > config.max_bad * records:
        raise UserError(
            f"{bad} of {records} records cannot be used, more than the share of {config.max_bad:g} that --max-bad "
            f"allows. They are named in {str(Path(config.output) / BAD_RECORDS)!r}. Mend the images where they "
            "are, or start the same command with a larger --max-bad: the run continues."
        )
