"""`python -m research`: its commands, and that options are read as those of the package are."""

from importlib import import_module

import pytest
import yaml
from helpers.modules import ROOT

from debias_diffusion.app.cli import main
from research.__main__ import COMMANDS, OWN
from research.evaluations.registry import EVALUATIONS


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main([*arguments], "python -m research", COMMANDS)
    return exit.value.code or 0


@pytest.mark.parametrize("name", OWN)
def test_every_command_names_what_exists_and_has_help(name, capsys):
    command = OWN[name]
    assert callable(command.load())
    assert run(name, "--help") == 0
    out = capsys.readouterr().out
    assert f"usage: python -m research {name} " in out and command.summary[1:] in " ".join(out.split())


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_of_research_are_commands_beside_those_of_the_package(name, capsys, with_research):
    assert all(map(callable, map(EVALUATIONS[name].load, (None, "tables", "figures"))))
    assert run("evaluate", name, "--help") == 0
    assert f"usage: python -m research evaluate {name} " in capsys.readouterr().out


def test_options_are_read_and_mistakes_explained(capsys):
    assert run("reproduce", "table-S4", "claims", "--seeds", "0", "2", "--print-config") == 0
    read = yaml.safe_load(capsys.readouterr().out)
    assert (read["target"], read["seeds"]) == (["table-S4", "claims"], [0, 2])
    assert run("reproduc") == 2 and "Did you mean reproduce" in capsys.readouterr().err


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "research" / "studies").glob("*.py")])
def test_every_study_can_be_imported(name):
    import_module(f"research.studies.{name}")
