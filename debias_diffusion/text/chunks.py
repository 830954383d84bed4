"""How texts longer than an encoder are read: where they are cut, which states become the result, what weights do.

Nothing but torch and the standard library is needed, so that a node of ComfyUI and a single file of code can carry it.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from .sentences import sentence_ends

if TYPE_CHECKING:
    import torch  # imported where it is used: names of readings are read before any model is loaded

MOST_SHARPENING = 4.0  # of `sharpen`
TRAINED_POSITIONS = 77  # what UNets for CLIP encoders are trained with, BOS and EOS included

# Of texts longer than the context length: our own ways, then the programs whose ways are imitated.
Reading = Literal["overlap", "separate", "cut", "a1111", "kohya", "comfyui"]
# What a weight does to the states of its token, see `weigh`; "none": signs of weights are text. "a1111" is "original".
Emphasis = Literal["none", "ignore", "original", "no_norm", "comfyui", "a1111"]
Breaks = Literal["concatenate", "average"]  # what BREAK does, where it is read
PROGRAMS: dict[Reading, Emphasis] = {"a1111": "original", "kohya": "none", "comfyui": "comfyui"}  # what each does
WHOLE_ROWS = ("a1111", "comfyui")  # these give the UNet each chunk's BOS, EOS and pads, too
KOHYA_POSITIONS = 227  # of `max_token_length=225`
_BACKTRACK = 20  # A1111's default: how many tokens move to the next chunk, so that this one ends with a comma
_LARGE_RUN = 8  # ComfyUI cuts runs of one weight with so many tokens


class Cut(IntEnum):
    """How good it is to end a chunk after a token."""

    NEVER = 0  # inside the vectors of one textual inversion
    TOKEN = 1
    WORD = 2
    COMMA = 3
    SENTENCE = 4


class Part(NamedTuple):
    """A part of a prompt between BREAKs.

    Attributes:
        runs: pieces of text and their weights, in order.
        strength: of the part, if the parts are averaged.
    """

    runs: Sequence[tuple[str, float]]
    strength: float = 1.0


class Tokens(NamedTuple):
    """One text, tokenized for one encoder.

    Attributes:
        ids: token ids without BOS and EOS.
        cuts: for each token, how good it is to end a chunk after it.
        weights: for each token, its weight; 1 changes nothing.
        breaks: numbers of tokens before which a chunk ends, however short it is; not descending, and twice for an empty
            chunk.
        strengths: of the parts between breaks, where they are averaged; all 1 if empty.
    """

    ids: list[int]
    cuts: list[Cut]
    weights: list[float]
    breaks: Sequence[int] = ()
    strengths: Sequence[float] = ()

    @classmethod
    def joined(cls, parts: Sequence["Tokens"], strengths: Sequence[float] = ()) -> "Tokens":
        """One text of parts with breaks between them."""
        columns = [list(itertools.chain(*column)) for column in zip(*(part[:3] for part in parts), strict=True)]
        return cls(*columns, list(itertools.accumulate(len(part.ids) for part in parts[:-1])), strengths)

    def first(self, count: int) -> "Tokens":
        """The first `count` tokens."""
        breaks = [at for at in self.breaks if at < count]
        return self._replace(ids=self.ids[:count], cuts=self.cuts[:count], weights=self.weights[:count], breaks=breaks)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Start and end of the parts between breaks."""
        return list(itertools.pairwise([0, *self.breaks, len(self.ids)]))

    @property
    def separated(self) -> list["Tokens"]:
        """The parts between breaks as texts of their own."""
        strengths = self.strengths or [1.0] * len(self.parts)
        parts = zip(self.parts, strengths, strict=True)
        return [Tokens(self.ids[a:b], self.cuts[a:b], self.weights[a:b], (), (own,)) for (a, b), own in parts]


class Chunk(NamedTuple):
    """A part of a text that is read at once, by token indices.

    Attributes:
        read: all of it.
        kept: its end, of which the states are used; what stands before it was kept from earlier chunks.
    """

    read: range
    kept: range

    @property
    def reread(self) -> int:
        """How many of the tokens were kept from earlier chunks."""
        return len(self.read) - len(self.kept)


