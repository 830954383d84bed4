"""The toy world's scenes, opened as any other image-caption pairs."""

import pytest

from debias_diffusion.data import toy_scenes
from debias_diffusion.data.images import is_there
from debias_diffusion.data.sources import data_digest, open_data, read_captions
from debias_diffusion.data.toy_scenes import toy_scene
from debias_diffusion.errors import UserError
from debias_diffusion.files import write_json
from debias_diffusion.toyworld import grammar, scenes
from debias_diffusion.toyworld.checker import compare, read_image
from debias_diffusion.toyworld.pairs import write_pairs

NAMES = ["toy/test", "toy/train-2", "toy/short-test", "toy/referring-test", "toy/short-referring-test-2"]


def digest(name):
    for cached in (toy_scene, toy_scenes._stamp):  # as in a new process
        cached.cache_clear()
    return data_digest(name, read_captions(name))


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
    for number in (0, 12, 999):
        record = captions.records[number]
        assert record.image == record.sample_id == f"{name.removeprefix('toy/')}/{number:06}"
        shown, caption = toy_scene(record.image)
        assert caption.text == record.caption
        assert all(compare(read_image(source.open(record.image)), shown).correct.values())
    # all four arrangements of the same objects tell from each other, and so do the captions
    least = 990 if "short" in name else 1000  # of one to three objects, some scenes are alike
    assert len({record.caption for record in captions.records}) >= least
    assert len({source.stamp(record.image) for record in captions.records}) == 1000


def test_only_scenes_of_the_split_are_there():
    source = open_data("toy/test")[1]
    assert is_there(source, "test/000012")
    for image in ("test/12.png", "test/-1", "test", "other/1", "test/٣"):
        assert not is_there(source, image)
        for read in (source.open, source.stamp):
            with pytest.raises(ValueError, match="no scene"):
                read(image)


def test_the_digest_is_of_captions_and_pictures(monkeypatch):
    monkeypatch.setattr(toy_scenes, "SHAREGPT4V_HELD_OUT", 40)
    before = digest("toy/test")
    assert digest("toy/train-2") != before == digest("toy/test")
    for change in ("colour", "words"):
        with monkeypatch.context() as changed:
            changed.setitem(scenes.COLOURS, "red", (214, 32, 39 if change == "colour" else 38))
            changed.setattr(grammar, "_EMPTY", grammar._EMPTY if change == "colour" else ("The {} is quite empty.",))
            assert digest("toy/test") != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy/train", "have learned from.*, toy/train-2"),
        ("toy/tset", "Did you mean toy/test.*a suffix"),
        ("toy/test/000012", "no file or folder"),
    ],
)
def test_other_names_are_refused_with_what_to_do(name, message):
    for read in (open_data, read_captions):
        with pytest.raises(UserError, match=message):
            read(name)


def test_what_is_on_the_disk_by_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    write_json(tmp_path / "toy" / "test", [{"image": "a.png", "caption": "My own."}])
    assert [record.caption for record in open_data("toy/test", tmp_path)[0].records] == ["My own."]
    assert len(digest("toy/test")) == 64
