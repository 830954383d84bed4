"""What earlier versions left (helpers/kept.py) is continued and drawn again by this one."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import kept
from helpers.training_runs import lines_of, without_clock
from PIL import Image

from debias_diffusion.app.generate import generate
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.training.two_tower import train


@pytest.fixture(params=sorted(kept.DATA.glob("kept-*.zip")), ids=lambda file: file.stem)
def folder(request, tmp_path, monkeypatch):
    shutil.unpack_archive(request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_was_killed_continues_as_it_would_have(folder, capsys):
    train(kept.training())
    assert ", 4 of them made" in capsys.readouterr().out
    for line, expected in zip(without_clock("run"), lines_of("expected.jsonl"), strict=True):
        assert line == pytest.approx(expected, rel=1e-3)  # processors round otherwise


def test_a_folder_of_images_continues(folder):
    before = {path: path.read_bytes() for path in Path("drawn").glob("*.png")}
    generate(kept.images())
    assert len(before) == 2 and all(path.read_bytes() == content for path, content in before.items())
    assert [line["file"][:7] for line in lines_of("drawn/index.jsonl")] == ["00000-0", "00001-1", "00002-2"]


def test_an_image_is_drawn_again_with_its_settings(folder):
    generate(GenerateConfig(None, like="picture.png", output="again.png", **kept.TOY))
    files = [Path(name) for name in ("picture.png", "again.png")]
    settings, again = map(read_settings, files)
    assert settings == again == settings | kept.PICTURE | {"scheduler": "DPM++ 2M"}
    first, second = (np.asarray(Image.open(file), dtype=float) for file in files)
    assert np.abs(first - second).mean() < 1
