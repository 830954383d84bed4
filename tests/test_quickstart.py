"""The quickstart: the whole chain with tiny untrained models, what it says, and folders it must not touch."""

import json
from pathlib import Path

import pytest
from helpers.html_page import Page
from helpers.untrained_toys import save_untrained_toys
from PIL import Image

from debias_diffusion.app.fine_tuning import RECIPES
from debias_diffusion.app.quickstart import QuickstartConfig, Setup, quickstart
from debias_diffusion.encoders.spec import load_text_encoder
from debias_diffusion.errors import UserError

pytestmark = pytest.mark.usefixtures("coarse_results")
# More prompts than scenes: the one does not limit the other.
TINY = {"scenes": 2, "prompts": 3, "split": "development", "train": "all"}
ROWS = ("SDXL's own, cut at 77 tokens", "SDXL's own, overlapping chunks", *RECIPES)  # of images


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    return save_untrained_toys(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def finished(setup, coarse_results, tmp_path_factory) -> Path:
    """The output of one run, which no test changes."""
    output = tmp_path_factory.mktemp("quickstart")
    assert quickstart(QuickstartConfig(**TINY, output=str(output)), setup) == output / "report.html"
    return output


def test_the_page_the_exports_and_the_images_are_there(finished):
    page = Page((finished / "report.html").read_text())
    page.check_is_self_contained()
    assert [row[0] for row in page.rows[1:6]][:2] == list(ROWS[:2]) and len(page.all("img")) > 5
    encoders = [load_text_encoder(str(finished / name)) for name in RECIPES]
    assert all(encoder.config.max_position_embeddings == 248 for encoder, _ in encoders)
    generated = json.loads((finished / "evaluation" / "generation.json").read_text())
    assert tuple(generated["encoders"]) == ROWS
    images = sorted((finished / "evaluation" / "images").glob("*/000001.png"))
    assert len(images) == len({path.read_bytes() for path in images}) == len(ROWS)
    assert {json.loads(Image.open(path).text["settings"])["seed"] for path in images} == {1}  # of image 1


def test_a_finished_run_does_nothing_again(finished, setup, monkeypatch, capsys):
    made = [*finished.glob("training/*/checkpoint-*"), *finished.glob("**/images/**/*.png")]
    before = {file: file.stat().st_mtime_ns for file in made}
    assert len(before) > 20
    quickstart(QuickstartConfig(**TINY, output=str(finished)), setup)
    assert {file: file.stat().st_mtime_ns for file in made} == before
    with pytest.raises(UserError, match="seed: 0 there, 1 here"):
        quickstart(QuickstartConfig(**TINY, output=str(finished), seed=1), setup)


def test_folders_of_others_are_refused(tmp_path, setup):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="something else"):
        quickstart(QuickstartConfig(**TINY, output=str(tmp_path)), setup)
