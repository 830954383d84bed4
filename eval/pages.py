"""HTML pages from templates. Text from outside is escaped, never read as HTML."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from debias_diffusion.files import write_text

TEMPLATES = Path(__file__).parent


def write_page(path: Path, template: str, folder: Path = TEMPLATES, **values) -> None:
    """Fills a template, by default one of `eval/`, and writes the page, whole or not at all.

    Args:
        folder: that holds the template.

    Raises:
        jinja2.UndefinedError: the template names a value that is not given.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_text(path, environment.get_template(template).render(values))


def png_url(content: bytes) -> str:
    """A PNG file as a data URL, so that a page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(content).decode()
