"""The notebooks of examples/, executed whole with the toy models: one cell of settings is replaced."""

import json

import torch
from helpers.modules import ROOT
from PIL import Image

from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.toyworld.grammar import caption
from debias_diffusion.toyworld.shipped import shipped

NOTEBOOK = ROOT / "examples" / "long_prompts_sdxl.ipynb"
TOY = {"BASE": shipped("toy/sdxl"), "LONG_CLIP": "toy/long-clip", "NEGATIVE": ""}
TOY |= {"DEVICE": "cpu", "DTYPE": "float32", "VARIANT": None, "SIZE": 48, "STEPS": 2, "GUIDANCE": 3.0, "SEED": 0}
# Nothing within 77 tokens tells these two from each other.
OPENING = caption("test", 0).text
TOY["PROMPTS"] = [
    OPENING,
    OPENING + "In the top right there is a large yellow star.",
    *(caption("test", i).text for i in (1, 2, 3)),
]


def code_cells() -> dict[str, str]:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def test_all_cells_run_in_order_and_the_settings_are_complete(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells, names = code_cells(), dict(TOY)
    exec(cells.pop("settings"), values := {})
    assert values.keys() == TOY.keys() | {"__builtins__"} and hasattr(torch, values["DTYPE"])
    lengths = [len(ids) for ids in clip_tokenizer(248)(values["PROMPTS"]).input_ids]
    assert len(lengths) == 5 and min(lengths) > 77 + 20 and max(lengths) <= 248
    for identifier, source in cells.items():
        exec(compile(source, f"{NOTEBOOK.name}, cell {identifier}", "exec"), names)
    rows = {way: [image.tobytes() for image in images] for way, images in names["rows"].items()}
    assert list(rows) == ["cut", "chunks", "LongCLIP-L"] and {len(images) for images in rows.values()} == {5}
    # Only a prompt that is read past 77 tokens is another one with another end; and no way draws what another does.
    assert [images[0] != images[1] for images in rows.values()] == [False, True, True]
    assert all(len(set(images)) == 3 for images in zip(*rows.values(), strict=True))
    assert names["chunks"].unet is names["stock"].unet is names["long_clip"].unet
    assert capsys.readouterr().out.count("stock reads 75") == 5
    assert (tmp_path / "real" / "check.json").is_file()
    with Image.open("long_prompts_sdxl.png") as sheet:
        assert sheet.size == (5 * 384, 3 * 408)
