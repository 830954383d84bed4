"""Long texts in chunks: where a text is cut, and how the chunks' hidden states are joined into one sequence."""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import convert_slow_tokenizer

TRAINED_POSITIONS = 77  # what UNets for CLIP encoders are trained with, BOS and EOS included


class Cut(IntEnum):
    """How good it is to end a chunk after a token."""

    NEVER = 0  # inside the vectors of one textual inversion
    TOKEN = 1
    WORD = 2
    COMMA = 3
    SENTENCE = 4
    BREAK = 5  # a chunk ends here, however short it is


class Tokens(NamedTuple):
    """One text, tokenized for one encoder.

    Attributes:
        ids: token ids without BOS and EOS.
        cuts: for each token, how good it is to end a chunk after it.
        weights: for each token, its weight; 1 changes nothing.
    """

    ids: list[int]
    cuts: list[Cut]
    weights: list[float]

    def first(self, count: int) -> "Tokens":
        """The first `count` tokens."""
        return Tokens(*(column[:count] for column in self))


class Chunk(NamedTuple):
    """A part of a text that is read at once, by token indices.

    Attributes:
        read: all of it.
        kept: its end, of which the states are used; what stands before it was kept from earlier chunks.
    """

    read: range
    kept: range

    @property
    def again(self) -> int:
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


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, list[tuple[int, int]]]:
    """The tokens of a text, all of weight 1, and their spans (start and end in `text`, in characters)."""
    tokenizer = fast_tokenizer(tokenizer)
    # verbose=False: transformers' warning about texts beyond the context length does not apply
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = batch["input_ids"], batch["offset_mapping"]
    added = tokenizer.added_tokens_encoder
    names = [name if name in added else None for name in tokenizer.convert_ids_to_tokens(ids)]
    return Tokens(ids, rate_cuts(text, spans, names), [1.0] * len(ids)), spans


