"""The page of all claims, rendered from their results and from nothing else."""

import re
from collections import Counter

from debias_diffusion.eval.common.report import Table, escaped

from .differences import FAILS, HOLDS, UNDECIDED, UNTESTED

_ABOUT = """# Evidence

Which claims of the papers, and of this package, hold. {world}, seeds {seeds}. Made by `debias-diffusion reproduce
claims --world toy` from the results in `{results}`, never by hand. [How it works](reproduce.md).

- A claim **holds** if the 95% interval of every difference under it lies on the expected side of 0 (or within the
  margins), **does not hold** if one lies wholly outside, and is **not decided** otherwise. There is no correction for
  the number of claims: where two models are alike, 1 difference in 20 is decided nevertheless.
- Differences are in points of R@1 in percent unless a score says otherwise. Each seed is a training of its own, scored
  on scenes of its own, so an interval (Student's, over {count} seeds) holds for other trainings and other scenes. A
  difference with a file behind it is read from that benchmark's results; where it has no numbers by seed, its interval
  is over the queries of one training.
- The toy world says nothing about the size of an effect on real images.{budget}

{summary}
"""


def evidence_page(content: dict, results: str) -> str:
    """The page of a written `claims.json`.

    Args:
        content: as `command.write_claims` writes it.
        results: the place of that file, for the page.
    """
    verdicts = Counter(entry["verdict"] for entries in content["claims"].values() for entry in entries)
    summary = ", ".join(f"{verdicts[verdict]} {name}" for verdict, name in _SUMMARY.items() if verdicts[verdict])
    about = _ABOUT.format(
        world=content["world"],
        seeds=", ".join(map(str, content["seeds"])),
        results=results,
        count=len(content["seeds"]),
        budget=f" {content['budget']}" if content["budget"] else "",
        summary=f"Of {sum(verdicts.values())} claims: {summary}.",
    )
    parts = [about.strip()]
    for title, entries in content["claims"].items():
        parts += [f"## {title}", _with_anchors(_claims_table(entries).markdown(), entries), *_notes(entries)]
    parts += [
        "## Scores of all models",
        "Means over seeds, with the standard deviation over seeds.",
        *_score_tables(content),
    ]
    return "\n\n".join(parts) + "\n"


_SUMMARY = {HOLDS: "hold", FAILS: "do not hold", UNDECIDED: "are not decided", UNTESTED: "are not tested"}


def _claims_table(entries: list[dict]) -> Table:
    header = ["claim", "published", "difference", "expected", "ours", "95%", "p", "by seed", "verdict"]
    rows = []
    for entry in entries:
        first = [_title(entry), f"{entry['published']} ({entry['source']})".strip()]
        if not entry["parts"]:
            rows.append([*first, "", "", "", "", "", "", entry["verdict"]])
        for number, part in enumerate(entry["parts"]):
            verdict = entry["verdict"] if len(entry["parts"]) == 1 else part["verdict"]
            rows.append([*(first if number == 0 else ["", ""]), *_part_cells(part), verdict])
        if len(entry["parts"]) > 1:
            rows.append(["", "", "all of these", "", "", "", "", "", entry["verdict"]])
    return Table(header, rows)


def _title(entry: dict) -> str:
    return entry["claim"] + (f" ({entry['steps']} steps)" if entry.get("steps") else "")


def anchor(title: str) -> str:
    """What follows # in the address of a claim's row."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def _with_anchors(table: str, entries: list[dict]) -> str:
    for entry in entries:
        cell = escaped(_title(entry))
        table = table.replace(f"| {cell} |", f'| <a id="{anchor(_title(entry))}"></a>{cell} |', 1)
    return table


def _part_cells(part: dict) -> list[str]:
    expected = f"within {part['margin']:g}" if part["sign"] == "=" else {"+": "above 0", "-": "below 0"}[part["sign"]]
    ends = "" if part["low"] is None else f"{signed(part['low'])} to {signed(part['high'])}"
    chance = "" if part["p"] is None else "< 0.001" if part["p"] < 0.001 else f"{part['p']:.3f}"
    by_seed = ", ".join(signed(value) for value in part["by_seed"]) if len(part["by_seed"]) > 1 else ""
    text = part["text"] + (f" [{part['file'].rpartition('/')[2]}]" if part.get("file") else "")
    return [text, expected, signed(part["difference"]), ends, chance, by_seed]


def signed(value: float) -> str:
    """A difference with its sign: one decimal from 10 on, else two, more below 0.1; 0 for an error of rounding."""
    if abs(value) < 1e-5:
        return "0"
    return f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"


def _notes(entries: list[dict]) -> list[str]:
    lines = []
    for entry in entries:
        texts = [text for text in (entry["note"], entry["reason"]) if text]
        line = f"- {escaped(entry['claim'])}: {' '.join(texts)}"
        if texts and line not in lines:
            lines.append(line)
    return ["\n".join(lines)] if lines else []


def _score_tables(content: dict) -> list[str]:
    """A table of each evaluation: rows are models, columns are scores."""
    tables = []
    for evaluation, models in content["scores"].items():
        columns = list(dict.fromkeys(score for scores in models.values() for score in scores))
        rows = [[model, *(_score_cell(scores.get(column)) for column in columns)] for model, scores in models.items()]
        tables.append(Table([evaluation, *columns], rows).markdown())
    return tables


def _score_cell(numbers: dict | None) -> str | None:
    if numbers is None:
        return None
    deviation = "" if numbers["deviation"] is None else f" ± {numbers['deviation']:.2g}"
    return f"{numbers['mean']:.4g}{deviation}"
