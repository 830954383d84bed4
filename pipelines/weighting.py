"""Weights in a prompt: `(word:1.3)`, `((word))`, `[word]`, `word++`, and BREAK."""

import math
import re

STEP = 1.1  # a bracket's or a plus sign's factor

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
_ROUND, _SQUARE = "(", "["


def parse_weights(prompt: str) -> list[list[Run]]:
    r"""A prompt's text and its weights, in the syntax of A1111's web interface and in that of compel's plus signs.

    | written | weight of what it encloses |
    |---|---|
    | `(word)` | 1.1; `((word))` 1.21 |
    | `[word]` | 1 / 1.1 |
    | `(word:1.3)` | 1.3 |
    | `word++`, `(two words)++` | 1.1 for each plus sign |
    | `word--`, `(two words)--` | 0.9 for each minus sign |
    | `\(`, `\)`, `\[`, `\]`, `\+`, `\-`, `\\` | the character itself |
    | `BREAK`, in capitals | what follows is read in another window |

    Nested weights multiply. A bracket that is never closed reaches to the end, as in A1111; one that was never opened
    is text. Signs count only at the end of a word: `state-of-the-art` is text, but `C++` must be written `C\+\+`.

    Returns:
        for each part between BREAKs, at least one, its runs of equal weight in order; no run is empty.

    Raises:
        ValueError: a weight too large for a number.
    """
    parts: list[list[list]] = [[]]  # of [text, weight]
    opened: list[tuple[str, int, int]] = []  # bracket, and where its content begins: part, run

    def multiply(since: tuple[int, int], factor: float) -> None:
        part, run = since
        for index in range(part, len(parts)):
            for entry in parts[index][run if index == part else 0 :]:
                entry[1] *= factor

    def add(text: str, weight: float = 1.0) -> None:
        parts[-1].append([text, weight])

    for match in _PIECE.finditer(prompt):
        kind, found = match.lastgroup, match.groupdict()
        if kind == "escaped":
            add(found["escaped"])
        elif kind == "open":
            opened.append((found["open"], len(parts) - 1, len(parts[-1])))
        elif kind == "number" and opened and opened[-1][0] == _ROUND:
            multiply(opened.pop()[1:], float(found["number"]))
        elif (
            kind in ("close", "close_signs") and opened and opened[-1][0] == {")": _ROUND, "]": _SQUARE}[found["close"]]
        ):
            bracket, *since = opened.pop()
            signs = found["close_signs"]
            multiply(since, _signed(signs) if signs else STEP if bracket == _ROUND else 1 / STEP)
        elif kind == "break":
            parts.append([])
        elif kind == "word_signs":
            add(found["word"], _signed(found["word_signs"]))
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
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {text!r} is {weight}: a prompt's weights must be numbers, such as 1.3")
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + text, weight)
        else:
            runs.append((text, weight))
    return runs
