"""Long texts in windows: where a text is cut, and how the windows' states are joined as if they were one."""

import math
from enum import IntEnum
from typing import NamedTuple

import torch

TRAINED_POSITIONS = 77  # what UNets for CLIP encoders are trained with, BOS and EOS included


class Cut(IntEnum):
    """How good it is to end a window after a token."""

    NEVER = 0  # inside the vectors of one textual inversion
    TOKEN = 1
    WORD = 2
    COMMA = 3
    SENTENCE = 4
    BREAK = 5  # a window ends here, however short it is


class Tokens(NamedTuple):
    """One text as one encoder reads it.

    Attributes:
        ids: the text's tokens, without BOS and EOS.
        cuts: for each token, how good it is to end a window after it.
        weights: for each token, how strongly it counts; 1 is as it is.
    """

    ids: list[int]
    cuts: list[Cut]
    weights: list[float]


def positions_for(n_tokens: int, windows: list[int]) -> int:
    """The length of the embeddings that hold `n_tokens` tokens, BOS and EOS.

    As many whole windows of 77 as are needed (or of the shortest encoder's, if that is shorter), as long as they fit
    the longest window; else that window, or as many of it as are needed. With an encoder of 248 that is 77, 152, 227,
    248, 494, 740, ...; without one 77, 152, 227, 302, ...

    Args:
        n_tokens: of the longest text, without BOS and EOS.
        windows: positions of each text encoder, BOS and EOS included.
    """

    def whole(window: int) -> int:
        return 2 + (window - 2) * max(1, math.ceil(n_tokens / (window - 2)))

    positions = whole(min(TRAINED_POSITIONS, *windows))
    return positions if positions <= max(windows) else whole(max(windows))


def rate_cuts(text: str, spans: list[tuple[int, int]], names: list[str | None]) -> list[Cut]:
    """How good it is to end a window after each token of a text.

    Args:
        text: what was tokenized.
        spans: where in `text` each token starts and ends, in characters.
        names: the content of each added token, None for the vocabulary's own.
    """
    cuts = []
    for (_, end), (start, _), name, next_name in zip(spans, spans[1:], names, names[1:], strict=False):
        gap = text[end:start]
        # What ends a sentence or a clause may stand inside quotation marks or brackets: (like this.)
        last = text[max(0, end - 8) : end].rstrip("\"'”’»)]}")[-1:] or " "
        if next_name is not None and next_name == _next_vector(name):
            cuts.append(Cut.NEVER)
        elif start < end:  # both tokens are bytes of one character
            cuts.append(Cut.TOKEN)
        elif "\n" in gap or last in "。！？" or (gap and last in ".!?…"):
            cuts.append(Cut.SENTENCE)
        elif last in "，、；：" or (gap and last in ",;:"):
            cuts.append(Cut.COMMA)
        else:
            cuts.append(Cut.WORD if gap else Cut.TOKEN)
    return cuts + [Cut.SENTENCE] * (len(spans) > 0)


def _next_vector(name: str | None) -> str | None:
    """The token of a textual inversion that follows `name`: "<x>_1" after "<x>", "<x>_2" after "<x>_1"."""
    if name is None:
        return None
    stem, _, number = name.rpartition("_")
    return f"{stem}_{int(number) + 1}" if stem and number.isdecimal() else f"{name}_1"


def split_windows(tokens: Tokens, slots: int) -> list[range]:
    """A text's tokens in pieces of at most `slots`, each cut where it hurts least.

    Every `Cut.BREAK` is a cut. Any other leaves at most half of the window unused. Among the places that allows, the
    best kind wins (a sentence's end, then a comma, a word, a token), and among equals the last. The vectors of one
    textual inversion stay together, also where that leaves more unused; only one that has more vectors than there are
    slots is cut.

    Returns:
        which tokens each piece has, at least one piece; an empty text is one empty piece.
    """
    ends = [at + 1 for at, cut in enumerate(tokens.cuts) if cut == Cut.BREAK]
    pieces, start = [], 0
    for end in [*ends, len(tokens.ids)]:
        while end - start > slots:
            best = _best_end(tokens.cuts, start, slots)
            pieces.append(range(start, best))
            start = best
        pieces.append(range(start, end))
        start = end
    return pieces


def _best_end(cuts: list[Cut], start: int, slots: int) -> int:
    """Where a window that begins at token `start` ends, exclusive."""
    half = start + slots - slots // 2

    def goodness(end: int) -> tuple:
        return cuts[end - 1] > Cut.NEVER, end >= half, cuts[end - 1], end

    return max(range(start + 1, start + slots + 1), key=goodness)


def join_windows(states: torch.Tensor, n_tokens: list[int], empty: torch.Tensor | None, length: int) -> torch.Tensor:
    """The states of a text's windows as those of one long window.

    BOS of the first window, every text token in order, EOS of the last window, then pads: the last window's own, and
    when those run out the positions after BOS of an empty window, as often as needed. So token j of a text stands at
    position 1 + j, whatever an encoder's window is, and two encoders' states belong together.

    Args:
        states: [windows, window, width], each `[BOS, text, EOS, pads]`.
        n_tokens: [windows] text tokens in each.
        empty: [window, width] states of `[BOS, EOS, pads]`; None if the last window's pads suffice.
        length: positions wanted, at least the text's tokens and two.

    Returns:
        [length, width]
    """
    texts = [row[1 : 1 + n] for row, n in zip(states, n_tokens, strict=True)]
    parts = [states[0, :1], *texts, states[-1, 1 + n_tokens[-1] :]]
    missing = length - sum(len(part) for part in parts)
    if missing > 0:
        parts += [empty[1:]] * math.ceil(missing / len(empty[1:]))
    return torch.cat(parts)[:length]


def weigh(states: torch.Tensor, weights: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """States moved away from those of an empty text, or towards them: empty + weight * (state - empty).

    This is how ComfyUI weights a prompt. States of weight 1 stay as they are, bit for bit.

    Args:
        states: [windows, window, width]
        weights: [windows, window]
        empty: [window, width] states of `[BOS, EOS, pads]`.
    """
    weights = weights.to(states)[..., None]
    return torch.where(weights == 1, states, empty + weights * (states - empty))
