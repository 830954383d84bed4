"""`reproduce`: every table's and claim's file from end to end on tiny data."""

from pathlib import Path

import pytest
from helpers.small_papers import PAPERS, count_compared, write_small_papers

from debias_diffusion.app.options import ReproduceConfig
from debias_diffusion.app.reproduce.command import RESULTS
from debias_diffusion.app.reproduce.evidence import evidence_page
from debias_diffusion.app.reproduce.listing import reproduce
from debias_diffusion.app.reproduce.papers import read_tables
from debias_diffusion.app.reproduce.units import RESULT
from debias_diffusion.files import read_json_object

pytestmark = pytest.mark.usefixtures("coarse_results")


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    return write_small_papers(tmp_path_factory.mktemp("repository") / "configs" / "papers")


@pytest.fixture(scope="module")
def settings(papers, tmp_path_factory):
    output = tmp_path_factory.mktemp("papers")
    return {"world": "toy", "papers": str(papers), "output": str(output), "device": "cpu"}


@pytest.fixture(scope="module")
def written(settings):
    return reproduce(ReproduceConfig(["all"], **settings))


def test_every_file_is_executed_from_end_to_end(written, papers, settings):
    output = Path(settings["output"]) / "toy"
    tables = read_tables(papers)
    assert len(tables) > 25 and {file.name for file in written} == {f"{name}.md" for name in tables} | {
        "claims.md",
        "claims.json",
    }
    for name, table in tables.items():
        count_compared(table, read_json_object(output / f"{name}.json"))
    assert "| Shuffle |" in (output / "table-S4.md").read_text()


def test_what_is_done_is_kept_and_shared(written, settings, capsys):
    output = Path(settings["output"]) / "toy"
    before = {file: file.stat().st_mtime_ns for file in output.rglob(RESULT)}
    assert len(before) > 80
    capsys.readouterr()
    reproduce(ReproduceConfig(["table-S5", "table-5"], **settings))
    assert {file: file.stat().st_mtime_ns for file in output.rglob(RESULT)} == before
    printed = capsys.readouterr().out
    assert "to do: 0 trainings, 0 other pieces" in printed
    trainings = list((output / "seed-0" / "training").iterdir())
    assert all(not list(folder.glob("checkpoint-*")) and (folder / "last").is_dir() for folder in trainings)


def test_a_page_has_every_claim_and_verdict(written, settings):
    output = Path(settings["output"]) / "toy"
    content = read_json_object(output / "claims.json")
    page = (output / "claims.md").read_text()
    assert page == evidence_page(content, RESULTS)
    entries = [entry for group in content["claims"].values() for entry in group]
    assert f"Of {len(entries)} claims: " in page
    assert "Padding adds to both on long captions at one epoch" in page


@pytest.mark.parametrize("world", ["toy", "real"])
def test_every_row_has_settings_that_can_be_used(world, tmp_path, capsys):
    reproduce(ReproduceConfig(["all"], world=world, papers=str(PAPERS), output=str(tmp_path / "new"), plan=True))
    printed = capsys.readouterr().out
    assert "to do: " in printed and ("of one core" if world == "toy" else "GPU hours") in printed
    assert not (tmp_path / "new").exists()
