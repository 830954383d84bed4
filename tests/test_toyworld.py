import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import nn
from transformers import CLIPTokenizer

from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import CaptionTokenizer
from debias_diffusion.toymodels import clip, stage
from debias_diffusion.toymodels.clip import encode, render_all, train_clip
from debias_diffusion.toymodels.stage import run_stage
from debias_diffusion.toyworld.grammar import caption, long_caption, short_caption
from debias_diffusion.toyworld.render import SIZE, render
from debias_diffusion.toyworld.scenes import (
    ARRANGEMENTS,
    BACKGROUNDS,
    COLOURS,
    KINDS,
    PLACES,
    SIZES,
    Scene,
    Thing,
    base_scene,
    draw_scene,
    generator,
    scene,
)
from debias_diffusion.toyworld.vocabulary import learn_tokenizer

scenes = st.integers(0, 2**40).map(lambda seed: draw_scene(random.Random(seed)))


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer((caption("train", i).text for i in range(1000)), merges=400)


# ---- scenes


@given(scenes)
def test_a_scene_has_four_to_six_objects_in_places_of_their_own(shown):
    assert 4 <= len(shown.things) <= 6
    assert len({thing.place for thing in shown.things}) == len(shown.things)
    assert len({thing.kind for thing in shown.things}) in (2, 3)
    places = [list(PLACES).index(thing.place) for thing in shown.things]
    assert places == sorted(places)


def test_everything_occurs_about_equally_often():
    things = [thing for i in range(2000) for thing in scene("development", i).things]
    for attribute, allowed in (("kind", KINDS), ("colour", COLOURS), ("size", SIZES), ("place", PLACES)):
        counts = Counter(getattr(thing, attribute) for thing in things)
        assert set(counts) == set(allowed)
        assert max(counts.values()) < 1.25 * min(counts.values()), attribute
    assert {scene("test", i).background for i in range(200)} == set(BACKGROUNDS)


def test_splits_never_meet():
    splits = ("train", "validation", "development", "test", "test-2")
    drawn = {scene(split, i) for split in splits for i in range(500)}
    assert len(drawn) == 2500 and scene("train", 7) in drawn
    with pytest.raises(ValueError, match="unknown split 'trian'"):
        scene("trian", 0)


def contents(shown):
    """A scene without its places."""
    return shown.background, tuple(sorted((thing.kind, thing.colour, thing.size) for thing in shown.things))


@pytest.mark.parametrize("first", [0, 4, 100])
def test_four_scenes_in_a_row_differ_in_nothing_but_places(first):
    row = [scene("test", index) for index in range(first, first + ARRANGEMENTS)]
    assert len(set(map(contents, row))) == 1 and len(set(row)) == ARRANGEMENTS
    assert contents(scene("test", first + ARRANGEMENTS)) != contents(row[0])


def test_base_models_learn_from_few_objects_and_exchanged_ones():
    rows = [[base_scene(ARRANGEMENTS * family + n) for n in range(ARRANGEMENTS)] for family in range(1000)]
    counts = Counter(len(row[0].things) for row in rows)  # a third one, a third two, and a fifth of the others
    assert set(counts) == {1, 2, 3, 4, 5, 6} and 280 < counts[1] < 390 and 340 < counts[2] < 460
    several = [row for row in rows if len(row[0].things) > 2]
    exchanged = [row for row in several if len({tuple(t.place for t in shown.things) for shown in row}) == 1]
    assert 0.4 < len(exchanged) / len(several) < 0.6
    for row in rows:
        assert len(set(row)) == ARRANGEMENTS
        for name in ("kind", "colour", "size"):
            assert len({tuple(sorted(getattr(t, name) for t in shown.things)) for shown in row}) == 1


def test_a_scene_stays_what_it_was():
    # Weights were trained on these scenes; they must be the same on every machine and Python.
    assert scene("test", 3) == PINNED


PINNED = Scene(
    "pale blue",
    (
        Thing("square", "purple", "large", "top left"),
        Thing("square", "orange", "large", "centre"),
        Thing("square", "blue", "small", "right"),
        Thing("star", "purple", "small", "bottom left"),
        Thing("square", "blue", "small", "bottom"),
    ),
)


