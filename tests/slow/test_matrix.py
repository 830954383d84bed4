"""Every class with every feature, but for the cells of tests/test_matrix.py."""

import pytest
from helpers.matrix import CELLS, PART, check

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("name", "feature"), [cell for cell in CELLS if cell not in PART])
def test_cell(name, feature):
    check(name, feature)