def positions_for(n_tokens: int, context_lengths: list[int]) -> int:
    """The length of the embeddings for `n_tokens` tokens, BOS and EOS.

    Up to the longest context length: as many whole chunks of 77 as needed (of the shortest context length, if that is
    below 77), at most the longest context length. Beyond it: whole chunks of the longest context length. With a
    248-token encoder that gives 77, 152, 227, 248, 494, 740, ...; without one 77, 152, 227, 302, ...

    Args:
        n_tokens: of the longest text, without BOS and EOS.
        context_lengths: of each text encoder, BOS and EOS included.
    """

    def whole_chunks(length: int) -> int:
        return 2 + (length - 2) * max(1, math.ceil(n_tokens / (length - 2)))

    positions = whole_chunks(min(TRAINED_POSITIONS, *context_lengths))
    return positions if positions <= max(context_lengths) else whole_chunks(max(context_lengths))


def chunk_length(context: int, reading: Reading) -> int:
    """Positions that an encoder of this context length reads at once; 77 as the programs do that are imitated."""
    return min(context, TRAINED_POSITIONS) if reading in PROGRAMS else context


def join_runs(runs: Sequence[str]) -> tuple[str, list[int]]:
    """Runs of text that are tokenized by themselves as one text, and where each begins: a run ends with a word, so a
    space stands between two that have none."""
    text, starts = "", []
    for run in runs:
        if text and run and not (text[-1].isspace() or run[0].isspace()):
            text += " "
        starts.append(len(text))
        text += run
    return text, starts


def rate_cuts(text: str, spans: Sequence[tuple[int, int]], joined: Sequence[bool]) -> list[Cut]:
    """How good it is to end a chunk after each token of a text.

    Args:
        text: the text that was tokenized, without the signs of weights.
        spans: start and end of each token in `text`, in characters.
        joined: for each token but the last, whether the next is a vector of the same textual inversion.
    """
    ends = sentence_ends(text)
    sentences = [bisect.bisect_right(ends, start) for start, _ in spans]
    cuts: list[Cut] = []
    for at, ((_, end), (start, _)) in enumerate(itertools.pairwise(spans)):
        gap = text[end:start]
        # Closing quotation marks and brackets may follow the end of a clause: (like this,) and so on.
        last = text[max(0, end - 8) : end].rstrip("\"'”’»)]}")[-1:] or " "
        if joined[at]:
            cuts.append(Cut.NEVER)
        elif start < end:  # both tokens are bytes of one character
            cuts.append(Cut.TOKEN)
        elif "\n" in gap or sentences[at] < sentences[at + 1]:
            cuts.append(Cut.SENTENCE)
        elif last in "，、；：" or (gap and last in ",;:"):
            cuts.append(Cut.COMMA)
        else:
            cuts.append(Cut.WORD if gap else Cut.TOKEN)
    return cuts + [Cut.SENTENCE] * (len(spans) > 0)


def rate_cuts_of_program(
    reading: Reading, joined: Sequence[bool], commas: Sequence[bool], runs: Sequence[int]
) -> list[Cut]:
    """`rate_cuts` for a program that is imitated: A1111 sees commas, ComfyUI the ends of runs of one weight.

    Args:
        commas: for each token, whether it is A1111's comma.
        runs: for each token, the number of its run.
    """
    cuts = [Cut.COMMA if is_comma and reading == "a1111" else Cut.TOKEN for is_comma in commas]
    for at, (run, next_run) in enumerate(itertools.pairwise([*runs, None])):
        if at < len(joined) and joined[at]:
            cuts[at] = Cut.NEVER
        elif run != next_run and reading == "comfyui":
            cuts[at] = Cut.WORD
    return cuts


