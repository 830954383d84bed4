"""The page of `synthesize`: images with their captions, how long these are, and what was removed and why."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from debias_diffusion.app.shards import shrink
from debias_diffusion.data import BadRecord, ImageSource, Record
from debias_diffusion.data.bad_records import printable, read_or_bad
from debias_diffusion.data.caption_statistics import CaptionStatistics
from debias_diffusion.eval.report import write_page
from debias_diffusion.tokens import CaptionTokenizer

from .parts import Outcome, Parts

_SHOWN = 24  # images with kept captions
_SHOWN_REMOVED = 8  # of each kind
_SIDE = 160  # pixels of a thumbnail's shorter side
_BIN = 25  # tokens
_MOST_TEXT = 1500  # characters of a caption on the page


def write_sheet(
    path: Path,
    parts: Parts,
    records: Sequence[Record],
    images: ImageSource,
    settings: Mapping[str, object],
    counts: Mapping,
    statistics: CaptionStatistics | None,
    tokenizer: CaptionTokenizer,
) -> None:
    """Writes the page. The same parts give the same bytes.

    Args:
        counts: "images", "kept", "unreadable", and by kind "removed".
        statistics: of the kept captions; None if there are none.
        tokenizer: that counts the lengths.
    """
    stride = max(1, -(-counts["kept"] // _SHOWN))
    kept = ((index, each) for index, each in enumerate(parts.outcomes()) if each.caption is not None)
    shown = [_entry(each, records[index], images) for index, each in islice(kept, 0, None, stride)]
    write_page(
        path,
        "synthesize.html.j2",
        Path(__file__).parent,
        settings=settings,
        counts=counts,
        removed_count=sum(counts["removed"].values()),
        statistics=statistics,
        bars=_bars(parts, tokenizer),
        shown=shown,
        removed=_removed(parts, records, images),
        prompts=_prompts(parts),
    )


def _removed(parts: Parts, records: Sequence[Record], images: ImageSource) -> dict[str, list[dict]]:
    """The first removed captions of each kind."""
    by_kind: dict[str, list[dict]] = {}
    for index, outcome in enumerate(parts.outcomes()):
        if outcome.reason is not None:
            group = by_kind.setdefault(outcome.reason.partition(":")[0], [])
            if len(group) < _SHOWN_REMOVED:
                group.append(_entry(outcome, records[index], images))
    return dict(sorted(by_kind.items()))


def _entry(outcome: Outcome, record: Record, images: ImageSource) -> dict:
    text = outcome.caption if outcome.caption is not None else outcome.text or ""
    cut = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
    return {
        "name": printable(outcome.image),
        "source": _thumbnail(record, images),
        "text": _encodable(cut),
        "short": _encodable(outcome.short_caption or ""),
        "prompt": outcome.prompt,
        "reason": outcome.reason,
    }


def _encodable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def _thumbnail(record: Record, images: ImageSource) -> str | None:
    """A small JPEG as a data URL; None for an image that has gone since it was captioned."""
    image = read_or_bad(record, images.open)
    if isinstance(image, BadRecord):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(shrink(image, _SIDE, 80)).decode()


def _bars(parts: Parts, tokenizer: CaptionTokenizer) -> list[dict]:
    """How many kept captions have how many tokens, in steps of 25, each with its share of the most in percent."""
    lengths = Counter(
        tokenizer.count(outcome.caption) // _BIN for outcome in parts.outcomes() if outcome.caption is not None
    )
    most = max(lengths.values(), default=1)
    return [
        {
            "label": f"{step * _BIN} to {(step + 1) * _BIN - 1}",
            "count": lengths[step],
            "percent": 100 * lengths[step] / most,
        }
        for step in range(min(lengths, default=0), max(lengths, default=-1) + 1)
    ]


def _prompts(parts: Parts) -> list[tuple[str, int, int]]:
    """(prompt, captions kept, captions removed), the most removed first: which prompts fail."""
    kept, removed = Counter(), Counter()
    for outcome in parts.outcomes():
        if outcome.prompt:
            (removed if outcome.reason else kept)[outcome.prompt] += 1
    rows = [(prompt, kept[prompt], removed[prompt]) for prompt in kept.keys() | removed.keys()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))
