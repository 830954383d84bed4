"""Shards: written as the folder they come from, and read as far as they can be, whatever their bytes are."""

import io
import json
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.ranks import forked
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import entry, tar
from PIL import Image, ImageChops, ImageStat

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.images import is_there
from debias_diffusion.data.shards import read_shards, verify_shards
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError

SIZES = [(60, 40), (40, 60), (20, 20), (50, 50), (300, 30), (34, 90), (64, 64)]


def picture(index, size=(24, 24)):
    """A smooth picture, one of ten."""
    rising = Image.linear_gradient("L").resize(size)
    return Image.merge(
        "RGB", [rising, Image.linear_gradient("L").rotate(90).resize(size), rising.point([25 * index % 250] * 256)]
    )


def caption(index):
    return f'Scene {index}. "A red cat." 猫. A bird.'


def encoded(image, kind="JPEG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    """(data file, image folder)"""
    entries = []
    for index, size in enumerate(SIZES):
        path = tmp_path / "images" / f"part{index % 2}" / f"{index}.v1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(index, size).save(path)
        entries.append(entry(f"part{index % 2}/{index}.v1.png", caption(index)))
    (tmp_path / "data.json").write_text(json.dumps(entries))
    return str(tmp_path / "data.json"), str(tmp_path / "images")


def written(folder, output, **changes):
    settings = {"data": folder[0], "images": folder[1], "output": str(output), "workers": 0, "size": 32, "per_shard": 3}
    write_shards(ShardsConfig(**settings | changes))
    return open_data(str(output))


def members_of(path):
    with tarfile.open(path) as file:
        return file.getmembers()


def pair(key, index=0):
    return [(f"{key}.jpg", encoded(picture(index))), (f"{key}.txt", caption(index).encode())]


def tars(output):
    return {path.name: path.read_bytes() for path in Path(output).glob("*.tar")}


def ids_of(captions):
    return [record.sample_id for record in captions.records]


def faults_of(captions):
    return [(bad.where, bad.kind) for bad in captions.bad]


# ---- writing


def test_shards_hold_the_pairs_of_the_folder_in_their_order(folder, tmp_path):
    there, originals = open_data(*folder)
    pairs = [(record.sample_id, record.caption) for record in there.records]
    here, images = written(folder, tmp_path / "shards")
    again, smaller = written((str(tmp_path / "shards"), None), tmp_path / "again", per_shard=2, size=16)
    assert sorted(tars(tmp_path / "shards")) == [f"shard-00000{number}.tar" for number in range(3)]
    for captions in (here, again):
        assert [(record.sample_id, record.caption) for record in captions.records] == pairs and captions.bad == []
    assert min(smaller.open(again.records[0].image).size) == 16
    for small, large, size in zip(here.records, there.records, SIZES, strict=True):
        image, original = images.open(small.image), originals.open(large.image)
        assert image.mode == "RGB" and original.size == size and min(image.size) == min(32, *size)
        assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.02)
        assert max(ImageStat.Stat(ImageChops.difference(image, original.resize(image.size))).mean) < 4


def test_any_number_of_workers_writes_the_same_bytes(folder, tmp_path):
    for name, changes in (("a", {}), ("b", {"workers": 2}), ("c", {"quality": 50})):
        written(folder, tmp_path / name, **changes)
    assert tars(tmp_path / "a") == tars(tmp_path / "b") != tars(tmp_path / "c") and len(tars(tmp_path / "a")) == 3


def test_training_reads_the_same_pixels_from_lossless_shards(folder, tmp_path):
    backbone, (there, originals) = tiny_clip(), open_data(*folder)
    here, images = written(folder, tmp_path / "shards", lossless=True)
    for small, large in zip(here.records, there.records, strict=True):
        image, original = images.open(small.image), originals.open(large.image)
        assert min(image.size) == min(32, *original.size)
        assert torch.equal(backbone.read_pixels(image), backbone.read_pixels(original))


def test_unusable_pairs_are_left_out_counted_and_named(folder, tmp_path, capsys):
    images, shards = Path(folder[1]), tmp_path / "shards"
    (images / "part0" / "2.v1.png").unlink()
    (images / "part1" / "3.v1.png").write_text("not an image")
    with pytest.raises(UserError, match="2 of 7 records cannot be used"):
        written(folder, shards)
    with pytest.raises(UserError, match="not finished"):
        open_data(str(shards))
    stamps = [path.stat().st_mtime_ns for path in sorted(shards.glob("*.tar"))]
    captions, _ = written(folder, shards, max_bad=0.6)  # continues
    assert ids_of(captions) == [f"part{i % 2}/{i}.v1.png" for i in (0, 1, 4, 5, 6)]
    assert [path.stat().st_mtime_ns for path in sorted(shards.glob("*.tar"))] == stamps
    kinds = sorted(json.loads(line)["kind"] for line in (shards / "bad-records.jsonl").read_text().splitlines())
    assert kinds == ["missing image", "unreadable image"]
    assert "Wrote 5 of 7 pairs" in capsys.readouterr().out


# ---- reading


def test_shards_from_elsewhere_are_read(tmp_path):
    first = [
        *pair("a/b.c/0001", 1),
        ("./0003.JPG", encoded(picture(3))),
        ("./0003.json", json.dumps({"id": "x"} | entry("coco/1.jpg", "From\na talk.")).encode()),
        ("0004.webp", encoded(picture(4), "WEBP")),
        ("0004.txt", "Vier – 四.".encode()),
        ("0004.json", json.dumps({"caption": None, "id": "four", "width": 3}).encode()),
        ("._0006.jpg", b"what another system leaves"),
    ]
    (x, x_text), (y, y_text) = pair("x", 8), pair("y.v2", 9)
    tar(tmp_path / "one.tar", first)
    tar(tmp_path / "two.tar", [x, y, y_text, x_text])  # all images before all captions
    (tmp_path / "._two.tar").write_bytes(b"what another system leaves")
    captions, images = read_shards(tmp_path)
    expected = {
        "one/a/b.c/0001": (caption(1), (24, 24)),
        "coco/1.jpg": ("From a talk.", (24, 24)),
        "four": ("Vier – 四.", (24, 24)),
        "two/x": (caption(8), (24, 24)),
        "two/y": (caption(9), (24, 24)),
    }
    assert captions.bad == []
    assert {r.sample_id: (r.caption, images.open(r.image).size) for r in captions.records} == expected
    assert ids_of(captions) == list(expected)
    assert list(open_data(str(tmp_path / "two.tar"))[0].records) == list(captions.records[-2:])


def test_members_that_lead_elsewhere_are_named_and_not_used(tmp_path):
    secret, shards = tmp_path / "secret.jpg", tmp_path / "shards"
    picture(0).save(secret)
    members = [*pair("../x"), *pair(str(secret.with_suffix(""))), *pair("a/../../y"), *pair("c\x1b[31m")]
    for name, kind in (("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE), ("p.jpg", tarfile.FIFOTYPE)):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, str(secret)
        members += [member, (name.replace("jpg", "txt"), b"A link.")]
    shards.mkdir()
    tar(shards / "s.tar", [*members, *pair("good")])
    captions, images = read_shards(shards)
    kinds = ["unsafe member name"] * 8 + ["member that is no file"] * 3 + ["no image"] * 3
    assert ids_of(captions) == ["s/good"] and [bad.kind for bad in captions.bad] == kinds
    assert all(text.isprintable() for bad in captions.bad for text in (bad.where, bad.detail))
    for name in ("../secret.jpg", f"{secret}", "/s.tar/a@0+9", "s.tar/a@-1+9"):
        assert not is_there(images, name)
        with pytest.raises((OSError, ValueError)):
            images.open(name)


def test_whole_samples_of_a_cut_shard_are_used(folder, tmp_path):
    whole, _ = written(folder, tmp_path / "shards", per_shard=4)
    path = tmp_path / "shards" / "shard-000001.tar"
    content, members = path.read_bytes(), members_of(path)
    ends = [member.offset_data + member.size for member in members[1::2]]  # of each caption, after its image
    closing = members[-1].offset_data + 512 * -(-members[-1].size // 512) + 512
    for cut in sorted({*range(0, len(content), 97), *ends, *(end - 1 for end in ends), closing, closing - 1}):
        path.write_bytes(content[:cut])
        captions, _ = open_data(str(path.parent))
        left = sum(end <= cut for end in ends)
        assert list(captions.records) == list(whole.records[: 4 + left]), cut
        assert faults_of(captions) == ([] if cut >= closing else [(path.name, "broken shard")])
        assert cut >= closing or f"{3 - left} of 3 samples are missing" in captions.bad[0].detail


def test_processes_threads_and_copies_read_the_same_images(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread")  # as on Windows
    for index in range(150):
        tar(tmp_path / f"{index:03}.tar", pair("a", index))
    captions, images = read_shards(tmp_path)
    expected = [images.open(record.image).tobytes() for record in captions.records]
    assert len(set(expected)) == 10

    def read(reader):
        with ThreadPoolExecutor(8) as threads:
            opened = threads.map(reader.open, [record.image for record in captions.records])
            return [image.tobytes() for image in opened]

    assert forked(2, lambda _: read(images), group=False) == [expected, expected]
    assert read(pickle.loads(pickle.dumps(images))) == expected


def test_verifying_finds_one_flipped_byte_and_a_lost_shard(folder, tmp_path):
    captions, images = written(folder, shards := tmp_path / "shards")
    assert verify_shards(shards) == [] and captions.bad == []
    image, path = captions.records[3].image, shards / "shard-000001.tar"
    stamp, content = images.stamp(image), bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    (bad,) = verify_shards(shards)
    assert images.stamp(image) != stamp != images.stamp(captions.records[4].image)
    assert (bad.where, bad.kind) == ("shard-000001.tar", "changed shard")
    assert verify_shards(path) == [bad] and verify_shards(path.with_name("shard-000000.tar")) == []
    path.unlink()
    for faults in (verify_shards(shards), open_data(str(shards))[0].bad):
        assert [(bad.where, bad.kind, bad.detail) for bad in faults] == [(path.name, "missing shard", "3 samples")]
