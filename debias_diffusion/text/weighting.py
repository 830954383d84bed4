"""Weights in a prompt, `(word:1.3)`, `((word))`, `[word]`, `word++`, and BREAK, as we and other programs read them."""

import itertools
import math
import re
from collections.abc import Iterator

from debias_diffusion.text.chunks import Emphasis, Part, Reading

STEP = 1.1  # factor of a bracket or a plus sign
MOST_WEIGHT = 100  # far beyond use; larger ones overflow half precision
MOST_NESTED = 100  # brackets in each other, far beyond use

_WEIGHT = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
BREAK = rf"\bBREAK\b(?::(?P<strength>{_WEIGHT}(?:[eE][+-]?\d+)?)(?![\w.]))?"
_IN_WORD = r"[^\s()\[\]\\,;:]"
_PIECE = re.compile(
    rf"""
    \\(?P<escaped>[()\[\]\\+-])                       # \( and the like: the character itself
    | (?P<open>[(\[])
    | :\s*(?P<number>{_WEIGHT})\s*\)                  # ends a round bracket: (word:1.3)
    | (?P<close>[)\]])(?:
        (?<=\))(?P<close_number>\d*\.\d+)(?!\w|\.\d)  # (two words)1.3, but (cat)2 dogs
        | (?P<close_signs>\++|-+)(?![\w+-])           # (two words)++
      )?
    | \s*{BREAK}\s*(?P<break>)
    | (?<!{_IN_WORD})(?P<word>(?![+-]){_IN_WORD}+?)(?P<word_signs>(?<!\+)\++(?!\+)|(?<!-)-+(?!-))(?=[\s,.;:!?)\]]|$)
    | (?P<text>\w+|\s+|.)
    """,
    re.VERBOSE | re.DOTALL,
)

Run = tuple[str, float]  # a piece of text and its weight
_A1111_BREAK = re.compile(r"(?:(?<!\s)\s*)?\bBREAK\b\s*")
_A1111_NUMBER = r":\s*(?P<weight>[+-]?[.\d]+)\s*\)"
_KOHYA_NUMBER = r":(?P<weight>[+-]?[.\d]+)\)"
_ROUND = "("
_PAIRS = {")": _ROUND, "]": "["}
# What A1111 takes out of a prompt before it reads it, in its order. By the number at the end it multiplies guidance.
_A1111_COMMENT, _A1111_NETWORK = re.compile(r"#[^\n]*"), re.compile(r"<\w+:[^>]+(?:>|\Z)")
_A1111_GUIDANCE = re.compile(r"(?<!\s)\s*:\s*[-+]?(?:\d+\.?|\d*\.\d+)(?=\s*(?:\bAND\b|\Z))")
# Habits from other programs that no reading reads: why not, and what to do.
_UNREAD = [
    (r"""(?<=[\w"')\]])\.(?:and|blend)\(""", "is not compel's function: write BREAK, see `breaks`"),
    (r"""(?<=[\w"')\]])\.swap\(""", "is not compel's function: write one of its texts"),
    (
        r"(?<!\\)\[(?=[^\[\]]*[^\W\d_])(?:[^\[\]|]*\|[^\[\]]*|[^\[\]]*:\s*[\d.]+\s*)\]",
        'does not change from step to step: write one of its texts; reading="a1111" changes them, if no | stands'
        " outside such brackets",
    ),
    (r"\bAND\b", "does not join two prompts: write BREAK, see `breaks`"),
    (r"(?i:\b(?:Hires|ADetailer)) [\w ]{1,30}:|\[(?:SEP|SKIP|PROMPT)\]", "is for a second pass, which there is not"),
    (r"\{prompt\}|\bStyle Selector [\w ]{1,30}:", "stays as it is: write the text of the style"),
    (r"(?im)^Negative prompt:|^Steps: \d+,", "is no setting here: pass it as an argument of its own"),
    (
        r"(?<!\S)--(?:(?:negative_)?prompt|seed|steps|cfg_scale|sampler_name|width|height|batch_size|ar|stylize)\b",
        "is no option in a prompt: pass it as an argument of its own",
    ),
    (r"\{[^{}|]*\|[^{}]*\}", "is no choice: write one of the alternatives"),
    (r"\bembedding:\S+", "loads nothing: load embeddings with load_textual_inversion(...), and write their tokens"),
    (r"<\w+:[^<>]+>", "loads nothing: load LoRAs with load_lora_weights(...), or give `generate` their folder"),
]
_GUIDANCE = "is taken out, as in A1111, which multiplies guidance by it: here guidance stays as it is"
_WEIGHTS = (
    "weights such as (red:1.3), backslashes before brackets and BREAK are read as text: the option "
    'emphasis="comfyui" reads them, and "none" keeps them as text'
)
# A weight with a point that is not 1, a bracket in a bracket, an escaped one, signs after a word or a bracket, BREAK.
_WEIGHTED = re.compile(
    r":\s*(?!0*1\.0*\s*\))(?:\d+\.\d*|\.\d+)\s*\)|\(\(|\)\d*\.\d|\\[()\[\]]"
    r"|(?:(?<=[^\W\d_]{3})\+\++|(?<=\))(?:\+\++|--+))(?=[\s,.)]|$)|(?<!^)\bBREAK\b"
)


