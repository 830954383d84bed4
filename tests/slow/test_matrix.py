"""Every class with every feature; tests/test_matrix.py has a part of them."""

import re
from collections import Counter
from contextlib import suppress

import pytest
from helpers.draw import EMBEDDINGS
from helpers.matrix import CELLS, Pipelines, check
from helpers.pages import ROOT

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_cell(name, feature):
    check(name, feature)


class ReadByCompel(Pipelines):
    """The stock pipeline given compel's embeddings, as its documentation says."""

    def __init__(self, name: str, copies: bool = False):
        super().__init__(name, copies)
        self.ours = self

    def set_long_prompt(self, *, emphasis: str):
        return self

    def draw(self, pipe, prompt, **call):
        if pipe is not self:
            return super().draw(pipe, prompt, **call)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        prompts = [re.sub(r"\((\w+):([\d.]+)\)", r"(\1)\2", text) for text in prompts]  # its syntax
        from compel import CompelForSD, CompelForSDXL

        is_xl = "XL" in type(self.stock).__name__
        negative = call.pop("negative_prompt", None if is_xl else "")  # SDXL's absent one is zeros, of any length
        read = (CompelForSDXL if is_xl else CompelForSD)(self.stock, device="cpu")
        result = read(prompts, negative_prompt=None if negative is None else [negative] * len(prompts))
        given = {name: getattr(result, name.replace("prompt_", "")) for name in EMBEDDINGS}
        given = {name: embeds for name, embeds in given.items() if embeds is not None}
        return super().draw(self.stock, None, **given, **call)


@pytest.mark.needs("compel")
def test_cells_of_compel():
    holds, asked = Counter(), [cell for cell in CELLS if cell[1] not in ("`positions`", "embeddings given")]
    for name, feature in asked:
        with suppress(Exception):
            check(name, feature, ReadByCompel)
            holds[feature] += 1
    text = f"{holds.total()} of {len(asked)} cells"
    assert text in (ROOT / "docs" / "comparison.md").read_text(), (text, holds)