def split_text(tokens: Tokens, slots: int, reading: Reading = "overlap") -> list[Chunk]:
    """The chunks of at most `slots` tokens in which a text is read.

    A break always ends a chunk. Otherwise:

    - "separate": any cut leaves at most half of the chunk unused; among the remaining places the best kind wins (end
      of a sentence, then comma, word, token), and among equals the last. The vectors of one textual inversion stay
      together, even if more than half stays unused; only an inversion of more than `slots` vectors is cut.
    - "overlap": as "separate", but each chunk but the first is read together with the end of the text before it. At
      most half of a chunk is then new, and at least a quarter is read again, from the earliest beginning of a sentence
      that fits (else after a comma, a word, a token). So no token is read as if the text began with it, but where it
      does and after a break. Up to three quarters are new where there would be more than twice as many chunks as
      without overlap, or a last one of a single token.
    - "a1111": full chunks, but one ends after its last comma if fewer than 20 tokens then move to the next.
    - "comfyui": full chunks, but no run of one weight with fewer than eight tokens is cut.
    - "kohya" and "cut": full chunks.

    Returns:
        at least one chunk, which may be empty; the kept parts make up the text, in order.
    """
    if reading == "overlap":
        return [chunk for part in tokens.parts for chunk in _overlapping(tokens.cuts, *part, slots)]
    split = {"separate": _split_at_best, "a1111": _split_at_commas, "comfyui": _split_at_runs}.get(reading, _split_full)
    chunks = []
    for start, end in tokens.parts:
        places = [start, *split(tokens.cuts, start, end, slots), end]
        chunks += [Chunk(range(*part), range(*part)) for part in itertools.pairwise(places)]
    return chunks


