"""How much of a toy prompt's objects a text encoder can know at most, from the tokens that it reads together."""

from collections.abc import Callable, Sequence

from debias_diffusion.pipelines.chunks import TRAINED_POSITIONS, Cut, Tokens, split_chunks
from debias_diffusion.tokens import clean
from debias_diffusion.toyworld.grammar import Caption
from debias_diffusion.toyworld.references import resolve, resolve_apart

ALONE, WITHIN, ACROSS = "told alone", "by reference within a chunk", "by reference across a cut"


def sentences_by_chunk(caption: Caption, count_tokens: Callable[[str], int]) -> list[list[int]]:
    """The numbers of the sentences that stand in each chunk of 77 tokens, cut as the pipelines cut a prompt.

    Args:
        count_tokens: of a cleaned sentence, without BOS and EOS. Sentences are tokenized alike alone and in a text.
    """
    lengths = [count_tokens(clean(sentence.text)) for sentence in caption.sentences]
    cuts = [cut for n in lengths for cut in [Cut.TOKEN] * (n - 1) + [Cut.SENTENCE]]
    number_of = [number for number, n in enumerate(lengths) for _ in range(n)]
    chunks = split_chunks(Tokens(number_of, cuts, []), TRAINED_POSITIONS - 2)
    whole = [[number_of[at] for at in chunk] for chunk in chunks]
    return [[number for number in dict.fromkeys(chunk) if chunk.count(number) == lengths[number]] for chunk in whole]


def truncated(caption: Caption, count_tokens: Callable[[str], int]) -> list[int]:
    """The numbers of the sentences that stand wholly in the first 77 tokens."""
    left, read = TRAINED_POSITIONS - 2, []
    for number, sentence in enumerate(caption.sentences):
        left -= count_tokens(clean(sentence.text))
        if left >= 0:
            read.append(number)
    return read


def ways_told(caption: Caption, chunks: Sequence[Sequence[int]]) -> dict[str, str]:
    """{place: ALONE, WITHIN or ACROSS}: how the kind and the colour of the object there are told.

    ALONE is in one sentence; ACROSS means that a cut into `chunks` divides the sentences that tell it together.
    """
    ways = {}
    for place, facts in caption.facts().items():
        needed = facts["kind"].sentences | facts["colour"].sentences
        together = any(needed <= set(chunk) for chunk in chunks)
        ways[place] = ALONE if len(needed) == 1 else WITHIN if together else ACROSS
    return ways


def knowable(caption: Caption, chunks: Sequence[Sequence[int]]) -> set[str]:
    """The places whose object's kind and colour can be known from chunks that are read apart."""
    claims = [{number: caption.sentences[number].claim for number in chunk} for chunk in chunks]
    facts = resolve_apart(claims) if len(claims) > 1 else resolve(claims[0])
    return {place for place, there in facts.items() if {"kind", "colour"} <= set(there)}
