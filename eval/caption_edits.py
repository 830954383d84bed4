"""Edits of captions: those of Figures 1a, 2, 3, 4 and S1 to S5 of the DeBias-CLIP paper, and of others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from debias_diffusion.data.batch import draw_generator
from debias_diffusion.text.sentences import join_sentences, split_sentences

PADDING = "This is a photo."  # Figures 2 and S2
MOST_PADDING = 5
SHUFFLES = 3  # random orders of every caption
PLACES = (25, 50, 75, 100)  # where sentence 1 is put, in percent of the other sentences


def swap_first(number: int, sentences: list[str]) -> list[str]:
    """Sentence 1 swapped with sentence `number`, or with the last of fewer (supplement, E.1)."""
    other, edited = min(number, len(sentences)) - 1, list(sentences)
    if other > 0:
        edited[0], edited[other] = edited[other], edited[0]
    return edited


def moved(percent: int, sentences: list[str]) -> list[str]:
    """Sentence 1 behind so many percent of the other sentences, rounded; these keep their order.

    After PosBias (Wu and Albreiki, arXiv 2511.11216), which moves a segment of a caption and masks the rest. Here the
    rest stays, so that at every position the caption has the same sentences.
    """
    place = (percent * (len(sentences) - 1) + 50) // 100
    return [*sentences[1 : place + 1], *sentences[:1], *sentences[place + 1 :]]


def padded(count: int, sentences: list[str]) -> list[str]:
    """The first two sentences behind `count` times "This is a photo." """
    return [PADDING] * count + sentences[:2]


def shuffled(seed: int, sentences: list[str]) -> list[str]:
    """All sentences in a random order, a function of the seed and the caption alone."""
    rng = draw_generator(seed, 0, join_sentences(sentences))
    return rng.sample(sentences, len(sentences))


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


# A caption of one sentence keeps it.
EDITS = {
    "keep": Edit("Keep", "keep", (list,)),
    "move2": Edit("Move 2", "keep", (partial(swap_first, 2),)),
    "move4": Edit("Move 4", "keep", (partial(swap_first, 4),)),
    "remove": Edit("Remove", "keep", (lambda sentences: sentences[1:] or sentences,)),
    "shuffle": Edit("Shuffle all", "keep", tuple(partial(shuffled, seed) for seed in range(SHUFFLES))),
    "first2": Edit("First 2", "first2", (lambda sentences: sentences[:2],)),
    "swap2": Edit("Swap 2", "first2", (lambda sentences: sentences[:2][::-1],)),
    "first": Edit("First only", "first2", (lambda sentences: sentences[:1],)),
    **{f"padding{n}": Edit(f"Padding {n}", "first2", (partial(padded, n),)) for n in range(1, MOST_PADDING + 1)},
    **{f"after{percent}": Edit(f"After {percent}%", "keep", (partial(moved, percent),)) for percent in PLACES},
}
LOSING = {name: edit for name, edit in EDITS.items() if edit.base != name}


def edit_caption(caption: str, edit: str) -> str:
    """`caption` with one of `EDITS`, in its first variant, applied to its sentences, joined by one space."""
    return join_sentences(EDITS[edit].variants[0](split_sentences(caption)))
