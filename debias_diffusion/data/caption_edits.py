"""Edits of captions: those of Figures 1a, 2, 3, 4 and S1 to S5 of the DeBias-CLIP paper, and random orders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..methods.sampling import draw_generator
from ..sentences import join_sentences, split_sentences

PADDING = "This is a photo."  # Figures 2 and S2
MOST_PADDING = 5
SHUFFLES = 3  # random orders of every caption


def keep(sentences: list[str]) -> list[str]:
    """The caption as it is."""
    return list(sentences)


def move2(sentences: list[str]) -> list[str]:
    """The first and second sentences swapped; a caption of one sentence keeps it."""
    return _swap_first(sentences, 1)


def move4(sentences: list[str]) -> list[str]:
    """The first and fourth sentences swapped, or the first and last of fewer than four (supplement, E.1)."""
    return _swap_first(sentences, 3)


def remove(sentences: list[str]) -> list[str]:
    """The first sentence dropped; a caption of one sentence keeps it."""
    return sentences[1:] or list(sentences)


def first2(sentences: list[str]) -> list[str]:
    """Only the first two sentences."""
    return sentences[:2]


def swap2(sentences: list[str]) -> list[str]:
    """Only the first two sentences, the second before the first."""
    return sentences[:2][::-1]


def first(sentences: list[str]) -> list[str]:
    """Only the first sentence."""
    return sentences[:1]


def padded(count: int, sentences: list[str]) -> list[str]:
    """The first two sentences behind `count` times "This is a photo." """
    return [PADDING] * count + sentences[:2]


def shuffled(seed: int, sentences: list[str]) -> list[str]:
    """All sentences in a random order, a function of the seed and the caption alone."""
    rng = draw_generator(seed, 0, join_sentences(sentences))
    return rng.sample(sentences, len(sentences))


def _swap_first(sentences: list[str], other: int) -> list[str]:
    """Sentence 0 swapped with sentence `other`, or with the last where there is no such sentence."""
    edited = list(sentences)
    other = min(other, len(edited) - 1)
    if other > 0:
        edited[0], edited[other] = edited[other], edited[0]
    return edited


@dataclass(frozen=True)
class Edit:
    """One way to edit captions.

    Attributes:
        title: the paper's name for it.
        base: the key in `EDITS` of the edit that it is compared with; its own key for such a base.
        variants: functions of a caption's sentences; R@1 is the mean over them.
    """

    title: str
    base: str
    variants: tuple[Callable[[list[str]], list[str]], ...]


EDITS = {
    "keep": Edit("Keep", "keep", (keep,)),
    "move2": Edit("Move 2", "keep", (move2,)),
    "move4": Edit("Move 4", "keep", (move4,)),
    "remove": Edit("Remove", "keep", (remove,)),
    "shuffle": Edit("Shuffle all", "keep", tuple(partial(shuffled, seed) for seed in range(SHUFFLES))),
    "first2": Edit("First 2", "first2", (first2,)),
    "swap2": Edit("Swap 2", "first2", (swap2,)),
    "first": Edit("First only", "first2", (first,)),
    **{
        f"padding{count}": Edit(f"Padding {count}", "first2", (partial(padded, count),))
        for count in range(1, MOST_PADDING + 1)
    },
}
LOSING = {name: edit for name, edit in EDITS.items() if edit.base != name}


def edit_caption(caption: str, edit: str) -> str:
    """`caption` with one of `EDITS`, in its first variant, applied to its sentences, joined by one space."""
    return join_sentences(EDITS[edit].variants[0](split_sentences(caption)))
