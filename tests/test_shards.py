import io
import json
import os
import pickle
import random
import tarfile
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from helpers.tiny_clip import save_tiny_clip
from helpers.vocabulary import tiny_tokenizer
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, PILToTensor, Resize

from debias_diffusion.app.cli import main
from debias_diffusion.app.shards import ShardsConfig, shrink, write_shards
from debias_diffusion.data.bad_records import read_or_bad
from debias_diffusion.data.dataset import CaptionDataset, Collate
from debias_diffusion.data.shards import ShardImages, read_shards, verify_shards
from debias_diffusion.data.sources import data_digest, open_data
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.tokens import CaptionTokenizer

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)
SIZES = [(60, 40), (40, 60), (20, 20), (50, 50), (300, 30), (33, 90), (64, 64)]


def picture(index, size=(24, 24)):
    """A smooth picture that no other index has."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    pixels = np.stack([x, y, np.full_like(x, index % 10 / 10)], axis=-1)
    return Image.fromarray((255 * pixels).astype(np.uint8))


def caption(index):
    return f"Scene {index}. A red cat. A blue dog. It is number {index}. A bird."


def encoded(image, kind="JPEG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def bomb(side=30_000):
    """A PNG of a few bytes that claims to have side * side pixels."""

    def chunk(name, content):
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path):
    """(data file, image folder)"""
    return make_folder(tmp_path / "folder")


def make_folder(folder, sizes=SIZES, captions=None):
    entries = []
    for index, size in enumerate(sizes):
        path = folder / "images" / f"part{index % 2}" / f"{index}.v1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(index, size).save(path)
        text = captions[index] if captions else caption(index)
        name = path.relative_to(folder / "images").as_posix()
        entries.append({"id": str(index), "image": name, "conversations": [{"value": "?"}, {"value": text}]})
    (folder / "data.json").write_text(json.dumps(entries))
    return str(folder / "data.json"), str(folder / "images")


def config(folder, output, **changes):
    return ShardsConfig(**({"data": folder[0], "images": folder[1], "output": str(output), "workers": 0} | changes))


def written(folder, output, **changes):
    write_shards(config(folder, output, **({"size": 32, "per_shard": 3} | changes)))
    return open_data(str(output))


def tar(path, members):
    """A tar of (name, content) or TarInfo."""
    with tarfile.open(path, "w") as file:
        for member in members:
            content = b""
            if not isinstance(member, tarfile.TarInfo):
                content, member = member[1], tarfile.TarInfo(member[0])
                member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def pair(key, index=0):
    return [(f"{key}.jpg", encoded(picture(index))), (f"{key}.txt", caption(index).encode())]


def batches(captions, images, workers=0):
    """Two epochs' batches of four pairs."""
    # Of importable parts alone, because a process that is not forked is sent all of it.
    preprocess = Compose([Resize((4, 4)), PILToTensor()])
    recipe = RECIPES["debias-clip"]
    return list(
        DataLoader(
            CaptionDataset(captions.records, images, preprocess, TOKENIZER, recipe, seed=5),
            batch_sampler=[[(epoch, index, 0) for index in (3, 0, 5, 6)] for epoch in range(2)],
            collate_fn=Collate(TOKENIZER, recipe),
            num_workers=workers,
        )
    )


def content(output):
    return {path.name: path.read_bytes() for path in Path(output).glob("*.tar")}


# Writing


def test_shards_hold_the_pairs_of_the_folder_in_their_order(folder, tmp_path):
    theirs, originals = open_data(*folder)
    ours, images = written(folder, tmp_path / "shards")
    assert sorted(path.name for path in (tmp_path / "shards").glob("*.tar")) == [
        f"shard-00000{i}.tar" for i in range(3)
    ]
    assert [(r.sample_id, r.caption) for r in ours.records] == [(r.sample_id, r.caption) for r in theirs.records]
    assert ours.bad == []
    for here, there, size in zip(ours.records, theirs.records, SIZES, strict=True):
        image, original = images.open(here.image), originals.open(there.image)
        assert image.mode == "RGB" and original.size == size
        assert min(image.size) == min(32, *size)
        assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.02)
        difference = np.asarray(image.resize((8, 8)), float) - np.asarray(original.resize((8, 8)), float)
        assert np.abs(difference).mean() < 4


