"""The toy world's scenes, opened as any other image-caption pairs."""

import pytest

from debias_diffusion.data.images import is_there
from debias_diffusion.data.sources import open_data, read_captions
from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.errors import UserError
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.pairs import write_pairs

NAMES = ["toy/test", "toy/train-2", "toy/short-test", "toy/short-test-2", "toy/long-test"]


def test_the_scenes_are_those_that_write_pairs_writes(tmp_path):
    captions, source = open_data("toy/development-b")
    written, pictures = open_data(*write_pairs(tmp_path, 2, 20, "development-b"))
    assert len(captions.records) == 1000 and captions.bad == []
    assert [record.image.partition("-")[0] for record in written.records[:2]] == ["validation"] * 2
    for ours, theirs in zip(captions.records, written.records[2:], strict=False):
        assert (theirs.image, theirs.caption) == (ours.image.replace("/", "-") + ".png", ours.caption)
        assert source.open(ours.image).tobytes() == pictures.open(theirs.image).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_record_names_its_scene(name):
    captions, source = open_data(name)
    record = captions.records[12]
    assert record.image == record.sample_id == f"{name.removeprefix('toy/')}/000012"
    shown, caption = toy_scene(record.image)
    assert caption.text == record.caption
    assert all(compare(read_image(source.open(record.image)), shown).correct.values())
    # all four arrangements of the same objects tell from each other, and so do the captions
    least = 1000 if name in NAMES[:2] else 990  # of one to three objects, some scenes are alike
    assert len({record.caption for record in captions.records}) >= least
    assert len({source.stamp(record.image) for record in captions.records}) == 1000


@pytest.mark.parametrize("image", ["test/12.png", "test/-1", "test", "other/1", "test/٣"])
def test_only_scenes_of_the_split_are_there(image):
    source = open_data("toy/test")[1]
    assert is_there(source, "test/000012") and not is_there(source, image)
    with pytest.raises(ValueError, match="no scene"):
        source.open(image)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy/train", "have learned from.*, toy/train-2"),
        ("toy/tset", "Did you mean toy/test.*a suffix"),
        ("toy/test/000012", "no file or folder"),
        ("toy/referring-test", "found in a checkout of the project: `python -m research evaluate generation"),
        ("toy/smart-clip-test", "no file or folder"),
    ],
)
def test_other_names_are_refused_with_what_to_do(name, message):
    for read in (open_data, read_captions):
        with pytest.raises(UserError, match=message):
            read(name)
