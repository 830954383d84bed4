"""Checks of the data, before and during training, and the report of bad records."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from torch.utils.data import DataLoader
from tqdm import tqdm

from ..errors import UserError
from ..text.tokens import CaptionTokenizer
from .bad_records import BAD_RECORDS, BadRecord, check_share, read_or_bad, report_bad, too_many
from .caption_statistics import CaptionMeasure, describe_captions, measure_caption
from .dataset import NO_SHORT_CAPTION, without_short_caption
from .images import ImageSource, is_there
from .records import Record
from .shards import is_shards, verify_shards
from .sources import open_data
from .workers import count_workers, load_batches

_LOOKED_UP = 200  # images whose presence is checked before a run
_ADD_SHORT = (
    "Add a short_caption to the entries of a JSON or JSONL file or of shards, or take another --sampling, such as "
    "summary"
)


def check_record(
    record: Record, images: ImageSource, tokenizer: CaptionTokenizer, reads_short: bool = False
) -> tuple[CaptionMeasure, BadRecord | None]:
    """The counts of its caption, and what is bad about it."""
    fault = without_short_caption(record) if reads_short else None
    image = fault or read_or_bad(record, images.open)
    return measure_caption(record.caption, tokenizer), image if isinstance(image, BadRecord) else None


def check_data(
    data: str,
    images: str | None,
    output: str,
    tokenizer: CaptionTokenizer,
    *,
    reads_short: bool = False,
    max_bad: float = 0.01,
    workers: int | Literal["auto"] = "auto",
) -> None:
    """Decodes every image, tokenizes every caption, prints statistics, and lists every bad record in a file.

    Shards are also compared with their checksums.

    Raises:
        UserError: more than `max_bad` of the records are unusable.
    """
    captions, source = open_data(data, images)
    check = partial(check_record, images=source, tokenizer=tokenizer, reads_short=reads_short)
    loader = DataLoader(captions.records, None, num_workers=count_workers(workers), collate_fn=check)
    with load_batches(loader) as rows:
        checked = list(tqdm(rows, desc="reading", unit=" pairs", total=len(captions.records)))
    bad = [*captions.bad, *(row[1] for row in checked if row[1] is not None)]
    changed = verify_shards(data) if is_shards(Path(data)) else []
    pairs = len(captions.records) + len(captions.bad)
    measures = [measure for measure, _ in checked]
    print(
        f"{pairs - len(bad)} of {pairs} pairs can be used.\nCaptions: {describe_captions(measures)} "
        f"{sum(measure.tokens > tokenizer.context_length for measure in measures)} are longer than the context length "
        f"of {tokenizer.context_length} and would be cut."
    )
    report_bad(bad + changed, Path(output))
    check_share(bad, pairs, max_bad, continue_hint(output, bad))


def look_for_images(records: Sequence[Record], images: ImageSource, max_bad: float) -> int:
    """How many of a sample of the images, spread evenly over the data, are missing.

    Raises:
        UserError: all of them are missing, or a larger share than `max_bad`.
    """
    sample = [*records[:: max(1, len(records) // _LOOKED_UP)]]
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
    sample = [*records[:: max(1, len(records) // _LOOKED_UP)]]
    missing = [record for record in sample if record.short is None]
    if too_many(len(missing), len(sample), max_bad):
        raise UserError(
            f"sampling is given, but of {len(sample)} records looked up {len(missing)} have no short_caption, for "
            f"example that of {missing[0].image!r}. {_ADD_SHORT}."
        )


def continue_hint(output: str, bad: Sequence[BadRecord]) -> str:
    """What to do when too many records of the run in `output` are bad, `bad` among them."""
    kinds = {record.kind for record in bad}
    are_images = all(kind.endswith("image") for kind in kinds)
    mend = "Mend the images where they are" if are_images else "Mend them in the data"
    mend = _ADD_SHORT if NO_SHORT_CAPTION in kinds else mend
    return (
        f"They are named in {str(Path(output) / BAD_RECORDS)!r}. {mend}, or start the same command with a "
        "larger --max-bad: the run continues."
    )
