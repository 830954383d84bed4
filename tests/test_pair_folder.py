"""A folder of image and caption files, opened as any other image-caption pairs."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.tiny_data import make_tiny_data
from PIL import Image
from safetensors.torch import load_file

from debias_diffusion.data.images import is_there
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import data_digest, open_data, read_captions
from debias_diffusion.errors import UserError
from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.loop import train


def put(folder: Path, *names: str, caption="A cat. A dog."):
    """Images, and captions for names that end in txt, each image of another colour."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".txt":
            path.write_text(caption, encoding="utf-8")
        else:
            colour = sum(map(ord, name)) % 256
            image = Image.new("RGB", (8, 8), (colour, 0, 0))
            image.save(path, {".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}.get(path.suffix.lower(), "PNG"))


def images_of(folder):
    return [record.image for record in open_data(folder)[0].records]


def test_pairs_are_read_from_all_folders_in_the_order_of_their_names(tmp_path):
    names = ["10.png", "2.jpg", "b/1.webp", "a/c/x.y.JPEG", "a-b/1.PNG", "ä/猫.jpg"]
    for name in names:
        put(tmp_path, name)
        ending = ".TXT" if name.startswith("10") else ".txt"
        put(tmp_path, name.rpartition(".")[0] + ending, caption=f"\ufeffAbout {name}.\r\n\n Größe. ")
    captions, source = open_data(str(tmp_path))
    assert captions.bad == []
    assert captions.records == [Record(name, name, f"About {name}. Größe.") for name in sorted(names)]
    for name in names:
        with Image.open(tmp_path / name) as file:
            assert source.open(name).tobytes() == file.convert("RGB").tobytes()
        assert is_there(source, name) and len(source.stamp(name)) == 16
    assert read_captions(tmp_path) == captions


def test_hidden_files_and_others_are_passed_over(tmp_path):
    put(tmp_path, "1.jpg", "1.txt")
    put(tmp_path, "._1.jpg", ".hidden/2.jpg", ".cache/3.txt", ".tar.jpg")
    for name in ("1.npz", "README", "metadata.json", "1.txt.bak", "jpg", "x.jpg~", ".x.tar"):
        (tmp_path / name).write_text("?")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "folder.txt" / "txt").mkdir(parents=True)
    (tmp_path / "itself").symlink_to(tmp_path)
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    assert images_of(tmp_path) == ["1.jpg"]
    (tmp_path / "s.tar").write_bytes(bytes(1024))  # makes it a folder of shards
    with pytest.raises(UserError, match="has 1 shards, and they are empty"):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (["b/3.jpg"], ["b/3.jpg: no caption (b/3.jpg has none (.txt))"]),
        (["b/3.TXT"], ["b/3.TXT: no image (b/3.TXT has none (.jpg, .jpeg, .png, .webp))"]),
        (["b/3.jpg", "b/3.jpeg", "b/3.txt"], ["b/3.jp.*: same name (b/3.jpeg and b/3.jpg)"]),
        (["3.jpg", "3.txt", "3.TXT"], ["3.jpg: same name (3.TXT and 3.txt)"]),
        (["x.jpg", "X.txt"], ["X.txt: no image", "x.jpg: no caption"]),
    ],
)
def test_a_file_without_its_partner_is_a_bad_record(tmp_path, names, faults):
    put(tmp_path, "1.jpg", "1.txt", "a/2.png", "a/2.txt", *names)
    captions, _ = open_data(tmp_path)
    assert [record.image for record in captions.records] == ["1.jpg", "a/2.png"]
    assert len(captions.bad) == len(faults)
    for bad, fault in zip(captions.bad, faults, strict=True):
        assert re.match(fault.replace("(", r"\(").replace(")", r"\)"), str(bad)), str(bad)


def test_what_cannot_be_read_is_left_out_and_named(tmp_path):
    folder = tmp_path / "pairs"
    for number in range(6):
        put(folder, f"{number}.png", f"{number}.txt")
    (folder / "0.png").write_text("no image")
    (folder / "1.txt").write_text(" \n")
    (folder / "2.txt").write_bytes(b"\xff\xfe")
    (folder / "3.txt").write_text("A" * (1 << 20) + ".")
    captions, source = open_data(folder)
    assert [record.image for record in captions.records] == ["0.png", "4.png", "5.png"]
    with pytest.raises(OSError, match="cannot identify"):
        source.open("0.png")
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("1.png", "empty or non-text caption"),
        ("2.png", "bad caption file"),
        ("3.png", "absurdly large caption"),
    ]
    for number in (0, 4, 5):
        (folder / f"{number}.txt").write_text("")
    with pytest.raises(UserError, match="has 6 pairs and none is usable. The first fault: 0.png: empty or non-text"):
        open_data(folder)


