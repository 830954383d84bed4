"""HTML pages from templates. Text from outside is escaped, never read as HTML."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from debias_diffusion.files import write_text


def write_page(path: Path, template: str, **values) -> None:
    """Fills a template of `eval/` and writes the page, whole or not at all.

    Raises:
        jinja2.UndefinedError: the template names a value that is not given.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_text(path, environment.get_template(template).render(values))


def png_url(content: bytes) -> str:
    """A PNG file as a data URL, so that a page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(content).decode()
