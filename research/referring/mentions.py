"""How toy captions mention their objects, and which of these can be known from the tokens that are read together."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from debias_diffusion.text.chunks import TRAINED_POSITIONS, Cut, Reading, Tokens, split_text
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import Caption

from .grammar import facts

ALONE, WITHIN, ACROSS = MENTION_KINDS = "told alone", "by reference within a chunk", "by reference across a cut"
ALL = "all objects"
# By name, how a symbolic reader reads, for tables.
READERS = {
    "truncated": "cut at 77 tokens",
    "in_chunks": "in chunks, each by itself",
    "in_overlapping_chunks": "in overlapping chunks",
    "whole": "whole",
}


class Mention(NamedTuple):
    """How the kind and the colour of an object are mentioned: one of `MENTION_KINDS`; and which `READERS` know them."""

    kind: str
    known_by: list[str]


def read_caption(caption: Caption, count_tokens: Callable[[str], int]) -> dict[str, Mention]:
    """How a caption mentions the object in each place that it fills; for `count_tokens` see `sentences_by_chunk`."""
    chunks = sentences_by_chunk(caption, count_tokens)
    parts = {
        "truncated": sentences_by_chunk(caption, count_tokens, "cut")[:1],
        "in_chunks": chunks,
        "in_overlapping_chunks": sentences_by_chunk(caption, count_tokens, "overlap"),
        "whole": [range(len(caption.sentences))],
    }
    known = {reader: knowable(caption, sentences) for reader, sentences in parts.items()}
    return {
        place: Mention(kind, [reader for reader in READERS if place in known[reader]])
        for place, kind in mention_kinds(caption, chunks).items()
    }


def ceilings(captions: Sequence[Mapping[str, Mention]]) -> list[dict]:
    """How many objects of several captions, see `read_caption`, each of `READERS` can know.

    Returns:
        for all objects, then for each of `MENTION_KINDS` that there is: "told", `ALL` or the kind, "objects", their
        number, and by reader the share, in percent.
    """
    rows, mentions = [], [mention for caption in captions for mention in caption.values()]
    for kind in (ALL, *MENTION_KINDS):
        known_by = [mention.known_by for mention in mentions if kind in (ALL, mention.kind)]
        if known_by:
            shares = {reader: 100 * sum(reader in each for each in known_by) / len(known_by) for reader in READERS}
            rows.append({"told": kind, "objects": len(known_by)} | shares)
    return rows


def sentences_by_chunk(
    caption: Caption, count_tokens: Callable[[str], int], reading: Reading = "separate"
) -> list[list[int]]:
    """The numbers of the sentences that stand whole in each chunk of 77 tokens, cut as the pipelines cut a prompt.

    Args:
        caption: of sentences of less than half a chunk, as the toy world's are: other places than their ends, such as
            commas, are not looked at.
        count_tokens: of a cleaned sentence, without BOS and EOS. Sentences are tokenized alike alone and in a text.
        reading: how a long prompt is read; what overlapping chunks read again stands in both.
    """
    lengths = [count_tokens(clean(sentence.text)) for sentence in caption.sentences]
    cuts = [cut for n in lengths for cut in [Cut.TOKEN] * (n - 1) + [Cut.SENTENCE]]
    number_of = [number for number, n in enumerate(lengths) for _ in range(n)]
    chunks = split_text(Tokens(number_of, cuts, []), TRAINED_POSITIONS - 2, reading)
    numbers = [[number_of[at] for at in chunk.read] for chunk in chunks]
    return [[number for number in dict.fromkeys(chunk) if chunk.count(number) == lengths[number]] for chunk in numbers]


def mention_kinds(caption: Caption, chunks: Sequence[Sequence[int]]) -> dict[str, str]:
    """{place: one of `MENTION_KINDS`}: how the kind and the colour of the object there are mentioned.

    `ALONE` is in one sentence; `ACROSS` means that a cut into `chunks` divides the sentences that mention it together.
    """
    needed = {place: known["kind"].sentences | known["colour"].sentences for place, known in facts(caption).items()}
    return {
        place: ALONE if len(at) == 1 else WITHIN if any(at <= set(chunk) for chunk in chunks) else ACROSS
        for place, at in needed.items()
    }


def knowable(caption: Caption, chunks: Sequence[Sequence[int]]) -> set[str]:
    """The places whose object's kind and colour can be known from chunks that are read apart."""
    return {
        place
        for place, known in facts(caption).items()
        if all(any(known[name].sentences <= set(chunk) for chunk in chunks) for name in ("kind", "colour"))
    }