def _overlapping(cuts: Sequence[Cut], start: int, end: int, slots: int) -> list[Chunk]:
    apart = _split_at_best(cuts, start, end, slots)
    first = apart[0] if apart else end
    chunks, overlap, ends = [Chunk(range(start, first), range(start, first))], slots // 4, [first]
    for new in (max(1, slots // 2), max(1, slots - overlap)) if apart else ():
        ends = [first, *_split_at_best(cuts, first, end, new), end]
        if len(ends) <= 2 * (1 + len(apart)):
            break
    else:
        ends = [*range(first, end, max(1, slots - overlap)), end]
    if len(ends) > 2 and ends[-1] - ends[-2] == 1 and ends[-1] - ends[-3] <= slots - overlap:
        del ends[-2]
    for kept, stop in itertools.pairwise(ends):
        if (begin := stop - slots) <= start:
            begin = start
        else:  # after the best cut, as early as possible
            begin = max(range(begin, max(begin, kept - overlap) + 1), key=lambda at: (cuts[at - 1], -at))
        chunks.append(Chunk(range(begin, stop), range(kept, stop)))
    return chunks


def _split_full(cuts: Sequence[Cut], start: int, end: int, slots: int) -> list[int]:
    return list(range(start + slots, end, slots))


def _split_at_best(cuts: Sequence[Cut], start: int, end: int, slots: int) -> list[int]:
    places = []
    while end - start > slots:
        places.append(start := _best_end(cuts, start, slots))
    return places


def _split_at_commas(cuts: Sequence[Cut], start: int, end: int, slots: int) -> list[int]:
    """Where A1111 cuts, whose commas alone have `Cut.COMMA`; the vectors of a textual inversion stay together."""
    places, comma = [], None
    for at, stop in _groups(cuts, start, end, Cut.TOKEN):
        is_comma = cuts[at] == Cut.COMMA
        if stop - start > slots and at > start:
            near = not is_comma and at - start == slots and comma is not None and at - comma <= _BACKTRACK
            places.append(start := comma + 1 if near else at)
            comma = None  # also a comma that begins a chunk is forgotten
        elif is_comma:
            comma = at
    return places


def _split_at_runs(cuts: Sequence[Cut], start: int, end: int, slots: int) -> list[int]:
    """Where ComfyUI cuts: between runs of one weight, which end at `Cut.WORD` or better, and in long ones."""
    places = []
    for at, stop in _groups(cuts, start, end, Cut.WORD):
        if stop - start > slots and stop - at < _LARGE_RUN and at > start:
            places.append(start := at)
        while stop - start > slots:
            places.append(start := start + slots)
    return places


def _groups(cuts: Sequence[Cut], start: int, end: int, least: Cut) -> Iterator[tuple[int, int]]:
    """Start and end of the groups of tokens that end with a cut of at least this kind, or at `end`."""
    last = end - 1  # a break may stand within a run
    return itertools.pairwise([start, *(at + 1 for at in range(start, end) if cuts[at] >= least or at == last)])


def _best_end(cuts: Sequence[Cut], start: int, slots: int) -> int:
    """Where a chunk that begins at token `start` ends, exclusive."""
    half = start + slots - slots // 2

    def goodness(end: int) -> tuple:
        return cuts[end - 1] > Cut.NEVER, end >= half, cuts[end - 1], end

    return max(range(start + 1, start + slots + 1), key=goodness)


def positions_of(chunks: Sequence[Chunk], context_length: int, length: int, reading: Reading = "overlap") -> list[int]:
    """Which states of a text's chunks are given to the UNet.

    Token j of a text stands at position 1 + j of the result, whatever its encoder's context length, except in
    `WHOLE_ROWS`:

    - "a1111" and "comfyui": all positions of all chunks, repeated as often as the length is a multiple of them, which
      leaves attention as it is; else empty chunks follow.
    - "kohya": BOS of the first chunk, the text positions of each, empty ones too, and the last position of the last.
    - otherwise: BOS of the first chunk, the text, EOS of the last chunk, then pads: first the last chunk's, then, as
      often as needed, the positions after BOS of an empty chunk.

    Args:
        chunks: of the text, in order.
        context_length: positions of each chunk, `[BOS, text, EOS, pads]`.
        length: of the result, at least the number of text tokens and two.

    Returns:
        [length] numbers of positions in all chunks, one after the other; from `len(chunks) * context_length` on, those
        of an empty chunk.
    """
    starts, empty = [row * context_length for row in range(len(chunks))], len(chunks) * context_length
    if reading in WHOLE_ROWS:
        positions = range(empty)
        pads = positions if length % empty == 0 else range(empty, empty + context_length)
    elif reading == "kohya":
        starts = (starts + [empty] * length)[: (length - 2) // (context_length - 2)]
        texts = [start + at for start in starts for at in range(1, context_length - 1)]
        positions, pads = [0, *texts, starts[-1] + context_length - 1], ()
    else:
        positions = [0]
        for start, chunk in zip(starts, chunks, strict=True):
            positions += range(start + 1 + chunk.reread, start + 1 + len(chunk.read))
        positions += range(starts[-1] + 1 + len(chunks[-1].read), empty)
        pads = range(empty + 1, empty + context_length)
    return list(itertools.islice(itertools.chain(positions, itertools.cycle(pads)), length))


def weigh(
    states: "torch.Tensor",
    weights: "torch.Tensor",
    empty: "torch.Tensor",
    emphasis: Emphasis,
    groups: "torch.Tensor",
    entries: "torch.Tensor",
) -> "torch.Tensor":
    """What weights do to hidden states. Those of weight 1 stay as they are, bit for bit, except under "original".

    - "comfyui": empty + weight * (state - empty), away from the states of an empty text, or towards them.
    - "no_norm": weight * state.
    - "original": as "no_norm", then each chunk is multiplied so that the mean of its group's states is what it was.

    Args:
        states: [chunks, context_length, width]
        weights: [chunks, context_length]
        empty: [context_length, width] hidden states of `[BOS, EOS, pads]`.
        groups: [chunks] numbers from 0; chunks of one number share their mean, in which
        entries: [chunks] is how often each counts: A1111 counts a text as often as its prompt changes to it.
    """
    import torch

    weights = weights.to(states)[..., None]
    if emphasis == "comfyui":
        return torch.where(weights == 1, states, empty + weights * (states - empty))
    weighted = states * weights
    if emphasis == "original":
        means = (part.mean((1, 2)) * entries for part in (states, weighted))
        before, after = (torch.zeros_like(mean).index_add(0, groups, mean)[groups] for mean in means)
        weighted = weighted * (before / after)[:, None, None]
    return weighted
