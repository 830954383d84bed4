"""Captions that refer back: which sentences say what, how objects are mentioned, and the scores by mention."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.data import toy_scenes
from debias_diffusion.data.sources import open_data
from debias_diffusion.data.toy_scenes import family, toy_scene
from debias_diffusion.toyworld import grammar
from debias_diffusion.toyworld.grammar import Caption, long_caption
from debias_diffusion.toyworld.scenes import draw_scene
from research.options import ReferringConfig
from research.referring.claims import Claim, Reference, resolve
from research.referring.grammar import KINDS, Statement, caption, facts, refer_back, short_prompt
from research.referring.mentions import (
    ACROSS,
    ALL,
    ALONE,
    READERS,
    WITHIN,
    Mention,
    ceilings,
    knowable,
    mention_kinds,
    read_caption,
    sentences_by_chunk,
)
from research.referring.scores import KIND_NAMES, evaluate_referring


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, kind in KINDS.items():
        monkeypatch.setitem(toy_scenes.KINDS, name, kind)


def words(text: str) -> int:
    """A token a word."""
    return len(text.split())


STAR = Claim(Reference("top"), (("kind", "star"),))
IT_IS_BLUE = Claim(Reference(), (("colour", "blue"),))
RING = Claim(Reference("left"), (("kind", "ring"),))
THE_RING_IS_RED = Claim(Reference(kind="ring"), (("colour", "red"),))
SQUARE = Claim(Reference("right"), (("kind", "square"), ("colour", "green")))
# 20 words a sentence, so a chunk holds three: a summary, the star and its colour; the ring, the square, the summary
# again; the ring's colour.
SENTENCES = tuple(
    Statement(" ".join([f"word{number}"] * 20), claim=claim)
    for number, claim in enumerate((None, STAR, IT_IS_BLUE, RING, SQUARE, None, THE_RING_IS_RED))
)
TOLD = Caption(SENTENCES)


def test_mentions_and_ceilings_in_closed_form():
    assert sentences_by_chunk(TOLD, words) == [[0, 1, 2], [3, 4, 5], [6]]
    # One sentence of each but the first chunk is new, after two that are read again.
    assert sentences_by_chunk(TOLD, words, "overlap") == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    truncating, *others = READERS
    reading = read_caption(TOLD, words)
    assert reading == {
        "top": Mention(WITHIN, [truncating, *others]),
        "left": Mention(ACROSS, ["whole"]),
        "right": Mention(ALONE, others),
    }
    # Cut between the star and "it", nothing is known of its colour; read together, all is.
    assert mention_kinds(TOLD, [[0, 1], [2, 3, 4, 5, 6]]) == {"top": ACROSS, "left": WITHIN, "right": ALONE}
    assert knowable(TOLD, [[0, 1], [2, 3, 4, 5, 6]]) == {"left", "right"}
    assert knowable(TOLD, [range(7)]) == {"top", "left", "right"} and knowable(TOLD, [[]]) == set()
    alone = {"top": Mention(ALONE, list(READERS))}
    assert ceilings([reading, alone]) == [
        {"told": ALL, "objects": 4, "truncated": 50, "in_chunks": 75, "in_overlapping_chunks": 75, "whole": 100},
        {"told": ALONE, "objects": 2, "truncated": 50, "in_chunks": 100, "in_overlapping_chunks": 100, "whole": 100},
        {"told": WITHIN, "objects": 1, "truncated": 100, "in_chunks": 100, "in_overlapping_chunks": 100, "whole": 100},
        {"told": ACROSS, "objects": 1, "truncated": 0, "in_chunks": 0, "in_overlapping_chunks": 0, "whole": 100},
    ]
    assert [line["told"] for line in ceilings([alone])] == [ALL, ALONE] and ceilings([]) == []


@given(seed=st.integers(0, 2**40))
def test_a_fact_needs_each_of_its_sentences_and_no_further_one(seed):
    caption = long_caption(draw_scene(random.Random(seed), 4, 6), random.Random(seed), refer_back)
    said = {number: getattr(sentence, "claim", None) for number, sentence in enumerate(caption.sentences)}
    known = facts(caption)
    assert sum(len(fact["colour"].sentences) > 1 for fact in known.values()) >= len(known) / 2
    for place, attributes in known.items():
        for name, fact in attributes.items():
            assert resolve({n: said[n] for n in fact.sentences})[place][name].value == fact.value
            for left_out in fact.sentences:
                rest = {n: claim for n, claim in said.items() if n != left_out}
                assert name not in resolve(rest).get(place, {})


def test_a_name_that_two_objects_have_says_nothing():
    stars = [Claim(Reference(place), (("kind", "star"),)) for place in ("top", "left")]
    red = Claim(Reference(kind="star"), (("colour", "red"),))
    known = resolve(dict(enumerate([*stars, red])))
    assert {place: {name: fact.value for name, fact in of_place.items()} for place, of_place in known.items()} == {
        "top": {"kind": "star"},
        "left": {"kind": "star"},
    }


def test_plain_captions_are_those_of_the_package_and_referring_ones_are_scenes_of_their_own():
    assert caption("test", 5, "plain").text == grammar.caption("test", 5).text
    assert short_prompt("test", 5, "plain")[1].text == grammar.short_prompt("test", 5)[1].text
    for name in ("toy/referring-test", "toy/short-referring-test-2"):
        record = open_data(name)[0].records[12]
        shown, written = toy_scene(record.image)
        assert record.caption == written.text and record.image == f"{name.removeprefix('toy/')}/000012"
        assert set(facts(written)) == {thing.place for thing in shown.things}
    assert toy_scene("referring-test/000012")[0] == toy_scene("test/000012")[0]
    assert [family(f"{kind}test/000013")[-2:] for kind in KINDS] == ["12", "13"]


@pytest.mark.usefixtures("blank_figures")
def test_images_are_scored_by_how_captions_mention_their_objects(tmp_path, capsys):
    toy = {"data": "toy/referring-test", "limit": 3, "steps": 1, "base": "toy/sdxl", "device": "cpu"}
    config = ReferringConfig(encoders=["cut:toy/clip"], output=str(tmp_path), **toy)
    report = evaluate_referring(config)
    every, *rows = report["ceilings"]
    [encoder] = report["encoders"].values()
    assert every["objects"] == sum(len(toy_scene(name)[0].things) for name in report["records"]["image"])
    assert every["truncated"] < every["whole"] == 100
    lines = encoder["scores"]["objects_right_by_telling"]
    assert [(line["told"], line["objects"]) for line in rows] == [(line["told"], line["objects"]) for line in lines]
    counts = [encoder["by_image"][f"objects_right_{KIND_NAMES[line['told']]}"] for line in lines]
    assert [sum(part["below"]) for part in counts] == [line["objects"] for line in lines]
    whole = encoder["by_image"]["objects_right"]["above"]
    assert [sum(rights) for rights in zip(*(part["above"] for part in counts), strict=True)] == whole
    assert "by how they are told" in capsys.readouterr().out
    assert json.loads((tmp_path / "referring.json").read_text()) == report
