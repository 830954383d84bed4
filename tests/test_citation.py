"""CITATION.cff and the BibTeX of the docs agree with each other and with the package."""

import re
from importlib.metadata import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
BIBTEX = re.search(r"```bibtex\n(.*?)```", (ROOT / "docs" / "comparison.md").read_text(), re.DOTALL)[1]


def entries() -> dict[str, dict[str, str]]:
    """{key: {field: value}}"""
    found = {}
    for key, body in re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", BIBTEX, re.MULTILINE | re.DOTALL):
        found[key] = dict(re.findall(r"^  (\w+) *= \{(.*)\},?$", body, re.MULTILINE))
    return found


def test_the_citation_has_what_its_format_requires():
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= CITATION.keys()
    assert {"type", "title", "authors"} <= CITATION["preferred-citation"].keys()


def test_the_software_is_this_package():
    package, software = metadata("debias-diffusion"), entries()["debias_diffusion"]
    for field, value in (("title", "Name"), ("version", "Version"), ("license", "License-Expression")):
        assert CITATION[field] == software[field] == package[value]
    assert software["author"] == f"{{{CITATION['authors'][0]['name']}}}"


def test_the_paper_is_the_one_in_the_bibtex():
    paper, entry = CITATION["preferred-citation"], entries()["lavoie2026shortsighted"]
    names = [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    assert entry["author"] == " and ".join(names) and len(names) == 5
    assert (entry["title"], entry["year"]) == (paper["title"], str(paper["year"]))
    assert entry["booktitle"] == paper["collection-title"] and entry["note"] == paper["identifiers"][0]["value"]
