"""The toy world: scenes and their pictures."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from scipy import ndimage

from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, SIZES, Scene, Thing, scene

# ---- scenes


@pytest.mark.parametrize("split", ["test", "development-2", "short-test", "short-test-2"])
def test_scenes_of_a_family_have_the_same_objects_and_others_do_not(split):
    names, by_family = [f"{split}/{index:06}" for index in range(96, 108)], {}
    shown = [toy_scene(name)[0] for name in names]
    for name, each in zip(names, shown, strict=True):
        objects = each.background, Counter((thing.kind, thing.colour, thing.size) for thing in each.things)
        assert by_family.setdefault(family(name), objects) == objects
    assert len(set(shown)) == 12 and len(by_family) == (12 if "short" in split else 3)
    assert all(family(name) == name for name in ("photos/000001.png", "test/1.png", "000007", "coco/test/000002"))


def test_splits_never_meet_and_a_scene_stays_what_it_was():
    splits = ("train", "validation", "development", "test", "test-2")
    assert len({scene(split, i) for split in splits for i in range(500)}) == 2500
    # Weights were trained on these scenes; they must be the same on every machine and Python.
    first, *others, last = scene("test", 3).things
    assert scene("test", 3).background == "pale blue" and len(others) == 3
    assert first == Thing("square", "purple", "large", "top left")
    assert last == Thing("square", "blue", "small", "bottom")


# ---- pictures


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_fills_its_place_and_no_other_and_kinds_differ(kind):
    blue, parts = {}, {}
    for size, (place, corner) in product(SIZES, PLACES.items()):
        picture = np.asarray(render(Scene("white", (Thing(kind, "blue", size, place),)))).astype(int)
        differs = (picture != BACKGROUNDS["white"]).any(axis=-1)
        for along, pixels in zip(corner, reversed(np.nonzero(differs)), strict=True):
            assert along * SIZE / 3 - 1 <= pixels.min() and pixels.max() <= (along + 1) * SIZE / 3
        parts[size, place] = ndimage.label(~differs)[1]  # of what is not the object
        blue[size] = (abs(picture - COLOURS["blue"]).sum(axis=-1) < 6).sum()
    assert blue["large"] > 2 * blue["small"] > 16
    assert parts["large", "centre"] == (2 if kind == "ring" else 1)  # outside and the hole