# ---- pictures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_an_object_fills_its_place_and_no_other(kind, size):
    third = SIZE / 3
    for place, corner in PLACES.items():
        picture = np.asarray(render(Scene("white", (Thing(kind, "blue", size, place),)))).astype(int)
        differs = (picture != BACKGROUNDS["white"]).any(axis=-1)
        for along, pixels in zip(corner, reversed(np.nonzero(differs)), strict=True):
            assert along * third - 1 <= pixels.min() and pixels.max() <= (along + 1) * third
        pure = (abs(picture - COLOURS["blue"]).sum(axis=-1) < 6).sum()
        # Antialiased where edges are not straight: some pixels are neither the object nor the background.
        assert pure > 8 and (kind in ("square", "cross") or differs.sum() - pure > 5)


def test_a_large_object_is_larger_and_kinds_differ():
    def area(kind, size):
        picture = np.asarray(render(Scene("black", (Thing(kind, "yellow", size, "centre"),)))).astype(int)
        return (abs(picture - BACKGROUNDS["black"]).sum(axis=-1) > 100).sum()

    assert all(area(kind, "large") > 2 * area(kind, "small") for kind in KINDS)
    assert render(scene("train", 0), 64).size == (64, 64)
    masks = {render(Scene("white", (Thing(kind, "red", "large", "centre"),))).tobytes() for kind in KINDS}
    assert len(masks) == len(KINDS)
    ring = np.asarray(render(Scene("white", (Thing("ring", "red", "large", "centre"),))))
    assert ndimage.label((ring == 250).all(axis=-1))[1] == 2  # outside and the hole


# ---- captions


@given(scenes, st.integers(0, 2**40))
@settings(max_examples=200)
def test_a_caption_says_the_summary_first_then_every_object_once_and_only_truths(shown, seed):
    written = long_caption(shown, random.Random(seed))
    sentences = written.sentences
    assert 9 <= len(sentences) <= 14
    assert split_sentences(written.text) == [sentence.text for sentence in sentences]
    counts = Counter(thing.kind for thing in shown.things)
    assert all(kind in sentences[0].text for kind in counts) and sentences[0].mentions == ()
    assert not any(colour in sentences[0].text for colour in COLOURS)
    mentioned = written.first_mentions()
    assert set(mentioned) == {thing.place for thing in shown.things}
    by_place = {thing.place: thing for thing in shown.things}
    for sentence in sentences[1:]:
        for place in sentence.mentions:
            thing = by_place[place]
            assert place in sentence.text and thing.kind in sentence.text and thing.colour in sentence.text
    for sentence in sentences:
        check_relation(shown, sentence.text)


def check_relation(shown, text):
    """A relation must hold for some pair of the objects it names, and every empty place must be empty."""
    for phrase, holds in {
        "to the left": lambda a, b: PLACES[a.place][0] < PLACES[b.place][0],
        "to the right": lambda a, b: PLACES[a.place][0] > PLACES[b.place][0],
        " above ": lambda a, b: PLACES[a.place][1] < PLACES[b.place][1],
        "higher up": lambda a, b: PLACES[a.place][1] < PLACES[b.place][1],
        " below ": lambda a, b: PLACES[a.place][1] > PLACES[b.place][1],
        "lower down": lambda a, b: PLACES[a.place][1] > PLACES[b.place][1],
        "larger than": lambda a, b: (a.size, b.size) == ("large", "small"),
    }.items():
        if phrase in text:
            first, second = text.lower().split(phrase, 1)
            named = [[t for t in shown.things if f"{t.colour} {t.kind}" in part] for part in (first, second)]
            # A name with a place means that one object.
            for i, part in enumerate((first, second)):
                exact = [t for t in named[i] if f"{t.kind} in the {t.place} " in f"{part.rstrip('. ')} "]
                named[i] = exact or named[i]
            assert any(holds(a, b) for a in named[0] for b in named[1] if a is not b), text
    if "empty" in text or "nothing at all" in text or "No object" in text:
        place = text.rstrip(".").removesuffix(" of the picture is empty")
        place = place.removeprefix("The ").removeprefix("There is nothing at all in the ")
        assert place.removeprefix("No object stands in the ") in set(PLACES) - {t.place for t in shown.things}, text