def parse_prompt(prompt: str, reading: Reading, emphasis: Emphasis, negative: bool = False) -> list[Part]:
    """The parts of a prompt between BREAKs and their runs of text with weights, in the syntax that `reading` reads.

    Args:
        emphasis: "none": all is text; "ignore": signs are read, but every weight is 1.
        negative: a negative prompt, see `take_out`.

    Raises:
        ValueError: a weight that is no number or out of range, or too many brackets in each other.
    """
    return parse_parts(take_out(prompt, reading, negative)[0], reading, emphasis)


def parse_parts(prompt: str, reading: Reading, emphasis: Emphasis) -> list[Part]:
    """`parse_prompt`, of what is left after `take_out`."""
    if emphasis == "none":
        return [Part([(prompt, 1.0)])]
    if reading in ("a1111", "kohya"):
        parts = _parse_a1111(prompt, breaks=reading == "a1111")
    else:
        parts = [Part(_parse_comfyui(prompt))] if reading == "comfyui" else parse_weights(prompt)
    for part in parts:
        for text, weight in [*part.runs, ("BREAK", part.strength)]:
            check_weight(text, weight)
    if emphasis == "ignore":
        parts = [part._replace(runs=[(text, 1.0) for text, _ in part.runs]) for part in parts]
    return parts


def check_weight(text: str, weight: float) -> None:
    """Raises ValueError for a weight, of `text`, that is out of range or no number."""
    if not abs(weight) <= MOST_WEIGHT:
        raise ValueError(
            f"the weight of {text[:80]!r} is {weight:g}, but must be from -{MOST_WEIGHT} to {MOST_WEIGHT}, such as 1.3"
        )


def _check_nested(depth: int) -> None:
    if depth > MOST_NESTED:
        raise ValueError(f"more than {MOST_NESTED} brackets stand in each other: write a weight, such as (word:1.3)")


def take_out(prompt: str, reading: Reading, negative: bool = False) -> tuple[str, list[str]]:
    """A prompt without what `reading` does not read, and that: A1111's comments and tags such as `<lora:name:0.8>`, and
    the number after a colon at the very end, or before AND, as in "masterpiece:1.2". Of a negative prompt A1111 reads
    tags and numbers as text.
    """
    taken = []

    def take(match: re.Match) -> str:
        is_open = match[0][0] == "<" and match[0][-1] != ">"
        taken.extend([] if is_open else [match[0].strip()])
        return match[0] if is_open else ""

    for pattern in (_A1111_COMMENT, *([] if negative else [_A1111_NETWORK, _A1111_GUIDANCE])):
        prompt = pattern.sub(take, prompt) if reading == "a1111" else prompt
    return prompt, taken


