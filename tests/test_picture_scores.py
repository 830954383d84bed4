"""Scores of pictures against their formulas, closed forms and torch-fidelity's own numbers."""

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from tiny_features import photographs_and_others, save_dino, save_inception

from debias_diffusion.errors import UserError
from debias_diffusion.eval import feature_networks
from debias_diffusion.eval.feature_networks import FID_FEATURES, ClsFeatures, InceptionFeatures, load_square
from debias_diffusion.eval.picture_scores import dino_score, fid_inception, fid_own

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> tuple[list[Path], list[Path]]:
    return photographs_and_others(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory) -> Path:
    return save_inception(tmp_path_factory.mktemp("inception"))


@pytest.fixture(scope="module")
def inception(inception_file) -> InceptionFeatures:
    return InceptionFeatures(inception_file, CPU)


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|mu_a - mu_b|^2 + Tr(S_a + S_b - 2 (S_a S_b)^(1/2)); a and b [N, D] float64."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # With S = X^T X the trace of the root is the sum of the singular values of X_a X_b^T, exact for any rank.
    centred_a, centred_b = ((x - x.mean(0)) / np.sqrt(len(x) - 1) for x in (a, b))
    root = scipy.linalg.svdvals(centred_a @ centred_b.T).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


def test_the_formula_is_the_textbook_one():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(50, 6)), rng.normal(size=(40, 6)) @ rng.normal(size=(6, 6)) + 1
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    textbook = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        cov_a + cov_b - 2 * scipy.linalg.sqrtm(cov_a @ cov_b).real
    )
    assert frechet_distance(a, b) == pytest.approx(textbook)


def inception_features(inception, paths) -> list[np.ndarray]:
    """Features of images fed one by one."""
    rows = []
    for path in paths:
        pixels = torch.from_numpy(np.array(load_square(path, 299))).permute(2, 0, 1)[None]
        rows.append([part.double().numpy() for part in inception.extractor(pixels)])
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def fid(inception, generated, originals, batch_size) -> dict[str, float]:
    return fid_inception(*(inception(paths, batch_size) for paths in (generated, originals)))


def test_fid_equals_the_formula_in_float64(inception, pictures):
    photographs, others = pictures
    scores = fid(inception, others, photographs, batch_size=4)
    features = zip(
        FID_FEATURES, inception_features(inception, others), inception_features(inception, photographs), strict=True
    )
    for n, ours, theirs in features:
        assert ours.shape == (3, n) and theirs.shape == (4, n) and ours.std(axis=0).mean() > 1e-3
        assert scores[f"fid_{n}"] == pytest.approx(frechet_distance(ours, theirs), rel=1e-3)
        assert scores[f"fid_{n}"] > 0.01


def test_fid_is_zero_on_itself_and_blind_to_order_and_batches(inception_file, pictures, monkeypatch):
    monkeypatch.setattr(feature_networks, "FID_FEATURES", (64,))  # eigenvalues of 2048 features take seconds each time
    inception = InceptionFeatures(inception_file, CPU)
    photographs, others = pictures
    same = fid(inception, photographs, photographs[::-1], batch_size=3)
    scores = fid(inception, others, photographs, batch_size=4)
    again = fid(inception, others[::-1], photographs[1:] + photographs[:1], batch_size=2)
    assert list(scores) == ["fid_64"]
    for name, score in scores.items():
        assert abs(same[name]) < 1e-4 * score
        assert again[name] == pytest.approx(score, rel=1e-4)


def test_fid_of_one_image_is_refused(inception, pictures):
    with pytest.raises(UserError, match=r"at least 2 images.*1 generated and 4"):
        fid(inception, pictures[1][:1], pictures[0], batch_size=2)


def test_dino_score_of_itself_is_one_and_depends_on_the_pairing(dino_folder, pictures):
    features = ClsFeatures(dino_folder, CPU)(pictures[0], batch_size=3)
    assert dino_score(features, features) == pytest.approx(1.0, abs=1e-6)
    assert dino_score(features, features.roll(1, 0)) < 0.999
    assert dino_score(features[:2], features[2:]) == pytest.approx(
        dino_score(features[2:].flip(0), features[:2].flip(0))
    )


def test_own_fid_is_the_formula_on_cls_features(dino_folder, pictures):
    network = ClsFeatures(dino_folder, CPU, "own_features")
    originals, generated = (network(paths, batch_size=4) for paths in pictures)
    assert network.width == originals.shape[1] == 24
    score = fid_own(generated, originals)
    assert score == pytest.approx(frechet_distance(generated.double().numpy(), originals.double().numpy()), rel=1e-3)
    assert score > 0.01 and abs(fid_own(originals, originals.flip(0))) < 1e-4 * score
    with pytest.raises(UserError, match="at least 2 images.*own_features to null"):
        fid_own(generated[:1], originals)
