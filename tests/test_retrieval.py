"""Recall at k against brute force and closed forms, and a retrieval evaluation on real photographs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import skimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_clip import save_tiny_clip

from debias_diffusion.backbones import load_backbone
from debias_diffusion.data import ImageFolder, read_sharegpt4v
from debias_diffusion.errors import UserError
from debias_diffusion.eval.report import digest, table, weights_digest
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.retrieval import encode_images, encode_pairs, recall_at_k

PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    """The folder of a small random two-tower."""
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"))


def brute_force(image_features, text_features, k):
    """Percent of texts whose image has fewer than k other images at least as similar, one comparison at a time."""
    images = [row / row.norm() if row.norm() > 0 else row for row in image_features.double()]
    texts = [row / row.norm() if row.norm() > 0 else row for row in text_features.double()]
    hits = 0
    for i, text in enumerate(texts):
        own = float(text @ images[i])
        hits += sum(float(text @ other) >= own - 1e-6 for j, other in enumerate(images) if j != i) < k
    return 100 * hits / len(texts)


# Small whole numbers, so that exact ties, duplicates and zero vectors are frequent.
features = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        *[st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=n, max_size=n) for _ in range(2)]
    )
)


@settings(max_examples=150, deadline=None)
@given(features, st.integers(1, 13), st.integers(1, 14))
def test_recall_equals_brute_force_with_ties_for_any_block(pair, k, block):
    images, texts = (torch.tensor(rows, dtype=torch.float32) for rows in pair)
    got = recall_at_k(images, texts, ks=(k,), block=block)
    assert got["text_to_image"][f"R@{k}"] == pytest.approx(brute_force(images, texts, k))
    assert got["image_to_text"][f"R@{k}"] == pytest.approx(brute_force(texts, images, k))


def test_recall_of_random_features_equals_brute_force():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(60, 8, generator=generator)
    texts = images + 1.5 * torch.randn(60, 8, generator=generator)
    got = recall_at_k(images, texts, block=7)
    for k in (1, 5, 10):
        assert 0 < got["text_to_image"][f"R@{k}"] < 100
        assert got["text_to_image"][f"R@{k}"] == pytest.approx(brute_force(images, texts, k))
        assert got["image_to_text"][f"R@{k}"] == pytest.approx(brute_force(texts, images, k))


def brute_force_of_several(images, texts, image_of, k):
    """(text to image, image to text) in percent, one comparison at a time. Any of an image's captions will do."""
    images = [row / row.norm() if row.norm() > 0 else row for row in images.double()]
    texts = [row / row.norm() if row.norm() > 0 else row for row in texts.double()]
    found = 0
    for text, image in zip(texts, image_of, strict=True):
        own = float(text @ images[image])
        found += sum(float(text @ other) >= own - 1e-6 for j, other in enumerate(images) if j != image) < k
    reached = 0
    for i, image in enumerate(images):
        hit = False
        for text, owner in zip(texts, image_of, strict=True):
            if owner == i:
                own = float(image @ text)
                strangers = [
                    t for t, o in zip(texts, image_of, strict=True) if o != i and float(image @ t) >= own - 1e-6
                ]
                hit = hit or len(strangers) < k
        reached += hit
    return 100 * found / len(texts), 100 * reached / len(images)


# One to three captions for each of a few images, in any order.
several = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.integers(1, 3), min_size=n, max_size=n).flatmap(
        lambda counts: st.tuples(
            st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=n, max_size=n),
            st.permutations([image for image, count in enumerate(counts) for _ in range(count)]),
            st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=sum(counts), max_size=sum(counts)),
        )
    )
)


@settings(max_examples=150, deadline=None)
@given(several, st.integers(1, 8), st.integers(1, 9))
def test_recall_with_several_captions_equals_brute_force_with_ties_for_any_block(given_features, k, block):
    images, image_of, texts = given_features
    images, texts = torch.tensor(images, dtype=torch.float32), torch.tensor(texts, dtype=torch.float32)
    got = recall_at_k(images, texts, ks=(k,), block=block, image_of=image_of)
    expected = brute_force_of_several(images, texts, image_of, k)
    assert (got["text_to_image"][f"R@{k}"], got["image_to_text"][f"R@{k}"]) == pytest.approx(expected)


def test_recall_with_five_random_captions_an_image_equals_brute_force():
    generator = torch.Generator().manual_seed(5)
    image_of = [image for image in range(20) for _ in range(5)]
    images = torch.randn(20, 8, generator=generator)
    texts = images[image_of] + 2 * torch.randn(100, 8, generator=generator)
    got = recall_at_k(images, texts, block=7, image_of=image_of)
    for k in (1, 5, 10):
        numbers = got["text_to_image"][f"R@{k}"], got["image_to_text"][f"R@{k}"]
        assert numbers == pytest.approx(brute_force_of_several(images, texts, image_of, k))
    assert 0 < got["text_to_image"]["R@1"] < got["image_to_text"]["R@1"] < 100  # one of five captions is enough


