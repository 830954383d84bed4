"""Finished captions, in parts of so many images: a part is whole or not there, so that a killed run loses little."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from debias_diffusion.data import BadRecord
from debias_diffusion.data.captions import is_text
from debias_diffusion.files import open_regular, write_text

FOLDER = "parts"


@dataclass(frozen=True)
class Outcome:
    """What became of one image: a caption, a removed one, or a bad record.

    Attributes:
        image: as the data name it.
        prompt: that the model was given; "" for a bad record.
        caption: what is trained on; None if there is none.
        short_caption: the image's short caption, if there is one.
        text: what the model wrote, if that was removed.
        reason: why it was removed, "kind: detail".
        bad: why the image was not captioned.
    """

    image: str
    prompt: str = ""
    caption: str | None = None
    short_caption: str | None = None
    text: str | None = None
    reason: str | None = None
    bad: BadRecord | None = None

    def kept(self) -> dict | None:
        """The line of `captions.jsonl`, or None."""
        if self.caption is None:
            return None
        short = {} if self.short_caption is None else {"short_caption": self.short_caption}
        return {"image": self.image, "caption": self.caption, **short, "prompt": self.prompt}

    def removed(self) -> dict | None:
        """The line of `removed.jsonl`, or None."""
        if self.reason is None:
            return None
        return {"image": self.image, "reason": self.reason, "text": self.text, "prompt": self.prompt}


class Parts:
    """The parts of an output folder, one file each. Any process may write one that no other writes.

    Args:
        output: folder of the run.
        images: how many there are.
        per_part: of them in a part; the last part may have fewer.
    """

    def __init__(self, output: Path, images: int, per_part: int):
        self.output = output
        starts = range(0, images, per_part)
        self.ranges = [range(start, min(start + per_part, images)) for start in starts]

    def path(self, number: int) -> Path:
        return self.output / FOLDER / f"part-{number:06}.jsonl"

    def write(self, number: int, outcomes: Sequence[Outcome]) -> None:
        """Writes a part, whole or not at all."""
        write_text(self.path(number), "".join(json_line(_short(outcome)) for outcome in outcomes))

    def read(self, number: int) -> list[Outcome] | None:
        """The outcomes of a part; None if it is not there or not whole."""
        try:
            with open_regular(self.path(number)) as file:
                outcomes = [_outcome(json.loads(line)) for line in file.read().splitlines()]
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return outcomes if len(outcomes) == len(self.ranges[number]) else None

    def any(self) -> bool:
        """Whether any part is there, of these images or others."""
        return next((self.output / FOLDER).glob("part-*.jsonl"), None) is not None

    def missing(self) -> list[int]:
        """The numbers of the parts that are still to be written."""
        return [number for number in range(len(self.ranges)) if self.read(number) is None]

    def outcomes(self) -> Iterator[Outcome]:
        """Those of all images, in order. Every part must be there."""
        for number in range(len(self.ranges)):
            yield from self.read(number)


def json_line(values: dict) -> str:
    """A line of JSON that UTF-8 can encode: a caption in the data may hold half a surrogate pair."""
    line = json.dumps(values, ensure_ascii=False)
    return f"{line if is_text(line) else json.dumps(values)}\n"


def _short(outcome: Outcome) -> dict:
    return {name: value for name, value in asdict(outcome).items() if value is not None}


def _outcome(values: dict) -> Outcome:
    """Raises TypeError or ValueError for values of another shape."""
    bad = values.pop("bad", None)
    if not all(isinstance(value, str) for value in values.values()):
        raise ValueError("not all values are text")
    if bad is not None and set(bad) != {field.name for field in fields(BadRecord)}:
        raise ValueError("a bad record of another shape")
    return Outcome(**values, bad=None if bad is None else BadRecord(**bad))
