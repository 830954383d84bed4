"""The studies that are settings of `reproduce`."""

import pytest
import torch
from helpers.small_papers import STUDIES

from research.options import ReproduceConfig
from research.reproduce.listing import reproduce
from research.reproduce.papers import read_tables
from research.studies import fix_clip

CPU = torch.device("cpu")
TRAININGS = {"toy": 6, "toy-test": 4, "toy-test-twice": 2, "fix-clip": 15}  # of each world's studies


@pytest.mark.parametrize("world", TRAININGS)
def test_every_study_has_settings_that_can_be_used(world, tmp_path, capsys):
    worlds = {name: "fix-clip" for name in read_tables(STUDIES) if name.startswith("fix-clip")}
    worlds |= {name: "toy" for name in read_tables(STUDIES) if name.startswith(("trade-off", "ablation"))}
    assert "fix-clip" in fix_clip.KINDS
    tables = [name for name in read_tables(STUDIES) if worlds.get(name, "toy-test") == world]
    for made in ("model", *(f"heads-{name}" for name in ("clip", "long-clip", "debias-clip"))):  # by scripts, in --root
        (tmp_path / made).mkdir()
        (tmp_path / made / "open_clip_config.json").write_text("{}")
    given = {"papers": str(STUDIES), "output": str(tmp_path / "new"), "root": str(tmp_path), "plan": True}
    reproduce(ReproduceConfig(tables or ["longer-training"], world=world, **given))
    assert f"to do: {TRAININGS[world]} trainings" in capsys.readouterr().out
