"""Captions of toy scenes as lists of tags, as people prompt community checkpoints: no sentences, and no order.

`toy/tags-test` and the like are the scenes of `toy/test`.
"""

import random
from collections import Counter

from debias_diffusion.data.toy_scenes import SceneKind
from debias_diffusion.toyworld.grammar import Caption, Sentence
from debias_diffusion.toyworld.scenes import PLACES, Scene, generator, scene

# True of every scene, so they only make a prompt longer.
_QUALITY = (
    *("masterpiece", "best quality", "high resolution", "highly detailed", "sharp focus", "flat colours", "no humans"),
    *("simple shapes", "clean lines", "vector art", "geometric", "minimalist", "illustration", "official art"),
)


def tag_list(scene: Scene, rng: random.Random) -> Caption:
    """One tag for each object with all that there is to say of it, and others between them, all in any order."""
    tags = [
        Sentence(f"{thing.size} {thing.colour} {thing.kind} {thing.place}", (thing.place,)) for thing in scene.things
    ]
    tags.append(Sentence(f"{scene.background} background"))
    tags += [Sentence(f"{count} {kind}") for kind, count in Counter(thing.kind for thing in scene.things).items()]
    empty = [place for place in PLACES if all(thing.place != place for thing in scene.things)]
    tags += [Sentence(f"empty {place}") for place in rng.sample(empty, min(3, len(empty)))]
    tags += map(Sentence, rng.sample(_QUALITY, rng.randint(2, len(_QUALITY))))
    rng.shuffle(tags)
    return Caption((*(Sentence(f"{tag.text},", tag.mentions) for tag in tags[:-1]), tags[-1]))


def tagged(split: str, index: int) -> tuple[Scene, Caption]:
    of_split = scene(split, index)
    return of_split, tag_list(of_split, generator(split, index, "tags"))


KINDS = {"tags-": SceneKind(tagged, in_families=True)}
