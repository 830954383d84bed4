"""`reproduce`: every table's, claim's and study's file from end to end on tiny data."""

import pytest
from helpers.small_papers import PAPERS, count_compared, write_small_papers

from debias_diffusion.files import read_json_object
from research.options import ReproduceConfig
from research.reproduce.evidence import evidence_page
from research.reproduce.listing import reproduce
from research.reproduce.papers import read_tables

pytestmark = pytest.mark.usefixtures("coarse_results", "with_research")


def test_every_file_is_executed_from_end_to_end_and_the_page_has_every_claim(tmp_path):
    papers, output = write_small_papers(tmp_path / "research" / "papers"), tmp_path / "output" / "toy"
    written = reproduce(ReproduceConfig(["all"], "toy", papers=str(papers), output=str(output.parent), device="cpu"))
    tables = read_tables(papers)
    names = {f"{name}.md" for name in tables} | {"claims.json", "evidence.md"}
    assert len(tables) > 25 and {file.name for file in written} == names
    for name, table in tables.items():
        count_compared(table, read_json_object(output / f"{name}.json"))
    assert "| Shuffle |" in (output / "table-S4.md").read_text()
    trainings = list((output / "seed-0" / "training").iterdir())
    assert trainings and all((folder / "last").is_dir() for folder in trainings)
    assert (output / "evidence.md").read_text() == evidence_page(read_json_object(output / "claims.json"))


@pytest.mark.parametrize("world", ["toy", "real"])
def test_every_row_has_settings_that_can_be_used(world, tmp_path, capsys):
    reproduce(ReproduceConfig(["all"], world=world, papers=str(PAPERS), output=str(tmp_path / "new"), plan=True))
    printed = capsys.readouterr().out
    assert "to do: " in printed and ("of one core" if world == "toy" else "GPU hours") in printed
    assert not (tmp_path / "new").exists()
