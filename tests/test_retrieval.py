"""Recall at k against brute force and closed forms, and a retrieval evaluation on real photographs."""

import html
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import skimage
import torch
from helpers.literal import literal_ranks
from helpers.tiny_clip import byte_tokenizer, save_tiny_clip
from helpers.tiny_data import make_tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_sharegpt4v
from debias_diffusion.encoders import EncoderSpec, labels
from debias_diffusion.errors import UserError
from debias_diffusion.eval import image_features, retrieval
from debias_diffusion.eval.options import check_output
from debias_diffusion.eval.report import Table, cell
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval, figures
from debias_diffusion.eval.retrieval_examples import disagreements, nearest_strangers
from debias_diffusion.files import path_digest
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.retrieval import encode_images, encode_texts, recall_at_k, recall_ranks

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    """The folder of a small random two-tower."""
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"), tokenizer=byte_tokenizer(77))


def recall(ranks, k):
    return 100 * sum(rank <= k for rank in ranks) / len(ranks)


def rows(count):
    """Small whole numbers, so that exact ties, duplicates and zero vectors are frequent."""
    return st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=count, max_size=count)


# Images, the captions' images and captions: one caption for each image, or one to three in any order.
one_each = st.integers(1, 12).flatmap(lambda n: st.tuples(rows(n), st.none(), rows(n)))
several = st.lists(st.integers(1, 3), min_size=1, max_size=6).flatmap(
    lambda counts: st.tuples(
        rows(len(counts)),
        st.permutations([image for image, count in enumerate(counts) for _ in range(count)]),
        rows(sum(counts)),
    )
)


@settings(max_examples=300)
@given(one_each | several, st.integers(1, 13), st.integers(1, 14))
def test_recall_equals_brute_force_with_ties_for_any_block(drawn, k, block):
    images, image_of, texts = drawn
    images, texts = torch.tensor(images).float(), torch.tensor(texts).float()
    got = recall_at_k(images, texts, ks=(k,), block=block, image_of=image_of)
    expected = literal_ranks(images, texts, range(len(texts)) if image_of is None else image_of)
    assert got == {way: {f"R@{k}": pytest.approx(recall(ranks, k))} for way, ranks in zip(got, expected, strict=True)}


def test_duplicates_count_as_ties():
    rows = torch.nn.functional.normalize(torch.randn(10, 64, generator=torch.Generator().manual_seed(2)), dim=1)
    twice = torch.cat([rows, rows * (1 + 1e-7)])  # even after rounding to single precision
    got = recall_at_k(twice, twice, ks=(1, 2))
    assert got == {"text_to_image": {"R@1": 0.0, "R@2": 100.0}, "image_to_text": {"R@1": 0.0, "R@2": 100.0}}
    eye = torch.eye(2)
    # the same caption twice for one image harms nobody
    perfect = {"text_to_image": {"R@1": 100.0}, "image_to_text": {"R@1": 100.0}}
    assert recall_at_k(eye, eye[[0, 0, 1]], ks=(1,), image_of=[0, 0, 1]) == perfect
    # the same caption for both images ties: with itself no image is found at 1, with another of its own it is
    shared = recall_at_k(eye, torch.stack([eye.sum(0), eye.sum(0), eye[1]]), ks=(1, 2), image_of=[0, 1, 1])
    assert shared["text_to_image"] == {"R@1": pytest.approx(100 / 3), "R@2": 100.0}
    assert shared["image_to_text"] == {"R@1": 50.0, "R@2": 100.0}


@pytest.mark.parametrize("image_of", [[0, 1], [0, 1, 3], [0, 0, 0], [0, 1, -1], [0, 1, 1, 0]])
def test_owners_that_do_not_fit_are_refused(image_of):
    with pytest.raises(UserError, match="from 0 to 1, and each image at least once"):
        recall_at_k(torch.ones(2, 4), torch.ones(3, 4), image_of=image_of)


