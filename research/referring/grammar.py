"""Captions of toy scenes whose sentences refer back: "In the top left there is a star. It is large." and some sentences
later "The star is blue." or "The star shares its colour with the ring."

Each sentence knows what it says of an object, so that one can tell which sentences have to be read together.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from debias_diffusion.data.toy_scenes import SceneKind
from debias_diffusion.toyworld.grammar import (
    Caption,
    Described,
    Sentence,
    describe,
    describe_thing,
    full_caption,
    long_caption,
)
from debias_diffusion.toyworld.scenes import Scene, Thing, draw_scene, generator, scene

from .claims import Claim, Facts, Reference, resolve

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


@dataclass(frozen=True)
class Statement(Sentence):
    """A sentence, and what it says of one object."""

    claim: Claim | None = None


def facts(caption: Caption) -> Facts:
    """What the caption says of each object, and which sentences say it together."""
    return resolve({at: getattr(sentence, "claim", None) for at, sentence in enumerate(caption.sentences)})


def refer_back(scene: Scene, things: Sequence[Thing], rng: random.Random) -> Described:
    """Half of the objects or more in two or three sentences, of which the later ones refer back."""
    things = rng.sample(things, len(things))
    alone = rng.randint(0, len(things) // 2)
    blocks, later = [[_whole(thing, rng)] for thing in things[:alone]], []
    for number, thing in enumerate(things[alone:], alone):
        name = _reference_to(scene, thing)
        orders = (_ORDERS[0], _BY_SIZE) if name and name.size else [order for order in _ORDERS if name or not order[-1]]
        at_once, by_pronoun, by_name = rng.choice(orders)
        text = rng.choice(_PLACED).format(name=" ".join(getattr(thing, a) for a in at_once), place=thing.place)
        block = [Statement(text, (thing.place,), _claim(thing, at_once))]
        compared = things[:number]  # with objects before it only, so that no two refer to each other
        if by_pronoun:
            block.append(_adding(scene, thing, Reference(), by_pronoun, compared, rng))
        if by_name:
            later.append((block, _adding(scene, thing, name, by_name, compared, rng)))
        blocks.append(block)
    return blocks, later


STYLES = {"plain": describe, "referring": refer_back}


def caption(split: str, index: int, style: str = "referring") -> Caption:
    """The long caption of scene number `index` of a split, the same on every machine: rarely over 15 sentences."""
    return long_caption(scene(split, index), generator(split, index, _purpose("caption", style)), STYLES[style])


def short_prompt(split: str, index: int, style: str = "referring") -> tuple[Scene, Caption]:
    """A scene of one or two objects (three in the shorter plain style), and a caption of it within 77 tokens."""
    small = draw_scene(generator(split, index, "short scene"), 1, 3 if style == "plain" else 2)
    return small, full_caption(small, generator(split, index, _purpose("short prompt", style)), STYLES[style])


def _purpose(name: str, style: str) -> str:
    return name if style == "plain" else f"{name}, {style}"


# `toy/referring-test` and the like: the same scenes as `toy/test`'s. Before a split's name.
KINDS = {
    "referring-": SceneKind(lambda split, index: (scene(split, index), caption(split, index)), in_families=True),
    "short-referring-": SceneKind(short_prompt, in_families=False),
}


def _whole(thing: Thing, rng: random.Random) -> Statement:
    sentence = describe_thing(thing, rng)
    return Statement(sentence.text, sentence.mentions, _claim(thing, ("kind", "colour", "size")))


def _adding(
    scene: Scene, thing: Thing, reference: Reference, attributes: tuple[str, ...], compared: Sequence[Thing], rng
) -> Statement:
    """A sentence that adds attributes to an object that another sentence places, half the time by comparison."""
    name = f"The {_spoken(reference)}" if reference.kind else "It"
    alike = [other for other in compared if getattr(other, attributes[0]) == getattr(thing, attributes[0])]
    if len(attributes) == 1 and alike and rng.random() < 0.5:
        other, (attribute,) = rng.choice(alike), attributes
        other_reference = _reference_to(scene, other) or Reference(other.place, other.kind)
        text = rng.choice(_SAME[attribute]).format(name=name, other=f"the {_spoken(other_reference)}")
        return Statement(text, claim=Claim(reference, same=attribute, other=other_reference))
    text = rng.choice(_BY_NAME[attributes]).format(name=name, **vars(thing))
    return Statement(text, claim=_claim(thing, attributes, reference))


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
