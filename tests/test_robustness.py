"""Sentence edits, recall under them against brute force, and the share of it that is kept."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import skimage
import torch
from helpers.literal import literal_ranks
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.tiny_data import caption, make_tiny_data
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.json_files import read_sharegpt4v
from debias_diffusion.eval.intervals import mean_interval, paired_difference
from debias_diffusion.eval.retrieval import DIRECTIONS
from debias_diffusion.eval.robustness import (
    COMPARED,
    EDITS,
    LOSING,
    PADDING,
    SHUFFLES,
    RobustnessConfig,
    edit_caption,
    evaluate_robustness,
    figures,
    hits_by_edit,
    share,
    shuffled,
    tables,
)
from debias_diffusion.models.backbone import Backbone
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.sentences import split_sentences

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"
LONG = {"context_length": 248, "tokenizer": byte_tokenizer(248)}


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"), **LONG)


@pytest.fixture(scope="module")
def other_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("other-clip"), seed=1, **LONG)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("keep", ["1", "12", "123", "1234", "12345"]),
        ("move2", ["1", "21", "213", "2134", "21345"]),
        ("move4", ["1", "21", "321", "4231", "42315"]),
        ("remove", ["1", "2", "23", "234", "2345"]),
        ("first2", ["1", "12", "12", "12", "12"]),
        ("swap2", ["1", "21", "21", "21", "21"]),
        ("first", ["1", "1", "1", "1", "1"]),
        ("padding1", ["01", "012", "012", "012", "012"]),
        ("padding5", ["000001", "0000012", "0000012", "0000012", "0000012"]),
    ],
)
def test_edits_of_one_to_five_sentences(edit, expected):
    sentences = [
        "A cat sits here.",
        "Its fur is red!",
        "Is it asleep?",
        "The wall is 2.5 m high.",
        "No one else is there",
    ]

    def named(digits):
        return " ".join(["This is a photo.", *sentences][int(digit)] for digit in digits)

    for length, digits in enumerate(expected, 1):
        assert edit_caption(" ".join(sentences[:length]), edit) == named(digits)


def test_all_edits_of_the_paper_are_there():
    whole, opening = ["move2", "move4", "remove", "shuffle"], ["swap2", "first", *(f"padding{n}" for n in range(1, 6))]
    assert list(EDITS) == ["keep", *whole, "first2", *opening]
    bases = dict.fromkeys(("keep", *whole), "keep") | dict.fromkeys(("first2", *opening), "first2")
    assert {name: edit.base for name, edit in EDITS.items()} == bases and list(LOSING) == [*whole, *opening]
    for record in read_sharegpt4v(PHOTOGRAPHS).records:  # real captions change under every edit
        assert edit_caption(record.caption, "keep") == record.caption
        assert len({edit_caption(record.caption, edit) for edit in EDITS}) == len(EDITS)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=9))
def test_edits_leave_their_input_alone_and_lose_nothing_but_what_they_name(sentences):
    before, two = list(sentences), sorted(sentences[:2])
    left = {"remove": sorted(sentences[1:] or sentences), "first": sentences[:1], "first2": two, "swap2": two}
    left |= {f"padding{count}": sorted([PADDING] * count + two) for count in range(1, 6)}
    for name, edit in EDITS.items():
        for variant in edit.variants:
            edited = variant(sentences)
            assert sentences == before and edited is not sentences
            assert sorted(edited) == left.get(name, sorted(sentences))
            assert variant(sentences) == edited
    (move2,), (move4,), (swap2,) = (EDITS[name].variants for name in ("move2", "move4", "swap2"))
    assert move2(move2(sentences)) == move4(move4(sentences)) == sentences  # swaps undo themselves
    assert swap2(sentences) == move2(sentences)[:2]
    if len(sentences) == 2:
        assert move2(sentences) == move4(sentences) == swap2(sentences)


def test_orders_are_decided_by_seed_and_caption_alone_and_are_all_alike_likely():
    long = [f"Sentence {number}." for number in range(9)]
    random.seed(1)
    first = [shuffled(seed, long) for seed in range(SHUFFLES)]
    random.seed(2)
    assert first == [shuffled(seed, long) for seed in range(SHUFFLES)]
    assert len({tuple(order) for order in first}) == SHUFFLES == len(EDITS["shuffle"].variants) > 1
    orders = Counter()
    for number in range(3000):
        sentences = [f"This is {number}.", "It is b.", "It is c."]
        orders[tuple(sentences.index(sentence) for sentence in shuffled(0, sentences))] += 1
    assert len(orders) == 6 and sum((count - 500) ** 2 / 500 for count in orders.values()) < 25  # chi-squared, 1e-4


# The share kept.


def test_share_in_closed_form():
    before, after = [100, 0, 100, 100, 0, 100], [0, 0, 100, 0, 0, 0]
    found = share(after, before)
    assert found.percent == 25.0 and found.numbers()["low"] == 0.0 <= 25 < found.numbers()["high"] <= 100
    assert share(before, before).numbers() == {"share": 100.0, "low": 100.0, "high": 100.0}
    assert share([100, 100], [100, 0]).percent == 200.0  # more can be found without the first sentence
    assert share([100, 0], [0, 0]).numbers() == {"share": None, "low": None, "high": None}
    ahead = share(before, before).minus(found)
    assert ahead["difference"] == 75.0 and ahead["p"] is None
    assert (ahead["low"], ahead["high"]) == pytest.approx((100 - found.numbers()["high"], 100.0))


def test_share_s_interval_is_the_normal_one_for_many_queries():
    random = np.random.default_rng(3)
    before = 100.0 * (random.random(2000) < 0.7)
    after = before * (random.random(2000) < 0.4) + (100 - before) * (random.random(2000) < 0.1)
    found = share(after, before)
    ratio = after.mean() / before.mean()
    error = 100 * (after - ratio * before).std() / before.mean() / math.sqrt(len(before))  # the delta method
    numbers = found.numbers()
    assert numbers["share"] == pytest.approx(100 * ratio)
    assert numbers["low"] == pytest.approx(100 * ratio - 1.96 * error, abs=0.1 * error)
    assert numbers["high"] == pytest.approx(100 * ratio + 1.96 * error, abs=0.1 * error)
    # four captions of an image that fare alike tell no more than one
    again = share(np.repeat(after, 4), np.repeat(before, 4), np.repeat(np.arange(2000), 4))
    assert again.numbers() == pytest.approx(numbers)


# Evaluations.


@pytest.fixture(scope="module")
def several(tmp_path_factory, tiny_clip, other_clip):
    """Two encoders on six images of three captions each, one of which cannot be opened; in Flickr30k's layout."""
    root = tmp_path_factory.mktemp("several")
    make_tiny_data(root, 6)
    (root / "images").rename(root / "flickr30k-images")
    captions = {f"{image}.png": [caption(image), caption(10 + image), caption(image)] for image in range(5)}
    captions["5.png"] = ["Not to be opened. Nor this."]
    captions["1.png"][1] = "Here is one sentence"
    (root / "flickr30k-images" / "5.png").write_text("no image")
    lines = [f"{name}#{n}\t{text}\n" for name, texts in captions.items() for n, text in enumerate(texts)]
    (root / "results_20130124.token").write_text("".join(lines))
    config = RobustnessConfig(
        [tiny_clip, other_clip], str(root / "out"), dataset="flickr30k", root=str(root), max_bad=0.2, batch_size=4
    )
    readable = {name: texts for name, texts in captions.items() if name != "5.png"}
    return SimpleNamespace(root=root, config=config, captions=readable, report=evaluate_robustness(config))


