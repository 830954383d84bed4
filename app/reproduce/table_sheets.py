"""A paper's table with the published number beside each of ours, as Markdown and JSON."""

from pathlib import Path

import numpy as np

from debias_diffusion.eval.report import Table, escaped, versions
from debias_diffusion.files import write_json, write_text

from .claims import Lookup
from .papers import PaperTable


def write_table(name: str, table: PaperTable, scores: Lookup, world_title: str, seeds: list[int], output: Path) -> Path:
    """Writes NAME.md and NAME.json into `output`, and returns the Markdown file.

    Args:
        scores: (row, evaluation, score) -> {seed: values}
    """
    content = {
        "name": name,
        "paper": table.paper,
        "title": table.title,
        "source": table.source,
        "note": table.note,
        "world": world_title,
        "seeds": seeds,
        "versions": versions(),
        "columns": list(table.columns),
        "rows": {label: _cells(table, label, scores) for label in table.rows},
    }
    write_json(output / f"{name}.json", content)
    write_text(output / f"{name}.md", table_page(content))
    return output / f"{name}.md"


def _cells(table: PaperTable, label: str, scores: Lookup) -> dict[str, dict]:
    """{column: {"ours": the mean over seeds, "by_seed", "published", "difference"}}"""
    row, cells = table.rows[label], {}
    published = [*row.published, *[None] * len(table.columns)]
    for (title, column), number in zip(table.columns.items(), published, strict=False):
        by_seed = [float(np.mean(values)) for values in scores(row, column.evaluation, column.score).values()]
        ours = float(np.mean(by_seed))
        difference = None if number is None else round(ours - number, 4)
        cells[title] = {"ours": round(ours, 4), "by_seed": [round(value, 4) for value in by_seed]}
        cells[title] |= {"published": number, "difference": difference}
    return cells


def table_page(content: dict) -> str:
    """The Markdown of a written table: ours and, if any is published, the published number and the difference."""
    published = any(cell["published"] is not None for cells in content["rows"].values() for cell in cells.values())
    header = ["row"]
    for title in content["columns"]:
        header += [title, "published", "difference"] if published else [title]
    rows = []
    for label, cells in content["rows"].items():
        row = [label]
        for cell in cells.values():
            difference = cell["difference"]
            row += [cell["ours"]]
            row += [cell["published"], None if difference is None else f"{difference:+.2f}"] if published else []
        rows.append(row)
    lines = [f"# {escaped(content['paper'])}, {escaped(content['name'])}: {escaped(content['title'])}"]
    lines += [f"{content['world']}, seeds {', '.join(map(str, content['seeds']))}. Published: {content['source']}."]
    lines += [content["note"]] if content["note"] else []
    return "\n\n".join([*lines, Table(header, rows).markdown()]) + "\n"
