"""Features of images in pieces: equal to those encoded at once, kept, and made anew where their causes change."""

import numpy as np
import open_clip
import pytest
import torch
from helpers.tiny_clip import byte_tokenizer, tiny_clip
from PIL import Image

from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import encode_images
from debias_diffusion.eval import image_features
from debias_diffusion.eval.image_features import ImageSession
from debias_diffusion.eval.options import RetrievalConfig
from debias_diffusion.eval.session import Pairs

RECORDS = [Record(f"id-{index}", f"{index}.png", "") for index in range(10)]


@pytest.fixture(scope="module")
def encoder():
    return tiny_clip(0).eval()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Ten images in pieces of four; the third and all of the second piece cannot be read."""
    monkeypatch.setattr(image_features, "PIECE", 4)
    (tmp_path / "images").mkdir()
    for index in (0, 1, 3, 8, 9):
        draw(tmp_path / "images", index)
    for index in (2, 4, 5, 6, 7):
        (tmp_path / "images" / f"{index}.png").write_bytes(b"no image")
    return tmp_path / "images"


def draw(folder, index, seed=0):
    pixels = np.random.default_rng([seed, index]).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{index}.png")


def session_of(folder):
    options = {"data": "toy/test", "batch_size": 3, "max_bad": 1, "device": "cpu"}
    data = Pairs(RECORDS, ImageFolder(folder), [], [], [], "")
    return ImageSession("retrieval", RetrievalConfig(["toy/clip"], str(folder.parent), **options), data)


def kept(folder):
    return {file: file.stat().st_mtime_ns for file in (folder.parent / "cache").glob("*.safetensors")}


def test_pieces_equal_what_is_encoded_at_once_and_are_kept(folder, encoder):
    features, good, bad = encode_images(encoder, RECORDS, ImageFolder(folder), 10, "cpu")
    assert [record.where for record in bad] == ["2.png", "4.png", "5.png", "6.png", "7.png"]
    session = session_of(folder)
    first, readable = session.encode("tiny", encoder)
    torch.testing.assert_close(first, features, rtol=0, atol=1e-5)
    assert readable == good == [0, 1, 3, 8, 9] and len(first.unique(dim=0)) == 5
    assert session.left_out == bad
    before = kept(folder)
    assert torch.equal(session_of(folder).encode("tiny", encoder)[0], first) and kept(folder) == before


def test_other_weights_tokenizers_or_images_are_other_pieces(folder, encoder):
    first, _ = session_of(folder).encode("tiny", encoder)
    assert not torch.equal(session_of(folder).encode("other", tiny_clip(1).eval())[0], first) and len(kept(folder)) == 6
    other = tiny_clip(0)
    open_clip.set_model_preprocess_cfg(other.model, {"mean": [0.1] * 3, "std": [0.2] * 3})
    session_of(folder).encode("other", other.eval())
    texts = tiny_clip(1, tokenizer=byte_tokenizer(77)).eval()  # another text tower on the same image tower
    texts.model.visual.load_state_dict(encoder.model.visual.state_dict())
    assert torch.equal(session_of(folder).encode("texts", texts)[0], first) and len(kept(folder)) == 9
    draw(folder, 1, seed=77)
    changed, _ = session_of(folder).encode("tiny", encoder)
    assert (changed == first).all(dim=1).tolist() == [True, False, True, True, True]
    draw(folder, 2)  # an image that was unreadable is read once it is mended
    assert 2 in session_of(folder).encode("tiny", encoder)[1]
