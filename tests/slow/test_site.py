"""The whole documentation site, built."""

import logging
import re
import shutil

import pytest
from helpers.modules import ROOT

DOCS = ROOT / "docs"


def test_the_site_builds_and_a_broken_link_is_the_only_warning(tmp_path, caplog):
    pytest.importorskip("mkdocs", reason="the site is tested where `make docs` has installed MkDocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    shutil.copytree(DOCS, tmp_path / "docs")
    with open(tmp_path / "docs" / "robustness.md", "a") as page:
        page.write("\n[gone](../benchmarks/gone.py)\n")
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path / "docs"), site_dir=str(tmp_path / "site"))
    config.plugins.on_startup(command="build", dirty=False)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(config)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'robustness.md'" in warning and "'../benchmarks/gone.py'" in warning
    assert "with_long_prompts(pipe)" in re.sub("<[^>]+>", "", (tmp_path / "site" / "index.html").read_text())
    reference = (tmp_path / "site" / "api-pipelines.html").read_text()
    assert "Lets an existing pipeline read prompts of any length." in reference
    assert "reads each chunk but the first together with" in reference
    source = (tmp_path / "site" / "repository" / "benchmarks" / "train_step.py.html").read_text()
    assert "class FixClipSteps" in re.sub("<[^>]+>", "", source)
