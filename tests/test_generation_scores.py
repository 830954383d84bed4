"""Evaluation of generated images as a whole, and generation that continues after a kill."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import skimage
import tiny_sdxl
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from tiny_clip import save_tiny_clip
from tiny_features import save_dino, save_inception

from debias_diffusion.errors import UserError
from debias_diffusion.eval.generation import (
    ClsFeatures,
    GenerationConfig,
    dino_score,
    evaluate_generation,
    generate_images,
)

CPU = torch.device("cpu")
PHOTOGRAPHS = Path(__file__).parent / "photographs" / "captions.json"
RUN = """
import json, sys
from debias_diffusion.eval.generation import GenerationConfig, evaluate_generation
evaluate_generation(GenerationConfig(**json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory) -> Path:
    return save_inception(tmp_path_factory.mktemp("inception"))


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory) -> str:
    return save_dino(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> str:
    return str(tiny_sdxl.build_tiny_sdxl(tmp_path_factory.mktemp("sdxl")))


def settings(tmp_path, base_folder, **changes) -> dict:
    return {
        "data": str(PHOTOGRAPHS), "images": skimage.data_dir, "base": base_folder, "output": str(tmp_path / "out"),
        "limit": 3, "steps": 2, "batch_size": 2, "device": "cpu", "dino": None,
    } | changes  # fmt: skip


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
