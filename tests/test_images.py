"""Images of unknown origin: what is read, what is refused and named, and that none starts a program or ends a run."""

import os
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from helpers.tiny_clip import tiny_clip
from helpers.vocabulary import tiny_tokenizer
from PIL import EpsImagePlugin, Image, features

from debias_diffusion.data.bad_records import read_or_bad
from debias_diffusion.data.dataset import CaptionDataset
from debias_diffusion.data.images import ImageFolder, is_there
from debias_diffusion.data.records import Record
from debias_diffusion.data.shards import ShardImages, read_shards
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import dpg_bench
from debias_diffusion.eval.images import networks as feature_networks
from debias_diffusion.eval.images.generation import _reference, _with_readable_reference, plot_examples
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.retrieval import encode_images
from debias_diffusion.tokens import CaptionTokenizer
from debias_diffusion.training.check import _CheckedRecords
from debias_diffusion.training.feature_cache import FrozenTower, cached_images

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)
ROOT = Path(__file__).resolve().parents[1]


def colours(width=40, height=30) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


def opened(folder: Path, name: str) -> Image.Image:
    return ImageFolder(folder).open(name)


# Formats and modes


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_what_image_folders_hold_is_opened_whatever_its_name(tmp_path, kind):
    if kind != "AVIF" or features.check("avif"):
        colours().save(tmp_path / "a.jpg", kind)
        with Image.open(tmp_path / "a.jpg") as image:
            assert opened(tmp_path, "a.jpg").tobytes() == image.convert("RGB").tobytes()


def test_other_formats_are_refused_by_name(tmp_path):
    for kind in ("EPS", "TGA", "ICO", "DDS", "PDF"):
        colours().save(tmp_path / "a.jpg", kind)
        with pytest.raises(OSError, match="cannot identify it as JPEG, PNG, "):
            opened(tmp_path, "a.jpg")


def test_no_picture_starts_ghostscript(tmp_path, monkeypatch):
    started, folder, path = tmp_path / "started", tmp_path / "bin", tmp_path / "a.jpg"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {started}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it asks once
    colours().save(path, "EPS")
    for read in (
        lambda: opened(tmp_path, "a.jpg"),
        lambda: feature_networks.load_image(path),
        lambda: dpg_bench.load_image([path], 0, 1),
        lambda: plot_examples(["A."], [colours()], {"x": [path]}),
    ):
        with pytest.raises((OSError, UserError), match=r"cannot identify it as JPEG"):
            read()
    assert not started.exists()
    with pytest.raises(OSError), Image.open(path) as image:
        image.load()
    assert started.exists()  # Pillow left to itself does start it


def test_no_other_place_lets_pillow_try_all_its_formats():
    files = [file for folder in ("debias_diffusion", "eval") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    opened = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "Image.open(" in line]
    assert opened and all("formats=" in line for line in opened)


def tiff(pixels: np.ndarray, sample_format: int) -> bytes:
    """A TIFF of one row of grey, as Pillow would not write it."""
    content, bits = pixels.tobytes(), 8 * pixels.itemsize
    tags = {256: len(pixels), 257: 1, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1}
    tags |= {279: len(content), 339: sample_format}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(content)) + content + struct.pack("<H", len(tags)) + entries + bytes(4)


RAMP = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_grey_of_16_bits_keeps_its_upper_8_and_does_not_become_white(tmp_path, kind):
    Image.fromarray(RAMP.reshape(256, 256)).save(tmp_path / "grey.png", kind)
    grey = np.asarray(opened(tmp_path, "grey.png"))
    assert grey.shape == (256, 256, 3) and np.array_equal(grey, np.repeat(RAMP >> 8, 3).reshape(256, 256, 3))


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        (tiff(np.linspace(0, 1, 40, dtype=np.float32), 3), "F"),
        (tiff(np.arange(40, dtype=np.int32), 2), "I"),
        (tiff(np.arange(40, dtype=np.int16), 2), "I"),
        (b"Pf\n4 1\n-1.0\n" + np.ones(4, dtype=np.float32).tobytes(), "F"),
    ],
)
def test_pixels_without_a_certain_white_are_refused_by_their_mode(tmp_path, content, mode):
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(ValueError, match=f"its pixels are of mode {mode}, .*Save it as RGB"):
        opened(tmp_path, "a.tif")


def test_transparency_is_left_out_and_every_pixel_keeps_its_colour(tmp_path):
    with_alpha = colours().convert("RGBA")
    with_alpha.putalpha(colours().convert("L"))
    palette = colours().quantize(16)
    images = {
        "RGBA.png": (with_alpha, {}),
        "palette.png": (palette, {"transparency": bytes(range(0, 256, 16))}),
        "one.gif": (palette, {"transparency": 3}),
        "rgb.png": (colours(), {"transparency": (0, 0, 0)}),
        "grey.png": (colours().convert("L"), {"transparency": 7}),
        "bits.png": (colours().convert("1"), {}),
        "cmyk.tif": (colours().convert("CMYK"), {}),
    }
    for name, (image, options) in images.items():
        image.save(tmp_path / name, **options)
        with Image.open(tmp_path / name) as file, warnings.catch_warnings(action="ignore"):
            expected = np.asarray(file.convert("RGB"))
        with warnings.catch_warnings(action="error"):
            assert np.array_equal(np.asarray(opened(tmp_path, name)), expected), name
        assert expected.std() > 20, name


