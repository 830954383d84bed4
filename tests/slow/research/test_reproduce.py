"""`reproduce`: every table's, claim's and study's file from end to end on tiny data."""

import pytest
import yaml
from helpers.small_papers import PAPERS, STUDIES, count_compared, write_small_papers

from debias_diffusion.files import read_json_object
from research.options import ReproduceConfig
from research.reproduce.evidence import evidence_page
from research.reproduce.listing import reproduce
from research.reproduce.papers import read_tables

pytestmark = pytest.mark.usefixtures("coarse_results")


def test_every_file_is_executed_from_end_to_end_and_the_page_has_every_claim(tmp_path):
    papers, output = write_small_papers(tmp_path / "research" / "papers"), tmp_path / "output" / "toy"
    written = reproduce(ReproduceConfig(["all"], "toy", papers=str(papers), output=str(output.parent), device="cpu"))
    tables = read_tables(papers)
    names = {f"{name}.md" for name in tables} | {"claims.md", "claims.json", "evidence.md"}
    assert len(tables) > 25 and {file.name for file in written} == names
    for name, table in tables.items():
        count_compared(table, read_json_object(output / f"{name}.json"))
    assert "| Shuffle |" in (output / "table-S4.md").read_text()
    trainings = list((output / "seed-0" / "training").iterdir())
    assert trainings and all((folder / "last").is_dir() for folder in trainings)
    content, page = read_json_object(output / "claims.json"), (output / "claims.md").read_text()
    assert page == evidence_page(content, every=True)
    assert f"Of {sum(map(len, content['claims'].values()))} claims: " in page
    assert "Padding adds to both on long captions at one epoch" in page


def test_a_study_trains_aligns_and_draws(tmp_path):
    """The trained and aligned encoder differs from the trained one, and readings from each other."""
    world = yaml.safe_load((STUDIES / "world-toy-test.yaml").read_text())
    world |= {"pairs": 16, "steps_per_epoch": 1}
    world["training"] |= {"batch": 8, "components": 2, "epochs": 1}
    few = {"batch": 8, "max_steps": 1, "epochs": 1, "warmup": 0, "eval_every": 1, "precision": "fp32"}
    world["alignment"] |= few
    world["evaluations"]["long"] |= {"limit": 2, "steps": 1}
    (tmp_path / "world-toy-test.yaml").write_text(yaml.safe_dump(world))
    (tmp_path / "toy-world-long.yaml").write_text((STUDIES / "toy-world-long.yaml").read_text())
    settings = {"world": "toy-test", "papers": str(tmp_path), "output": str(tmp_path / "output"), "device": "cpu"}
    reproduce(ReproduceConfig(["toy-world-long"], seeds=[7], **settings))
    rows = read_json_object(tmp_path / "output" / "toy-test" / "toy-world-long.json")["rows"]
    second = "debias-clip-sdxl, the second in overlapping chunks"
    different = ["clip", "clip in chunks", "clip in overlapping chunks", "long-clip", "debias-clip"]
    different += [second, "clip in overlapping chunks, aligned", f"{second}, aligned"]
    assert len(rows) == 11 and len({rows[name]["FID"]["ours"] for name in different}) == len(different)


@pytest.mark.parametrize("world", ["toy", "real"])
def test_every_row_has_settings_that_can_be_used(world, tmp_path, capsys):
    reproduce(ReproduceConfig(["all"], world=world, papers=str(PAPERS), output=str(tmp_path / "new"), plan=True))
    printed = capsys.readouterr().out
    assert "to do: " in printed and ("of one core" if world == "toy" else "GPU hours") in printed
    assert not (tmp_path / "new").exists()
