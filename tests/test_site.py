"""The documentation site: every page in the navigation, every public name in the reference, every link alive."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import debias_diffusion
from debias_diffusion import methods, pipelines

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text()
REFERENCE = {"api": debias_diffusion, "api-pipelines": pipelines, "api-methods": methods, "api-interchange": None}


def site_hooks():
    pytest.importorskip("mkdocs", reason="the site is tested where `make docs` has installed MkDocs")
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once():
    listed = re.findall(r"^ +- (?:[\w ]+: )?([\w./-]+\.md)$", SETTINGS.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(page for page in listed if "/" not in page) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_has_every_public_name(page):
    names = re.findall(r"^::: (debias_diffusion[\w.]*)\.(\w+)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    package = REFERENCE[page]  # None: its names are imported from their modules
    assert names and (package is None or {name for _, name in names} == set(package.__all__))
    for module, name in names:
        assert hasattr(importlib.import_module(module), name)
        assert package is None or getattr(package, name) is getattr(importlib.import_module(module), name)


def test_links_out_of_the_docs_lead_to_pages_of_the_site():
    rewrite = site_hooks().rewrite_links
    page = "[a](training.md#memory) [b](../README.md#use) [c](../configs) `x[0](y)` [d](https://example.org/README.md)"
    assert rewrite(page, "docs/faq.md") == (
        "[a](training.md#memory) [b](repository/README.md#use) [c](repository/configs/index.md) `x[0](y)` "
        "[d](https://example.org/README.md)"
    )
    assert rewrite("[e](docs/faq.md) [f](eval/page.html.j2) [g](app/cli.py)", "README.md") == (
        "[e](../faq.md) [f](eval/page.html.j2.md) [g](app/cli.py.md)"
    )
    assert rewrite("[h](../generate.py)", "benchmarks/results/policies.md") == "[h](../generate.py.md)"
    assert rewrite('<img src="docs/drift.png">', "README.md") == '<img src="../drift.png">'
    assert rewrite("[i](../missing.py)", "docs/faq.md") == "[i](../missing.py)"  # MkDocs reports it


def test_memory_is_counted_while_it_lives():
    sys.path.append(str(ROOT / "benchmarks"))
    try:
        from sdxl_memory import LiveBytes, peak_bytes
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    given = torch.empty(1000, device="meta")

    def chain() -> None:
        first = given + 1  # 4,000 bytes; what is given does not count
        second = first.view(10, 100) * 2  # 8,000: a view holds nothing of its own
        del first  # the view is gone too
        second.add_(1)
        torch.cat([second, second])  # 4,000 + 8,000

    assert peak_bytes(chain) == 12_000
    with LiveBytes() as live:
        chain()
    assert live.now == 0
