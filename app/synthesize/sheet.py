"""The page of `synthesize`: images with their captions, how long these are, and what was removed and why."""

import base64
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from debias_diffusion.app.shards import shrink
from debias_diffusion.data.bad_records import BadRecord, printable, read_or_bad
from debias_diffusion.data.caption_statistics import CaptionMeasure, CaptionStatistics, measure_caption
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.eval.report import write_page
from debias_diffusion.tokens import CaptionTokenizer

from .parts import Outcome

_SHOWN = 24  # images with kept captions
_SHOWN_REMOVED = 8  # of each kind
_SIDE = 160  # pixels of a thumbnail's shorter side
_BIN = 25  # tokens
_MOST_TEXT = 1500  # characters of a caption on the page


class Summary:
    """What the page says of all outcomes, which are added in order.

    Args:
        kept: how many captions will be kept, of which some are shown.
        tokenizer: that counts the lengths.

    Attributes:
        bad: the unreadable images.
        measures: of each kept caption.
        removed: by kind, how many captions.
        by_prompt: by prompt, [kept, removed].
        shown: kept captions with their numbers.
        shown_removed: by kind, the first removed captions with their numbers.
    """

    def __init__(self, kept: int, tokenizer: CaptionTokenizer):
        self.kept, self.tokenizer = kept, tokenizer
        self.stride = max(1, -(-kept // _SHOWN))
        self.bad: list[BadRecord] = []
        self.measures: list[CaptionMeasure] = []
        self.removed: Counter[str] = Counter()
        self.by_prompt: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.shown: list[tuple[int, Outcome]] = []
        self.shown_removed: dict[str, list[tuple[int, Outcome]]] = defaultdict(list)

    def add(self, index: int, outcome: Outcome) -> None:
        """Counts the outcome of an image."""
        if outcome.bad is not None:
            self.bad.append(outcome.bad)
            return
        self.by_prompt[outcome.prompt][outcome.reason is not None] += 1
        if outcome.reason is not None:
            kind = outcome.reason.partition(":")[0]
            self.removed[kind] += 1
            if self.removed[kind] <= _SHOWN_REMOVED:
                self.shown_removed[kind].append((index, outcome))
            return
        if len(self.measures) % self.stride == 0:
            self.shown.append((index, outcome))
        self.measures.append(measure_caption(outcome.caption, self.tokenizer))

    def bars(self) -> list[dict]:
        """How many kept captions have how many tokens, in steps of 25, each with its share of the most in percent."""
        lengths = Counter(measure.tokens // _BIN for measure in self.measures)
        most = max(lengths.values(), default=1)
        return [
            {
                "label": f"{step * _BIN} to {(step + 1) * _BIN - 1}",
                "count": lengths[step],
                "percent": 100 * lengths[step] / most,
            }
            for step in range(min(lengths, default=0), max(lengths, default=-1) + 1)
        ]


def write_sheet(
    path: Path,
    summary: Summary,
    records: Sequence[Record],
    images: ImageSource,
    settings: Mapping[str, object],
    counts: Mapping,
    statistics: CaptionStatistics | None,
) -> None:
    """Writes the page. The same outcomes give the same bytes.

    Args:
        counts: "images", "kept", "unreadable", and by kind "removed".
        statistics: of the kept captions; None if there are none.
    """

    def entries(shown: list[tuple[int, Outcome]]) -> list[dict]:
        return [_entry(outcome, records[index], images) for index, outcome in shown]

    prompts = [(prompt, *numbers) for prompt, numbers in summary.by_prompt.items()]
    write_page(
        path,
        "synthesize.html.j2",
        Path(__file__).parent,
        settings=settings,
        counts=counts,
        removed_count=sum(counts["removed"].values()),
        statistics=statistics,
        bars=summary.bars(),
        shown=entries(summary.shown),
        removed={kind: entries(shown) for kind, shown in sorted(summary.shown_removed.items())},
        prompts=sorted(prompts, key=lambda row: (-row[2], row[0])),  # which prompts fail
    )


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
