"""The documentation site: files outside `docs/` become pages of it, and the API reference sees the whole package.

MkDocs loads this file as a hook (`mkdocs.yml`). The pages link to the README, to code and to results by relative paths,
as the code host wants them. On the site, every such file that a page links to is a page under `repository/`, and the
links are rewritten. So a link is written once, works in both places, and `make docs` fails if it leads nowhere.
"""

import os
import re
import tempfile
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS, PACKAGE, ROOMS = "docs", "debias_diffusion", ("pipelines", "eval", "app")
HOME = "index.md"
OUTSIDE = "repository"  # the folder of the site that holds the pages of files outside `docs/`
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".js": "javascript", ".css": "css"}
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(#[^()\s]*)?(?=\))|(?<=(?:src|ref)=\")([^\"\s#]+)(?=\")")
TEXT_ONLY = "---\nsearch:\n  exclude: true\n---\n\n"


def site_path(path: str) -> str:
    """Where a file or folder of the repository, by its path from the root, has its page in the site."""
    parts = PurePosixPath(path)
    if parts.parts[0] == DOCS:
        return str(parts.relative_to(DOCS))
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    return f"{OUTSIDE}/{path}" if parts.suffix == ".md" else f"{OUTSIDE}/{path}.md"


def linked_paths(text: str, folder: str) -> dict[str, str]:
    """The links of a page in `folder` that lead to files of the repository: {link: path from the root}."""
    paths = {}
    for match in LINK.finditer(text):
        link = match[1] or match[3]
        if "://" in link:
            continue
        path = os.path.normpath(os.path.join(folder, link))
        if not path.startswith("..") and (ROOT / path).exists():
            paths[link] = path
    return paths


def rewrite_links(text: str, page: str, shown_on: str | None = None) -> str:
    """The text of the page at `page`, a path from the root, with its links as the site needs them.

    shown_on: the page of the site that shows the text, if it is not `page`'s own.
    """
    paths = linked_paths(text, os.path.dirname(page))
    here = os.path.dirname(shown_on or site_path(page))

    def rewritten(match: re.Match) -> str:
        link = match[1] or match[3]
        return (os.path.relpath(site_path(paths[link]), here) if link in paths else link) + (match[2] or "")

    return LINK.sub(rewritten, text)


def page_text(path: str) -> str:
    """The Markdown of the page of a file or folder outside `docs/`, with links as the repository has them."""
    place = ROOT / path
    if place.is_dir():
        entries = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith(("__", ".")))
        return f"{TEXT_ONLY}# {path}\n\nThis folder of the repository holds:\n\n" + "".join(
            f"- `{name}`\n" for name in entries
        )
    text = place.read_text()
    if place.suffix == ".md":
        return text
    language = LANGUAGES.get(place.suffix, "text")
    return f"{TEXT_ONLY}# {path}\n\n``````{language}\n{text}\n``````\n"


def outside_pages(docs: dict[str, str]) -> dict[str, str]:
    """Pages that the site needs beside `docs`, {path from the root: Markdown}: those linked, and those they link."""
    pages: dict[str, str] = {}
    waiting = [*FIRST_PAGES, *(path for page, text in docs.items() for path in linked_paths(text, DOCS).values())]
    while waiting:
        path = waiting.pop()
        if path in pages or path.startswith(f"{DOCS}/") or path == DOCS:
            continue
        pages[path] = page_text(path)
        if path.endswith(".md"):
            waiting += linked_paths(pages[path], os.path.dirname(path)).values()
    return pages


def package_tree(folder: Path) -> None:
    """The package as it installs, by links in `folder`: griffe reads sources and knows no `package-dir`."""
    package = folder / PACKAGE
    package.mkdir()
    for place in [*(ROOT / PACKAGE).iterdir(), *(ROOT / room for room in ROOMS)]:
        (package / place.name).symlink_to(place)


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    tree = tempfile.TemporaryDirectory()
    package_tree(Path(tree.name))
    config.extra["package_tree"] = tree  # removed when MkDocs ends
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [tree.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    docs = {f"{DOCS}/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, text in outside_pages(docs).items():
        file = File.generated(config, site_path(path), content=rewrite_links(text, path))
        file.inclusion = InclusionLevel.NOT_IN_NAV  # they need not be: pages of `docs/` link to them
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith(f"{OUTSIDE}/"):
        return markdown
    text = rewrite_links(markdown, f"{DOCS}/{page.file.src_uri}")
    return home(text) if page.file.src_uri == HOME else text


def home(tasks: str) -> str:
    """The site's first page: the README up to its second heading, then the tasks of docs/index.md without its title."""
    first_screen = page_text("README.md").partition("\n## ")[0]
    return rewrite_links(first_screen, "README.md", shown_on=HOME) + "\n" + tasks.partition("\n")[2]
