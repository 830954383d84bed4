"""Damaged and disguised images of every format that Pillow can write, in folders and in shards."""

import io
import os
import subprocess
import tarfile
from functools import cache

import pytest
from helpers.fuzzing import fuzz, no_hang
from helpers.mutations import damaged_bytes
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.dataset import CaptionDataset
from debias_diffusion.data.images import ImageFolder, is_there
from debias_diffusion.data.sources import open_data
from debias_diffusion.methods import find_method
from debias_diffusion.tokens import CaptionTokenizer

MODES = ("RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16", "I", "F")
ENDINGS = ("jpg", "png", "webp", "gif", "tif", "eps", "avif", "dat")


@cache
def encoded() -> list[bytes]:
    """A small image in every format and mode that Pillow writes, PNG first."""
    Image.init()
    files = []
    for name in sorted(Image.SAVE, key=lambda name: (name != "PNG", name)):
        for mode in MODES:
            buffer = io.BytesIO()
            try:
                Image.linear_gradient("L").resize((24, 20)).convert(mode).save(buffer, name)
            except Exception:  # this format has no such mode, or its library is not installed
                continue
            files.append(buffer.getvalue())
    return files


@st.composite
def damaged(draw) -> bytes:
    """One of the files: whole, damaged, or with another's beginning."""
    content, other = (draw(st.sampled_from(encoded())) for _ in range(2))
    content = draw(st.sampled_from((content, other[: draw(st.integers(0, 64))] + content)))
    return draw(st.just(content) | damaged_bytes(content))


@pytest.fixture(autouse=True)
def no_program(monkeypatch):
    """No image may start a program (Pillow runs Ghostscript for EPS)."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr(os, "system", started.append)
    yield
    assert not started


def sample(captions, source, index: int, stand_in: int):
    """A record as training reads it, with another to replace it, and the modes of the images that were opened."""
    tokenizer, method, modes = CaptionTokenizer(tiny_tokenizer(77), 77), find_method("debias-clip"), []
    preprocess = lambda image: modes.append(image.mode) or image  # noqa: E731
    dataset = CaptionDataset(captions.records, source, preprocess, tokenizer, method, 0, lambda epoch: [stand_in])
    with no_hang():
        return dataset[0, index, 0], modes


def test_an_image_of_a_folder_opens_or_is_a_bad_record(tmp_path):
    (tmp_path / "whole.png").write_bytes(encoded()[0])
    counts = {"opened": 0, "refused": 0}

    @given(damaged(), st.sampled_from(ENDINGS))
    def search(content, ending):
        (tmp_path / f"image.{ending}").write_bytes(content)
        rows = "".join(f'{{"image": "{name}", "caption": "A. B."}}\n' for name in (f"image.{ending}", "whole.png"))
        (tmp_path / "data.jsonl").write_text(rows)
        read, modes = sample(*open_data(tmp_path / "data.jsonl", tmp_path), index=0, stand_in=1)
        assert modes == ["RGB"]
        refused = read.sample_id == "whole.png"
        assert [(bad.where, bool(bad.detail)) for bad in read.bad] == [(f"image.{ending}", True)] * refused
        counts["refused" if refused else "opened"] += 1

    fuzz(search, seconds=25)
    print(counts)
    assert all(counts.values())


def test_a_shard_is_read_as_far_as_it_can_be(tmp_path):
    """Damaged members, and a damaged tar around them."""

    @given(st.lists(damaged(), min_size=1, max_size=4), st.integers(0, 2), st.data())
    def search(contents, flips, data):
        buffer, first = io.BytesIO(), 0
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number, content in enumerate([encoded()[0], *contents]):
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

    fuzz(search, seconds=10, count=100)


def test_every_path_in_a_folder_opens_or_is_a_bad_record(tmp_path):
    """What is no image: loops of links, folders, names that cannot be."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    source = ImageFolder(tmp_path)
    for name in ("loop", "folder", "empty", "x" * 300, "a/" * 2000, "nul\0", "."):
        with no_hang(), pytest.raises((OSError, ValueError)):
            source.open(name)
        assert is_there(source, name) in (True, False)
