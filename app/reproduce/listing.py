"""`reproduce`, and its list of tables, which needs no large library."""

from pathlib import Path

from ..options import ReproduceConfig
from .availability import gpu_hours, missing_parts
from .papers import describe, find_papers, read_absent, read_tables, read_world


def reproduce(config: ReproduceConfig) -> list[Path]:
    """Lists tables, or does what `command.regenerate` does."""
    if config.list:
        print(list_tables(config))
        return []
    from .command import regenerate  # imports what takes seconds

    return regenerate(config)


def list_tables(config: ReproduceConfig) -> str:
    """Every table and figure, what it needs, and whether that is here."""
    folder = find_papers(config.papers)
    world, rows = read_world(folder, config.world), []
    for name, table in sorted(read_tables(folder).items(), key=lambda pair: (pair[1].paper, pair[0])):
        models = list(table.rows.values())
        missing = missing_parts(world, Path(config.root), models, table.columns.values())
        state = "here" if not missing else f"missing {len(missing)}: {missing[0]}"
        hours = sum({describe(model): gpu_hours(model, world) for model in models}.values())
        needs = f"{hours:.0f} GPU hours" if hours else ("no training" if not world.pairs else "toy")
        rows.append([name, table.paper, needs, table.title, state])
    for entry in read_absent(folder):
        rows.append([entry.name, entry.paper, "", entry.title, f"not here: {entry.reason}"])
    return "\n".join(
        "  ".join([row[0].ljust(22), row[1].ljust(12), row[2].ljust(14), f"{row[3]}\n{'':24}{row[4]}"]) for row in rows
    )
