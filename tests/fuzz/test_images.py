"""Damaged and disguised images of every format that Pillow can write, in folders and in shards."""

import io
import os
import subprocess
import tarfile
from functools import cache

import pytest
from fuzzing import examples, fuzz, no_hang
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.dataset import CaptionDataset
from debias_diffusion.data.images import ImageFolder, is_there
from debias_diffusion.data.sources import open_data
from debias_diffusion.methods import find_method
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

MODES = ("RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16", "I", "F")
ENDINGS = ("jpg", "png", "webp", "gif", "tif", "eps", "avif", "dat")


@cache
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer(clip_tokenizer(77), 77)


@cache
def encoded() -> list[bytes]:
    """A small image in every format and mode that Pillow writes."""
    Image.init()
    files = []
    for name in sorted(Image.SAVE):
        for mode in MODES:
            buffer = io.BytesIO()
            picture = Image.linear_gradient("L").resize((24, 20))
            try:
                (picture if mode == "L" else picture.convert(mode)).save(buffer, name)
            except Exception:  # this format has no such mode, or its library is not installed
                continue
            files.append(buffer.getvalue())
    return files


def whole_png() -> bytes:
    return next(file for file in encoded() if file.startswith(b"\x89PNG"))


@st.composite
def damaged(draw) -> bytes:
    """One of the files: whole, with some bytes changed, cut short, with another's beginning, or with bytes added."""
    content = bytearray(draw(st.sampled_from(encoded())))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, min(len(content), 512) - 1)) | st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "begin", "add", "huge")))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at:]
        elif kind == "begin":
            begin = draw(st.sampled_from(encoded()))[: draw(st.integers(1, 64))]
            content[: len(begin)] = begin
        elif kind == "add":
            content[at:at] = draw(st.binary(max_size=64))
        else:
            content[at : at + 4] = draw(st.sampled_from((b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\0")))
    return bytes(content)


@pytest.fixture(autouse=True)
def no_program(monkeypatch):
    """No image may start a program (Pillow runs Ghostscript for EPS)."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr(os, "system", started.append)
    yield
    assert not started


def sample(captions, source, index: int, stand_in: int):
    """A record through the data set that training reads, with another to replace it: (sample, modes and sizes seen)."""
    seen = []

    def preprocess(image):
        seen.append((image.mode, image.size))
        return image

    dataset = CaptionDataset(
        captions.records, source, preprocess, tokenizer(), find_method("debias-clip"), 0, lambda epoch: [stand_in]
    )
    with no_hang():
        return dataset[0, index, 0], seen


def test_an_image_of_a_folder_opens_or_is_a_bad_record(tmp_path):
    (tmp_path / "whole.png").write_bytes(whole_png())
    opened, refused = 0, 0

    @examples(200)
    @given(damaged(), st.sampled_from(ENDINGS))
    def search(content, ending):
        nonlocal opened, refused
        (tmp_path / f"image.{ending}").write_bytes(content)
        rows = "".join(f'{{"image": "{name}", "caption": "A. B."}}\n' for name in (f"image.{ending}", "whole.png"))
        (tmp_path / "data.jsonl").write_text(rows)
        read, seen = sample(*open_data(tmp_path / "data.jsonl", tmp_path), index=0, stand_in=1)
        assert [mode for mode, _ in seen] == ["RGB"]
        if read.sample_id == "whole.png":
            (bad,) = read.bad
            assert bad.where == f"image.{ending}" and bad.detail
            refused += 1
        else:
            assert read.bad == []
            opened += 1

    fuzz(search, seconds=25)
    assert opened and refused
    print(f"{opened} images opened, {refused} refused")


def test_a_shard_is_read_as_far_as_it_can_be(tmp_path):
    """Damaged members, and a damaged tar around them."""

    @examples(100)
    @given(st.lists(damaged(), min_size=1, max_size=4), st.integers(0, 2), st.data())
    def search(contents, flips, data):
        buffer, first = io.BytesIO(), 0
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number, content in enumerate([whole_png(), *contents]):
                for name, part in ((f"{number}.png", content), (f"{number}.txt", b"A. B.")):
                    member = tarfile.TarInfo(name)
                    member.size = len(part)
                    tar.addfile(member, io.BytesIO(part))
                first = tar.offset if number == 0 else first
        whole = bytearray(buffer.getvalue())
        for _ in range(flips):
            whole[data.draw(st.integers(first, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        (tmp_path / "a.tar").write_bytes(whole)
        with no_hang():
            captions, images = open_data(tmp_path / "a.tar")
        assert captions.records[0].sample_id == "a/0" and all(record.caption for record in captions.records)
        for index, record in enumerate(captions.records):
            assert is_there(images, record.image)
            read, _ = sample(captions, images, index, stand_in=0)
            assert read.sample_id in (record.sample_id, "a/0") and len(read.bad) == (read.sample_id != record.sample_id)

    fuzz(search, seconds=10)


def test_every_path_in_a_folder_opens_or_is_a_bad_record(tmp_path):
    """What is no image: loops of links, folders, names that cannot be."""
    inside = tmp_path / "images"
    inside.mkdir()
    (inside / "loop").symlink_to("loop")
    (inside / "first").symlink_to("second")
    (inside / "second").symlink_to("first")
    (inside / "folder").mkdir()
    (inside / "empty").write_bytes(b"")
    source = ImageFolder(inside)
    names = [*(path.name for path in inside.iterdir()), "x" * 300, "a/" * 2000, "nul\0", "."]
    for name in names:
        with no_hang(), pytest.raises((OSError, ValueError)):
            source.open(name)
        assert is_there(source, name) in (True, False)