def find_unread(
    prompt: str, taken_out: list[str], reading: Reading = "overlap", negative: bool = False, weights: bool = False
) -> dict[str, str]:
    """What a prompt holds of other programs' syntax that is not read, each in a sentence, by what there is to do.

    `prompt` and `taken_out` are of `take_out`. `weights` says whether signs of weights are text. Of a negative prompt
    A1111 reads AND as text.
    """
    tags, found = " ".join([prompt, *(part for part in taken_out if part[0] == "<")]), {}
    for pattern, advice in _UNREAD:
        schedules = "step to step" in advice and reading == "a1111"
        if match := not schedules and re.search(pattern, tags):
            found[advice] = match[0]
    if negative if reading == "a1111" else prompt.isupper():  # Some people write all in capitals.
        found = {advice: text for advice, text in found.items() if text != "AND"}
    for number in (part for part in taken_out if part[0] == ":"):
        found[_GUIDANCE] = number
    if weights and _WEIGHTED.search(prompt.strip()):
        found[_WEIGHTS] = ""
    sentences = {advice: f"{text[:40]!r} {advice}" if text else advice for advice, text in found.items()}
    return {advice: f"In the prompt {prompt[:80]!r}, {sentence}." for advice, sentence in sentences.items()}


def parse_weights(prompt: str) -> list[Part]:
    r"""Splits a prompt into runs of text with weights, in the syntax of A1111's web interface and compel's signs.

    | syntax | weight of the enclosed text |
    |---|---|
    | `(word)` | 1.1; `((word))` 1.21 |
    | `[word]` | 1 / 1.1 |
    | `(word:1.3)` | 1.3 |
    | `(two words)1.3` | 1.3; without a point the number is text |
    | `word++`, `(two words)++` | 1.1 for each plus sign |
    | `word--`, `(two words)--` | 0.9 for each minus sign |
    | `\(`, `\)`, `\[`, `\]`, `\+`, `\-`, `\\` | the character itself |
    | `BREAK`, in capitals | a new chunk begins, or a part that is averaged with the others |
    | `BREAK:0.7` | the strength of the part after it is 0.7 |

    Nested weights multiply. An unclosed bracket reaches to the end, as in A1111; an unopened one is text. Signs count
    only at the end of a word: `state-of-the-art` is text, but `C++` must be written `C\+\+`.

    Returns:
        for each part between BREAKs (at least one), its runs of text in order, which end at brackets and at words with
        signs; no run is empty.
    """
    runs: list[list] = [["", 1.0]]  # text and weight; text goes to the last
    starts, strengths = [0], [1.0]  # of parts
    opened: list[tuple[str, int]] = []  # bracket, start of its content

    for match in _PIECE.finditer(prompt):
        kind, groups = match.lastgroup, match.groupdict()
        if kind == "open":
            opened.append((groups["open"], len(runs)))
            runs.append(["", 1.0])
            _check_nested(len(opened))
        elif kind == "number" and opened and opened[-1][0] == _ROUND:
            _multiply(runs, opened.pop()[1], float(groups["number"]))
            runs.append(["", 1.0])
        elif groups["close"] and opened and opened[-1][0] == _PAIRS[groups["close"]]:
            bracket, start = opened.pop()
            number, signs = groups["close_number"], groups["close_signs"]
            step = STEP if bracket == _ROUND else 1 / STEP
            _multiply(runs, start, float(number) if number else _signed(signs) if signs else step)
            runs.append(["", 1.0])
        elif kind == "break":
            starts.append(len(runs))
            runs.append(["", 1.0])
            strengths.append(float(groups["strength"] or 1))
        elif kind == "word_signs":
            runs += [[groups["word"], _signed(groups["word_signs"])], ["", 1.0]]
        else:
            runs[-1][0] += groups["escaped"] or match[0]
    for bracket, start in opened:
        _multiply(runs, start, STEP if bracket == _ROUND else 1 / STEP)
    parts = itertools.starmap(slice, itertools.pairwise([*starts, None]))
    texts = [[(text, weight) for text, weight in runs[part] if text] for part in parts]
    return [Part(part, strength) for part, strength in zip(texts, strengths, strict=True)]


