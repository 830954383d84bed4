"""Command lines of settings."""

from collections.abc import Mapping

from debias_diffusion.app.command_line import flag


def as_options(settings: Mapping) -> list[str]:
    """Settings as they are typed; None and empty lists are left out."""
    options = []
    for name, value in settings.items():
        if isinstance(value, bool):
            options.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        elif isinstance(value, list):
            options += [flag(name), *map(str, value)] if value else []
        elif value is not None:
            options.append(f"{flag(name)}={value}")
    return options