@st.composite
def with_candidates(draw):
    """Images, captions, the captions' images, and for every query some candidates with a partner among them."""
    images, image_of, texts = draw(several)
    some_images = st.sets(st.integers(0, len(images) - 1))
    of_texts = [[*draw(some_images) - {owner}, owner] for owner in image_of]
    some_texts = st.sets(st.integers(0, len(texts) - 1))
    of_images = [sorted(draw(some_texts) | {image_of.index(image)}) for image in range(len(images))]
    return images, image_of, texts, of_texts, of_images


@settings(max_examples=100)
@given(with_candidates(), st.integers(1, 9))
def test_ranks_among_candidates_equal_brute_force_with_ties_for_any_block(drawn, block):
    images, image_of, texts, of_texts, of_images = drawn
    images, texts = torch.tensor(images, dtype=torch.float32), torch.tensor(texts, dtype=torch.float32)
    candidates = {"text_to_image": of_texts, "image_to_text": of_images}
    got = recall_ranks(images, texts, block, image_of, candidates)
    assert tuple(got[name].tolist() for name in candidates) == literal_ranks(
        images, texts, image_of, of_texts, of_images
    )


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ({"text_to_image": [[0, 1]]}, "must be 2 lists, one a query, of rows from 0 to 1; got 1"),
        ({"text_to_image": [[0, 1], [1, 2]]}, "must be 2 lists"),
        ({"text_to_image": [[0, 1], [0]]}, "of query 1 lack its partner"),
        ({"image_to_text": [[0], []]}, "of query 1 lack its partner"),
        ({"image_to_text": [[0], [1, 1]]}, "repeat a row"),
        ({"images": [[0], [1]]}, "Name only text_to_image and image_to_text"),
    ],
)
def test_candidates_that_do_not_fit_are_refused(candidates, message):
    with pytest.raises(UserError, match=message):
        recall_ranks(torch.eye(2), torch.eye(2), candidates=candidates)


def test_recall_in_closed_form():
    eye = torch.eye(20)
    assert set(recall_at_k(eye, eye)["text_to_image"].values()) == {100.0}
    # Reversed, no partner is found; all wrong candidates tie with it at 0 except one that is better.
    assert recall_at_k(eye, eye.flip(0), ks=(1, 10, 19, 20))["image_to_text"] == {
        "R@1": 0.0, "R@10": 0.0, "R@19": 0.0, "R@20": 100.0,
    }  # fmt: skip
    # On a half circle similarity falls with distance. Shifted by one, image i - 1 fits text i exactly, and its own
    # image i ties with image i - 2: rank 3, but 1 and 2 for the first two texts, which lack such neighbours.
    angles = torch.linspace(0, 3, 20)
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    shifted = recall_at_k(circle[1:], circle[:-1], ks=(1, 2, 3))["text_to_image"]
    assert shifted == pytest.approx({"R@1": 100 / 19, "R@2": 200 / 19, "R@3": 100.0})


def test_recall_does_not_depend_on_length_or_order():
    generator = torch.Generator().manual_seed(3)
    images, texts = torch.randn(30, 6, generator=generator), torch.randn(30, 6, generator=generator)
    order = torch.randperm(30, generator=generator)
    for scale in (1e-3, 1e3):
        assert recall_at_k(scale * images[order], texts[order] / scale) == recall_at_k(images, texts)


def test_memory_is_of_a_block_and_not_of_the_whole_matrix(monkeypatch):
    sizes, multiply = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: sizes.append((len(a), b.shape[1])) or multiply(a, b))
    rows = torch.randn(100, 4)
    recall_at_k(rows, rows[:30].repeat(4, 1)[:101], block=16, image_of=[*range(100), 7])
    assert {size for size, _ in sizes} == {16, 100 % 16} and {size for _, size in sizes} == {16, 101 % 16}
    assert len(sizes) == 7 * 7  # once for both directions


