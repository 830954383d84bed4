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
def test_refused(name):
    cls = getattr(diffusers, name)
    with pytest.raises(ValueError, match=f"{name} does not encode prompts as SDXL or Stable Diffusion 1.5 do"):
        with_long_prompts(cls.__new__(cls))


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "pipelines.md").read_text()
    assert table() in page and refusals() in page
