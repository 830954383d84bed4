"""Every way to draw a short caption from a long one.

A sampler takes the list of a caption's sentences and a `random.Random` and returns the sentences of the short caption,
in the order they are read. To add a way of sampling, write such a function and name it in `SAMPLERS`.
"""

import random
from collections.abc import Callable

from ..errors import UserError, near_matches
from ..text.sentences import join_sentences

GIVEN = "given"  # the record's own short caption, which no sampler draws


def summary(sentences: list[str], rng: random.Random) -> list[str]:
    """Long-CLIP's short caption: the first sentence."""
    return sentences[:1]


def summary_as_released(sentences: list[str], rng: random.Random) -> list[str]:
    """Long-CLIP's short caption by its released code: `caption.split(". ")[0]` (train/sharegpt4v.py).

    Not always a sentence, and without its full stop: "Mr. Lee reads. ..." gives "Mr".
    """
    return join_sentences(sentences).split(". ")[: len(sentences) and 1]


def opening(sentences: list[str], rng: random.Random) -> list[str]:
    """SmartCLIP's caption: cut after n ~ U{1, ..., n_sents} sentences (section C.5; "Original" in Table S6)."""
    return sentences[: rng.randint(1, max(1, len(sentences)))]


def details(sentences: list[str], rng: random.Random) -> list[str]:
    """All but the summary, in their order ("Only drop 1" in Table S6). A caption of one sentence keeps it."""
    return sentences[1:] or list(sentences)


def random_subset(sentences: list[str], rng: random.Random) -> list[str]:
    """DeBias-CLIP's short caption (Algorithm 1, lines 3 to 6; "Random" in Table S4).

    The summary is dropped, then n ~ U{1, ..., n_sents - 1} of the others are drawn without replacement, in random
    order. A caption of one sentence keeps it, here and in all that follow.
    """
    if len(sentences) <= 1:
        return list(sentences)
    return rng.sample(sentences[1:], rng.randint(1, len(sentences) - 1))


def ordered(sentences: list[str], rng: random.Random) -> list[str]:
    """From the second sentence to an end e ~ U{2, ..., n_sents} ("Ordered" in Table S4, "Start at 2" in Table S6)."""
    return opening(details(sentences, rng), rng)


def independent(sentences: list[str], rng: random.Random) -> list[str]:
    """Each detail with probability 1/2, drawn anew until there is one, in random order ("Independent" in Table S4)."""
    candidates, drawn = details(sentences, rng), []
    while candidates and not drawn:
        drawn = [sentence for sentence in candidates if rng.random() < 0.5]
    return rng.sample(drawn, len(drawn))


def shuffle(sentences: list[str], rng: random.Random) -> list[str]:
    """All details, in random order ("Shuffle" in Table S4)."""
    return keep(len(sentences))(sentences, rng)


def keep(count: int) -> "Sampler":
    """min(`count`, n_sents - 1) of the details, without replacement, in random order ("Keep 4" in Table S4)."""

    def keep_count(sentences: list[str], rng: random.Random) -> list[str]:
        candidates = details(sentences, rng)
        return rng.sample(candidates, min(count, len(candidates)))

    return keep_count


Sampler = Callable[[list[str], random.Random], list[str]]
SAMPLERS: dict[str, Sampler] = {
    "random": random_subset,
    "ordered": ordered,
    "independent": independent,
    "shuffle": shuffle,
    "keep-4": keep(4),
    "summary": summary,
    "summary-as-released": summary_as_released,
    "opening": opening,
    "details": details,
}


def find_sampler(name: str) -> Sampler:
    """The sampler of that name in SAMPLERS; "keep-N" for any N from 1. Raises UserError with the near matches."""
    return SAMPLERS.get(name) or numbered(name, "sampling", SAMPLERS, "keep", keep, least=1)


def numbered(name: str, setting: str, known: dict, prefix: str, make: Callable, least: int):
    """`make(N)` for "prefix-N" with N from `least`.

    Raises:
        UserError: `name` is nothing like it; says what `setting` may be, `known` or so.
    """
    number = name.removeprefix(f"{prefix}-")
    if number != name and number.isdecimal() and int(number) >= least:
        return make(int(number))
    raise UserError(
        f"Unknown {setting} {name!r}.{near_matches(name, known)} Choose one of: {', '.join(known)}; or {prefix}-N "
        f"with another N from {least}."
    )
