"""Checks of the data, before and during training, and the report of bad records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ..data.bad_records import BAD_RECORDS, BadRecord, check_share, read_or_bad, report_bad, too_many
from ..data.caption_statistics import CaptionMeasure, measure_caption, summarise
from ..data.dataset import NO_SHORT_CAPTION, without_short_caption
from ..data.images import ImageSource, is_there
from ..data.records import Record
from ..data.shards import is_shards, verify_shards
from ..data.sources import open_data
from ..data.workers import count_workers, load_batches
from ..errors import UserError
from ..text.tokens import CaptionTokenizer
from .config import RunConfig, TrainConfig

_LOOKED_UP = 200  # images whose presence is checked before a run
_ADD_SHORT = (
    "Add a short_caption to the entries of a JSON or JSONL file or of shards, or take another --sampling, such as "
    "summary"
)


@dataclass(eq=False, repr=False)
class _CheckedRecords(Dataset):
    """(measure of the caption, BadRecord or None) of every record."""

    records: Sequence[Record]
    images: ImageSource
    tokenizer: CaptionTokenizer
    reads_short: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[CaptionMeasure, BadRecord | None]:
        record = self.records[index]
        fault = without_short_caption(record) if self.reads_short else None
        image = fault or read_or_bad(record, self.images.open)
        bad = image if isinstance(image, BadRecord) else None
        return measure_caption(record.caption, self.tokenizer), bad


def check_data(config: TrainConfig, tokenizer: CaptionTokenizer) -> None:
    """Decodes every image, tokenizes every caption, prints statistics, and lists every bad record in a file.

    Shards are also compared with their checksums.

    Raises:
        UserError: more than `config.max_bad` of the records are unusable.
    """
    captions, images = open_data(config.data, config.images)
    records = _CheckedRecords(captions.records, images, tokenizer, config.make_method().reads_short)
    loader = DataLoader(records, batch_size=None, num_workers=count_workers(config.workers))
    with load_batches(loader) as rows:
        checked = list(tqdm(rows, desc="reading", unit=" pairs", total=len(records)))
    statistics, tokens = summarise(row[0] for row in checked), np.array([row[0].tokens for row in checked])
    bad = [*captions.bad, *(row[1] for row in checked if row[1] is not None)]
    changed = verify_shards(config.data) if is_shards(Path(config.data)) else []
    pairs = len(captions.records) + len(captions.bad)
    print(
        f"{pairs - len(bad)} of {pairs} pairs can be used.\n"
        f"Captions: {statistics.sentences_mean:.1f} sentences and {statistics.tokens_mean:.1f} tokens on average, 95% "
        f"within {np.percentile(tokens, 95):.0f}; {(tokens > tokenizer.context_length).sum()} are longer than the "
        f"context length of {tokenizer.context_length} and would be cut.\n{statistics}"
    )
    report_bad(bad + changed, Path(config.output))
    check_share(bad, pairs, config.max_bad, continue_hint(config, bad))


def look_for_images(records: Sequence[Record], images: ImageSource, max_bad: float) -> int:
    """How many of a sample of the images, spread evenly over the data, are missing.

    Raises:
        UserError: all of them are missing, or a larger share than `max_bad`.
    """
    sample = records[:: max(1, len(records) // _LOOKED_UP)]
    missing = [record.image for record in sample if not is_there(images, record.image)]
    if len(missing) == len(sample) or too_many(len(missing), len(sample), max_bad):
        raise UserError(
            f"Of {len(sample)} images looked up in {str(images.root)!r}, {len(missing)} are missing, for example "
            f"{missing[0]!r}; --max-bad allows a share of {max_bad:g}. Give the folder that the data file's image "
            "paths start from; `train --check-data` names all that are missing."
        )
    return len(missing)


def look_for_short_captions(records: Sequence[Record], max_bad: float) -> None:
    """Raises UserError if a larger share than `max_bad` of a sample of the records has no short caption."""
    sample = records[:: max(1, len(records) // _LOOKED_UP)]
    missing = [record for record in sample if record.short is None]
    if too_many(len(missing), len(sample), max_bad):
        raise UserError(
            f"sampling is given, but of {len(sample)} records looked up {len(missing)} have no short_caption, for "
            f"example that of {missing[0].image!r}. {_ADD_SHORT}."
        )


def continue_hint(config: RunConfig, bad: Sequence[BadRecord]) -> str:
    """What to do when too many records of a run are bad, `bad` among them."""
    kinds = {record.kind for record in bad}
    are_images = all(kind.endswith("image") for kind in kinds)
    mend = "Mend the images where they are" if are_images else "Mend them in the data"
    mend = _ADD_SHORT if NO_SHORT_CAPTION in kinds else mend
    return (
        f"They are named in {str(Path(config.output) / BAD_RECORDS)!r}. {mend}, or start the same command with a "
        "larger --max-bad: the run continues."
    )