def test_shrinking_keeps_the_shorter_side_exactly():
    for size in ((1000, 7), (257, 256), (256, 300), (333, 777), (511, 512)):
        width, height = Image.open(io.BytesIO(shrink(picture(0, size), 256, 95))).size
        assert min(width, height) == min(256, *size) and (width < height) == (size[0] < size[1])


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1), min_size=1, max_size=4))
def test_any_caption_comes_back_as_the_folder_gives_it(captions):
    hypothesis.assume(any(text.strip() for text in captions))
    with tempfile.TemporaryDirectory() as there:
        folder = make_folder(Path(there), [(8, 8)] * len(captions), captions)
        theirs = open_data(*folder)[0]
        ours = written(folder, Path(there) / "shards", max_bad=1.0)[0]
        assert [(r.sample_id, r.caption) for r in ours.records] == [(r.sample_id, r.caption) for r in theirs.records]


def test_the_same_pairs_give_the_same_bytes_with_any_number_of_workers(folder, tmp_path):
    for name, workers in (("a", 0), ("b", 2)):
        written(folder, tmp_path / name, workers=workers)
    assert content(tmp_path / "a") == content(tmp_path / "b") and len(content(tmp_path / "a")) == 3
    written(folder, tmp_path / "c", quality=50)
    assert content(tmp_path / "a") != content(tmp_path / "c")


def test_unusable_pairs_are_left_out_counted_and_named(folder, tmp_path, capsys):
    images = Path(folder[1])
    (images / "part1" / "1.v1.png").write_bytes(bomb())
    (images / "part0" / "2.v1.png").unlink()
    (images / "part1" / "3.v1.png").write_text("not an image")
    entries = json.loads(Path(folder[0]).read_text())
    entries[4]["conversations"][1]["value"] = " "
    Path(folder[0]).write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"4 of 7 records cannot be used, .* share of 0.01.*bad-records.jsonl"):
        written(folder, tmp_path / "shards")
    with pytest.raises(UserError, match="not finished"):
        open_data(str(tmp_path / "shards"))
    stamps = [path.stat().st_mtime_ns for path in sorted((tmp_path / "shards").glob("*.tar"))]
    captions, _ = written(folder, tmp_path / "shards", max_bad=0.6)
    assert [record.sample_id for record in captions.records] == [f"part{i % 2}/{i}.v1.png" for i in (0, 5, 6)]
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "shards").glob("*.tar"))] == stamps
    lines = (tmp_path / "shards" / "bad-records.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["kind"] for line in lines) == [
        "absurdly large image",
        "empty or non-text caption",
        "missing image",
        "unreadable image",
    ]
    assert "Wrote 3 of 7 pairs" in capsys.readouterr().out


