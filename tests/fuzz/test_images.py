"""Damaged and disguised images of every format that Pillow can write, in a shard that is damaged too; odd settings."""

import io
import json
import os
import re
import subprocess
import tarfile
from functools import cache

import pytest
from helpers.fuzzing import fuzz, no_hang
from helpers.modules import ROOT
from helpers.mutations import ODD_VALUES, damaged_bytes
from helpers.vocabulary import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.data.images import is_there
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.methods import find_method
from debias_diffusion.pipelines.rendering.infotext import read_image
from debias_diffusion.text.tokens import CaptionTokenizer
from debias_diffusion.training.batches import CaptionDataset

# Pillow says what it makes the best of.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MODES = ("RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16", "I", "F")


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


def test_a_shard_is_read_as_far_as_it_can_be(tmp_path):
    """Each image opens, or is a bad record and another one stands in for it; the tar around them is damaged too."""
    tokenizer, method = CaptionTokenizer(tiny_tokenizer(77), 77), find_method("debias-clip")
    counts = {"opened": 0, "refused": 0}

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
        modes = []
        preprocess = lambda image: modes.append(image.mode) or image  # noqa: E731
        dataset = CaptionDataset(captions.records, images, preprocess, 0, lambda epoch: [0], tokenizer, method)
        for index, record in enumerate(captions.records):
            assert is_there(images, record.image)
            with no_hang():
                read = dataset[0, index, 0]
            refused = read.sample_id != record.sample_id
            assert not refused or read.sample_id == "a/0"
            assert [(bad.where, bool(bad.detail)) for bad in read.bad] == [(record.image, True)] * refused
            counts["refused" if refused else "opened"] += 1
        assert set(modes) == {"RGB"}

    fuzz(search, seconds=10, count=100)
    print(counts)
    assert all(counts.values())


SETTINGS = {
    "prompt": json.dumps(json.loads((ROOT / "examples" / "comfyui" / "long_prompt.json").read_text())),
    "parameters": "a\nNegative prompt: b\nSteps: 2, Sampler: Euler, Seed: 3, Size: 8x8, Clip skip: 2, Emphasis: None",
    "settings": '{"prompt": "a <lora:b:1>", "seed": 3, "reading": "a1111", "scheduler": "Euler"}',
}
VALUE = re.compile(r'(?<=: )("[^"]*"|\[[^]]*\]|\{[^{}]*\}|[^,\n{}]+)|$')
ODD = (*ODD_VALUES, ["3", 0], ["5", 1], ["6", 0], {"": ["6", 0]}, {"class_type": "X", "inputs": {"value": 3}})
NOT_PLAIN = re.compile(r"object has|unhashable|Expecting|subscript|NoneType|unpack|codec|argument")


def test_settings_in_images_are_read_or_refused_in_plain_words(tmp_path):
    """With odd values, and links from nodes to any others, in the place of values."""

    @given(st.sampled_from([*SETTINGS]), st.lists(st.sampled_from(ODD), max_size=8), st.data())
    def search(name, odd_values, data):
        info, text = PngInfo(), SETTINGS[name]
        for odd in odd_values:
            value = data.draw(st.sampled_from([*VALUE.finditer(text)]))
            text = text[: value.start()] + json.dumps(odd) + text[value.end() :]
        info.add_text(name, text)
        Image.new("L", (1, 1)).save(tmp_path / "a.png", pnginfo=info)
        try:
            with no_hang():
                sentences = read_image(tmp_path / "a.png").left
        except UserError as error:
            sentences = [str(error)]
        assert not NOT_PLAIN.search(str(sentences))

    fuzz(search, seconds=5)