@pytest.mark.parametrize(
    ("images", "texts", "ks", "message"),
    [
        (torch.ones(3, 2), torch.ones(2, 2), (1,), r"\(3, 2\).*\(2, 2\)"),
        (torch.ones(0, 2), torch.ones(0, 2), (1,), "N >= 1"),
        (torch.full((2, 2), torch.nan), torch.ones(2, 2), (1,), "NaN"),
        (torch.ones(2, 2), torch.ones(2, 2), (0,), "at least 1"),
        (torch.ones(2, 2), torch.ones(2, 2), (), "at least one k"),
    ],
)
def test_unusable_features_are_refused(images, texts, ks, message):
    with pytest.raises(UserError, match=message):
        recall_at_k(images, texts, ks=ks)


def encode_pairs(backbone, records, images, batch_size):
    image_features, good, bad = encode_images(backbone, records, images, batch_size, "cpu", progress=False)
    captions = [records[index].caption for index in good]
    return image_features, encode_texts(backbone, captions, batch_size, "cpu", progress=False), bad


def test_features_of_batches_equal_those_one_by_one(tiny_clip):
    backbone = load_backbone(tiny_clip).eval()
    records, images = read_sharegpt4v(PHOTOGRAPHS).records[:5], ImageFolder(skimage.data_dir)
    image_features, text_features, bad = encode_pairs(backbone, records, images, batch_size=2)
    assert image_features.shape == text_features.shape == (5, 24) and not bad
    for row, record in enumerate(records):
        with torch.no_grad():
            image = backbone.encode_image(backbone.preprocess(images.open(record.image))[None])
            text = backbone.encode_text(backbone.tokenize([record.caption]))
        torch.testing.assert_close(image_features[row], image[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(text_features[row], text[0], atol=1e-5, rtol=1e-4)
    assert image_features.std(dim=0).mean() > 1e-3 and text_features.std(dim=0).mean() > 1e-3


def test_images_are_read_ahead_in_order_and_unreadable_ones_named(tiny_clip):
    """Threads read; what comes of it is as if one after the other, whatever the batch."""
    backbone = load_backbone(tiny_clip).eval()
    good = read_sharegpt4v(PHOTOGRAPHS).records[:5]
    broken = [replace(good[0], image=f"no-such-{number}.png") for number in range(3)]
    records, images = [broken[0], *good[:2], *broken[1:], *good[2:]], ImageFolder(skimage.data_dir)
    expected, _, _ = encode_images(backbone, good, images, 1, "cpu", progress=False)
    for batch_size in (1, 2, 3, 100):
        features, places, bad = encode_images(backbone, records, images, batch_size, "cpu", progress=False)
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
        assert places == [1, 2, 5, 6, 7] and [f"no-such-{n}" in bad[n].detail for n in range(3)] == [True] * 3


@pytest.fixture(scope="module")
def another_clip(tmp_path_factory) -> str:
    """Another small random two-tower, of the same sizes."""
    return save_tiny_clip(tmp_path_factory.mktemp("another-clip"), seed=5, tokenizer=byte_tokenizer(77))


def settings_of(tmp_path, *encoders, **changes) -> RetrievalConfig:
    settings = {"data": str(PHOTOGRAPHS), "images": skimage.data_dir, "output": str(tmp_path / "out"), "batch_size": 4}
    return RetrievalConfig(list(encoders), **(settings | changes))


def test_the_report_holds_numbers_and_left_out_pairs(tiny_clip, another_clip, tmp_path, capsys):
    entries = json.loads(PHOTOGRAPHS.read_text())
    broken = dict(entries[0], image="no-such.png")
    data = tmp_path / "data.json"
    data.write_text(json.dumps([entries[0], broken, {"image": "x.png"}, *entries[1:6]]))
    report = evaluate_retrieval(settings_of(tmp_path, tiny_clip, another_clip, data=str(data), limit=6))
    assert report == json.loads((tmp_path / "out" / "retrieval.json").read_text())
    assert report["images"] == report["captions"] == 5
    assert [bad["kind"] for bad in report["left_out"]] == ["no caption", "missing image"]
    assert "no-such.png" in report["left_out"][1]["detail"]
    assert report["digests"]["data"] == path_digest(data) and report["settings"]["limit"] == 6
    assert {"torch", "transformers", "diffusers", "open_clip_torch", "debias-diffusion"} <= set(report["versions"])
    printed = capsys.readouterr().out
    assert sum("no-such.png" in line for line in printed.splitlines()) == 1 and "text to image" in printed
    files = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("items-")}
    assert files == {"retrieval.json", "retrieval.png", "cache", "job.json"}
    first, second = labels([EncoderSpec.parse(name) for name in (tiny_clip, another_clip)], readings=False)
    assert list(report["encoders"]) == [first, second] == list(report["digests"]["encoders"])
    # against features computed one by one, as the library's user would
    for name, label in ((tiny_clip, first), (another_clip, second)):
        backbone = load_backbone(name).eval()
        records = read_sharegpt4v(PHOTOGRAPHS).records[:5]
        images, texts, _ = encode_pairs(backbone, records, ImageFolder(skimage.data_dir), 1)
        numbers = report["encoders"][label]
        assert numbers["recall_percent"] == recall_at_k(images, texts)
        lengths = [backbone.tokenizer.count(record.caption) for record in records]
        assert numbers["captions_longer_than_context"] == sum(length > 77 for length in lengths) > 0
        for direction, recalls in numbers["recall_percent"].items():
            for k, value in recalls.items():
                low, high = numbers["interval_percent"][direction][k]
                assert 0 <= low <= value <= high <= 100 and (low < high or value in (0, 100))
            low, high = numbers["mean_r_interval_percent"][direction]
            assert low <= numbers["mean_r_percent"][direction] <= high and low < high
    recalls = [report["encoders"][label]["recall_percent"].values() for label in (first, second)]
    differences = [pytest.approx(after["R@1"] - before["R@1"]) for before, after in zip(*recalls, strict=True)]
    compared = [(line["a"], line["b"], line["difference"]) for line in report["compared"]]
    assert compared == [(second, first, difference) for difference in differences]
    (figure,) = figures(report).values()
    for axes, direction in zip(figure.axes, retrieval.DIRECTIONS, strict=True):
        recalls = [numbers["recall_percent"][direction] for numbers in report["encoders"].values()]
        assert [bar.get_height() for bar in axes.patches] == [value for of_k in recalls for value in of_k.values()]
    with Image.open(tmp_path / "out" / "retrieval.png") as image:
        assert image.format == "PNG" and image.width > image.height > 200


def test_mean_r_is_the_mean_of_three_recalls_with_an_interval_over_images():
    # of the captions of image 0 one is first and one third; the caption of image 1 is not found
    result = {"ranks": {"text_to_image": [1, 3, 20], "image_to_text": [1, 7]}, "image_of": [0, 0, 1]}
    mean_r, limits = retrieval.mean_recall(result)
    assert mean_r == pytest.approx({"text_to_image": 500 / 9, "image_to_text": 200 / 3, "both": 550 / 9})
    # more than 2.5% of the samples draw one of the two images twice
    expected = {"text_to_image": [0, 250 / 3], "image_to_text": [100 / 3, 100], "both": [50 / 3, 275 / 3]}
    assert limits == {name: pytest.approx(interval) for name, interval in expected.items()}
    # both directions draw the same images: what one loses with an image the other gains
    result = {"ranks": {"text_to_image": [1, 20], "image_to_text": [20, 1]}, "image_of": [0, 1]}
    mean_r, limits = retrieval.mean_recall(result)
    assert mean_r == {"text_to_image": 50, "image_to_text": 50, "both": 50}
    assert limits == {"text_to_image": [0, 100], "image_to_text": [0, 100], "both": [50, 50]}


@pytest.fixture
def three(tiny_clip, tmp_path) -> RetrievalConfig:
    """Settings of the first three of twelve images in a folder that a test may change."""
    data, images = make_tiny_data(tmp_path, 12)
    return settings_of(tmp_path, tiny_clip, data=data, images=images, limit=3, max_bad=1)


@pytest.mark.usefixtures("blank_figures")
def test_ranks_are_of_the_images_that_were_read(three):
    assert evaluate_retrieval(three)["images"] == 3
    image = Path(three.images, "1.png")
    whole, before = image.read_bytes(), image.stat()
    image.write_bytes(bytes(len(whole)))
    changed = evaluate_retrieval(three)  # an image that has changed is read again
    assert changed["images"] == 2 and [bad["kind"] for bad in changed["left_out"]] == ["unreadable image"]
    assert evaluate_retrieval(three) == changed  # now from the cache
    times = {"ns": (before.st_atime_ns, before.st_mtime_ns)}
    for content, count in ((bytes(len(whole)), 2), (whole, 3)):  # as where a network drive failed
        image.write_bytes(content)
        os.utime(image, **times)
        for piece in Path(three.output, "cache").glob("images-*"):
            piece.unlink()
        assert evaluate_retrieval(three)["images"] == count


def test_a_piece_without_any_readable_image_is_no_end(three, monkeypatch):
    monkeypatch.setattr(image_features, "PIECE", 2)
    for index in (2, 3):
        Path(three.images, f"{index}.png").unlink()
    report = evaluate_retrieval(replace(three, limit=5))
    assert report["images"] == 3 and len(report["left_out"]) == 2


@pytest.mark.usefixtures("blank_figures")
def test_a_data_file_with_too_many_bad_records_is_refused(three, tmp_path):
    entries = json.loads(Path(three.data).read_text())[:3]
    (tmp_path / "bad.json").write_text(json.dumps([*entries, {"image": "a.png"}, {"image": "b.png"}]))
    config = replace(three, data=str(tmp_path / "bad.json"), limit=2, max_bad=0.01)
    with pytest.raises(UserError, match="2 of 5 records cannot be used.*--max-bad"):
        evaluate_retrieval(config)
    assert evaluate_retrieval(replace(config, max_bad=0.4))["images"] == 2
    # Identical entries never score at rank one.
    (tmp_path / "same.json").write_text(json.dumps(entries[:1] * 7))
    report = evaluate_retrieval(replace(three, data=str(tmp_path / "same.json"), limit=None))
    recalls = next(iter(report["encoders"].values()))["recall_percent"]
    assert recalls["text_to_image"] == recalls["image_to_text"] == {"R@1": 0.0, "R@5": 0.0, "R@10": 100.0}


def test_names_are_no_formulas(three, tmp_path):
    name = tmp_path / r"$\x$"
    shutil.copytree(three.encoders[0], name)
    report = evaluate_retrieval(replace(three, encoders=[str(name)]))
    assert list(report["encoders"]) == [r"$\x$"] and (tmp_path / "out" / "retrieval.png").is_file()


# ---- pairs that a run was trained on


HELD_OUT = 6  # as in `helpers.training_runs.config`


def evaluate_run(encoders, world, tmp_path, **settings):
    _, data, images = world
    config = {"output": str(tmp_path / "scores"), "data": data, "images": images} | settings
    return evaluate_retrieval(RetrievalConfig([str(name) for name in encoders], **config))


@pytest.mark.usefixtures("blank_figures")
def test_pairs_that_were_trained_on_are_counted_or_left_out(finished_run, world, tmp_path, capsys):
    report = evaluate_run([finished_run, world[0]], world, tmp_path)
    pairs = len(json.loads(Path(world[1]).read_text()))
    assert list(report["trained_on"].values()) == [pairs - HELD_OUT] and report["images"] == pairs
    (label,) = report["trained_on"]
    note = f"{label} was trained on {pairs - HELD_OUT} of these {pairs} pairs. --held-out evaluates on the others."
    assert report["notes"] == [note] and f"Note: {note}" in capsys.readouterr().out
    # The folder of the run's model is the same model, and the first pairs are the held-out ones.
    of_model = evaluate_run([Path(finished_run) / "last"], world, tmp_path, limit=HELD_OUT + 1)
    assert list(of_model["trained_on"].values()) == [1]
    held_out = evaluate_run([world[0], finished_run], world, tmp_path, held_out=True)
    assert held_out["images"] == HELD_OUT and list(held_out["trained_on"].values()) == [0] and held_out["notes"] == []
    other = shutil.copy(world[1], tmp_path / "data.json")  # of other data nothing is said
    other.write_text(other.read_text() + "\n")
    report = evaluate_run([finished_run], world, tmp_path, data=str(other))
    assert report["trained_on"] == {} and report["notes"] == []
    with pytest.raises(UserError, match="None of the encoders was trained on the data .* Leave out --held-out"):
        evaluate_run([finished_run], world, tmp_path, held_out=True, data=str(other))


# ---- settings, tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": "nowhere"}, "nowhere"),
        ({"data": "nowhere.json"}, "nowhere.json"),
        ({"images": "."}, "None of the 3 images"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"encoders": ["ViT-B-32"]}, "ViT-B-32:WEIGHTS"),
        ({"output": "file"}, "cannot be made: .*file' is a file"),
        ({"output": "file/deeper"}, "cannot be made: .*file' is a file"),
    ],
)
def test_unusable_settings_are_refused(tiny_clip, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    config = {"encoders": [tiny_clip], "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "limit": 3}
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(RetrievalConfig(**({"output": "out"} | config | change)))
    assert not (tmp_path / "out" / "retrieval.json").exists()
    check_output(str(tmp_path / "not" / "there" / "yet"))
    assert not (tmp_path / "not").exists()


def test_a_table_in_markdown_holds_its_cells_and_as_text_is_aligned():
    table = Table(["a|b", "n"], [["<b>_x_", 1.5], ["c", None], ["d", 3]])
    assert table.markdown().split("\n") == [
        r"| a\|b | n |", "| --- | --: |", r"| \<b\>\_x\_ | 1.50 |", "| c | - |", "| d | 3 |",
    ]  # fmt: skip
    assert str(Table(["", "R@1"], [["a", 5.0], ["bc", None]])).split("\n") == ["     R@1", "a   5.00", "bc     -"]
    cells = [cell(1.5), cell(1.5, 1, 2, "+.2f"), cell(1.5, None, None), cell(None)]
    assert cells == ["1.5", "+1.50 (+1.00 to +2.00)", "1.5 (no interval: too few)", None]


# ---- the page of captions that one encoder retrieves and another does not


HOSTILE = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }} red square"
COUNT = 12