def test_a_wrong_image_folder_is_noticed_before_anything_is_written(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty' holds none of the images, .*Give the folder"):
        written((folder[0], str(tmp_path / "empty")), tmp_path / "shards")


def test_an_output_of_other_settings_or_data_is_refused(folder, tmp_path):
    written(folder, tmp_path / "shards")
    with pytest.raises(UserError, match=r"other settings \(size: 32 there, 16 here\)"):
        written(folder, tmp_path / "shards", size=16)
    with pytest.raises(UserError, match="The data is another one, by its contents"):
        written(make_folder(tmp_path / "other", SIZES[:5]), tmp_path / "shards")


def test_the_command_says_what_it_did_and_what_comes_next(folder, tmp_path, capsys):
    output = str(tmp_path / "shards")
    main(["shards", "--data", folder[0], "--images", folder[1], "--output", output, "--per-shard", "4", "--workers=0"])
    out = capsys.readouterr().out
    assert "Wrote 7 of 7 pairs" in out and "2 shards" in out and f"train --data {output}" in out
    again = str(tmp_path / "again")  # shards can be read to write others
    main(["shards", "--data", output, "--output", again, "--per-shard", "2", "--size", "16", "--workers=0"])
    assert [r.caption for r in open_data(again)[0].records] == [r.caption for r in open_data(output)[0].records]


# Reading


def test_workers_read_what_one_process_reads_and_draw_as_from_the_folder(folder, tmp_path):
    captions, images = written(folder, tmp_path / "shards")
    alone = batches(captions, images)  # which leaves shards open that a forked process inherits
    copied = batches(*pickle.loads(pickle.dumps((captions, images))))  # as workers that are not forked get them
    from_folder = batches(*open_data(*folder))
    for one, forked, sent, theirs in zip(alone, batches(captions, images, 2), copied, from_folder, strict=True):
        assert torch.equal(one.images, forked.images) and torch.equal(one.images, sent.images)
        for other in (forked, sent, theirs):
            assert torch.equal(one.tokens.padded(), other.tokens.padded())
    assert not torch.equal(alone[0].tokens.padded(), alone[1].tokens.padded())
    assert len({bytes(image.numpy()) for image in alone[0].images}) == 4


def test_shards_from_elsewhere(tmp_path):
    described = {"id": "x", "image": "coco/1.jpg", "conversations": [{"value": "?"}, {"value": "From\na talk."}]}
    first = [
        *pair("a/b.c/0001", 1),
        ("./0002.png", encoded(picture(2, (10, 20)), "PNG")),
        ("./0002.json", json.dumps({"id": 7, "caption": "Two."}).encode()),
        ("0003.JPG", encoded(picture(3))),
        ("0003.json", json.dumps(described).encode()),
        ("0004.webp", encoded(picture(4), "WEBP")),
        ("0004.txt", "Vier – 四.".encode()),
        ("0004.json", json.dumps({"caption": None, "id": "four", "width": 3}).encode()),
        ("0004.cls", b"3"),
        ("0005.small.png", encoded(picture(5, (5, 5)), "PNG")),
        ("0005.jpg", encoded(picture(5, (9, 9)))),
        ("0005.txt", b"Five."),
        ("._0006.jpg", b"what another system leaves"),
        ("0007.v2.jpg", encoded(picture(7))),
        ("0007.v2.txt", b"Seven."),
        *pair("./0008", 8),
    ]
    # all images before all captions
    second = [("x.jpg", encoded(picture(8))), ("y.jpg", encoded(picture(9))), ("y.txt", b"Y."), ("x.txt", b"X.")]
    tar(tmp_path / "one.tar", first)
    tar(tmp_path / "two.tar", second)
    (tmp_path / "._two.tar").write_bytes(b"what another system leaves")
    captions, images = read_shards(tmp_path)
    assert captions.bad == []
    assert [(r.sample_id, r.caption) for r in captions.records] == [
        ("one/a/b.c/0001", caption(1)),
        ("7", "Two."),
        ("coco/1.jpg", "From a talk."),
        ("four", "Vier – 四."),
        ("one/0005", "Five."),
        ("one/0007", "Seven."),
        ("one/0008", caption(8)),
        ("two/x", "X."),
        ("two/y", "Y."),
    ]
    assert [images.open(r.image).size for r in captions.records] == [
        *[(24, 24), (10, 20), (24, 24), (24, 24), (9, 9), (24, 24), (24, 24)],
        *[(24, 24), (24, 24)],
    ]
    alone, images = open_data(str(tmp_path / "two.tar"))
    assert alone.records == captions.records[-2:] and images.open(alone.records[0].image).size == (24, 24)


LACKING = {
    "a": ({"jpg": encoded(picture(0))}, "no caption"),
    "b": ({"txt": b"B."}, "no image"),
    "c": ({"jpg": b"", "json": b"{"}, "bad caption file"),
    "d": ({"jpg": b"", "txt": b"D.", "png": b""}, "several images"),
    "e": ({"jpg": b"", "txt": b" \n"}, "empty or non-text caption"),
    "f": ({"jpg": b"", "txt": b"\xff"}, "bad caption file"),
    "g": ({"jpg": b"", "txt": b"x" * 2_000_000}, "absurdly large caption"),
    "h": ({"jpg": b"", "json": b"[" * 100_000}, "bad caption file"),
    "i": ({"jpg": b"", "json": b'{"caption": 3}'}, "empty or non-text caption"),
    "j": ({"jpg": b"", "json": b'{"text": "no caption"}'}, "no caption"),
}


def test_samples_that_lack_something_are_named(tmp_path):
    members = [(f"{key}.{ending}", part) for key, (parts, _) in LACKING.items() for ending, part in parts.items()]
    captions, _ = read_shards(tar(tmp_path / "s.tar", [*pair("good"), *members]))
    assert [record.sample_id for record in captions.records] == ["s/good"]
    assert [(bad.where, bad.kind) for bad in captions.bad] == [(f"s.tar/{key}", LACKING[key][1]) for key in LACKING]


def test_members_that_lead_elsewhere_are_ignored_and_named(tmp_path):
    secret = tmp_path / "secret.jpg"
    picture(0).save(secret)
    members = [*pair("../x"), *pair(str(secret.with_suffix(""))), *pair("a/../../y"), *pair("c\x1b[31m")]
    for name, kind in (("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE), ("p.jpg", tarfile.FIFOTYPE)):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, str(secret)
        members += [member, (name.replace("jpg", "txt"), b"A link.")]
    directory = tarfile.TarInfo("folder")
    directory.type = tarfile.DIRTYPE
    (tmp_path / "shards").mkdir()
    tar(tmp_path / "shards" / "s.tar", [directory, *members, *pair("good")])
    captions, images = read_shards(tmp_path / "shards")
    assert [record.sample_id for record in captions.records] == ["s/good"]
    kinds = [bad.kind for bad in captions.bad]
    assert kinds == ["unsafe member name"] * 8 + ["member that is no file"] * 3 + ["no image"] * 3
    assert repr(secret.as_posix())[1:-1] in captions.bad[2].detail
    assert all(text.isprintable() for bad in captions.bad for text in (bad.where, bad.detail))
    for name in ("../secret.jpg", f"{secret}", "/s.tar/a@0+9", "nowhere.tar/a@0+9", "s.tar/a@-1+9"):
        assert not images.is_there(name)
        with pytest.raises((OSError, ValueError)):
            images.open(name)
    (tmp_path / "shards" / "t.tar").symlink_to(tar(tmp_path / "outside.tar", pair("z")))
    captions, _ = read_shards(tmp_path / "shards")
    assert [record.sample_id for record in captions.records] == ["s/good", "t/z"]


def test_of_a_shard_cut_anywhere_what_was_whole_is_used(folder, tmp_path):
    whole, _ = written(folder, tmp_path / "shards", per_shard=4)
    path = tmp_path / "shards" / "shard-000001.tar"
    content = path.read_bytes()
    with tarfile.open(path) as file:
        members = file.getmembers()
    ends = [member.offset_data + member.size for member in members[1::2]]  # of each caption, after its image
    closing = members[-1].offset_data + 512 * -(-members[-1].size // 512) + 512
    assert len(ends) == 3 and closing <= len(content)
    for cut in sorted({*range(0, len(content), 97), *ends, *(end - 1 for end in ends), closing, closing - 1}):
        path.write_bytes(content[:cut])
        captions, _ = open_data(str(path.parent))
        left = sum(end <= cut for end in ends)
        assert captions.records == whole.records[: 4 + left], cut
        if cut >= closing:
            assert captions.bad == []
        else:
            (bad,) = captions.bad
            assert (bad.where, bad.kind) == (path.name, "broken shard")
            assert f"{3 - left} of 3 samples are missing" in bad.detail and "byte" in bad.detail


@pytest.mark.parametrize("order", [1, -1])
def test_neither_half_a_caption_nor_half_an_image_is_used(tmp_path, order):
    path = tar(tmp_path / "s.tar", [*pair("a"), *pair("b")[::order]])
    with tarfile.open(path) as file:
        last = file.getmembers()[-1]
    os.truncate(path, last.offset_data + last.size - 1)
    captions, _ = read_shards(path)
    assert [record.sample_id for record in captions.records] == ["s/a"]
    assert [bad.kind for bad in captions.bad] == ["broken shard"] and f"ends inside '{last.name}'" in captions.bad[
        0
    ].detail


def test_a_damaged_header_ends_a_shard_and_no_damage_stops_the_reading(tmp_path):
    path = tar(tmp_path / "s.tar", [member for key in range(4) for member in pair(str(key), key)])
    whole = path.read_bytes()
    with tarfile.open(path) as file:
        header = file.getmembers()[4].offset
    path.write_bytes(whole[:header] + b"damage" + whole[header + 6 :])
    captions, _ = read_shards(path)
    assert [record.sample_id for record in captions.records] == ["s/0", "s/1"]
    (bad,) = captions.bad
    assert bad.kind == "broken shard" and f"byte {header} of {len(whole)}" in bad.detail


def test_whatever_the_bytes_are_they_are_read_or_named(tmp_path):
    path = tar(tmp_path / "s.tar", [*pair("a"), *pair("x" * 120), *pair("c")])
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    with tarfile.open(path) as file:
        headers = [member.offset for member in file.getmembers()]
    for number in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            start = rng.choice(headers) + rng.randrange(512)
            content[start : start + 1] = rng.randbytes(rng.randint(1, 12))
        for header in headers if number % 2 else []:  # damage that the check sum hides
            block = content[header : header + 512]
            block[148:156] = b" " * 8
            content[header + 148 : header + 156] = b"%06o\0 " % sum(block)
        path.write_bytes(content)
        try:
            captions, images = read_shards(path)
        except UserError as error:
            assert "no usable sample" in str(error)
            refused += 1
            continue
        for record in captions.records:
            assert images.is_there(record.image)
    assert 0 < refused < 300


def with_header(path, index, kind, size, unpacked=0):
    """Gives a tar's member another type and size; `unpacked` is the size that a sparse one would have unpacked."""
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as file:
        header = file.getmembers()[index].offset
    block = content[header : header + 512]
    block[124:136] = b"\xff" * 8 + (size & 0xFFFFFFFF).to_bytes(4, "big") if size < 0 else b"%011o\0" % size
    block[156:157] = kind
    block[483:495] = b"%011o\0" % unpacked if kind == tarfile.GNUTYPE_SPARSE else bytes(12)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(content[:header] + block + content[header + 512 :])
    return path


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE])
@pytest.mark.parametrize("size", [-1, -2048])
@pytest.mark.parametrize("index", [2, 3])  # an image, a caption
def test_a_member_of_negative_size_does_not_make_the_reading_endless(tmp_path, kind, size, index):
    path = with_header(tar(tmp_path / "s.tar", [*pair("a"), *pair("b")]), index, kind, size, unpacked=100)
    captions, _ = read_shards(path)
    assert [record.sample_id for record in captions.records] == ["s/a"]
    assert "broken shard" in [bad.kind for bad in captions.bad]


def test_sparse_members_are_ignored_and_named(tmp_path):
    members = [*pair("a"), *pair("b"), *pair("c")]
    size = len(members[2][1])
    path = with_header(tar(tmp_path / "s.tar", members), 2, tarfile.GNUTYPE_SPARSE, size, unpacked=10**9)
    captions, _ = read_shards(path)
    assert [record.sample_id for record in captions.records] == ["s/a", "s/c"]
    assert [bad.kind for bad in captions.bad] == ["member that is no file", "no image"]


def test_a_shard_cut_after_it_was_indexed_is_noticed(tmp_path):
    path = tar(tmp_path / "s.tar", pair("a"))
    captions, images = read_shards(path)
    images.open(captions.records[0].image)
    os.truncate(path, 900)
    assert not images.is_there(captions.records[0].image)
    with pytest.raises(OSError, match=r"'s.tar' ends inside the image"):
        images.open(captions.records[0].image)
    with pytest.raises(OSError, match=r"'s.tar' ends before the image"):
        images.stamp(captions.records[0].image)


def test_absurdly_large_images_and_those_of_unknown_formats_are_bad_records(tmp_path):
    members = [("a.png", bomb()), ("a.txt", b"A."), ("b.jpg", encoded(picture(0), "EPS")), ("b.txt", b"B.")]
    captions, images = read_shards(tar(tmp_path / "s.tar", [*members, *pair("c")]))
    opened = [read_or_bad(record, images.open) for record in captions.records]
    assert opened[0].kind == "absurdly large image" and "cannot identify" in opened[1].detail
    assert opened[2].size == (24, 24)


def test_few_shards_are_open_at_once_and_none_after_pickling(tmp_path):
    for index in range(150):
        tar(tmp_path / f"{index:03}.tar", pair("a", index))
    captions, images = read_shards(tmp_path)
    assert len(captions.records) == 150
    before = len(os.listdir("/dev/fd"))
    for record in [*captions.records, *captions.records]:
        images.open(record.image)
    assert 0 < len(os.listdir("/dev/fd")) - before <= 128
    copy = pickle.loads(pickle.dumps(images))
    assert isinstance(copy, ShardImages) and copy.root == images.root
    record = captions.records[7]
    assert copy.open(record.image).tobytes() == images.open(record.image).tobytes()


def test_threads_share_the_open_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("debias_diffusion.data.shards._OPENED", 1)  # so that each drops what the others read from
    captions, images = written(folder, tmp_path / "shards", per_shard=1)
    expected = {record.image: images.open(record.image).tobytes() for record in captions.records}
    with ThreadPoolExecutor(8) as threads:
        for image, opened in [
            (record.image, threads.submit(images.open, record.image)) for record in list(captions.records) * 60
        ]:
            assert opened.result().tobytes() == expected[image]


def test_stamps_change_with_the_files(folder, tmp_path):
    for captions, images, path in (
        (*open_data(*folder), Path(folder[1]) / "part0" / "0.v1.png"),
        (*written(folder, tmp_path / "shards"), tmp_path / "shards" / "shard-000000.tar"),
    ):
        one, other = (images.stamp(record.image) for record in captions.records[:2])
        assert one != other and len(one) == len(other) == 16
        assert one == images.stamp(captions.records[0].image)
        assert images.is_there(captions.records[0].image)
        stat = path.stat()
        time.sleep(0.02)  # the clock of a file system ticks some hundred times a second
        path.write_bytes(path.read_bytes()[::-1])  # another file of the same size and time
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        assert images.stamp(captions.records[0].image) != one
        path.unlink()
        assert not images.is_there(captions.records[0].image)
        with pytest.raises(OSError):
            images.stamp(captions.records[0].image)


def test_verifying_finds_one_flipped_byte_and_a_lost_shard(folder, tmp_path):
    written(folder, tmp_path / "shards")
    assert verify_shards(tmp_path / "shards") == []
    path = tmp_path / "shards" / "shard-000001.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    (bad,) = verify_shards(tmp_path / "shards")
    assert (bad.where, bad.kind) == ("shard-000001.tar", "changed shard")
    assert verify_shards(path) == [bad] and verify_shards(path.with_name("shard-000000.tar")) == []
    assert open_data(str(path.with_name("shard-000000.tar")))[0].bad == []
    path.unlink()
    for faults in (verify_shards(tmp_path / "shards"), open_data(str(tmp_path / "shards"))[0].bad):
        assert [(bad.where, bad.kind, bad.detail) for bad in faults] == [(path.name, "missing shard", "3 samples")]
    (tmp_path / "shards" / "job.json").unlink()
    assert verify_shards(tmp_path / "shards") == []


def test_what_cannot_be_opened_is_refused_with_what_to_do(folder, tmp_path):
    tar(tmp_path / "s.tar", pair("a"))
    tar(tmp_path / "empty.tar", [])
    (tmp_path / "nothing").mkdir()
    for arguments, message in (
        ((str(tmp_path), folder[1]), "hold their images, but images is.*Leave images out"),
        ((str(tmp_path / "s.tar"), folder[1]), "hold their images, but images is"),
        ((folder[1], folder[1]), "hold their images, but images is.*Leave images out"),
        (("toy/test", folder[1]), "'toy/test' hold their images.*Leave images out"),
        ((folder[0], None), "images is not given. Give the folder"),
        ((str(tmp_path / "nothing"), None), r"no \*.tar. Give a folder of image and caption files"),
        ((str(tmp_path / "nowhere.tar"), None), "are not there"),
        ((str(tmp_path / "nowhere"), None), "are not there. Give a JSON or JSONL file; WebDataset shards"),
        ((str(tmp_path / "empty.tar"), None), "they are empty"),
        ((folder[0], str(tmp_path / "nowhere")), "Image folder .* is not there"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(*arguments)
    (tmp_path / "bad.tar").write_bytes(b"no tar at all" * 99)
    with pytest.raises(UserError, match=r"no usable sample. The first fault: bad.tar: broken shard"):
        open_data(str(tmp_path / "bad.tar"))


def test_other_data_has_another_digest(folder, tmp_path):
    shards = str(tmp_path / "shards")
    ours, _ = written(folder, shards)
    digest = data_digest(shards, ours)
    moved = str(tmp_path / "moved")
    os.rename(shards, moved)
    assert data_digest(moved, open_data(moved)[0]) == digest
    written(make_folder(tmp_path / "fewer", SIZES[:-1]), shards)
    other = data_digest(shards, open_data(shards)[0])
    of_file = data_digest(folder[0], open_data(*folder)[0])
    assert len({digest, other, of_file}) == 3 and all(len(value) == 64 for value in (digest, other, of_file))


def test_evaluations_take_shards(folder, tmp_path):
    model = str(save_tiny_clip(tmp_path / "clip"))
    written(folder, tmp_path / "shards")
    report = evaluate_retrieval(RetrievalConfig([model], str(tmp_path / "scores"), str(tmp_path / "shards")))
    assert report["images"] == 7 and report["left_out"] == []
    theirs = evaluate_retrieval(RetrievalConfig([model], str(tmp_path / "scores"), *folder))
    assert theirs["images"] == 7 and theirs["digests"]["data"] != report["digests"]["data"]