def features(backbone: Backbone, images: Path, captions: dict[str, list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the images and of their captions, one at a time."""
    with torch.no_grad():
        pixels = [backbone.preprocess(Image.open(images / name))[None] for name in captions]
        texts = [text for of_image in captions.values() for text in of_image]
        return (
            torch.cat([backbone.encode_image(image) for image in pixels]).double(),
            torch.cat([backbone.encode_text(backbone.tokenize([text])) for text in texts]).double(),
        )


def edited(captions: dict[str, list[str]], variant) -> dict[str, list[str]]:
    """By image, its captions edited."""
    return {image: [" ".join(variant(split_sentences(text))) for text in texts] for image, texts in captions.items()}


def test_numbers_equal_brute_force_with_several_captions_an_image(several, tiny_clip, other_clip):
    report, folder = several.report, several.root / "flickr30k-images"
    assert (report["images"], report["captions"], report["one_sentence_captions"]) == (5, 15, 1)
    (left_out,) = report["left_out"]
    assert left_out["kind"] == "unreadable image" and "5.png" in str(left_out)
    image_of = [image for image in range(5) for _ in range(3)]
    groups = {"text_to_image": image_of, "image_to_text": None}
    hits = {}
    for name, (label, numbers) in zip((tiny_clip, other_clip), report["encoders"].items(), strict=True):
        backbone, found = load_backbone(name).eval(), {}
        for edit, its in EDITS.items():
            variants = []
            for variant in its.variants:
                ranks = literal_ranks(*features(backbone, folder, edited(several.captions, variant)), image_of)
                hits_of = [[100.0 * (rank == 1) for rank in of_way] for of_way in ranks]
                variants.append(dict(zip(DIRECTIONS, hits_of, strict=True)))
            found[edit] = {way: np.mean([one[way] for one in variants], axis=0) for way in DIRECTIONS}
            for way in DIRECTIONS:
                assert numbers["recall_at_1_percent"][edit][way] == pytest.approx(found[edit][way].mean())
                assert numbers["interval_percent"][edit][way] == mean_interval(found[edit][way], groups[way])
                if edit == "shuffle":
                    each = [np.mean(one[way]) for one in variants]
                    assert numbers["shuffles"]["recall_at_1_percent"][way] == pytest.approx(each)
                    assert numbers["shuffles"]["deviation_points"][way] == pytest.approx(np.std(each, ddof=1))
        for edit in LOSING:
            for way in DIRECTIONS:
                expected = paired_difference(found[EDITS[edit].base][way], found[edit][way], groups[way])
                assert numbers["drop_points"][edit][way] == pytest.approx(expected)
        for way in DIRECTIONS:
            kept = share(found["remove"][way], found["keep"][way], groups[way]).numbers()
            assert numbers["kept_without_summary_percent"][way] == kept
        hits[label] = found
    assert len({values.mean() for found in hits.values() for its in found.values() for values in its.values()}) > 4
    first, second = hits
    scores = {line["score"]: line for line in report["compared"]}
    for edit in COMPARED:
        for way in DIRECTIONS:
            line = scores[f"drop of {EDITS[edit].title}, {way.replace('_', ' ')}"]
            lost = [hits[label][EDITS[edit].base][way] - hits[label][edit][way] for label in (second, first)]
            assert (line["a"], line["b"]) == (second, first)
            expected = paired_difference(*lost, groups[way])
            assert {key: line[key] for key in expected} == pytest.approx(expected)


def test_similarities_of_image_and_caption_are_cosines(several, tiny_clip):
    backbone, images = load_backbone(tiny_clip).eval(), several.root / "flickr30k-images"
    numbers = next(iter(several.report["encoders"].values()))
    assert numbers["similarity"].keys() == EDITS.keys()
    expected, owners = {}, [image for image in range(5) for _ in range(3)]
    for edit in ("first", "keep", "shuffle"):
        cosines = []
        for variant in EDITS[edit].variants:
            seen, read = features(backbone, images, edited(several.captions, variant))
            cosines.append(torch.nn.functional.cosine_similarity(seen[owners], read).tolist())
        expected[edit] = np.mean(cosines, axis=0)
    for edit, cosines in expected.items():
        similarity = numbers["similarity"][edit]
        assert similarity["mean"] == pytest.approx(np.mean(cosines), abs=1e-6)
        assert similarity["interval"] == pytest.approx(mean_interval(np.array(cosines), owners), abs=1e-6)
    assert numbers["similarity"]["first"]["mean"] != pytest.approx(numbers["similarity"]["keep"]["mean"], abs=1e-3)


def test_tokens_of_the_first_two_sentences(several, tiny_clip):
    numbers = next(iter(several.report["encoders"].values()))
    texts = [" ".join(split_sentences(text)[:2]) for texts in several.captions.values() for text in texts]
    # a symbol a byte without spaces: the tokenizer has no merges
    expected = np.mean([len("".join(text.split())) for text in texts])
    assert numbers["first_two_sentences_tokens"] == pytest.approx(expected)
    table = next(table for table in tables(several.report) if "similarity" in table.header[0])
    assert len(table.rows) == 2 and table.rows[0][-1] == pytest.approx(expected)


@pytest.mark.usefixtures("blank_figures")
def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(several, tmp_path, monkeypatch):
    calls, encode = [], Backbone.encode_text

    def counted(self, tokens):
        calls.append(len(tokens))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return encode(self, tokens)

    monkeypatch.setattr(Backbone, "encode_text", counted)
    config = replace(several.config, output=str(tmp_path / "out"))
    # Four batches a variant and fifteen variants: in the third batch of the second encoder's eighth variant.
    stop, finished, whole = 60 + 28 + 3, 60 + 28, 120
    with pytest.raises(KeyboardInterrupt):
        evaluate_robustness(config)
    stop = None
    calls.clear()
    report = evaluate_robustness(config)
    for key in ("encoders", "compared", "images", "captions", "digests", "left_out"):
        assert report[key] == several.report[key]
    assert len(calls) == whole - finished


def test_some_edits_alone_give_the_same_recall(several, tmp_path):
    hits = hits_by_edit(replace(several.config, output=str(tmp_path)), ("remove", "keep"))
    for label, numbers in several.report["encoders"].items():
        for edit in ("remove", "keep"):
            recalls = {way: hits[label].of(edit, way).mean() for way in DIRECTIONS}
            assert recalls == numbers["recall_at_1_percent"][edit]


def test_a_report_is_written_and_printed(tiny_clip, tmp_path, capsys):
    report = evaluate_robustness(RobustnessConfig([tiny_clip], str(tmp_path), str(PHOTOGRAPHS), skimage.data_dir))
    assert report == json.loads((tmp_path / "robustness.json").read_text())
    assert report["captions"] == report["images"] == 12
    assert report["one_sentence_captions"] == 0 and report["left_out"] == report["notes"] == report["compared"] == []
    (numbers,) = report["encoders"].values()
    longer = numbers["captions_longer_than_context"]
    assert longer["keep"] == 12 > longer["first"] == 0
    with Image.open(tmp_path / "robustness.png") as image:
        assert image.format == "PNG" and image.width > image.height > 200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10
    printed = capsys.readouterr().out
    assert printed.endswith(f"\n{numbers['in_words']}\n")
    assert all(edit.title in printed for edit in EDITS.values()) and "share of R@1 kept" in printed


@pytest.mark.usefixtures("blank_figures")
def test_edits_reach_the_encoder(tiny_clip, tmp_path):
    # Captions that agree but for the first sentence are all alike once it is removed: R@1 falls to 0, because ties
    # count against the model. What the edits do to features is thus seen in the numbers.
    data, images = make_tiny_data(tmp_path, 5)
    entries = json.loads(Path(data).read_text())
    for number, entry in enumerate(entries):
        entry["conversations"][1]["value"] = f"This is image {number}. It is a photograph."
    entries[4]["conversations"][1]["value"] = "One sentence only."
    Path(data).write_text(json.dumps(entries))
    report = evaluate_robustness(RobustnessConfig([tiny_clip], str(tmp_path), data, images))
    assert report["one_sentence_captions"] == 1
    assert "1 of 5 captions have a single sentence" in report["notes"][0]
    (numbers,) = report["encoders"].values()
    recall = numbers["recall_at_1_percent"]
    assert recall["move2"] == recall["move4"] == recall["swap2"] and recall["keep"] == recall["first2"]
    assert recall["remove"]["image_to_text"] <= 20.0
    # texts in common are encoded once: keep, swapped, removed, first, five paddings, and orders that none of these is
    parts = list((tmp_path / "cache").glob("robustness-*.json"))
    assert 4 + 5 <= len(parts) <= 4 + 5 + SHUFFLES


@pytest.mark.usefixtures("blank_figures")
def test_who_finds_nothing_has_nothing_to_lose(tiny_clip, other_clip, tmp_path):
    data, images = make_tiny_data(tmp_path, 1)
    Path(data).write_text(json.dumps(json.loads(Path(data).read_text()) * 3))
    report = evaluate_robustness(RobustnessConfig([tiny_clip, other_clip], str(tmp_path), data, images))
    for numbers in report["encoders"].values():
        assert set(numbers["recall_at_1_percent"]["keep"].values()) == {0.0}
        assert numbers["kept_without_summary_percent"]["text_to_image"] == {"share": None, "low": None, "high": None}
        assert numbers["in_words"].endswith("so it has nothing to lose.")
    assert not any("share" in line["score"] for line in report["compared"]) and report["compared"]


def test_the_figure_draws_the_numbers(several):
    (figure,) = figures(several.report).values()
    encoders = several.report["encoders"].values()

    def recalls(edits: list[str], way: str) -> list[list[float]]:
        return [[numbers["recall_at_1_percent"][edit][way] for edit in edits] for numbers in encoders]

    scales = [[], []]
    for row, way in enumerate(DIRECTIONS):
        whole, two, behind, kept = figure.axes[4 * row : 4 * row + 4]
        for axes, edits in (
            (whole, ["keep", "move2", "move4", "remove", "shuffle"]),
            (two, ["first2", "swap2", "first"]),
        ):
            heights = [[bar.get_height() for bar in bars] for bars in axes.containers if hasattr(bars, "patches")]
            assert heights == recalls(edits, way)
            assert [label.get_text() for label in axes.get_xticklabels()] == [EDITS[edit].title for edit in edits]
        curves = [list(errorbar.lines[0].get_ydata()) for errorbar in behind.containers]
        assert curves == recalls(["first2", *(f"padding{count}" for count in range(1, 6))], way)
        shares = [numbers["kept_without_summary_percent"][way]["share"] for numbers in encoders]
        assert [bar.get_height() for bar in kept.patches] == [one for one in shares if one is not None]
        scales[0] += [axes.get_ylim() for axes in (whole, two, behind)]
        scales[1].append(kept.get_ylim())
    assert [len(set(limits)) for limits in scales] == [1, 1]  # recalls, and shares, each on one scale
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(several.report["encoders"])


@pytest.mark.usefixtures("blank_figures")
def test_wide_shares_are_too_low_to_say(tmp_path):
    data, images = make_tiny_data(tmp_path, 40)
    clips = [save_tiny_clip(tmp_path / f"clip-{seed}", seed=seed) for seed in range(2)]
    report = evaluate_robustness(RobustnessConfig(clips, str(tmp_path / "scores"), data, images))
    kept = [numbers["kept_without_summary_percent"] for numbers in report["encoders"].values()]
    wide = [[s["low"] is not None and s["high"] - s["low"] > 100 for s in shares.values()] for shares in kept]
    assert any(map(any, wide))  # of so few images with models that know nothing
    rows = tables(report)[0].rows
    assert [[cell == "too low to say" for cell in row[1:]] for row in rows] == wide
    for (text_to_image, _), numbers in zip(wide, report["encoders"].values(), strict=True):
        assert ("finds too few images first to say" in numbers["in_words"]) == text_to_image
