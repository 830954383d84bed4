"""Captions of scenes: a summary first, then details in varied order and wording, as in real long captions.

A caption knows which sentence first mentions each object, so that generated images can be scored sentence by sentence.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ..text.sentences import join_sentences
from .claims import Claim, Facts, Reference, resolve
from .scenes import PLACES, Scene, Thing, draw_scene, generator, scene

STYLES = ("plain", "referring")
SENTENCES = (9, 14)  # fewest and most in a caption
_WITH_BACKGROUND = 1 / 3  # of the short captions
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SUMMARIES = ("This picture shows {}.", "Here is a picture of {}.", "The image contains {}.", "This is an image of {}.")
_THINGS = (
    "A {size} {colour} {kind} stands in the {place} of the picture.",
    "In the {place} there is a {size} {colour} {kind}.",
    "The {place} holds a {kind} that is {size} and {colour}.",
    "You can see a {size} {kind} of {colour} colour in the {place}.",
    "The object in the {place} is a {size} {colour} {kind}.",
)
_PLACED = (
    "A {name} stands in the {place} of the picture.",
    "In the {place} there is a {name}.",
    "The {place} holds a {name}.",
    "You can see a {name} in the {place}.",
    "The object in the {place} is a {name}.",
)
_BY_NAME = {  # what one sentence adds to an object that another one has placed: "It ..." or "The star ..."
    ("size", "colour"): ("{name} is {size} and {colour}.", "{name} is {colour} and {size}."),
    ("colour",): ("{name} is {colour}.", "{name} has the colour {colour}."),
    ("size",): ("{name} is {size}.", "{name} is a {size} one."),
}
# What the sentence that names the place says of an object, what a pronoun adds, and what its name some sentences later.
_ORDERS = (
    (("kind",), ("size", "colour"), ()),
    (("kind",), ("size",), ("colour",)),
    (("kind",), ("colour",), ("size",)),
    (("kind",), (), ("size", "colour")),
)
_BY_SIZE = (("size", "kind"), (), ("colour",))
_SAME = {
    "colour": ("{name} has the same colour as {other}.", "{name} shares its colour with {other}."),
    "size": ("{name} is of the same size as {other}.", "{name} has the size of {other}."),
}
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
    """One sentence, the places whose object it names with the place or by kind and colour, and what it says of one."""

    text: str
    mentions: tuple[str, ...] = ()
    claim: Claim | None = None


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

    def facts(self) -> Facts:
        """What the caption says of each object, and which sentences say it together."""
        return resolve({number: sentence.claim for number, sentence in enumerate(self.sentences)})


def long_caption(scene: Scene, rng: random.Random, style: str = "plain") -> Caption:
    """A caption of 9 to 14 sentences: the summary, every object, the background, and further true details.

    Args:
        style: "plain" describes each object in one sentence; "referring" half of them or more in two or three, of
            which the later ones refer back: "In the top left there is a star. It is large." and some sentences later
            "The star is blue." or "The star shares its colour with the ring.", rarely more than 15 sentences in all.
    """
    blocks, later = _describe(scene, scene.things, rng, style)
    blocks.append([_background(scene, rng)])
    further = _further(scene, rng)
    rng.shuffle(further)
    missing = rng.randint(*SENTENCES) - 1 - sum(map(len, blocks)) - len(later)
    return _compose(scene, blocks + [[sentence] for sentence in further[: max(0, missing)]], later, rng)


def short_caption(scene: Scene, rng: random.Random, style: str = "plain") -> Caption:
    """A caption as CLIP models are pretrained on: the summary, one or two objects, and now and then the background."""
    described = rng.sample(scene.things, min(rng.randint(1, 2), len(scene.things)))
    blocks, later = _describe(scene, described, rng, style)
    if rng.random() < _WITH_BACKGROUND:
        blocks.append([_background(scene, rng)])
    return _compose(scene, blocks, later, rng)


def caption(split: str, index: int, style: str = "plain") -> Caption:
    """The long caption of scene number `index` of a split, the same on every machine."""
    return long_caption(scene(split, index), generator(split, index, _purpose("caption", style)), style)


def full_caption(scene: Scene, rng: random.Random, style: str = "plain") -> Caption:
    """The summary, every object and the background, in any order; of three plain objects within 77 tokens."""
    blocks, later = _describe(scene, scene.things, rng, style)
    return _compose(scene, [*blocks, [_background(scene, rng)]], later, rng)


def short_prompt(split: str, index: int, style: str = "plain") -> tuple[Scene, Caption]:
    """A scene of one to three objects (two in the longer "referring" style), and a caption of it within 77 tokens."""
    small = draw_scene(generator(split, index, "short scene"), 1, 3 if style == "plain" else 2)
    return small, full_caption(small, generator(split, index, _purpose("short prompt", style)), style)


def _purpose(name: str, style: str) -> str:
    return name if style == "plain" else f"{name}, {style}"


def _compose(scene: Scene, blocks: list[list[Sentence]], later: list[tuple[Thing, Sentence]], rng) -> Caption:
    """The summary, the blocks in any order, and each of `later` somewhere behind the block about its object."""
    rng.shuffle(blocks)
    for thing, sentence in later:
        claims = [block[0].claim for block in blocks]
        first = next(i for i, claim in enumerate(claims) if claim and claim.about.place == thing.place)
        blocks.insert(rng.randint(first + 1, len(blocks)), [sentence])
    return Caption((_summary(scene, rng), *(sentence for block in blocks for sentence in block)))


def _summary(scene: Scene, rng: random.Random) -> Sentence:
    """Kinds and counts only, in alphabetical order, which says nothing about places."""
    counts = Counter(thing.kind for thing in scene.things)
    plurals = {kind: f"{kind}es" if kind.endswith("s") else f"{kind}s" for kind in counts}
    parts = [f"{_NUMBERS[n]} {kind if n == 1 else plurals[kind]}" for kind, n in sorted(counts.items())]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return Sentence(rng.choice(_SUMMARIES).format(listed))


def _thing(thing: Thing, rng: random.Random) -> Sentence:
    claim = _claim(thing, ("kind", "colour", "size"))
    return Sentence(rng.choice(_THINGS).format(**vars(thing)), (thing.place,), claim)


def _background(scene: Scene, rng: random.Random) -> Sentence:
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


def _describe(
    scene: Scene, things: Sequence[Thing], rng: random.Random, style: str
) -> tuple[list[list[Sentence]], list[tuple[Thing, Sentence]]]:
    """(for each object the sentences that stand together, [(object, sentence that follows at some distance)])"""
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}; it must be one of {', '.join(STYLES)}")
    alone = len(things)
    if style == "referring":
        things = rng.sample(things, len(things))
        alone = rng.randint(0, len(things) // 2)
    blocks, later = [[_thing(thing, rng)] for thing in things[:alone]], []
    for number, thing in enumerate(things[alone:], alone):
        name = _reference_to(scene, thing)
        orders = (_ORDERS[0], _BY_SIZE) if name and name.size else [order for order in _ORDERS if name or not order[-1]]
        at_once, by_pronoun, by_name = rng.choice(orders)
        text = rng.choice(_PLACED).format(name=" ".join(getattr(thing, a) for a in at_once), place=thing.place)
        block = [Sentence(text, (thing.place,), _claim(thing, at_once))]
        compared = things[:number]  # with objects before it only, so that no two refer to each other
        if by_pronoun:
            block.append(_adding(scene, thing, Reference(), by_pronoun, compared, rng))
        if by_name:
            later.append((thing, _adding(scene, thing, name, by_name, compared, rng)))
        blocks.append(block)
    return blocks, later


def _adding(
    scene: Scene, thing: Thing, reference: Reference, attributes: tuple[str, ...], compared: Sequence[Thing], rng
) -> Sentence:
    """A sentence that adds attributes to an object that another sentence places, half the time by comparison."""
    name = f"The {_spoken(reference)}" if reference.kind else "It"
    alike = [other for other in compared if getattr(other, attributes[0]) == getattr(thing, attributes[0])]
    if len(attributes) == 1 and alike and rng.random() < 0.5:
        other, (attribute,) = rng.choice(alike), attributes
        other_reference = _reference_to(scene, other) or Reference(other.place, other.kind)
        text = rng.choice(_SAME[attribute]).format(name=name, other=f"the {_spoken(other_reference)}")
        return Sentence(text, claim=Claim(reference, same=attribute, other=other_reference))
    text = rng.choice(_BY_NAME[attributes]).format(name=name, **vars(thing))
    return Sentence(text, claim=_claim(thing, attributes, reference))


def _reference_to(scene: Scene, thing: Thing) -> Reference | None:
    """The shortest name that only this object of the scene has: its kind, or its size and kind."""
    alike = [other for other in scene.things if other.kind == thing.kind]
    if len(alike) == 1:
        return Reference(kind=thing.kind)
    if sum(other.size == thing.size for other in alike) == 1:
        return Reference(kind=thing.kind, size=thing.size)
    return None


def _spoken(reference: Reference) -> str:
    name = f"{reference.size} {reference.kind}" if reference.size else reference.kind
    return f"{name} in the {reference.place}" if reference.place else name


def _claim(thing: Thing, attributes: tuple[str, ...], reference: Reference | None = None) -> Claim:
    return Claim(reference or Reference(thing.place), tuple((name, getattr(thing, name)) for name in attributes))
