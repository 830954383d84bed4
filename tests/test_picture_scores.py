"""Scores of pictures against closed forms, brute force and torch-fidelity's own numbers; how sure they are."""

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import skimage
import torch
import torch_fidelity
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_features import save_dino, save_inception
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.networks import ClsFeatures, InceptionFeatures, load_square
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
from debias_diffusion.eval.intervals import mean_interval

CPU = torch.device("cpu")


def features(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [50, 4])  # more than features, and fewer
def test_fid_is_the_textbook_formula(count):
    """|mu_a - mu_b|^2 + Tr(S_a + S_b - 2 (S_a S_b)^(1/2))"""
    a, b = features(count, 6), features(40, 6, seed=1) @ features(6, 6, seed=2) + 1
    covariances = [np.cov(rows.numpy(), rowvar=False) for rows in (a, b)]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = (a.mean(0) - b.mean(0)).square().sum().item() + np.trace(sum(covariances) - 2 * root)
    assert fid(a, b) == pytest.approx(expected, rel=1e-5) and expected > 1
    assert fid(b, a.flip(0)) == pytest.approx(expected, rel=1e-5)
    assert fid(a, a.flip(0)) == pytest.approx(0, abs=1e-4)


def test_cosines_of_pairs():
    a, b = features(6, 4), features(6, 4, seed=1)
    expected = [float(x @ y / (x.norm() * y.norm())) for x, y in zip(a, b, strict=True)]
    assert min(expected) < 0 < max(expected) and cosines(a, b) == pytest.approx(expected)
    assert clip_scores(a, b) == pytest.approx([100 * max(cosine, 0) for cosine in expected])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Nine generated and nine reference images."""
    rng, both = np.random.default_rng(0), []
    for coarse in (3, 6):
        folder = tmp_path_factory.mktemp("images")
        for i in range(9):
            path = folder / f"{i}.png"
            pixels = rng.integers(0, 256, (coarse, coarse + 1, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(path)
        both.append(sorted(folder.iterdir()))
    return both


def test_scores_are_those_of_torch_fidelity_for_photographs_of_any_size(tmp_path):
    """Of two sets of JPEGs; each size is read alone, because torch-fidelity needs a batch of one size."""
    weights, folders = save_inception(tmp_path), [tmp_path / "a", tmp_path / "b"]
    sides = {"retina.jpg": 1024, "rocket.jpg": 768, "astronaut.png": 299, "coffee.png": None}  # the last as it is
    for seed, folder in enumerate(folders):
        folder.mkdir()
        for name, side in sides.items():
            photograph = Image.open(Path(skimage.data_dir, name))
            pixels = np.asarray(photograph.resize((side, side)) if side else photograph).astype(float)
            pixels += 25 * seed * np.random.default_rng(0).normal(size=pixels.shape)  # the detail of generated images
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{name}.jpg", quality=95)
    network = InceptionFeatures(weights, CPU)
    a, b = (network(sorted(folder.iterdir()), batch_size=4) for folder in folders)
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folders[0]), input2=str(folders[1]), cuda=False, fid=True, kid=True, prc=True, kid_subset_size=4,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(weights), batch_size=1,
        feature_layer_fid="64", feature_layer_prc="2048", cache=False, verbose=False, save_cpu_ram=True,
    )  # fmt: skip
    distances = theirs["frechet_inception_distance"], theirs["kernel_inception_distance_mean"]
    assert (fid(a[64], b[64]), kid(a[2048], b[2048])) == pytest.approx(distances, rel=1e-3)
    assert distances[0] > 0.01 and abs(distances[1]) > 1e-4
    assert precision_and_recall(a[2048], b[2048]) == (theirs["precision"], theirs["recall"])


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


def test_a_comparison_is_over_the_same_halves_both_ways():
    a, b = (numbers_of(0, shift) for shift in (0.5, 0.6))
    assert compare_scores(a, a)["fid_own"] == {"difference": 0, "low": None, "high": None, "p": 1}
    there, back = compare_scores(a, b)["fid_own"], compare_scores(b, a)["fid_own"]
    assert there["difference"] == -back["difference"] < 0 and there["p"] == back["p"] < 1
    # so that what is common to a and b does not blur it
    alone = [standard_error(one.halves["fid_own"], one.groups) for one in (a, b)]
    assert (there["high"] - there["low"]) / 2 / 1.96 < 0.5 * min(alone)


CAPTIONS = ["A cat sits. It is red.", "A dog runs.", "Two birds fly. They are white. The sky is blue.", "A cat. A mat."]
CAPTIONS += ["A tree. " + "It has very many green leaves, on all of its branches and twigs. " * 8]
CAPTIONS += ["A house. It is tall."] * 4


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


@pytest.mark.usefixtures("no_grad")
def test_all_scores_of_images(networks, images, result):
    generated, references = images
    names = ["fid_own", "kid_own", "precision_own", "recall_own", "dino_score", "clip_score"]
    assert list(result.numbers) == names + [f"clip_score_{number}" for number in range(1, 10)]
    values = {score: number["value"] for score, number in result.numbers.items()}
    dino = ClsFeatures(networks["dino"], CPU)
    a, b = dino(generated, 9), dino(references, 9)
    expected = [fid(a, b), kid(a, b), *precision_and_recall(a, b), np.mean(cosines(a, b))]
    assert [values[name] for name in names[:5]] == pytest.approx(expected, rel=1e-4) and values["dino_score"] != 1
    by_image, backbone = result.by_image, load_backbone(networks["clip_score"]).eval()
    shown = torch.cat([backbone.encode_image(backbone.preprocess(Image.open(path))[None]) for path in generated])
    read = torch.cat([backbone.encode_text(backbone.tokenize([text])) for text in [*CAPTIONS, "They are white."]])
    assert by_image["clip_score"] == pytest.approx(clip_scores(shown, read[:-1]), abs=1e-3)
    second = clip_scores(shown[[2]], read[-1:])
    assert by_image["clip_score_2"][1:3] == [None, pytest.approx(second[0], abs=1e-3)]
    assert result.numbers["clip_score_4"]["low"] is None  # of one image
    assert result.notes == ["1 of 9 captions exceed CLIPScore's context length of 77 tokens and were cut."]


def test_means_over_images_draw_whole_families(scores, images):
    families = [*"aaaabcdef"]
    result = scores(images[0], scores.of_references(images[1], CAPTIONS, families))
    values, number = result.by_image["dino_score"], result.numbers["dino_score"]
    assert [number["low"], number["high"]] == mean_interval(values, families) != mean_interval(values)
    assert result.numbers["fid_own"]["low"] is None and "families" in result.notes[0]  # of six families


def test_square_is_centred(tmp_path):
    image = Image.new("RGB", (30, 10), "red")
    image.paste("blue", (10, 0, 20, 10))
    image.save(tmp_path / "wide.png")
    assert load_square(tmp_path / "wide.png", 16).getcolors() == [(256, (0, 0, 255))]


def test_inception_from_the_cache(tmp_path, monkeypatch, images):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(UserError, match=rf"{tmp_path}.*not there"):
        InceptionFeatures("cache", CPU)
    (tmp_path / "checkpoints").mkdir()
    save_inception(tmp_path).rename(tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth")
    rows = InceptionFeatures("cache", CPU)(images[0][:2], 2)
    assert {size: tuple(of_size.shape) for size, of_size in rows.items()} == {64: (2, 64), 2048: (2, 2048)}


def normalised(path, size):
    pixels = np.asarray(load_square(path, size)) / 255
    pixels = torch.tensor((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225], dtype=torch.float32)
    return pixels.permute(2, 0, 1)[None]


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(("trained_at", "shown"), [(518, 224), (28, 28)])
def test_dinov2_is_shown_at_most_224_pixels(tmp_path, images, trained_at, shown):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2, "patch_size": 14}
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(image_size=trained_at, initializer_range=0.3, **sizes)).eval()
    model.save_pretrained(tmp_path)
    network = ClsFeatures(tmp_path, CPU, "dinov2")
    assert network.size == shown
    states = model(normalised(images[0][0], shown), output_hidden_states=True).hidden_states
    assert states[-1].shape[1] == 1 + (shown // 14) ** 2
    expected = model.layernorm(states[-1])[:, 0]  # CLS, after the last norm
    torch.testing.assert_close(network(images[0][:2], 2)[:1], expected, rtol=1e-4, atol=1e-4)
