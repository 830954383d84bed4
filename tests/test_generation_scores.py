"""FID and DINO score against their formulas, refusal of hostile weights, and generation that continues after a kill."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import skimage
import tiny_sdxl
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from tiny_clip import save_tiny_clip
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import ViTConfig, ViTModel

from debias_diffusion.errors import UserError
from debias_diffusion.eval import generation
from debias_diffusion.eval.generation import (
    FID_FEATURES,
    ClsFeatures,
    GenerationConfig,
    InceptionScore,
    dino_score,
    evaluate_generation,
    fid_own,
    frechet_distances,
    generate_images,
    load_square,
)

CPU = torch.device("cpu")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"
RUN = """
import json, sys
from debias_diffusion.eval.generation import GenerationConfig, evaluate_generation
evaluate_generation(GenerationConfig(**json.loads(sys.argv[1])))
"""


class UntrainedInception(FeatureExtractorInceptionV3):
    """torch-fidelity's Inception as its constructor leaves it before it loads a file."""

    def load_state_dict(self, state_dict):
        pass


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory) -> Path:
    """A weights file with torch-fidelity's names and shapes, and random values that keep features of everyday size."""
    folder = tmp_path_factory.mktemp("inception")
    torch.save({}, folder / "empty.pth")
    torch.manual_seed(0)
    network = UntrainedInception("inception", ["2048"], folder / "empty.pth")
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    torch.save(network.state_dict(), folder / "random.pth")
    return folder / "random.pth"


