"""The page of `synthesize`: images with their captions, how long these are, and what was removed and why."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from debias_diffusion.app.shards import shrink
from debias_diffusion.data.bad_records import BadRecord, printable, read_or_bad
from debias_diffusion.data.check import Counts, measure_caption
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.eval.report import image_url, write_page

from .cleaning import counting_tokenizer

_SHOWN = 24  # images with kept captions
_SHOWN_REMOVED = 8  # of each kind
_SIDE = 160  # pixels of a thumbnail's shorter side
_BIN = 25  # tokens


class Sheet:
    """What the page says of the captions of all images, which are added in order.

    Args:
        kept: how many captions will be kept, of which some are shown.

    Attributes:
        measures: of each kept caption.
        removed: by kind, how many captions.
    """

    def __init__(self, kept: int, images: ImageSource):
        self.images = images
        self.measures: list[Counts] = []
        self.removed: Counter[str] = Counter()
        self._stride = max(1, -(-kept // _SHOWN))
        self._by_prompt: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # kept, removed
        self._shown: dict[str, list[dict]] = defaultdict(list)  # by kind of fault; "" of those that are kept

    def add(self, row: Mapping[str, str], record: Record) -> None:
        """Counts a caption: a line of `captions.jsonl` or `removed.jsonl`, and the image's record."""
        kind = row.get("reason", "").partition(":")[0]
        self._by_prompt[row["prompt"]][bool(kind)] += 1
        if kind:
            is_shown = self.removed[kind] < _SHOWN_REMOVED
            self.removed[kind] += 1
        else:
            is_shown = len(self.measures) % self._stride == 0
            self.measures.append(measure_caption(row["caption"], counting_tokenizer()))
        if is_shown:
            self._shown[kind].append(self._entry(row, record))

    def _entry(self, row: Mapping[str, str], record: Record) -> dict:
        image = read_or_bad(record, self.images.open)
        # It may have gone since it was captioned.
        source = None if isinstance(image, BadRecord) else image_url(shrink(image, _SIDE, 80), "jpeg")
        return {**row, "image": printable(row["image"]), "source": source}

    def write(self, path: Path, **values) -> None:
        """Writes the page. The same captions give the same bytes.

        Args:
            values: the template's `settings`; `counts`: "images", "kept", "unreadable", and by kind "removed"; and the
                `statistics` of the kept captions, None if there are none.
        """
        lengths = Counter(tokens // _BIN for _, tokens, _ in self.measures)
        steps = range(min(lengths, default=0), max(lengths, default=-1) + 1)
        prompts = [(prompt, *numbers) for prompt, numbers in self._by_prompt.items()]
        write_page(
            path,
            "synthesize.html.j2",
            Path(__file__).parent,
            **values,
            lengths=[(f"{step * _BIN} to {(step + 1) * _BIN - 1}", lengths[step]) for step in steps],
            shown=self._shown.pop("", []),
            removed=dict(sorted(self._shown.items())),
            prompts=sorted(prompts, key=lambda row: (-row[2], row[0])),  # which prompts fail
        )
