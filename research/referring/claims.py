"""What sentences say about each object of a scene, and which sentences one has to read together to know it.

A symbolic reader: it resolves "it", "the star" and "the same colour as the ring" from the sentences that it is given.
So it says how much a text that is truncated, or read in chunks, can tell at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Fact(NamedTuple):
    """The value of an attribute, and the numbers of the sentences that give it together."""

    value: str
    sentences: frozenset[int]


Facts = dict[str, dict[str, Fact]]  # {place: {"kind", "colour" or "size": fact}}


@dataclass(frozen=True)
class Reference:
    """How a sentence names an object: by its place, by its kind (and size), or, with nothing, as "it".

    "It" is the object that the sentence before names.
    """

    place: str | None = None
    kind: str | None = None
    size: str | None = None


@dataclass(frozen=True)
class Claim:
    """What one sentence says of one object: attributes as they are, or that one is the same as another object's.

    Attributes:
        about: the object.
        attributes: {"kind", "colour" or "size": value}
        same: the attribute that the object shares with `other`, if there is one.
    """

    about: Reference
    attributes: tuple[tuple[str, str], ...] = ()
    same: str | None = None
    other: Reference | None = None


def resolve(claims: Mapping[int, Claim | None]) -> Facts:
    """What the sentences that are read together say of each place.

    Args:
        claims: {number of the sentence in the caption: its claim}. "It" is resolved from the sentence one number
            before, if that is among them; a name from all sentences, in any order.
    """
    known: Facts = {}
    unresolved = {number: claim for number, claim in claims.items() if claim}
    while unresolved:
        resolved = [number for number, claim in unresolved.items() if _learn(known, number, claim, claims)]
        if not resolved:
            break
        for number in resolved:
            del unresolved[number]
    return known


def _learn(known: Facts, number: int, claim: Claim, claims: Mapping[int, Claim | None]) -> bool:
    """Whether the claim could be resolved; what it says is added to `known`."""
    referent = _resolve(known, number, claim.about, claims)
    if referent is None:
        return False
    place, through = referent
    values = [(attribute, Fact(value, through)) for attribute, value in claim.attributes]
    if claim.same:
        other = _resolve(known, number, claim.other, claims)
        if other is None or claim.same not in known.get(other[0], {}):
            return False
        value, givers = known[other[0]][claim.same]
        values.append((claim.same, Fact(value, through | other[1] | givers)))
    there = known.setdefault(place, {})
    for attribute, fact in values:
        there.setdefault(attribute, fact)
    return True


def _resolve(
    known: Facts, number: int, reference: Reference, claims: Mapping[int, Claim | None]
) -> tuple[str, frozenset[int]] | None:
    """(the object's place, the sentences needed to know it), or None if the sentences do not say."""
    here = frozenset((number,))
    if reference.place:
        return reference.place, here
    if reference.kind:
        named = {"kind": reference.kind} | ({"size": reference.size} if reference.size else {})
        places = [p for p, there in known.items() if all(a in there and there[a].value == v for a, v in named.items())]
        if len(places) != 1:
            return None
        return places[0], here.union(*(known[places[0]][attribute].sentences for attribute in named))
    before = claims.get(number - 1)
    referent = before and _resolve(known, number - 1, before.about, claims)
    return referent and (referent[0], here | referent[1])
