"""Reads all of the data before a training: how long its captions are, and what is bad about it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from ..text.sentences import join_sentences, split_sentences
from ..text.tokens import CaptionTokenizer
from .bad_records import BadRecord, check_share, continue_hint, read_or_bad, report_bad, without_short_caption
from .images import ImageSource
from .records import Record
from .shards import verify_shards
from .sources import is_shards, open_data
from .workers import read_records

Counts = tuple[int, int, int]  # of a caption: sentences, tokens, and tokens of its first two sentences


def measure_caption(caption: str, tokenizer: CaptionTokenizer) -> Counts:
    """The counts of one caption, SOT and EOT included.

    DeBias-CLIP's supplement, section F, has means of 46.6, 43.8 and 40.4 tokens for the first two sentences of DOCCI,
    and 49.5, 46.5 and 42.1 of Urban1k, under CLIP's, SigLIP's and SigLIP 2's tokenizers; it does not say whether SOT
    and EOT count.
    """
    sentences = split_sentences(caption)
    return len(sentences), tokenizer.count(caption), tokenizer.count(join_sentences(sentences[:2]))


def describe_captions(measures: Sequence[Counts]) -> str:
    """The means of captions, at least one, in words."""
    sentences, tokens, first_two = zip(*measures, strict=True)
    return (
        f"{fmean(sentences):.1f} sentences and {fmean(tokens):.1f} tokens on average, 95% within "
        f"{np.percentile(tokens, 95):.0f}; the first two sentences have {fmean(first_two):.1f}."
    )


def check_record(
    images: ImageSource, tokenizer: CaptionTokenizer, reads_short: bool, record: Record
) -> tuple[Counts, BadRecord | None]:
    """The counts of its caption, and what is bad about it."""
    fault = without_short_caption(record) if reads_short else None
    image = fault or read_or_bad(record, images.open)
    return measure_caption(record.caption, tokenizer), image if isinstance(image, BadRecord) else None


def check_data(
    data: str,
    images: str | None,
    output: str,
    tokenizer: CaptionTokenizer,
    reads_short: bool,
    max_bad: float,
    workers: int | Literal["auto"],
) -> None:
    """Decodes every image, tokenizes every caption, prints statistics, and lists every bad record in a file.

    Shards are also compared with their checksums.

    Raises:
        UserError: more than `max_bad` of the records are unusable.
    """
    captions, source = open_data(data, images)
    check = partial(check_record, source, tokenizer, reads_short)
    with read_records(captions.records, check, workers, desc="reading", unit=" pairs") as checked:
        measures, faults = zip(*checked, strict=True)
    bad = [*captions.bad, *filter(None, faults)]
    changed = verify_shards(data) if is_shards(Path(data)) else []
    pairs = len(captions.records) + len(captions.bad)
    print(
        f"{pairs - len(bad)} of {pairs} pairs can be used.\nCaptions: {describe_captions(measures)} "
        f"{sum(tokens > tokenizer.context_length for _, tokens, _ in measures)} are longer than the context length "
        f"of {tokenizer.context_length} and would be cut."
    )
    report_bad(bad + changed, Path(output))
    check_share(bad, pairs, max_bad, continue_hint(output, bad))
