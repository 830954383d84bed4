"""Finished captions, in parts of so many images: a part is whole or not there, so that a killed run loses little."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.data.captions import is_text
from debias_diffusion.jobs import Job


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
    """The parts of a job, an item each. Any process may write one that no other writes.

    Args:
        images: how many there are.
        per_part: of them in a part; the last part may have fewer.
    """

    def __init__(self, job: Job, images: int, per_part: int):
        self.job = job
        starts = range(0, images, per_part)
        self.ranges = [range(start, min(start + per_part, images)) for start in starts]

    def write(self, number: int, outcomes: Sequence[Outcome]) -> None:
        """Writes a part, whole or not at all."""
        kept = sum(outcome.caption is not None for outcome in outcomes)
        with self.job.write(_name(number), kept=kept) as temporary:
            temporary.write_text("".join(json_line(_short(outcome)) for outcome in outcomes), encoding="utf-8")

    def is_whole(self, number: int) -> bool:
        """Whether a part is there and not damaged."""
        return self.job.path(_name(number), damaged="absent") is not None

    def kept(self) -> int:
        """How many captions all parts keep. Every part must be there."""
        return sum(self.job.notes(_name(number))["kept"] for number in range(len(self.ranges)))

    def read(self, number: int) -> list[Outcome]:
        """The outcomes of a part, which must be there."""
        return [_outcome(json.loads(line)) for line in self.job.path(_name(number)).read_bytes().splitlines()]

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
    bad = values.pop("bad", None)
    return Outcome(**values, bad=bad and BadRecord(**bad))


def _name(number: int) -> str:
    return f"parts/part-{number:06}.jsonl"