@pytest.fixture(scope="module")
def inception(inception_file) -> InceptionScore:
    return InceptionScore(inception_file, CPU)


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32, patch_size=8
    )
    folder = tmp_path_factory.mktemp("dino")
    model = ViTModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> str:
    return str(tiny_sdxl.build_tiny_sdxl(tmp_path_factory.mktemp("sdxl")))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> tuple[list[Path], list[Path]]:
    """Photographs, and other random images, of several sizes."""
    names = [entry["image"] for entry in json.loads(PHOTOGRAPHS.read_text())]
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(3):
        pixels = rng.integers(0, 256, (4, 5 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((50 + 10 * i, 64), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return [Path(skimage.data_dir) / name for name in names[:4]], sorted(folder.iterdir())


def settings(tmp_path, base_folder, **changes) -> dict:
    return {
        "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": base_folder, "output": str(tmp_path / "out"),
        "limit": 3, "steps": 2, "batch_size": 2, "device": "cpu", "dino": None,
    } | changes  # fmt: skip


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


def test_fid_equals_the_formula_in_float64(inception, pictures):
    photographs, others = pictures
    scores = inception(others, photographs, batch_size=4)
    features = zip(
        FID_FEATURES, inception_features(inception, others), inception_features(inception, photographs), strict=True
    )
    for n, ours, theirs in features:
        assert ours.shape == (3, n) and theirs.shape == (4, n) and ours.std(axis=0).mean() > 1e-3
        assert scores[f"fid_{n}"] == pytest.approx(frechet_distance(ours, theirs), rel=1e-3)
        assert scores[f"fid_{n}"] > 0.01


def test_fid_is_zero_on_itself_and_blind_to_order_and_batches(inception_file, pictures, monkeypatch):
    monkeypatch.setattr(generation, "FID_FEATURES", (64,))  # eigenvalues of 2048 features take seconds each time
    inception = InceptionScore(inception_file, CPU)
    photographs, others = pictures
    same = inception(photographs, photographs[::-1], batch_size=3)
    scores = inception(others, photographs, batch_size=4)
    again = inception(others[::-1], photographs[1:] + photographs[:1], batch_size=2)
    assert list(scores) == ["fid_64"]
    for name, score in scores.items():
        assert abs(same[name]) < 1e-4 * score
        assert again[name] == pytest.approx(score, rel=1e-4)


def test_fid_of_one_image_is_refused(inception, pictures):
    with pytest.raises(UserError, match=r"at least 2 images.*1 generated and 4"):
        inception(pictures[1][:1], pictures[0], batch_size=2)


def test_square_is_centred(tmp_path):
    Image.new("RGB", (30, 10), (255, 0, 0)).save(tmp_path / "wide.png")
    with Image.open(tmp_path / "wide.png") as image:
        image.paste((0, 0, 255), (10, 0, 20, 10))
        image.save(tmp_path / "wide.png")
    square = load_square(tmp_path / "wide.png", 16)
    assert square.size == (16, 16) and square.getcolors() == [(256, (0, 0, 255))]
    assert load_square(Path(skimage.data_dir) / "camera.png", 8).mode == "RGB"


class Payload:
    """Pickles to code that makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_weights_with_code_are_refused_before_it_runs(tmp_path):
    marker = tmp_path / "executed"
    torch.save({"Conv2d_1a_3x3.conv.weight": Payload(marker)}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Payload(marker)))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(UserError, match=rf"{name}.*cannot be used"):
            InceptionScore(tmp_path / name, CPU)
        assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)  # the payload is live: read without care it runs
    assert marker.exists()


def test_missing_or_wrong_weights_say_which_file_to_get(tmp_path):
    with pytest.raises(UserError, match=r"not there.*--inception_weights.*weights-inception-2015-12-05-6726825d\.pth"):
        InceptionScore(tmp_path / "nothing.pth", CPU)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"cannot be used.*torch-fidelity"):
        InceptionScore(tmp_path / "other.pth", CPU)


def test_dino_score_is_the_mean_cosine_of_cls_features(dino_folder, pictures):
    photographs, others = pictures[0][:3], pictures[1]
    dino = ClsFeatures(dino_folder, CPU)
    model = ViTModel.from_pretrained(dino_folder, add_pooling_layer=False).eval()
    features = []
    for path in photographs + others:
        pixels = np.asarray(load_square(path, 32)) / 255
        pixels = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        with torch.no_grad():
            hidden = model(torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None]).last_hidden_state
        features.append(hidden[0, 0].double().numpy())
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(features[:3], features[3:], strict=True)]
    assert np.std(cosines) > 1e-3
    assert dino_score(dino(photographs, 4), dino(others, 2)) == pytest.approx(np.mean(cosines), abs=1e-5)


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
    # In several batches, of several kinds at once, it is the same.
    parts = [[(rows, rows[:, :5]) for rows in features.split(2)] for features in (generated, originals)]
    assert frechet_distances(*parts, (24, 5)) == pytest.approx([score, fid_own(generated[:, :5], originals[:, :5])])
    with pytest.raises(UserError, match="at least 2 images.*set own_features to null"):
        fid_own(generated[:1], originals)


def test_dino_weights_that_are_missing_or_code_are_refused(dino_folder, tmp_path):
    (tmp_path / "config.json").write_text((Path(dino_folder) / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it lacks \d+ of the model's weights"):
        ClsFeatures(tmp_path, CPU)
    marker = tmp_path / "executed"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(marker)}))
    with pytest.raises(UserError, match="could not be loaded"):
        ClsFeatures(tmp_path, CPU)
    assert not marker.exists()


def test_a_whole_evaluation(tmp_path, base_folder, dino_folder, inception_file, capsys):
    entries = json.loads(PHOTOGRAPHS.read_text())[:3]
    data = tmp_path / "data.json"
    data.write_text(json.dumps([entries[0], dict(entries[1], image="no-such.png"), *entries[1:]]))
    encoder = save_tiny_clip(tmp_path / "encoder", context_length=248)
    config = settings(
        tmp_path, base_folder, data=str(data), encoder=encoder, dino=dino_folder, limit=4,
        inception_weights=str(inception_file),
    )  # fmt: skip
    report = evaluate_generation(GenerationConfig(**config))
    assert report == json.loads((tmp_path / "out" / "generation.json").read_text())
    # An image keeps the number of its record, also where another has no original.
    images = tmp_path / "out" / "images"
    assert sorted(path.name for path in images.iterdir()) == [
        "000000.png", "000002.png", "000003.png", "settings.json",
    ]  # fmt: skip
    assert report["pairs"] == 3 and report["left_out"][0]["where"] == "no-such.png"
    assert report["fid_64"] > 0 and report["fid_2048"] > 0 and -1 <= report["dino_score"] < 0.999
    assert "299 x 299" in report["resize"]["fid"] and "32 x 32" in report["resize"]["dino_score"]
    assert len(report["notes"]) == 1 and "2048" in report["notes"][0]
    assert all(len(report["digests"][name]) == 64 for name in ("data", "base", "encoder", "inception_weights", "dino"))
    assert "fid_2048" in capsys.readouterr().out

    # The scores are those of the named files, and the encoder reaches the images.
    generated = [images / f"{i:06}.png" for i in (0, 2, 3)]
    originals = [Path(skimage.data_dir) / entry["image"] for entry in entries]
    dino = ClsFeatures(dino_folder, CPU)
    assert dino_score(dino(generated, 3), dino(originals, 3)) == pytest.approx(report["dino_score"])
    other = evaluate_generation(
        GenerationConfig(
            **config
            | {
                "encoder": None,
                "output": str(tmp_path / "other"),
                "inception_weights": None,
                "own_features": dino_folder,
            }
        )
    )
    assert "fid_own" not in report
    assert other["fid_64"] is None and "FID was skipped" in other["notes"][0] and other["fid_own"] > 0
    assert "32 x 32" in other["resize"]["fid_own"]
    assert other["digests"]["own_features"] == other["digests"]["dino"] == report["digests"]["dino"]
    assert (tmp_path / "other" / "images" / "000000.png").read_bytes() != generated[0].read_bytes()

    # Other settings do not mix with these images, and a longer run of the same settings keeps them.
    for change in ({"seed": 1}, {"steps": 3}, {"encoder": None}, {"truncate": True}, {"guidance_scale": 5.0}):
        with pytest.raises(UserError, match=f"other settings.*{next(iter(change))}"):
            evaluate_generation(GenerationConfig(**(config | change)))
    written = [path.stat().st_mtime_ns for path in generated]
    evaluate_generation(GenerationConfig(**(config | {"inception_weights": None})))
    assert [path.stat().st_mtime_ns for path in generated] == written


def test_a_killed_generation_continues_and_ends_equal(tmp_path, base_folder, dino_folder):
    config = settings(tmp_path, base_folder, dino=dino_folder, limit=4, steps=4)
    images = tmp_path / "out" / "images"
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps(config)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while not (images / "000000.png").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in images.glob("0*.png")}
    assert 1 <= len(finished) < 4
    (images / ".000003.png.tmp").write_bytes(b"half an image")

    report = evaluate_generation(GenerationConfig(**config))
    uninterrupted = evaluate_generation(GenerationConfig(**(config | {"output": str(tmp_path / "whole")})))
    assert report["dino_score"] == uninterrupted["dino_score"] and report["pairs"] == 4
    assert all((images / name).stat().st_mtime_ns == written for name, written in finished.items())
    names = sorted(os.listdir(images))
    assert names == sorted(os.listdir(tmp_path / "whole" / "images")) and len(names) == 5
    for name in names:
        assert (images / name).read_bytes() == (tmp_path / "whole" / "images" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dino": None}, "None of inception_weights, dino and own_features is given"),
        ({"steps": 0}, "steps=0"),
        ({"images_at_once": 0}, "images_at_once=0"),
        ({"own_features": "no/such/folder"}, "no/such/folder.*Give own_features a folder"),
        ({"limit": 1, "own_features": "toy/features"}, "1 of 1 pairs.*at least 2"),
        ({"dino": "toy/nothing"}, "Unknown toy model 'toy/nothing'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"base": "nowhere"}, "The base model 'nowhere' is not there"),
        ({"encoder": "nowhere"}, "'nowhere' is not there"),
        ({"images": "."}, "0 of 3 pairs"),
        ({"limit": 1, "inception_weights": "x.pth"}, "1 of 1 pairs.*at least 2"),
        ({"inception_weights": "x.pth"}, "x.pth"),
        ({"dino": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_unusable_settings_are_refused_before_anything_is_drawn(
    tmp_path, base_folder, dino_folder, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluate_generation(GenerationConfig(**settings(tmp_path, base_folder, **({"dino": dino_folder} | change))))
    assert not (tmp_path / "out").exists()


# Of 77, 152 and 227 positions, in mixed order.
PROMPTS = {
    index: " ".join([f"Number {index}.", *["A cat, a dog and a bird sit on the wide red sofa."] * sentences])
    for index, sentences in enumerate([1, 12, 1, 8, 2, 12, 9])
}


def drawn(folder, base, **changes) -> list[np.ndarray]:
    """Pixels of PROMPTS."""
    config = GenerationConfig(data="", images="", base=base, output=str(folder), steps=2, **changes)
    return [np.asarray(Image.open(path)).astype(int) for path in generate_images(config, PROMPTS, {}, CPU)]


def test_pictures_drawn_at_once_are_those_drawn_one_by_one(tmp_path, base_folder):
    encoder = save_tiny_clip(tmp_path / "encoder", context_length=248)
    alone = drawn(tmp_path / "alone", base_folder, encoder=encoder)
    kept = tmp_path / "together" / "images" / "000002.png"
    kept.parent.mkdir(parents=True)
    (kept.parent / "settings.json").write_text("{}")
    Image.new("RGB", (64, 64), "red").save(kept)
    together = drawn(tmp_path / "together", base_folder, encoder=encoder, images_at_once=2)
    assert (together.pop(2) == [255, 0, 0]).all()  # what was there is not drawn again
    missing = [pixels for index, pixels in enumerate(alone) if index != 2]
    assert all(abs(a - b).max() <= 1 for a, b in zip(together, missing, strict=True))
    assert all(abs(a - b).max() > 1 for i, a in enumerate(missing) for b in missing[:i])


def test_truncated_prompts_are_what_stock_sdxl_makes_of_them(tmp_path, base_folder):
    pipe = StableDiffusionXLPipeline.from_pretrained(base_folder, add_watermarker=False)
    warnings, handler = [], logging.Handler()
    handler.emit = warnings.append
    logger = logging.getLogger("diffusers")
    logger.addHandler(handler)
    short = drawn(tmp_path / "short", base_folder, truncate=True, images_at_once=3)
    assert not warnings
    whole = drawn(tmp_path / "whole", base_folder)
    for index, prompt in PROMPTS.items():
        noise = torch.Generator().manual_seed(index)
        stock = pipe(prompt, num_inference_steps=2, guidance_scale=7.0, generator=noise).images[0]
        assert abs(np.asarray(stock).astype(int) - short[index]).max() <= 1
        assert (abs(short[index] - whole[index]).max() <= 1) == (index in (0, 2, 4))  # those that fit 77 tokens
    assert warnings  # of prompts cut; only where nobody asked for it are they worth reading
    logger.removeHandler(handler)
    # An encoder of 248 positions reads the first 77 tokens, too.
    encoder = save_tiny_clip(tmp_path / "encoder", context_length=248)
    other = drawn(tmp_path / "other", base_folder, encoder=encoder, truncate=True, images_at_once=7)
    assert other[1].shape == (64, 64, 3) and abs(other[1] - short[1]).max() > 1


def test_images_of_unknown_settings_are_refused(tmp_path, base_folder, dino_folder):
    images = tmp_path / "out" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(images / "000000.png")
    with pytest.raises(UserError, match=r"no settings\.json"):
        evaluate_generation(GenerationConfig(**settings(tmp_path, base_folder, dino=dino_folder)))


def test_an_encoder_of_another_width_is_refused(tmp_path, dino_folder):
    base = str(tiny_sdxl.build_tiny_sdxl(tmp_path / "wide", text_width=64))
    encoder = save_tiny_clip(tmp_path / "encoder")
    with pytest.raises(UserError, match=r"width 32.*of width 64"):
        evaluate_generation(GenerationConfig(**settings(tmp_path, base, encoder=encoder, dino=dino_folder)))
