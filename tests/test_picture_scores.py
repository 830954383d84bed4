"""Scores of pictures against closed forms, brute force and torch-fidelity's own numbers; how sure they are."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
import torch_fidelity
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import save_dino, save_inception
from PIL import Image
from torchmetrics.image.fid import FrechetInceptionDistance

from debias_diffusion.eval.images import scores as picture_scores
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures, TwoTowerFeatures, load_square
from debias_diffusion.eval.images.scores import (
    HALVES,
    ImageNumbers,
    ImageScores,
    clip_scores,
    compare_scores,
    cosines,
    fid,
    halves,
    kid,
    precision_and_recall,
    standard_error,
)
from debias_diffusion.eval.intervals import mean_interval, paired_difference

CPU = torch.device("cpu")


def features(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- scores


@pytest.mark.parametrize("count", [50, 4])  # more than features, and fewer
def test_fid_is_the_textbook_formula_and_torchmetrics(count):
    """|mu_a - mu_b|^2 + Tr(S_a + S_b - 2 (S_a S_b)^(1/2))"""
    a, b = features(count, 6), features(40, 6, seed=1) @ features(6, 6, seed=2) + 1
    covariances = [np.cov(rows.numpy(), rowvar=False) for rows in (a, b)]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = (a.mean(0) - b.mean(0)).square().sum().item() + np.trace(sum(covariances) - 2 * root)
    assert fid(a, b) == pytest.approx(expected, rel=1e-5) and expected > 1
    assert fid(b, a.flip(0)) == pytest.approx(expected, rel=1e-5)
    assert fid(a, a.flip(0)) == pytest.approx(0, abs=1e-4)
    network = torch.nn.Identity()  # what torchmetrics reads are features already
    network.num_features = 6
    metric = FrechetInceptionDistance(feature=network)
    metric.update(b, real=True)
    metric.update(a, real=False)
    assert fid(a, b) == pytest.approx(metric.compute().item(), rel=1e-5)


def test_kid_is_the_unbiased_mmd_and_of_many_over_subsets(monkeypatch):
    a, b = features(7, 5), features(7, 5, seed=1) + 0.5

    def mean(x, y, same):
        kernel = (x @ y.T / 5 + 1) ** 3
        return (kernel[~torch.eye(7, dtype=torch.bool)] if same else kernel).mean().item()

    expected = mean(a, a, True) + mean(b, b, True) - 2 * mean(a, b, False)
    assert kid(a, b) == pytest.approx(expected) and expected > 0
    assert kid(a, a) < 0  # unbiased, so not 0
    a, b = features(60, 3), features(60, 3, seed=1) + 0.5
    of_all = kid(a, b)
    monkeypatch.setattr(picture_scores, "KID_SUBSET_SIZE", 30)
    assert kid(a, b) == kid(a, b) != of_all and kid(a, b) == pytest.approx(of_all, rel=0.3)


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
    assert min(expected) < 0 < max(expected) and cosines(a, b) == pytest.approx(expected)
    assert clip_scores(a, b) == pytest.approx([100 * max(cosine, 0) for cosine in expected])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Nine generated and nine reference images, in the size that Inception reads, so that nobody resizes them."""
    rng, both = np.random.default_rng(0), []
    for coarse in (3, 6):
        folder = tmp_path_factory.mktemp("images")
        for i in range(9):
            path = folder / f"{i}.png"
            pixels = rng.integers(0, 256, (coarse, coarse + 1, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(path)
            load_square(path, InceptionFeatures.size).save(path)
        both.append(sorted(folder.iterdir()))
    return both


def test_scores_are_those_of_torch_fidelity(images, tmp_path):
    weights, folders = save_inception(tmp_path), [tmp_path / "a", tmp_path / "b"]
    for folder, files in zip(folders, images, strict=True):
        folder.mkdir()
        for file in files[:4]:
            shutil.copy(file, folder)
    network = InceptionFeatures(weights, CPU)
    a, b = (network(sorted(folder.iterdir()), batch_size=4) for folder in folders)
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folders[0]), input2=str(folders[1]), cuda=False, fid=True, kid=True, prc=True, kid_subset_size=4,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(weights),
        feature_layer_fid="64", feature_layer_prc="2048", cache=False, verbose=False, save_cpu_ram=True,
    )  # fmt: skip
    distances = theirs["frechet_inception_distance"], theirs["kernel_inception_distance_mean"]
    assert (fid(a[64], b[64]), kid(a[2048], b[2048])) == pytest.approx(distances, rel=1e-3)
    assert distances[0] > 0.01 and abs(distances[1]) > 1e-4
    assert precision_and_recall(a[2048], b[2048]) == (theirs["precision"], theirs["recall"])


