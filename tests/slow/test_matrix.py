"""Every class with every feature; tests/test_matrix.py has a part of them."""

import pytest
from helpers.matrix import CELLS, check

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_cell(name, feature):
    check(name, feature)
