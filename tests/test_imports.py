"""What optional libraries are installed by. Which module may import which, `make lint` checks (pyproject.toml)."""

import pytest
from helpers.modules import ROOT

from debias_diffusion.app.cli import COMMANDS
from debias_diffusion.errors import EXTRAS


def test_extras_install_what_is_optional_and_commands_name_one():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert any(line.replace("-", "_").startswith(library) for line in extras[extra]), library
    assert {COMMANDS[name].extra for name in ("export", "generate")} == {""}
