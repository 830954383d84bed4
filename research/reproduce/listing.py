"""`reproduce`, and its list of tables: what each costs, and whether data and weights are here; no large library."""

from pathlib import Path

from ..options import ReproduceConfig
from . import papers
from .availability import gpu_hours, missing_parts


def reproduce(config: ReproduceConfig) -> list[Path]:
    """Lists tables, or trains and evaluates what is missing and writes tables. Returns the files written.

    Raises:
        UserError: a name is unknown, a setting cannot be used, or data or weights are missing.
    """
    if config.list:
        print(list_tables(config))
        return []
    from .command import Reproduction  # imports what takes seconds

    return Reproduction(config).run()


def list_tables(config: ReproduceConfig) -> str:
    """Every table and figure, what it needs, and whether that is here."""
    folder = papers.find_papers(config.papers)
    world, lines = papers.read_world(folder, config.world), []
    for name, table in sorted(papers.read_tables(folder).items(), key=lambda pair: (pair[1].paper, pair[0])):
        models = table.rows.values()
        missing = missing_parts(world, Path(config.root), models, table.columns.values())
        hours = sum({papers.describe(model): gpu_hours(model, world) for model in models}.values())
        needs = f"{hours:.0f} GPU hours" if hours else ("no training" if not world.pairs else "toy")
        state = f"missing {len(missing)}: {missing[0]}" if missing else "here"
        lines.append(f"{name:22}  {table.paper:12}  {needs:14}  {table.title}\n{'':24}{state}")
    form = "{name:22}  {paper:12}                  {title}\n                        not here: {reason}"
    lines += [form.format(**absent) for absent in papers.read_absent(folder)]
    return "\n".join(lines)