# ---- how sure


def test_the_standard_error_of_a_mean_is_the_textbook_one():
    values = features(41, 1)[:, 0].numpy()
    all_halves = list(halves(range(41)))
    assert len({tuple(half) for half in all_halves}) == len(all_halves) == HALVES
    expected = values.std(ddof=1) / np.sqrt(41)
    assert standard_error([values[half].mean() for half in all_halves], range(41)) == pytest.approx(expected, rel=0.15)


def test_halves_are_of_whole_families():
    families, values = np.repeat([f"{number}" for number in range(20)], 4), np.repeat(features(20, 1)[:, 0].numpy(), 4)
    of_families = [half.tolist() for half in halves(families)]
    assert all(half[::4] == [4 * (at // 4) for at in half[::4]] and len(half) == 40 for half in of_families)
    assert len({tuple(half) for half in of_families}) == HALVES
    expected = values.std() / np.sqrt(19)  # as if each family had one image
    assert standard_error([values[half].mean() for half in of_families], families) == pytest.approx(expected, rel=0.15)


def numbers_of(seed, shift):
    """Of images whose features are like those of their references, and as far off as `shift` says."""
    references = features(60, 4, 2 * seed)
    generated = 0.7 * references + 0.7 * features(60, 4, 2 * seed + 1) + shift
    of_halves = [fid(generated[half], references[half]) for half in halves(range(60))]
    value = {"value": fid(generated, references)}
    return ImageNumbers({"fid_own": value}, {"fid_own": of_halves}, {}, list(range(60)))


def test_the_error_of_fid_is_its_spread():
    drawn = [numbers_of(seed, 0.5) for seed in range(24)]
    spread = np.std([one.numbers["fid_own"]["value"] for one in drawn], ddof=1)
    assert 0.7 < np.mean([standard_error(one.halves["fid_own"], one.groups) for one in drawn]) / spread < 1.5


def test_a_comparison_is_over_the_same_halves_both_ways():
    a, b, c = (numbers_of(0, shift) for shift in (0.5, 0.6, -0.5))
    assert compare_scores(a, a)["fid_own"] == {"difference": 0, "low": 0, "high": 0, "p": 1}
    there, back = compare_scores(a, b)["fid_own"], compare_scores(b, a)["fid_own"]
    assert there["difference"] == -back["difference"] < 0 and there["p"] == back["p"] < 1
    assert (there["low"], there["high"]) == pytest.approx((-back["high"], -back["low"]))
    # so that what is common to a and b does not blur it
    alone = [standard_error(one.halves["fid_own"], one.groups) for one in (a, b)]
    assert (there["high"] - there["low"]) / 2 / 1.96 < 0.5 * min(alone)
    line = compare_scores(a, c)["fid_own"]
    error = (line["high"] - line["difference"]) / scipy.stats.norm.ppf(0.975)
    assert line["p"] == pytest.approx(2 * scipy.stats.norm.sf(abs(line["difference"]) / error), rel=1e-4)
    assert 0.01 < line["p"] < 0.99


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
def networks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")
    dino = save_dino(folder / "dino")
    return {"dino": dino, "own_features": dino, "clip_score": save_tiny_clip(folder / "clip", seed=16)}


@pytest.fixture(scope="module")
def scores(networks):
    return ImageScores(networks, 4, CPU)


@pytest.fixture(scope="module")
def result(scores, images):
    return scores(images[0], scores.of_references(images[1], CAPTIONS))


def test_all_scores_of_images(networks, images, result):
    generated, references = images
    names = ["fid_own", "kid_own", "precision_own", "recall_own", "dino_score", "clip_score"]
    assert list(result.numbers) == names + [f"clip_score_{number}" for number in range(1, 10)]
    values = {score: number["value"] for score, number in result.numbers.items()}
    dino, clip = ClsFeatures(networks["dino"], CPU), TwoTowerFeatures(networks["clip_score"], CPU)
    a, b = dino(generated, 9), dino(references, 9)
    expected = [fid(a, b), kid(a, b), *precision_and_recall(a, b), np.mean(cosines(a, b))]
    assert [values[name] for name in names[:5]] == pytest.approx(expected, rel=1e-4) and values["dino_score"] != 1
    shown, by_image = clip.of_images(generated, 9), result.by_image
    assert by_image["clip_score"] == pytest.approx(clip_scores(shown, clip.of_texts(CAPTIONS, 9)), abs=1e-3)
    second = clip_scores(shown[[2]], clip.of_texts(["They are white."], 1))
    assert by_image["clip_score_2"][1:3] == [None, pytest.approx(second[0], abs=1e-3)]
    third = [value for value in by_image["clip_score_3"] if value is not None]
    assert len(third) == result.numbers["clip_score_3"]["pictures"] == 2 and values["clip_score_3"] == np.mean(third)
    assert result.numbers["clip_score_4"]["low"] is None  # of one image
    known = [number for number in result.numbers.values() if number.get("pictures") != 1]
    assert all(number["low"] <= number["value"] <= number["high"] for number in known)
    assert result.notes == ["1 of 9 captions exceed CLIPScore's context length of 77 tokens and were cut."]


def test_results_depend_on_how_the_weights_are_used(networks, scores, tmp_path):
    folder = shutil.copytree(networks["dino"], tmp_path / "dino")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    other = ImageScores(networks | {"dino": str(folder)}, 4, CPU)
    assert other.digests["dino"] != scores.digests["dino"]
    assert ImageScores(networks, 4, CPU).digests == scores.digests


def test_numbers_go_through_json_and_are_compared(scores, result, images):
    again = ImageNumbers(**json.loads(json.dumps(asdict(result))))
    best = scores(images[1], scores.of_references(images[1], CAPTIONS))  # the references in place of generated images
    compared = compare_scores(again, best)
    assert again == result and list(compared) == list(result.numbers)
    assert compared["fid_own"]["difference"] > 0 > compared["dino_score"]["high"]
    thirds = ([value for value in one.by_image["clip_score_3"] if value is not None] for one in (result, best))
    assert compared["clip_score_3"]["difference"] == pytest.approx(np.subtract(*thirds).mean())


def test_means_over_images_draw_whole_families(scores, images):
    families = [*"aaaabbbbc"]
    result = scores(images[0], scores.of_references(images[1], CAPTIONS, families))
    values, number = result.by_image["dino_score"], result.numbers["dino_score"]
    assert [number["low"], number["high"]] == mean_interval(values, families) != mean_interval(values)
    assert result.numbers["fid_own"]["low"] is None and "families" in result.notes[0]  # of three families
    best = scores(images[1], scores.of_references(images[1], CAPTIONS, families))
    expected = paired_difference(values, best.by_image["dino_score"], families)
    assert compare_scores(result, best)["dino_score"] == expected


def test_few_images_have_fewer_scores_and_no_intervals(networks, images):
    scores = ImageScores({"own_features": networks["own_features"]}, 4, CPU)

    def of(count):
        return scores(images[0][:count], scores.of_references(images[1][:count], CAPTIONS[:count]))

    four = of(4)
    assert list(four.numbers) == ["fid_own", "kid_own", "precision_own", "recall_own"]
    assert list(of(3).numbers) == ["fid_own", "kid_own"]
    assert four.numbers["fid_own"]["low"] is None and "at least 8 images" in four.notes[0]
    assert compare_scores(four, four)["fid_own"] == {"difference": 0, "low": None, "high": None, "p": None}