_FAST = WeakKeyDictionary()  # by tokenizer of transformers 4: the number of its tokens, and its fast twin


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or one of the same tokens that gives spans, where it is one of transformers 4 that does not."""
    if tokenizer.is_fast:
        return tokenizer
    count, fast = _FAST.get(tokenizer, (None, None))
    if count != len(tokenizer):  # textual inversions add tokens
        special = tokenizer.special_tokens_map_extended
        fast = PreTrainedTokenizerFast(tokenizer_object=convert_slow_tokenizer(tokenizer), **special)
        fast.add_tokens([token for _, token in sorted(tokenizer.added_tokens_decoder.items())])
        _FAST[tokenizer] = (len(tokenizer), fast)
    return fast


def rate_cuts(text: str, spans: list[tuple[int, int]], added_tokens: list[str | None]) -> list[Cut]:
    """How good it is to end a chunk after each token of a text.

    Args:
        text: the text that was tokenized.
        spans: start and end of each token in `text`, in characters.
        added_tokens: the content of each added token, None for tokens of the original vocabulary.
    """
    cuts: list[Cut] = []
    for (_, end), (start, _), name, next_name in zip(spans, spans[1:], added_tokens, added_tokens[1:], strict=False):
        gap = text[end:start]
        # Closing quotation marks and brackets may follow the end of a sentence or clause: (like this.)
        last = text[max(0, end - 8) : end].rstrip("\"'”’»)]}")[-1:] or " "
        # A textual inversion "<x>" of several vectors is the tokens "<x>", "<x>_1", "<x>_2", ...
        if not (cuts and cuts[-1] == Cut.NEVER):
            stem, vector = name, 0
        if stem is not None and next_name == f"{stem}_{vector + 1}":
            vector += 1
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


def split_text(tokens: Tokens, slots: int, overlap: bool = True) -> list[Chunk]:
    """The chunks of at most `slots` tokens in which a text is read, cut at the best places.

    `Cut.BREAK` always ends a chunk. Any other cut leaves at most half of the chunk unused; among the remaining places
    the best kind wins (end of a sentence, then comma, word, token), and among equals the last. The vectors of one
    textual inversion stay together, even if more than half stays unused; only an inversion of more than `slots` vectors
    is cut.

    Args:
        overlap: read each chunk but the first together with the end of the text before it. At most half of a chunk is
            then new, and at least a quarter is read again, from the earliest beginning of a sentence that fits (else
            after a comma, a word, a token). So no token is read as if the text began with it, but where it does and
            after `Cut.BREAK`.

    Returns:
        at least one chunk, which may be empty; the kept parts make up the text, in order.
    """
    chunks, start, new = [], 0, max(1, slots // 2) if overlap else slots
    for end in [*(at + 1 for at, cut in enumerate(tokens.cuts) if cut == Cut.BREAK), len(tokens.ids)]:
        stop = end if end - start <= slots else _best_end(tokens.cuts, start, slots)
        chunks.append(Chunk(range(start, stop), range(start, stop)))
        while stop < end:
            kept, stop = stop, end if end - stop <= new else _best_end(tokens.cuts, stop, new)
            read = _best_start(tokens.cuts, start, stop - slots, kept - slots // 4) if overlap else kept
            chunks.append(Chunk(range(read, stop), range(kept, stop)))
        start = end
    return chunks


def _best_start(cuts: Sequence[Cut], first: int, least: int, most: int) -> int:
    """Where to begin to read, between `least` and `most`: at `first` if possible, else after the best cut, early."""
    if least <= first:
        return first
    return max(range(least, max(least, most) + 1), key=lambda start: (cuts[start - 1], -start))


def _best_end(cuts: list[Cut], start: int, slots: int) -> int:
    """Where a chunk that begins at token `start` ends, exclusive."""
    half = start + slots - slots // 2

    def goodness(end: int) -> tuple:
        return cuts[end - 1] > Cut.NEVER, end >= half, cuts[end - 1], end

    return max(range(start + 1, start + slots + 1), key=goodness)


def lacks_pads(chunks: Sequence[Chunk], context_length: int, length: int) -> bool:
    """Whether a sequence of `length` positions needs more pads than a text's last chunk has, from an empty chunk."""
    return context_length - chunks[-1].again + sum(len(chunk.kept) for chunk in chunks[:-1]) < length


def join_chunks(states: torch.Tensor, chunks: Sequence[Chunk], empty: torch.Tensor | None, length: int) -> torch.Tensor:
    """Joins the hidden states of a text's chunks into one sequence.

    The result is BOS of the first chunk, every text token in order, EOS of the last chunk, then pads: first the last
    chunk's, then, as often as needed, the positions after BOS of an empty chunk. So token j of a text always stands at
    position 1 + j, and two encoders of different context lengths stay aligned.

    Args:
        states: [chunks, context_length, width], each row `[BOS, text, EOS, pads]`.
        chunks: of the text, in order.
        empty: [context_length, width] hidden states of `[BOS, EOS, pads]`; None if the last chunk has enough pads.
        length: positions of the result, at least the number of text tokens and two.

    Returns:
        [length, width]
    """
    texts = [row[1 + chunk.again : 1 + len(chunk.read)] for row, chunk in zip(states, chunks, strict=True)]
    parts = [states[0, :1], *texts, states[-1, 1 + len(chunks[-1].read) :]]
    missing = length - sum(len(part) for part in parts)
    if missing > 0:
        parts += [empty[1:]] * math.ceil(missing / len(empty[1:]))
    return torch.cat(parts)[:length]


def weigh(states: torch.Tensor, weights: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Moves hidden states away from those of an empty text, or towards them: empty + weight * (state - empty).

    ComfyUI weights prompts in the same way. States of weight 1 stay as they are, bit for bit.

    Args:
        states: [chunks, context_length, width]
        weights: [chunks, context_length]
        empty: [context_length, width] hidden states of `[BOS, EOS, pads]`.
    """
    weights = weights.to(states)[..., None]
    return torch.where(weights == 1, states, empty + weights * (states - empty))