# Whatever is wrong, it is named


class Failing(ImageFolder):
    """A folder of which one image makes a decoder raise `error`."""

    def __init__(self, root, error):
        super().__init__(root)
        self.error = error

    def open(self, image):
        if image == "1.png":
            raise self.error
        return super().open(image)


@pytest.fixture
def three(tmp_path) -> tuple[list[Record], Path]:
    """The records and the folder of three images."""
    for index in range(3):
        colours().rotate(90 * index).save(tmp_path / f"{index}.png")
    return [Record(str(index), f"{index}.png", f"Scene {index}. A cat.") for index in range(3)], tmp_path


ERRORS = {
    "unreadable image": [
        *(RuntimeError("Failed to decode"), IndexError("index out of range"), NotImplementedError(), EOFError()),
        *(OverflowError("too large"), struct.error("unpack requires 4 bytes"), RecursionError("too deep")),
    ],
    "absurdly large image": [MemoryError(), Image.DecompressionBombError("too many pixels")],
    "missing image": [FileNotFoundError(2, "No such file")],
}


@pytest.mark.parametrize(("kind", "error"), [(kind, error) for kind, errors in ERRORS.items() for error in errors])
def test_whatever_an_image_raises_its_record_is_named(three, kind, error):
    records, folder = three
    bad = read_or_bad(records[1], Failing(folder, error).open)
    assert (bad.where, bad.kind) == ("1.png", kind)
    assert bad.detail.startswith("1.png: ") and len(bad.detail) > len("1.png: ")


def dataset(records, images, preprocess, stand_ins=lambda epoch: [2]):
    return CaptionDataset(records, images, preprocess, TOKENIZER, RECIPES["debias-clip"], 0, stand_ins)


def test_a_bad_image_does_not_stop_any_reader(three):
    records, folder = three
    images, backbone = Failing(folder, RuntimeError("Failed to decode")), tiny_clip().eval()
    sample = dataset(records, images, backbone.read_pixels)[(0, 1, 0)]
    checked = _CheckedRecords(records, images, TOKENIZER)
    tower = FrozenTower(backbone, Accelerator(cpu=True), "fp32")
    for bad in (
        sample.bad,
        [fault for *_, fault in (checked[index] for index in range(3)) if fault],
        cached_images(tower, records, images, folder / "cache", batch=2)[1],
        encode_images(backbone, records, images, 2, "cpu", progress=False)[2],
        _with_readable_reference(records, images)[1],
    ):
        assert [str(fault) for fault in bad] == ["1.png: unreadable image (1.png: RuntimeError: Failed to decode)"]
    assert sample.sample_id == "2"
    with pytest.raises(UserError, match=r"cannot be read now: 1.png: .*Start the same command again"):
        _reference(records[1], images)


@pytest.mark.parametrize("error", [UserError("Give another."), KeyboardInterrupt(), SystemExit(3)])
def test_other_errors_stop_every_reader(three, error):
    records, folder = three
    images = Failing(folder, error)
    for read in (
        lambda: dataset(records, images, lambda image: image)[(0, 1, 0)],
        lambda: _CheckedRecords(records, images, TOKENIZER)[1],
        lambda: _with_readable_reference(records, images),
    ):
        with pytest.raises(type(error)):
            read()


def test_a_preprocessing_that_always_fails_is_an_error(three):
    records, images = three[0], ImageFolder(three[1])

    def preprocess(image):
        raise RuntimeError("no memory")

    with pytest.raises(UserError, match=r"the last: 0.png: RuntimeError: no memory"):
        dataset(records, images, preprocess, None)[(0, 0, 0)]
    with pytest.raises(UserError, match=r"None of the 3 images .* 0.png: RuntimeError: no memory"):
        encode_images(tiny_clip(), records, images, 2, "cpu", progress=False, read=preprocess)


@pytest.mark.skipif(not features.check("avif"), reason="Pillow reads no AVIF here")
def test_a_damaged_avif_is_unreadable(tmp_path):
    colours().save(tmp_path / "whole.avif")
    content = (tmp_path / "whole.avif").read_bytes()
    place = content.index(b"mdat") + 8
    (tmp_path / "a.avif").write_bytes(content[:place] + bytes(len(content) - place))
    with pytest.raises(OSError, match="RuntimeError: Failed to decode"):  # as Pillow raises
        opened(tmp_path, "a.avif")


def test_loops_of_links_are_bad_records(three):
    records, folder = three
    for name in ("1.png", "s.tar"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / name)
    images = ImageFolder(folder)
    assert not is_there(images, "1.png") and not is_there(ShardImages(folder), "s.tar/a.jpg@0+1")
    good, bad = _with_readable_reference(records, images)
    assert good == [0, 2] and [(fault.where, fault.kind) for fault in bad] == [("1.png", "unreadable image")]
    with pytest.raises(UserError, match=r"no usable sample. The first fault: s.tar: broken shard"):
        read_shards(folder)
    with pytest.raises(UserError, match="is not there"):
        ImageFolder(folder / "1.png")
