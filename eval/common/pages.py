"""Pages from templates: what comes from outside stands in them as text, never as HTML."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from debias_diffusion.files import write_text


def write_page(path: Path, template: str, **values) -> None:
    """Fills a template of this folder and writes it, whole or not at all.

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