def _signed(signs: str) -> float:
    return math.prod([STEP if signs[0] == "+" else 0.9] * len(signs))


def _parse_a1111(prompt: str, breaks: bool) -> list[Part]:
    """As A1111's interface and Forge do; `breaks=False`: as kohya's scripts do.

    Round and square brackets are matched apart, a backslash goes even if it escapes nothing, and BREAK in brackets is
    text.
    """
    number = _A1111_NUMBER if breaks else _KOHYA_NUMBER
    runs: list[list] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}
    factors = {")": STEP, "]": 1 / STEP}
    for match in re.finditer(rf"\\(?P<escaped>[()\[\]\\]?)|[(\[]|{number}|[)\]]|[^\\()\[\]:]+|:", prompt):
        piece, (escaped, weight) = match[0], match.group("escaped", "weight")
        opening = _PAIRS.get(piece)
        if escaped is not None:
            runs.append([escaped, 1.0])
        elif piece in opened:
            opened[piece].append(len(runs))
            _check_nested(len(opened[piece]))
        elif weight is not None and opened["("]:
            _multiply(runs, opened["("].pop(), float(weight))
        elif opening and opened[opening]:
            _multiply(runs, opened[opening].pop(), factors[piece])
        else:
            for index, text in enumerate(_A1111_BREAK.split(piece) if breaks else [piece]):
                runs += [["BREAK", -1.0]] * (index > 0) + [[text, 1.0]]
    for bracket, starts in opened.items():
        for start in starts:
            _multiply(runs, start, STEP if bracket == "(" else 1 / STEP)
    parts: list[list[Run]] = [[]]
    for weight, group in itertools.groupby(runs, key=lambda run: run[1]):  # neighbours of one weight are one run
        text = "".join(text for text, _ in group)
        if breaks and (text, weight) == ("BREAK", -1.0):
            parts.append([])
        else:
            parts[-1].append((text, weight))
    return [Part(part) for part in parts]


def _multiply(runs: list[list], start: int, factor: float) -> None:
    for run in runs[start:]:
        run[1] *= factor


def _parse_comfyui(prompt: str) -> list[Run]:
    """As ComfyUI does: `(words)` times 1.1, and `(words:1.3)` is 1.3, whatever encloses it."""
    hidden = prompt.replace("\\)", "\0\1").replace("\\(", "\0\2")
    return [(text.replace("\0\1", ")").replace("\0\2", "("), weight) for text, weight in _nested(hidden, 1.0)]


def _nested(text: str, weight: float, depth: int = 0) -> Iterator[Run]:
    _check_nested(depth)
    for piece in _outermost(text):
        if len(piece) < 2 or piece[0] != "(" or piece[-1] != ")":
            yield piece, weight
            continue
        inner, colon, number = piece[1:-1].rpartition(":")
        try:
            given = float(number) if colon and inner else None
        except ValueError:
            given = None
        inside = (piece[1:-1], weight * STEP) if given is None else (inner, given)
        yield from _nested(*inside, depth + 1)


def _outermost(text: str) -> Iterator[str]:
    """The text cut before and after its outermost round brackets. After a stray `)` none is outermost."""
    depth = start = 0
    for at, sign in enumerate(text):
        if sign == "(":
            if depth == 0 and at > start:
                yield text[start:at]
                start = at
            depth += 1
        elif sign == ")":
            depth -= 1
            if depth == 0:
                yield text[start : at + 1]
                start = at + 1
    if start < len(text):
        yield text[start:]
