"""Weights in a prompt: `(word:1.3)`, `((word))`, `[word]`, `word++`, and BREAK."""

import math
import re

STEP = 1.1  # factor of a bracket or a plus sign
MOST_WEIGHT = 100  # far beyond use; larger ones overflow half precision

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_IN_WORD = r"[^\s()\[\]\\,;:]"
_PIECE = re.compile(
    rf"""
    \\(?P<escaped>[()\[\]\\+-])                       # \( and the like: the character itself
    | (?P<open>[(\[])
    | :\s*(?P<number>{_NUMBER})\s*\)                  # ends a round bracket: (word:1.3)
    | (?P<close>[)\]])(?P<close_signs>(?:\++|-+)(?![\w+-]))?  # (two words)++
    | \s*\bBREAK\b\s*(?P<break>)
    | (?<!{_IN_WORD})(?P<word>(?![+-]){_IN_WORD}+?)(?P<word_signs>\++|-+)(?=[\s,.;:!?)\]]|$)  # word++
    | (?P<text>\w+|\s+|.)
    """,
    re.VERBOSE | re.DOTALL,
)

Run = tuple[str, float]  # a piece of text and its weight
_ROUND = "("
_OPENING = {")": _ROUND, "]": "["}


def parse_weights(prompt: str) -> list[list[Run]]:
    r"""Splits a prompt into runs of text with weights, in the syntax of A1111's web interface and compel's signs.

    | syntax | weight of the enclosed text |
    |---|---|
    | `(word)` | 1.1; `((word))` 1.21 |
    | `[word]` | 1 / 1.1 |
    | `(word:1.3)` | 1.3 |
    | `word++`, `(two words)++` | 1.1 for each plus sign |
    | `word--`, `(two words)--` | 0.9 for each minus sign |
    | `\(`, `\)`, `\[`, `\]`, `\+`, `\-`, `\\` | the character itself |
    | `BREAK`, in capitals | a new chunk begins |

    Nested weights multiply. An unclosed bracket reaches to the end, as in A1111; an unopened one is text. Signs count
    only at the end of a word: `state-of-the-art` is text, but `C++` must be written `C\+\+`.

    Returns:
        for each part between BREAKs (at least one), its runs of equal weight in order; no run is empty.

    Raises:
        ValueError: a weight, with those that multiply it, is not from -100 to 100.
    """
    parts: list[list[list]] = [[]]  # of [text, weight]
    opened: list[tuple[str, int, int]] = []  # bracket, start of its content: part, run

    def multiply(since: tuple[int, int], factor: float) -> None:
        part, run = since
        for index in range(part, len(parts)):
            for entry in parts[index][run if index == part else 0 :]:
                entry[1] *= factor

    def add(text: str, weight: float = 1.0) -> None:
        parts[-1].append([text, weight])

    for match in _PIECE.finditer(prompt):
        kind, groups = match.lastgroup, match.groupdict()
        if kind == "escaped":
            add(groups["escaped"])
        elif kind == "open":
            opened.append((groups["open"], len(parts) - 1, len(parts[-1])))
        elif kind == "number" and opened and opened[-1][0] == _ROUND:
            multiply(opened.pop()[1:], float(groups["number"]))
        elif kind in ("close", "close_signs") and opened and opened[-1][0] == _OPENING[groups["close"]]:
            bracket, *since = opened.pop()
            signs = groups["close_signs"]
            multiply(since, _signed(signs) if signs else STEP if bracket == _ROUND else 1 / STEP)
        elif kind == "break":
            parts.append([])
        elif kind == "word_signs":
            add(groups["word"], _signed(groups["word_signs"]))
        else:
            add(match[0])
    for bracket, *since in opened:
        multiply(since, STEP if bracket == _ROUND else 1 / STEP)
    return [_merge(part) for part in parts]


def _signed(signs: str) -> float:
    return math.prod([STEP if signs[0] == "+" else 0.9] * len(signs))


def _merge(part: list[list]) -> list[Run]:
    runs: list[Run] = []
    for text, weight in part:
        if not abs(weight) <= MOST_WEIGHT:
            raise ValueError(
                f"the weight of {text!r} is {weight:g}, but must be from -{MOST_WEIGHT} to {MOST_WEIGHT}, such as 1.3"
            )
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + text, weight)
        else:
            runs.append((text, weight))
    return runs