def test_short_captions_are_the_summary_and_one_or_two_objects(tokenizer):
    count = CaptionTokenizer(tokenizer, 77)
    written = [short_caption(scene("train", i), generator("train", i, "short")) for i in range(300)]
    details = [[sentence.mentions for sentence in caption.sentences[1:]] for caption in written]
    assert all([len(places) for places in of_one if places] in ([1], [1, 1]) for of_one in details)
    assert 70 < sum(() in of_one for of_one in details) < 130  # a third name the background
    assert all(count.count(caption.text) <= 77 for caption in written)


# ---- the tokenizer


def test_captions_have_90_to_200_tokens_and_every_word_is_one(tokenizer):
    counter = CaptionTokenizer(tokenizer, 248)
    texts = [caption("development", i).text for i in range(500)]
    counts = [counter.count(text) for text in texts]
    assert min(counts) >= 88 and max(counts) <= 200
    assert all(token.endswith("</w>") for text in texts[:50] for token in tokenizer.tokenize(text))


def test_the_tokenizer_is_laid_out_as_clips_and_saved_whole(tokenizer, tmp_path):
    assert tokenizer.eos_token_id == len(tokenizer) - 1 and tokenizer.bos_token_id == len(tokenizer) - 2
    assert tokenizer.convert_ids_to_tokens(0) == "!"
    ids = tokenizer("a giraffe, naïve 猫 👍", add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == "a giraffe , naïve 猫 👍"
    again = learn_tokenizer((caption("train", i).text for i in range(1000)), merges=400)
    assert again.get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    text = caption("test", 0).text
    assert CLIPTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text, verbose=False).input_ids


# ---- stages


def test_a_killed_stage_ends_as_an_unbroken_one(tmp_path):
    def stage(folder, fail_at=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def loss(step):
            if step == fail_at:
                raise KeyboardInterrupt
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            return (model(x) - x[:, :2]).square().mean()

        run_stage(folder, model, loss, steps=1200, peak=1e-2)
        return [p.detach().clone() for p in model.parameters()]

    whole = stage(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path / "killed", fail_at=700)
    continued = stage(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole, continued, strict=True))
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "killed")]
    steps = [[json.loads(line)["step"] for line in text.splitlines()] for text in logs]
    assert len(steps[0]) == 12 and steps[0] == steps[1]  # a step that was made again is logged once


# ---- the base model


def test_the_base_clip_learns_and_is_an_ordinary_backbone(tmp_path, tokenizer, monkeypatch, full_precision):
    monkeypatch.setattr(stage, "_LOG_EVERY", 5)
    backbone = train_clip(tmp_path / "clip", tokenizer, scenes=8, steps=30, batch=8)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "clip" / "log.jsonl").read_text().splitlines()]
    guess = np.log(8) + 2 * np.log(len(tokenizer))  # among 8 images, and of each word
    assert losses[0] > 0.95 * guess and losses[-1] < 0.85 * guess
    pictures = [render(scene("train", i)) for i in range(16)]
    texts = [caption("train", i).text for i in range(16)]
    image, text = encode(backbone, pictures, texts, batch=5)
    assert image.shape == text.shape == (16, 128)
    # Training reads texts and images as the finished model does.
    tokens = backbone.tokenize(texts)
    with torch.no_grad():
        trained, hidden_states = clip._encode_text(backbone.model, tokens.padded(), tokens.n_prefix + tokens.lengths)
        trained_image, _ = clip.encode_patches(backbone, render_all([scene("train", i) for i in range(16)], backbone))
    torch.testing.assert_close(trained, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(trained_image, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden_states, backbone.text.penultimate_states(tokens, pad=0), rtol=0, atol=1e-5)
    # What training drew and scaled itself is what the model's own transform gives.
    drawn = backbone.normalise(render_all([scene("train", 0), scene("train", 1)], backbone))
    torch.testing.assert_close(drawn[1], backbone.preprocess(pictures[1]), rtol=0, atol=1e-6)