def test_a_name_that_is_no_text_is_left_out(tmp_path):
    put(tmp_path, "1.jpg", "1.txt")
    try:
        for ending in (b"jpg", b"txt"):
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff." + ending)).write_text("?")
    except OSError:
        pytest.skip("this file system has no such names")
    captions = open_data(tmp_path)[0]
    assert [record.image for record in captions.records] == ["1.jpg"]
    assert [str(bad) for bad in captions.bad] == [r"\xff.jpg: bad file name (\xff.jpg is not UTF-8)"]
    assert len(data_digest(tmp_path, captions)) == 64


def test_folders_of_nothing_are_refused_with_every_layout(tmp_path):
    layouts = r"no \*.tar. Give a folder of image and caption files .*WebDataset shards .*JSON or JSONL file"
    for names, found in (
        ([], r"0 images and 0 captions \(.txt\), and "),
        (["1.jpg", "a/2.jpg"], "2 images and 0 captions .* such as '1.jpg', and "),
        (["a/2.txt"], "0 images and 1 captions .* such as 'a/2.txt', and "),
    ):
        folder = tmp_path / f"of-{len(names)}"
        folder.mkdir()
        put(folder, *names)
        with pytest.raises(UserError, match=found + layouts):
            open_data(folder)


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    put(tmp_path, "1.jpg", "1.txt", "a/2.jpg", "a/2.txt")
    scandir = os.scandir

    def locked(path):  # a mode of 0 does not keep root out
        if os.fspath(path).endswith("/a"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(UserError, match=r"/a' cannot be read \(Permission denied\). Make it readable"):
        open_data(tmp_path)


def test_the_digest_is_of_names_and_captions_wherever_the_folder_lies(tmp_path):
    put(tmp_path / "one", "1.jpg", "1.txt", "2.jpg", "2.txt")
    (tmp_path / "one" / "2.txt").write_text("")

    def digest(folder):
        return data_digest(folder, read_captions(folder))

    first = digest(tmp_path / "one")
    os.rename(tmp_path / "one", tmp_path / "two")
    assert digest(tmp_path / "two") == first
    (tmp_path / "two" / "2.txt").write_text("Mended.")
    second = digest(tmp_path / "two")
    for ending in ("jpg", "txt"):
        os.rename(tmp_path / "two" / f"2.{ending}", tmp_path / "two" / f"3.{ending}")
    assert len({first, second, digest(tmp_path / "two")}) == 3


def test_train_reads_checks_and_caches_them_and_starts_anew_for_others(tmp_path, world, capsys):
    folder, (data, images) = tmp_path / "pairs", make_tiny_data(tmp_path / "world")
    folder.mkdir()
    for place, part in enumerate(json.loads(Path(data).read_text())):
        shutil.copy(Path(images, part["image"]), folder / f"{place:03}.png")
        (folder / f"{place:03}.txt").write_text(part["conversations"][1]["value"])
    (folder / "007.png").write_text("no image")
    (folder / "011.txt").write_text("")
    settings = dict(validation=4, batch=4, components=2, epochs=1, max_steps=2, warmup=1, workers=0, max_bad=0.1)
    settings |= dict(data=str(folder), model=world[0], output=str(tmp_path / "run"))
    assert train(TrainConfig(**settings, check_data=True)) is None
    named = [json.loads(line) for line in (tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()]
    assert [(bad["where"], bad["kind"]) for bad in named] == [
        ("011.png", "empty or non-text caption"),
        ("007.png", "unreadable image"),
    ]
    assert "22 of 24 pairs can be used" in capsys.readouterr().out
    settings |= dict(freeze_image_tower=True, feature_cache=str(tmp_path / "features"))
    assert train(TrainConfig(**settings)) is not None
    (file,) = tmp_path.glob("features/*/*.safetensors")
    assert len(load_file(file)["features"]) == 22
    (folder / "012.txt").write_text("Another caption. Another sentence.")
    with pytest.raises(UserError, match="The data is another one"):
        train(TrainConfig(**settings))