def test_duplicates_among_several_captions():
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


def test_equal_features_do_not_flatter():
    same = torch.ones(8, 4)
    assert recall_at_k(same, same, ks=(1, 7, 8))["text_to_image"] == {"R@1": 0.0, "R@7": 0.0, "R@8": 100.0}


def test_duplicated_pair_counts_as_tie_even_after_float32_rounding():
    rows = torch.nn.functional.normalize(torch.randn(10, 64, generator=torch.Generator().manual_seed(2)), dim=1)
    twice = torch.cat([rows, rows * (1 + 1e-7)])
    got = recall_at_k(twice, twice, ks=(1, 2))
    assert got == {"text_to_image": {"R@1": 0.0, "R@2": 100.0}, "image_to_text": {"R@1": 0.0, "R@2": 100.0}}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_recall_does_not_depend_on_length_or_order(scale):
    generator = torch.Generator().manual_seed(3)
    images, texts = torch.randn(30, 6, generator=generator), torch.randn(30, 6, generator=generator)
    order = torch.randperm(30, generator=generator)
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


def test_encode_pairs_equals_one_by_one(tiny_clip):
    backbone = load_backbone(tiny_clip).eval()
    records, images = read_sharegpt4v(PHOTOGRAPHS).records[:5], ImageFolder(skimage.data_dir)
    image_features, text_features, bad = encode_pairs(backbone, records, images, batch_size=2, device="cpu")
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


def test_evaluate_retrieval_reports_numbers_and_left_out_pairs(tiny_clip, tmp_path, capsys):
    entries = json.loads(PHOTOGRAPHS.read_text())
    broken = dict(entries[0], image="no-such.png")
    data = tmp_path / "data.json"
    data.write_text(json.dumps([entries[0], broken, {"image": "x.png"}, *entries[1:6]]))
    config = RetrievalConfig(
        model=tiny_clip, data=str(data), images=skimage.data_dir, output=str(tmp_path / "out"), limit=6, batch_size=4
    )
    report = evaluate_retrieval(config)
    assert report == json.loads((tmp_path / "out" / "retrieval.json").read_text())
    assert report["pairs"] == 5
    assert [bad["kind"] for bad in report["left_out"]] == ["no caption", "missing image"]
    assert "no-such.png" in report["left_out"][1]["detail"]
    assert report["digests"]["data"] == digest(data) and report["settings"]["limit"] == 6
    assert {"torch", "transformers", "diffusers", "open_clip_torch", "debias-diffusion"} == set(report["versions"])
    assert report["recall_percent"]["text_to_image"]["R@5"] == 100.0  # of 5 pairs
    assert 0 <= report["recall_percent"]["image_to_text"]["R@1"] < 100
    printed = capsys.readouterr().out
    assert "no-such.png" in printed and "text to image" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"retrieval.json", "retrieval.png"}
    lengths = [load_backbone(tiny_clip).tokenizer.count(entry["conversations"][1]["value"]) for entry in entries[:5]]
    assert report["images"] == 5 and report["captions_over_window"] == sum(length > 77 for length in lengths) > 0


def test_identical_entries_never_score_at_rank_one(tiny_clip, tmp_path):
    entry = json.loads(PHOTOGRAPHS.read_text())[0]
    data = tmp_path / "data.json"
    data.write_text(json.dumps([entry] * 7))
    config = RetrievalConfig(
        model=tiny_clip, data=str(data), images=skimage.data_dir, output=str(tmp_path), batch_size=3
    )
    recalls = evaluate_retrieval(config)["recall_percent"]
    assert recalls["text_to_image"] == recalls["image_to_text"] == {"R@1": 0.0, "R@5": 0.0, "R@10": 100.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 0}, "limit=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"images": "nowhere"}, "nowhere"),
        ({"data": "nowhere.json"}, "nowhere.json"),
        ({"images": "."}, "None of the 3 images"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"model": "ViT-B-32"}, "--pretrained"),
    ],
)
def test_unusable_settings_are_refused(tiny_clip, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    config = {"model": tiny_clip, "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "output": "out", "limit": 3}
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(RetrievalConfig(**(config | change)))
    assert not (tmp_path / "out").exists()


def test_digests_tell_contents_apart(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"1")
    first = digest(tmp_path / "a")
    (tmp_path / "a" / ".hidden").write_bytes(b"2")
    assert digest(tmp_path / "a") == first
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert digest(tmp_path / "a") != first
    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    before = weights_digest(layer)
    assert before == weights_digest(layer)
    with torch.no_grad():
        layer.bias[0] += 1
    assert weights_digest(layer) != before


def test_table_is_aligned():
    assert table(["", "R@1"], [["a", 5.0], ["bc", None]]).split("\n") == ["     R@1", "a   5.00", "bc     -"]
