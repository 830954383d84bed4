"""How toy captions tell their objects, against closed forms."""

import random

from debias_diffusion.eval.images.mentions import (
    ACROSS,
    ALL,
    ALONE,
    READERS,
    WITHIN,
    Mention,
    ceilings,
    knowable,
    mention_kinds,
    read_caption,
    refers_back,
    sentences_by_chunk,
)
from debias_diffusion.toyworld.claims import Claim, Reference
from debias_diffusion.toyworld.grammar import Caption, Sentence, long_caption
from debias_diffusion.toyworld.scenes import draw_scene


def referring(seed: int, style: str = "referring") -> Caption:
    return long_caption(draw_scene(random.Random(seed), 4, 6), random.Random(seed), style)


def words(text: str) -> int:
    """A token a word."""
    return len(text.split())


STAR = Claim(Reference("top"), (("kind", "star"),))
IT_IS_BLUE = Claim(Reference(), (("colour", "blue"),))
RING = Claim(Reference("left"), (("kind", "ring"),))
THE_RING_IS_RED = Claim(Reference(kind="ring"), (("colour", "red"),))
SQUARE = Claim(Reference("right"), (("kind", "square"), ("colour", "green")))
# 20 words a sentence, so a chunk holds three: a summary, the star and its colour; the ring, the square, the summary
# again; the ring's colour.
SENTENCES = tuple(
    Sentence(" ".join([f"word{number}"] * 20), claim=claim)
    for number, claim in enumerate((None, STAR, IT_IS_BLUE, RING, SQUARE, None, THE_RING_IS_RED))
)
TOLD = Caption(SENTENCES)


def test_mentions_and_ceilings_in_closed_form():
    assert sentences_by_chunk(TOLD, words) == [[0, 1, 2], [3, 4, 5], [6]]
    # One sentence of each but the first chunk is new, after two that are read again.
    assert sentences_by_chunk(TOLD, words, "overlap") == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    truncating, *others = READERS
    reading = read_caption(TOLD, words)
    assert reading == {
        "top": Mention(WITHIN, [truncating, *others]),
        "left": Mention(ACROSS, ["whole"]),
        "right": Mention(ALONE, others),
    }
    # Cut between the star and "it", nothing is known of its colour; read together, all is.
    assert mention_kinds(TOLD, [[0, 1], [2, 3, 4, 5, 6]]) == {"top": ACROSS, "left": WITHIN, "right": ALONE}
    assert knowable(TOLD, [[0, 1], [2, 3, 4, 5, 6]]) == {"left", "right"}
    assert refers_back(TOLD) and not refers_back(referring(3, "plain"))
    assert knowable(TOLD, [range(7)]) == {"top", "left", "right"} and knowable(TOLD, [[]]) == set()
    alone = {"top": Mention(ALONE, list(READERS))}
    assert ceilings([reading, alone]) == [
        {"told": ALL, "objects": 4, "truncated": 50, "in_chunks": 75, "in_overlapping_chunks": 75, "whole": 100},
        {"told": ALONE, "objects": 2, "truncated": 50, "in_chunks": 100, "in_overlapping_chunks": 100, "whole": 100},
        {"told": WITHIN, "objects": 1, "truncated": 100, "in_chunks": 100, "in_overlapping_chunks": 100, "whole": 100},
        {"told": ACROSS, "objects": 1, "truncated": 0, "in_chunks": 0, "in_overlapping_chunks": 0, "whole": 100},
    ]
    assert [line["told"] for line in ceilings([alone])] == [ALL, ALONE] and ceilings([]) == []
