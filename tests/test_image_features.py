"""Features of images in pieces: equal to those encoded at once, kept, and made anew when anything that decides them
changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_clip import tiny_clip, tiny_siglip
from helpers.vocabulary import tiny_tokenizer
from PIL import Image

from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.errors import UserError
from debias_diffusion.eval import image_features
from debias_diffusion.eval.image_features import ImageSession
from debias_diffusion.eval.options import RetrievalConfig
from debias_diffusion.eval.session import Pairs, TwoTower, how_used
from debias_diffusion.models.weight_files import weights_digest
from debias_diffusion.retrieval import encode_images


def two_tower(seed: int) -> TwoTower:
    backbone = tiny_clip(seed).eval()
    return TwoTower(f"tiny-{seed}", backbone, weights_digest(backbone))


@pytest.fixture(scope="module")
def encoder() -> TwoTower:
    return two_tower(0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Ten images in pieces of four; the third and all of the second piece cannot be read."""
    monkeypatch.setattr(image_features, "PIECE", 4)
    (tmp_path / "images").mkdir()
    for index in range(10):
        draw(tmp_path / "images", index)
    for index in (2, 4, 5, 6, 7):
        (tmp_path / "images" / f"{index}.png").write_bytes(b"no image")
    return tmp_path / "images"


def draw(folder: Path, index: int, seed: int | None = None) -> None:
    pixels = np.random.default_rng(index if seed is None else seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{index}.png")


RECORDS = [Record(f"id-{index}", f"{index}.png", "") for index in range(10)]


def session_of(folder: Path, images: type[ImageFolder] = ImageFolder) -> ImageSession:
    options = {"data": "toy/test", "batch_size": 3, "max_bad": 1, "device": "cpu"}
    data = Pairs(RECORDS, images(folder), [], [], [], "")
    return ImageSession("retrieval", RetrievalConfig(["toy/clip"], str(folder.parent), **options), data)


def encode(folder: Path, encoder: TwoTower) -> tuple[torch.Tensor, list[int]]:
    return session_of(folder).encode(encoder)


def kept(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (folder.parent / "cache").iterdir()}


def test_pieces_equal_what_is_encoded_at_once(folder, encoder):
    features, good, bad = encode_images(encoder.backbone, RECORDS, ImageFolder(folder), 10, "cpu")
    session = session_of(folder)
    got, readable = session.encode(encoder)
    assert readable == good == [0, 1, 3, 8, 9]
    assert session.left_out == bad
    assert [record.where for record in bad] == ["2.png", "4.png", "5.png", "6.png", "7.png"]
    torch.testing.assert_close(got, features, rtol=0, atol=1e-6)
    assert len(features.unique(dim=0)) == 5
    session.encode(encoder)
    assert session.left_out == bad  # named once


def test_a_finished_piece_is_read_from_the_disk_and_a_damaged_one_made_anew(folder, encoder):
    first, good = encode(folder, encoder)
    before = kept(folder)
    assert len(before) == 3
    again = session_of(folder)
    features, readable = again.encode(encoder)
    assert kept(folder) == before and readable == good and len(again.left_out) == 5
    assert torch.equal(features, first)
    removed, cut, *_ = (folder.parent / "cache" / name for name in before)
    removed.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    mended, _ = encode(folder, encoder)
    assert torch.equal(mended, first) and kept(folder).keys() == before.keys()


def test_encoders_see_the_same_images(folder, encoder):
    draw(folder, 2)
    session = session_of(folder)
    session.encode(encoder)
    (folder / "2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"'2.png' and perhaps other images could be read for one encoder and not"):
        session.encode(two_tower(1))


def test_another_tokenizer_is_told_from_the_first(encoder):
    assert replace(encoder, backbone=tiny_clip(0).eval()).depends == encoder.depends
    encoder.backbone.encode_text(encoder.backbone.tokenize(["A cat.", "A dog and a cat."]))
    assert replace(encoder).depends == encoder.depends  # a call changes nothing
    tokenizer = tiny_tokenizer(77)
    tokenizer.backend_tokenizer.normalizer = None  # the same vocabulary, and an A is no a
    other = replace(encoder, backbone=tiny_clip(0, tokenizer=tokenizer).eval())
    assert other.depends != encoder.depends
    assert how_used(tiny_siglip())["tokenizer"] != encoder.depends["tokenizer"]


def test_other_weights_configuration_or_images_are_other_pieces(folder, encoder):
    first, _ = encode(folder, encoder)
    assert not torch.equal(encode(folder, two_tower(1))[0], first)
    assert len(kept(folder)) == 6
    other = tiny_clip(0)
    other.config = other.config | {"preprocess_cfg": {"mean": [0.1, 0.1, 0.1]}}
    encode(folder, replace(encoder, backbone=other.eval()))
    assert len(kept(folder)) == 9
    draw(folder, 1, seed=77)
    changed, _ = encode(folder, encoder)
    assert len(kept(folder)) == 12
    assert (changed == first).all(dim=1).tolist() == [True, False, True, True, True]
    draw(folder, 2)  # an image that was unreadable is read once it is mended
    assert 2 in encode(folder, encoder)[1]


class OnceUnreadable(ImageFolder):
    """A folder of which one image fails the first time, as on a network disk."""

    failed = False

    def open(self, image):
        if image == "1.png" and not self.failed:
            self.failed = True
            raise OSError("connection lost")
        return super().open(image)


def test_an_image_that_fails_once_and_then_opens_is_named(folder, encoder):
    session = session_of(folder, OnceUnreadable)
    assert session.encode(encoder)[1] == [0, 3, 8, 9]
    assert [bad.where for bad in session.left_out[:2]] == ["1.png", "2.png"]
    assert {bad.kind for bad in session.left_out} == {"unreadable image"}
    assert "could not be read when it was encoded" in session.left_out[0].detail


def test_no_readable_image_is_told(folder, encoder):
    for index in range(10):
        (folder / f"{index}.png").unlink(missing_ok=True)
    with pytest.raises(UserError, match="None of the 10 images can be read"):
        encode(folder, encoder)
