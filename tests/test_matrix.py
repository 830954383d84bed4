"""A part of the table of classes and features, each meeting others in turn; tests/slow has all of it."""

import diffusers
import pytest
from helpers.matrix import CASES, CELLS, FEATURES, REFUSED, check, refusals, table
from helpers.pages import ROOT

from debias_diffusion.pipelines import with_long_prompts

pytestmark = pytest.mark.usefixtures("no_grad")
ROWS, COLUMNS = list(CASES), list(FEATURES)
PART = [cell for cell in CELLS if (ROWS.index(cell[0]) + COLUMNS.index(cell[1])) % 4 == 0]


@pytest.mark.parametrize(("name", "feature"), PART)
def test_cell(name, feature):
    check(name, feature)


def test_every_class_and_every_feature_is_among_them():
    assert {name for name, _ in PART} == set(CASES) and {feature for _, feature in PART} == set(FEATURES)


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.startswith("Alt")])
def test_a_class_that_encodes_otherwise_is_refused_with_what_works_instead(name):
    """AltDiffusion's class encodes as they do, but its encoder is no CLIP (tests/test_wrapped_pipelines.py)."""
    cls = getattr(diffusers, name)
    instead = r".* It can be given .*prompt_embed.* a wrapped base" if "wrapped base" in REFUSED[name] else ""
    with pytest.raises(ValueError, match=f"{name} does not encode prompts as SDXL or Stable Diffusion 1.5 do{instead}"):
        with_long_prompts(cls.__new__(cls))


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "pipelines.md").read_text()
    assert table() in page and refusals() in page