def test_disagreements_are_all_captions_that_one_has_first_and_the_other_has_not():
    ranks = {"a": [1, 1, 2, 1, 9], "b": [1, 2, 1, 3, 9]}
    both = {(part.right, part.wrong): part for part in disagreements(ranks, 5)}
    assert both["a", "b"].queries == [1, 3] and both["b", "a"].queries == [2]
    assert [part.total for part in disagreements(ranks, 1)] == [2, 1]
    some = disagreements({"a": [1] * 99, "b": [2] * 99}, 10)[0]
    assert len(set(some.queries)) == 10 and some == disagreements({"a": [1] * 99, "b": [2] * 99}, 10)[0]


def test_nearest_strangers_are_never_the_captions_own_image():
    random = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(count, 5, generator=random) for count in (7, 9))
    own = [3, 0, 0, 6, 2, 1, 5, 4, 4]
    for text, image, nearest in zip(texts, own, nearest_strangers(images, texts, own), strict=True):
        cosines = [float(torch.cosine_similarity(text, other, dim=0)) for other in images]
        assert nearest == max((row for row in range(7) if row != image), key=cosines.__getitem__)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    random = np.random.default_rng(0)
    (folder / "images").mkdir()
    entries = []
    for index in range(COUNT):
        name = f"{index} & <b>.png"
        Image.fromarray(random.integers(0, 256, (40, 400, 3), dtype=np.uint8)).save(folder / "images" / name)
        entries.append({"image": name, "conversations": [{}, {"value": f"{HOSTILE} {index}"}]})
    (folder / "data.json").write_text(json.dumps(entries))
    tokenizer = byte_tokenizer(77)
    encoders = [save_tiny_clip(folder / name, seed=seed, tokenizer=tokenizer) for seed, name in enumerate(["a", "b"])]
    config = RetrievalConfig(
        encoders, str(folder / "out"), str(folder / "data.json"), str(folder / "images"), examples=COUNT
    )
    report = evaluate_retrieval(config)
    page = (folder / "out" / "retrieval_examples.html").read_text()
    return SimpleNamespace(folder=folder, encoders=encoders, report=report, page=page)


