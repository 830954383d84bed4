"""Prompts whose text changes from step to step, as A1111 reads them: [from:to:when], [to:when], [from::when], [a|b].

The grammar is that of A1111's `prompt_parser.py`. Brackets that are not one of these, nor weights, are text; a `|` that
is in none of them, or a backslash with nothing after it, makes the whole prompt text.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

MANY_STEPS = 1000  # where their number is not known
_MOST_NESTED = 100  # brackets in each other, far beyond use; more are text
_FLAT = r"(?:[^\\\[\]():|]|\\.)*"
_WHEN = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_INNERMOST = re.compile(
    rf"""
    \\.
    | (?P<weighted>\({_FLAT}(?::{_FLAT})?\)|\[{_FLAT}\])
    | \[(?:(?P<before>{_FLAT}):)?(?P<after>{_FLAT}):\s*(?P<when>{_WHEN})\s*\]
    | \[(?P<turns>{_FLAT}(?:\|{_FLAT})+)\]
    """,
    re.VERBOSE,
)
_ONE_OF_TURNS = re.compile(rf"(?:^|\|)({_FLAT})")
_REST = re.compile(r"(?:[^\\|]|\\.)*")
_HOLE = re.compile("\0([0-9]+)\0")  # where a bracket stood, with its number


class _Bracket(NamedTuple):
    """A bracket as it is written, and the texts of which each step has one: in turn, or the second after `when`."""

    source: str
    texts: list[str]
    when: str | None = None

    def last_step(self, steps: int) -> int:
        """Of the first text. `when` is a share of all steps if it has a point, else a step."""
        number = float(self.when or 0)
        return int(max(-1, min(steps, number * steps if "." in (self.when or "") else number)))

    def at(self, step: int, steps: int) -> str:
        if self.when is not None:
            return self.texts[step > self.last_step(steps)]
        return self.texts[(step - 1) % len(self.texts)]


def find_schedules(*prompts: str) -> list[str]:
    """The schedules of prompts as they are written, such as "[cat:dog:0.5]", once each and inner ones first."""
    found = {}
    for _, brackets in map(_parse, prompts):
        sources = [bracket.source for bracket in brackets if len(bracket.texts) > 1]
        found |= dict.fromkeys(_filled(source, brackets, lambda bracket: bracket.source) for source in sources)
    return [*found]


def last_steps(steps: int, *prompts: str) -> list[int]:
    """The steps, from 1 to `steps`, after which the text of a prompt may change, and the last one."""
    ends = {steps}
    for bracket in (bracket for prompt in prompts for bracket in _parse(prompt)[1]):
        if bracket.when is not None:
            ends.add(bracket.last_step(steps))
        elif len(bracket.texts) > 1:
            ends |= {*range(1, steps)}
    return sorted(end for end in ends if end > 0)


def text_at(prompt: str, step: int, steps: int) -> str:
    """The text of a prompt at a step, from 1 to `steps`."""
    text, brackets = _parse(prompt)
    return _filled(text, brackets, lambda bracket: bracket.at(step, steps))


def _filled(text: str, brackets: list[_Bracket], choose: Callable[[_Bracket], str]) -> str:
    return _HOLE.sub(lambda hole: _filled(choose(brackets[int(hole[1])]), brackets, choose), text)


@lru_cache(maxsize=256)
def _parse(prompt: str) -> tuple[str, list[_Bracket]]:
    """A prompt with holes for its brackets, and these, which may have holes, too."""
    brackets: list[_Bracket] = []

    def take(match: re.Match) -> str:
        source, before, after, when, turns = match.group(0, "before", "after", "when", "turns")
        if when is not None:
            texts = [before or "", after]
        elif match["weighted"] is None and turns is None:
            return source  # an escaped character
        else:
            texts = [source] if turns is None else _ONE_OF_TURNS.findall(turns)
        brackets.append(_Bracket(source, texts, when))
        return f"\0{len(brackets) - 1}\0"

    text = prompt
    for _ in range(_MOST_NESTED if "\0" not in prompt else 0):
        reduced = _INNERMOST.sub(take, text)  # a bracket that holds no bracket
        if reduced == text:
            break
        text = reduced
    return (text, brackets) if _REST.fullmatch(text) else (prompt, [])
