"""The repository's files of papers and claims, with the smallest of toy worlds."""

import shutil
from pathlib import Path

import yaml

from research.reproduce.papers import read_tables

PAPERS = Path(__file__).parents[2] / "research" / "papers"


def write_small_papers(folder: Path) -> Path:
    """A copy in which everything is trained and evaluated in moments, and each table has its last row alone."""
    shutil.copytree(PAPERS, folder)
    world = yaml.safe_load((folder / "world-toy.yaml").read_text())
    world |= {"steps_per_epoch": 1, "pairs": 16, "held_out": 2}
    world["training"]["batch"] = 8
    world["ablation"] |= {"limit": 22, "generations": 1, "bp_batch": 8}
    few = {"components": {32: 2, 4: 0}, "batch": {1024: 8, 2048: 8}, "limit": dict.fromkeys((100, 200, 500, 1000), 22)}
    few["epochs"] = dict.fromkeys((3, 5, 6, 7, 9, 10, 16, 32, 64), 1)
    world["substitute"] |= few
    for evaluation in world["evaluations"].values():
        evaluation["limit"] = 3
    world["evaluations"]["sharegpt4v-generation"] |= {"limit": 2, "steps": 1}
    (folder / "world-toy.yaml").write_text(yaml.safe_dump(world))
    for name in read_tables(folder):  # the claims train the models of most other rows
        table = yaml.safe_load((folder / f"{name}.yaml").read_text())
        row = list(table["rows"])[-1]
        table["rows"] = {row: table["rows"][row]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    return folder


def count_compared(table, content: dict) -> int:
    """How many numbers of a result stand beside published ones."""
    assert list(content["rows"]) == list(table.rows)
    compared = 0
    for label, cells in content["rows"].items():
        for cell, number in zip(cells.values(), table.rows[label].published, strict=False):
            assert cell["published"] == number
            compared += number is not None
    return compared
