"""Images of unknown origin: what is read, what is refused and named, and that none starts a program or ends a run."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from helpers.odd_files import ODD, put_odd
from helpers.tiny_clip import tiny_clip
from helpers.vocabulary import tiny_tokenizer
from PIL import ExifTags, Image

from debias_diffusion.data.check import check_record
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import encode_images
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.generation import _reference, check_images
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.training.batches import CaptionDataset
from debias_diffusion.training.feature_cache import cached_images, frozen_tower

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)


def colours(width=40, height=30) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


def opened(folder: Path, name: str) -> Image.Image:
    return ImageFolder(folder).open(name)


RAMP = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_grey_of_16_bits_keeps_its_upper_8_and_does_not_become_white(tmp_path, kind):
    Image.fromarray(RAMP.reshape(256, 256)).save(tmp_path / "grey.png", kind)
    grey = np.asarray(opened(tmp_path, "grey.png"))
    assert grey.shape == (256, 256, 3) and np.array_equal(grey, np.repeat(RAMP >> 8, 3).reshape(256, 256, 3))


TURN = Image.Transpose
STORED = {  # by EXIF's orientation, how a camera that was held so stores an upright image
    **{1: None, 2: TURN.FLIP_LEFT_RIGHT, 3: TURN.ROTATE_180, 4: TURN.FLIP_TOP_BOTTOM},
    **{5: TURN.TRANSPOSE, 6: TURN.ROTATE_90, 7: TURN.TRANSVERSE, 8: TURN.ROTATE_270},
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "MPO"])
def test_photographs_are_upright_however_the_camera_was_held(tmp_path, kind, orientation):
    # JPEG keeps blocks of 16 pixels of one colour whole.
    image = Image.fromarray(np.kron(np.array([[0, 80], [160, 240], [40, 120]], np.uint8), np.ones((16, 16), np.uint8)))
    image, turn, exif = image.convert("RGB"), STORED[orientation], Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = image if turn is None else image.transpose(turn)
    stored.save(tmp_path / "a.jpg", kind, exif=exif, quality=100, lossless=True)
    turned, upright = opened(tmp_path, "a.jpg"), np.asarray(image).astype(int)
    assert turned.size == (32, 48) and abs(np.asarray(turned) - upright).max() < 3
    assert turned.getexif().get(ExifTags.Base.Orientation, 1) == 1  # so that nothing turns it again


def test_where_exif_is_unreadable_the_image_is_as_it_is_stored(tmp_path):
    colours().save(tmp_path / "a.png")
    for exif in (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM", b"nonsense", b"Exif\0\0\0\0\0\0\0\0"):
        colours().save(tmp_path / "b.png", exif=exif)
        with warnings.catch_warnings(action="ignore"):
            assert opened(tmp_path, "b.png").tobytes() == opened(tmp_path, "a.png").tobytes()


class Failing(ImageFolder):
    """A folder of which one image makes a decoder fail."""

    def open(self, image):
        if image == "1.png":
            raise RuntimeError("Failed to decode")
        return super().open(image)


@pytest.fixture
def three(tmp_path) -> tuple[list[Record], Path]:
    for index in range(3):
        colours().rotate(90 * index).save(tmp_path / f"{index}.png")
    return [Record(str(index), f"{index}.png", f"Scene {index}. A cat.") for index in range(3)], tmp_path


def test_a_bad_image_does_not_stop_any_reader(three):
    records, folder = three
    images, backbone = Failing(folder), tiny_clip().eval()
    recipe = RECIPES["debias-clip"]
    dataset = CaptionDataset(records, images, backbone.read_pixels, 0, lambda epoch: [2], TOKENIZER, recipe)
    sample = dataset[(0, 1, 0)]
    tower = frozen_tower(backbone, Accelerator(cpu=True), "fp32")
    for bad in (
        sample.bad,
        [fault for _, fault in (check_record(images, TOKENIZER, False, record) for record in records) if fault],
        cached_images(tower, records, images, folder / "cache", batch=2)[1],
        encode_images(backbone, records, images, 2, "cpu", progress=False)[2],
        check_images(records, images)[0],
    ):
        assert [str(fault) for fault in bad] == ["1.png: unreadable image (1.png: RuntimeError: Failed to decode)"]
    assert sample.sample_id == "2"
    with pytest.raises(UserError, match=r"'1.png' cannot be read any more: .*Start the same command again"):
        _reference(records[1], images)


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_a_bad_record_at_once(three, kind):
    records, folder = three
    (folder / "1.png").unlink()
    put_odd(folder / "1.png", kind)
    bad, good = check_images(records, ImageFolder(folder))
    assert [one.kind for one in bad] == ["unreadable image"] and good == [0, 2]
