"""Captions of scenes: a summary first, then details in varied order and wording, as in real long captions.

A caption knows which sentence first mentions each object, so that generated images can be scored sentence by sentence.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..text.sentences import join_sentences
from .scenes import PLACES, Scene, Thing, draw_scene, generator, scene

SENTENCES = (9, 14)  # fewest and most in a caption
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SUMMARIES = ("This picture shows {}.", "Here is a picture of {}.", "The image contains {}.", "This is an image of {}.")
_THINGS = (
    "A {size} {colour} {kind} stands in the {place} of the picture.",
    "In the {place} there is a {size} {colour} {kind}.",
    "The {place} holds a {kind} that is {size} and {colour}.",
    "You can see a {size} {kind} of {colour} colour in the {place}.",
    "The object in the {place} is a {size} {colour} {kind}.",
)
_BACKGROUNDS = (
    "The background of the whole picture is {}.",
    "Everything is set against a plain {} background.",
    "Behind all of the objects there is nothing but {}.",
)
_EMPTY = ("The {} of the picture is empty.", "There is nothing at all in the {}.", "No object stands in the {}.")
_COLOUR_COUNTS = ("{number} of the objects {verb} {colour}.", "Of all the objects, {number} {verb} {colour}.")
_ACROSS = {
    False: ("{a} is further to the left than {b}.", "{a} stands to the left of {b}."),
    True: ("{a} is further to the right than {b}.", "{a} stands to the right of {b}."),
}
_DOWN = {
    False: ("{a} is higher up than {b}.", "{a} stands above {b}."),
    True: ("{a} is lower down than {b}.", "{a} stands below {b}."),
}
_LARGER = ("{a} is larger than {b}.", "Of the two, {a} is larger than {b}.")


@dataclass(frozen=True)
class Sentence:
    """One sentence, and the places whose object it names with the place or by kind and colour."""

    text: str
    mentions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Caption:
    """The sentences of a caption, the summary first."""

    sentences: tuple[Sentence, ...]

    @property
    def text(self) -> str:
        return join_sentences([sentence.text for sentence in self.sentences])

    def first_mentions(self) -> dict[str, int]:
        """{place: number, from 0, of the sentence that first mentions the object there}"""
        first: dict[str, int] = {}
        for number, sentence in enumerate(self.sentences):
            for place in sentence.mentions:
                first.setdefault(place, number)
        return first


# The sentences about each object that stand together; and sentences that follow one of these blocks at some distance.
Described = tuple[list[list[Sentence]], list[tuple[list[Sentence], Sentence]]]
Describe = Callable[[Scene, Sequence[Thing], random.Random], Described]


def describe(scene: Scene, things: Sequence[Thing], rng: random.Random) -> Described:
    """Each object in one sentence."""
    return [[describe_thing(thing, rng)] for thing in things], []


def describe_thing(thing: Thing, rng: random.Random) -> Sentence:
    """One sentence with all that there is to say about an object."""
    return Sentence(rng.choice(_THINGS).format(**vars(thing)), (thing.place,))


def long_caption(scene: Scene, rng: random.Random, describe: Describe = describe) -> Caption:
    """A caption of 9 to 14 sentences: the summary, every object, the background, and further true details."""
    blocks, later = describe(scene, scene.things, rng)
    blocks.append([describe_background(scene, rng)])
    further = _further(scene, rng)
    rng.shuffle(further)
    missing = rng.randint(*SENTENCES) - 1 - sum(map(len, blocks)) - len(later)
    return compose(scene, blocks + [[sentence] for sentence in further[: max(0, missing)]], later, rng)


def full_caption(scene: Scene, rng: random.Random, describe: Describe = describe) -> Caption:
    """The summary, every object and the background, in any order; of three objects within 77 tokens."""
    blocks, later = describe(scene, scene.things, rng)
    return compose(scene, [*blocks, [describe_background(scene, rng)]], later, rng)


def caption(split: str, index: int) -> Caption:
    """The long caption of scene number `index` of a split, the same on every machine."""
    return long_caption(scene(split, index), generator(split, index, "caption"))


def short_prompt(split: str, index: int, told: str = "short") -> tuple[Scene, Caption]:
    """A scene of one to three objects, and a caption of it: within 77 tokens, or a long one if `told` is "long"."""
    small = draw_scene(generator(split, index, "short scene"), 1, 3)
    return small, (long_caption if told == "long" else full_caption)(small, generator(split, index, f"{told} prompt"))


def compose(scene: Scene, blocks: list[list[Sentence]], later: list[tuple[list[Sentence], Sentence]], rng) -> Caption:
    """The summary, the blocks in any order, and each of `later` somewhere behind its block."""
    rng.shuffle(blocks)
    for block, sentence in later:
        blocks.insert(rng.randint(blocks.index(block) + 1, len(blocks)), [sentence])
    return Caption((_summary(scene, rng), *(sentence for block in blocks for sentence in block)))


def _summary(scene: Scene, rng: random.Random) -> Sentence:
    """Kinds and counts only, in alphabetical order, which says nothing about places."""
    counts = Counter(thing.kind for thing in scene.things)
    plurals = {kind: f"{kind}es" if kind.endswith("s") else f"{kind}s" for kind in counts}
    parts = [f"{_NUMBERS[n]} {kind if n == 1 else plurals[kind]}" for kind, n in sorted(counts.items())]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return Sentence(rng.choice(_SUMMARIES).format(listed))


def describe_background(scene: Scene, rng: random.Random) -> Sentence:
    return Sentence(rng.choice(_BACKGROUNDS).format(scene.background))


def _further(scene: Scene, rng: random.Random) -> list[Sentence]:
    """True sentences about relations, empty places and how often a colour occurs; at least eight."""
    sentences = [_relation(scene, *rng.sample(pair, 2), rng) for pair in combinations(scene.things, 2)]
    empty = [place for place in PLACES if all(thing.place != place for thing in scene.things)]
    sentences += [Sentence(rng.choice(_EMPTY).format(place)) for place in rng.sample(empty, min(3, len(empty)))]
    counts = Counter(thing.colour for thing in scene.things)
    for colour, count in counts.items():
        number, verb = _NUMBERS[count], "is" if count == 1 else "are"
        text = rng.choice(_COLOUR_COUNTS).format(number=number, verb=verb, colour=colour)
        sentences.append(Sentence(text[0].upper() + text[1:]))
    return sentences


def _relation(scene: Scene, a: Thing, b: Thing, rng: random.Random) -> Sentence:
    """One true relation between two objects: across, down, or in size."""
    (ax, ay), (bx, by) = PLACES[a.place], PLACES[b.place]
    is_larger = (a.size, b.size) == ("large", "small")
    relations = (ax != bx, _ACROSS[ax > bx]), (ay != by, _DOWN[ay > by]), (is_larger, _LARGER)
    wordings = [wording for is_true, wording in relations if is_true]
    names, places = zip(*(_name(scene, thing) for thing in (a, b)), strict=True)
    text = rng.choice(rng.choice(wordings)).format(a=names[0], b=names[1])
    return Sentence(text[0].upper() + text[1:], tuple(place for place in places if place))


def _name(scene: Scene, thing: Thing) -> tuple[str, str | None]:
    """An unambiguous name of an object, and its place if the name includes that."""
    alike = [other for other in scene.things if (other.kind, other.colour) == (thing.kind, thing.colour)]
    name = f"the {thing.colour} {thing.kind}"
    return (name, None) if len(alike) == 1 else (f"{name} in the {thing.place}", thing.place)