def test_the_page_shows_the_captions_and_both_images(evaluated):
    sections = evaluated.page.split("<h2>")[1:]
    assert [section[: section.index("</h2>")] for section in sections] == [
        "a is right, b is wrong",
        "b is right, a is wrong",
    ]
    features = []
    for name in evaluated.encoders:
        backbone = load_backbone(name).eval()
        with torch.no_grad():
            pixels = [Image.open(evaluated.folder / "images" / f"{index} & <b>.png") for index in range(COUNT)]
            images = backbone.encode_image(torch.stack([backbone.preprocess(image) for image in pixels]))
            texts = backbone.encode_text(backbone.tokenize([f"{HOSTILE} {index}" for index in range(COUNT)]))
        cosine = torch.nn.functional.normalize(texts, dim=1) @ torch.nn.functional.normalize(images, dim=1).T
        features.append(cosine.argmax(dim=1).tolist())
    shown = 0
    for section, (right, wrong) in zip(sections, (features, features[::-1]), strict=True):
        expected = [index for index in range(COUNT) if right[index] == index != wrong[index]]
        assert f"<p>{len(expected)} of {COUNT} captions" in section
        articles = section.split("<article>")[1:]
        for article, index in zip(articles, expected, strict=True):
            assert html.unescape(re.search("<p>(.*?)</p>", article)[1]) == f"{HOSTILE} {index}"
            names = [html.unescape(name) for name in re.findall(r"<br>(.*?)</figcaption>", article)]
            assert names == [f"{index} & <b>.png", f"{wrong[index]} & <b>.png"]
            assert article.count('src="data:image/jpeg;base64,') == 2
            shown += 1
    assert shown > 0


def test_all_text_on_it_is_escaped(evaluated):
    assert "<script" not in evaluated.page and "<b>" not in evaluated.page and "{{ 7 * 7 }}" in evaluated.page
    assert "&lt;script&gt;" in evaluated.page


def test_without_examples_there_is_no_page_and_with_one_encoder_an_error(evaluated, tmp_path):
    settings = {"data": str(evaluated.folder / "data.json"), "images": str(evaluated.folder / "images")}
    report = evaluate_retrieval(RetrievalConfig(evaluated.encoders, str(tmp_path / "out"), **settings))
    assert not (tmp_path / "out" / "retrieval_examples.html").exists()
    assert report["encoders"] == evaluated.report["encoders"]
    with pytest.raises(UserError, match="examples is 3 with 1 encoder"):
        RetrievalConfig(evaluated.encoders[:1], str(tmp_path / "out"), examples=3, **settings)
