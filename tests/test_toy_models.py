"""The toy world's picture side: checker, prompts, and the models that ship."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from debias_diffusion.encoders.spec import load_two_tower
from debias_diffusion.errors import UserError
from debias_diffusion.toyworld import shipped
from debias_diffusion.toyworld.checker import UNCLEAR, compare, read_image
from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import PLACES, Scene, Thing, draw_scene

LABELLED = Path(__file__).parent / "labelled"
scenes = st.integers(0, 2**40).map(lambda seed: draw_scene(random.Random(seed), 1, 9))

# ---- checker


@given(scenes, st.sampled_from([48, 64, 96]), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60)
def test_the_checker_reads_rendered_and_blurred_pictures(its, size, blur):
    seen = read_image(render(its, size).filter(ImageFilter.GaussianBlur(blur * size / 48))).objects
    there = {thing.place: thing for thing in its.things}
    assert seen == {place: there.get(place) for place in PLACES}


def test_an_object_counts_by_kind_colour_and_place_and_not_by_size():
    asked = Scene("grey", (Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left")))
    for things, correct in (
        (asked.things, [True, True]),
        ([Thing("star", "red", "large", "top"), Thing("ring", "green", "large", "left")], [True, False]),
        ([Thing("cross", "red", "small", "top"), Thing("ring", "blue", "large", "centre")], [False, False]),
        ([], [False, False]),
    ):
        seen = read_image(render(Scene("grey", tuple(things)), SIZE))
        assert list(compare(seen, asked).correct.values()) == correct
    drawn = (Thing("star", "red", "large", "top"), Thing("cross", "pink", "small", "bottom"))
    comparison = compare(read_image(render(Scene("black", drawn), SIZE)), asked)
    assert comparison.sizes == {"top": False, "left": False} and comparison.filled == ("top", "bottom")
    assert comparison.invented == ("bottom",) and not comparison.background
    noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    assert set(read_image(Image.fromarray(noise)).objects.values()) == {UNCLEAR}


def test_the_checker_agrees_with_labels_given_by_looking():
    """104 drawings of two toy SDXLs, labelled without sight of their prompts; what could not be told is "unsure"."""
    objects, empty = [], []
    for name, labels in json.loads((LABELLED / "labels.json").read_text()).items():
        with Image.open(LABELLED / name) as picture:
            seen = read_image(picture).objects
        for place, thing in seen.items():
            if place not in labels:
                empty.append(thing is None)
            elif labels[place] != "unsure":
                objects.append(isinstance(thing, Thing) and f"{thing.colour} {thing.kind}" == labels[place])
    assert (len(objects), len(empty)) == (372, 505)
    assert np.mean(objects) > 0.95 and np.mean(empty) > 0.99


def test_weights_that_are_not_complete_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "WEIGHTS", tmp_path)
    (tmp_path / "clip").mkdir()
    with pytest.raises(UserError, match="not in this installation.*python -m research toymodels"):
        load_two_tower("toy/clip")
