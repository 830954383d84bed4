"""Scores of pictures against closed forms, brute force and torch-fidelity's own numbers; how sure they are."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
import torch_fidelity
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import save_dino, save_inception
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import scores as picture_scores
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures, TwoTowerFeatures, load_square
from debias_diffusion.eval.images.scores import (
    HALVES,
    ImageNumbers,
    ImageScores,
    clip_scores,
    compare,
    cosines,
    fast_fid,
    fid,
    halves,
    kid,
    precision_and_recall,
    score_titles,
    standard_error,
)

CPU = torch.device("cpu")


def features(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- scores


def textbook_fid(a: torch.Tensor, b: torch.Tensor) -> float:
    """|mu_a - mu_b|^2 + Tr(S_a + S_b - 2 (S_a S_b)^(1/2))"""
    a, b = a.numpy(), b.numpy()
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root))


@pytest.mark.parametrize("count", [50, 4])  # more than features, and fewer
def test_fid_is_the_textbook_formula(count):
    a, b = features(count, 6), features(40, 6, seed=1) @ features(6, 6, seed=2) + 1
    expected = textbook_fid(a, b)
    assert expected > 1
    for x, y in ((a, b), (b, a)):
        assert fid(x, y) == pytest.approx(expected, rel=1e-5) and fast_fid(x, y) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 12), st.integers(4, 12), st.integers(1, 15), st.integers(0, 1000))
def test_distances_of_a_set_and_itself_and_in_another_order(n, m, width, seed):
    a, b = features(n, width, seed), features(m, width, seed + 1)
    for distance in (fid, fast_fid):
        assert distance(a, a.flip(0)) == pytest.approx(0, abs=1e-4)
        assert distance(a.flip(0), b.roll(2, 0)) == pytest.approx(distance(a, b), rel=1e-5, abs=1e-5)
    assert precision_and_recall(a, a.flip(0)) == (1, 1)
    shares = precision_and_recall(a, b)
    assert shares == precision_and_recall(a.flip(0), b.roll(2, 0)) == precision_and_recall(b, a)[::-1]
    size = min(n, m)
    a, b = a[:size], b[:size]
    assert kid(a.flip(0), b.roll(2, 0)) == pytest.approx(kid(a, b), rel=1e-6, abs=1e-9)


def test_kid_is_the_unbiased_mmd():
    a, b = features(7, 5), features(7, 5, seed=1) + 0.5

    def kernel(x, y):
        return float(x @ y / 5 + 1) ** 3

    def mean(x, y, same):
        values = [kernel(p, q) for i, p in enumerate(x) for j, q in enumerate(y) if not (same and i == j)]
        return sum(values) / len(values)

    expected = mean(a, a, True) + mean(b, b, True) - 2 * mean(a, b, False)
    assert kid(a, b) == pytest.approx(expected) and expected > 0
    assert kid(a, a) < 0  # unbiased, so not 0


def test_kid_of_many_is_over_subsets(monkeypatch):
    a, b = features(60, 3), features(60, 3, seed=1) + 0.5
    of_all = kid(a, b)
    monkeypatch.setattr(picture_scores, "KID_SUBSET_SIZE", 30)
    assert kid(a, b) == kid(a, b) != of_all
    assert kid(a, b) == pytest.approx(of_all, rel=0.3)


def test_precision_and_recall_by_brute_force():
    generated, references = features(30, 3) * 0.5, features(25, 3, seed=1)

    def inside(points, balls):
        radii = [sorted(torch.dist(x, y).item() for y in balls)[3] for x in balls]  # itself, then three neighbours
        return np.mean([any(torch.dist(p, x) <= r for x, r in zip(balls, radii, strict=True)) for p in points])

    expected = inside(generated, references), inside(references, generated)
    assert precision_and_recall(generated, references) == pytest.approx(expected)
    assert expected[0] > 0.9 > 0.7 > expected[1] > 0.1


def test_cosines_of_pairs():
    a, b = features(6, 4), features(6, 4, seed=1)
    expected = [float(x @ y / (x.norm() * y.norm())) for x, y in zip(a, b, strict=True)]
    assert min(expected) < 0 < max(expected)
    assert cosines(a, b) == pytest.approx(expected) and cosines(a, 3 * a) == pytest.approx([1] * 6)
    assert clip_scores(a, b) == pytest.approx([100 * max(cosine, 0) for cosine in expected])


# ---- torch-fidelity


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Nine generated and nine original pictures, in the size that Inception reads, so that nobody resizes them."""
    rng, both = np.random.default_rng(0), []
    for coarse in (3, 6):
        folder = tmp_path_factory.mktemp("pictures")
        for i in range(9):
            pixels = rng.integers(0, 256, (coarse, coarse + 1, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(folder / "whole.png")
            load_square(folder / "whole.png", InceptionFeatures.size).save(folder / f"{i}.png")
        (folder / "whole.png").unlink()
        both.append(folder)
    return both


def test_torch_fidelity_gives_the_same(folders, tmp_path):
    weights = save_inception(tmp_path)
    network = InceptionFeatures(weights, CPU)
    smaller = [tmp_path / folder.name for folder in folders]
    for folder, whole in zip(smaller, folders, strict=True):
        folder.mkdir()
        for i in range(4):
            shutil.copy(whole / f"{i}.png", folder)
    generated, references = (network(sorted(folder.iterdir()), batch_size=4) for folder in smaller)
    theirs = torch_fidelity.calculate_metrics(
        input1=str(smaller[0]), input2=str(smaller[1]), cuda=False, fid=True, kid=True, prc=True, kid_subset_size=4,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(weights),
        feature_layer_fid="64", feature_layer_prc="2048", cache=False, verbose=False, save_cpu_ram=True,
    )  # fmt: skip
    expected = theirs["frechet_inception_distance"]
    assert fast_fid(generated[64], references[64]) == pytest.approx(expected, rel=1e-3) and expected > 0.01
    assert fid(generated[64], references[64]) == pytest.approx(expected, rel=1e-3)
    expected = theirs["kernel_inception_distance_mean"]
    assert kid(generated[2048], references[2048]) == pytest.approx(expected, rel=1e-3) and abs(expected) > 1e-4
    assert precision_and_recall(generated[2048], references[2048]) == (theirs["precision"], theirs["recall"])


# ---- how sure


@pytest.mark.parametrize("count", [40, 41])
def test_the_standard_error_of_a_mean_is_the_textbook_one(count):
    values = features(count, 1)[:, 0].numpy()
    all_halves = list(halves(count))
    assert len(all_halves) == HALVES and all(len(set(half)) == count // 2 for half in all_halves)
    assert len({tuple(half) for half in all_halves}) == HALVES and set(np.concatenate(all_halves)) == set(range(count))
    assert all((a == b).all() for a, b in zip(all_halves, halves(count), strict=True))
    expected = values.std(ddof=1) / np.sqrt(count)
    assert standard_error([values[half].mean() for half in all_halves], count) == pytest.approx(expected, rel=0.15)


def image_set(seed: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of images and of their references, which are like them."""
    references = features(60, 4, 2 * seed)
    return 0.7 * references + 0.7 * features(60, 4, 2 * seed + 1) + shift, references


def numbers_of(generated: torch.Tensor, references: torch.Tensor) -> ImageNumbers:
    of_halves = [fast_fid(generated[half], references[half]) for half in halves(len(generated))]
    return ImageNumbers({"fid_own": {"value": fast_fid(generated, references)}}, {"fid_own": of_halves}, {}, 60)


def test_the_standard_error_of_fid_is_its_spread_over_sets_of_images():
    sets = [numbers_of(*image_set(seed, 0.5)) for seed in range(24)]
    spread = np.std([one.numbers["fid_own"]["value"] for one in sets], ddof=1)
    errors = [standard_error(one.halves["fid_own"], 60) for one in sets]
    assert 0.7 < np.mean(errors) / spread < 1.5


def test_encoders_as_far_off_as_each_other_are_not_told_apart_and_worse_ones_are():
    """Opposite faults of one size: the images differ, their FID does not."""
    ps, worse = [], []
    for seed in range(24):
        generated, references = image_set(seed, 0.5)
        a, b, c = (numbers_of(generated + shift, references) for shift in (0.0, -1.0, 0.5))
        ps.append(compare(a, b)["fid_own"]["p"])
        worse.append(compare(c, a)["fid_own"])
    assert np.mean(np.array(ps) < 0.05) < 0.2 and min(ps) < 0.7
    assert all(one["p"] < 1e-3 and one["low"] > 0 for one in worse)


def test_a_comparison_with_itself_both_ways_and_its_p():
    a, b, c = (numbers_of(*image_set(0, shift)) for shift in (0.5, 0.6, -0.5))
    assert compare(a, a)["fid_own"] == {"difference": 0, "low": 0, "high": 0, "p": 1}
    there, back = compare(a, b)["fid_own"], compare(b, a)["fid_own"]
    assert there["difference"] == -back["difference"] < 0 and there["p"] == back["p"] < 1
    assert (there["low"], there["high"]) == pytest.approx((-back["high"], -back["low"]))
    # the interval leaves 0 out just where p is below 0.05
    assert (there["low"] <= 0 <= there["high"]) == (there["p"] > 0.05)
    # over the same halves, so that what is common to a and b does not blur it
    alone = [standard_error(one.halves["fid_own"], 60) for one in (a, b)]
    assert (there["high"] - there["low"]) / 2 / 1.96 < 0.5 * min(alone)
    line = compare(a, c)["fid_own"]
    error = (line["high"] - line["difference"]) / scipy.stats.norm.ppf(0.975)
    assert 0.01 < line["p"] < 0.99
    assert line["p"] == pytest.approx(2 * scipy.stats.norm.sf(abs(line["difference"]) / error), rel=1e-4)
    for other in (
        ImageNumbers(a.numbers, a.halves, {}, 61),
        ImageNumbers({"kid_own": {"value": 0}}, {"kid_own": a.halves["fid_own"]}, {}, 60),
    ):
        with pytest.raises(ValueError, match="same captions and scores"):
            compare(a, other)


def test_no_interval_goes_beyond_what_the_score_can_be():
    ends = {
        name: list(picture_scores._interval(0.5, 1.0, f"{name}_own").values())[1:] for name in ("recall", "fid", "kid")
    }
    high = pytest.approx(2.46, abs=0.01)
    assert ends == {"recall": [0, 1], "fid": [0, high], "kid": [pytest.approx(-1.46, abs=0.01), high]}


# ---- networks and scores together

CAPTIONS = [
    "A cat sits on a mat. The mat is red.",
    "A dog runs.",
    "Two birds fly. They are white. The sky is blue.",
    "A cat sits on a mat. The sky is blue.",
    "A tree. " + "It has very many green leaves, on all of its branches and twigs. " * 8,
    *["A house. It is tall."] * 4,
]


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("networks")
    dino = save_dino(folder / "dino")
    return {"dino": dino, "own_features": dino, "clip_score": save_tiny_clip(folder / "clip", seed=16)}


@pytest.fixture(scope="module")
def whole(networks, folders) -> tuple[ImageScores, ImageNumbers]:
    scores = ImageScores(networks, 4, CPU)
    generated, references = (sorted(folder.iterdir()) for folder in folders)
    return scores, scores(generated, scores.of_references(references, CAPTIONS))


def test_all_scores_of_images(networks, folders, whole):
    _, result = whole
    generated, references = (sorted(folder.iterdir()) for folder in folders)
    assert list(result.numbers) == [
        "fid_own", "kid_own", "precision_own", "recall_own", "dino_score", "clip_score",
        *(f"clip_score_{number}" for number in range(1, 10)),
    ]  # fmt: skip
    values = {score: number["value"] for score, number in result.numbers.items()}
    dino, clip = ClsFeatures(networks["dino"], CPU), TwoTowerFeatures(networks["clip_score"], CPU)
    of_generated, of_references = dino(generated, 9), dino(references, 9)
    assert values["fid_own"] == pytest.approx(fid(of_generated, of_references), rel=1e-5)
    assert values["kid_own"] == pytest.approx(kid(of_generated, of_references), rel=1e-4)
    assert (values["precision_own"], values["recall_own"]) == precision_and_recall(of_generated, of_references)
    assert values["dino_score"] == pytest.approx(np.mean(cosines(of_generated, of_references)), rel=1e-5) != 1
    images, by_image = clip.of_images(generated, 9), result.pictures
    assert by_image["clip_score"] == pytest.approx(clip_scores(images, clip.of_texts(CAPTIONS, 9)), abs=1e-3)
    second = clip_scores(images[[2]], clip.of_texts(["They are white."], 1))
    assert by_image["clip_score_2"][1:3] == [None, pytest.approx(second[0], abs=1e-3)]
    assert np.ptp(by_image["clip_score_1"]) > 0.1
    third = [value for value in by_image["clip_score_3"] if value is not None]
    assert len(third) == result.numbers["clip_score_3"]["pictures"] == 2 and values["clip_score_3"] == np.mean(third)
    assert result.numbers["clip_score_1"]["pictures"] == 9 and "pictures" not in result.numbers["clip_score"]
    known = [number for number in result.numbers.values() if number.get("pictures") != 1]  # else no interval is
    assert all(number["low"] <= number["value"] <= number["high"] for number in known)
    assert result.numbers["clip_score_4"]["low"] is None
    assert all(number["low"] < number["high"] for number in result.numbers.values() if "pictures" not in number)
    assert result.notes == ["1 of 9 captions exceed CLIPScore's context length of 77 tokens and were cut."]


def test_results_are_kept_by_weights_and_how_they_are_used(networks, whole, tmp_path):
    scores, _ = whole
    changes = {
        "clip_score": ("open_clip_config.json", {"quick_gelu": True}),
        "dino": ("config.json", {"hidden_act": "relu"}),
    }
    for option, (file, change) in changes.items():
        folder = shutil.copytree(networks[option], tmp_path / option)
        config = json.loads((folder / file).read_text())
        config.get("model_cfg", config).update(change)
        (folder / file).write_text(json.dumps(config))
        other = ImageScores(networks | {option: str(folder)}, 4, CPU)
        assert other.digests == scores.digests and other.depends != scores.depends
    again = ImageScores(networks, 4, CPU)
    assert json.dumps(again.depends) == json.dumps(scores.depends)
    assert scores.digests["dino"] == scores.digests["own_features"] != scores.digests["clip_score"]
    assert all(len(scores.digests[name]) == 64 for name in networks)
    assert scores.digests["inception_weights"] is None and scores.digests["dinov2"] is None
    assert "32 x 32" in scores.resize["own_features"] and "CenterCrop(size=(32, 32))" in scores.resize["clip_score"]
    notes = " ".join(scores.notes)
    assert "FID with Inception was skipped" in notes and "compare with nothing published" in notes


def test_numbers_go_through_json_and_are_compared(whole, folders):
    scores, result = whole
    again = ImageNumbers(**json.loads(json.dumps(asdict(result))))
    assert again == result
    references = sorted(folders[1].iterdir())
    # in place of a generated image its reference is the best there is
    best = scores(references, scores.of_references(references, CAPTIONS))
    assert best.numbers["fid_own"]["value"] == pytest.approx(0, abs=1e-3 * result.numbers["fid_own"]["value"])
    assert best.numbers["dino_score"]["value"] == pytest.approx(1)
    other = scores(references, scores.of_references(references, CAPTIONS[1:] + CAPTIONS[:1]))
    assert other.pictures["clip_score"] != best.pictures["clip_score"]
    compared = compare(again, best)
    assert list(compared) == list(result.numbers)
    assert compared["fid_own"]["difference"] > 0 > compared["dino_score"]["high"] and compared["dino_score"]["p"] < 0.05
    thirds = ([value for value in one.pictures["clip_score_3"] if value is not None] for one in (result, best))
    assert compared["clip_score_3"]["difference"] == pytest.approx(np.subtract(*thirds).mean())


def test_few_images(networks, folders):
    scores = ImageScores({"own_features": networks["own_features"]}, 4, CPU)
    generated, references = (sorted(folder.iterdir()) for folder in folders)

    def of(count: int) -> ImageNumbers:
        return scores(generated[:count], scores.of_references(references[:count], CAPTIONS[:count]))

    four, three = of(4), of(3)
    assert list(four.numbers) == ["fid_own", "kid_own", "precision_own", "recall_own"]
    assert list(three.numbers) == ["fid_own", "kid_own"]
    assert four.numbers["fid_own"]["low"] is None and "at least 8 images" in four.notes[0]
    assert compare(four, four)["fid_own"] == {"difference": 0, "low": None, "high": None, "p": None}
    with pytest.raises(UserError, match="at least 2 images on each side, got 1 generated.*own_features to null"):
        of(1)
    with pytest.raises(ValueError, match="3 images and 4 reference images"):
        scores(generated[:3], scores.of_references(references[:4], CAPTIONS[:4]))


def test_titles_name_the_networks():
    titles = score_titles(
        {"own_features": str(Path(__file__).parent), "dino": "toy/features", "clip_score": "toy/clip"}
    )
    assert titles["fid_own"] == "FID (tests)" and titles["recall_own"] == "recall (tests)"
    assert titles["dino_score"] == "DINO score (toy/features)" and titles["clip_score"] == "CLIPScore (toy/clip)"
    assert (titles["fid_2048"], titles["fid_64"], titles["kid_2048"]) == ("FID (2048)", "FID (64)", "KID")
