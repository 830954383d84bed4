"""The page of all claims, rendered from their results and from nothing else."""

import re
from collections import Counter

from debias_diffusion.eval.report import escaped

from .differences import FAILS, HOLDS, UNDECIDED, UNTESTED

_ABOUT = """# Evidence

Which claims of the papers, and of this package, hold? {summary} {world}, seeds {seeds}; rows that name a file have
that file's seeds.

- A claim **holds** if the 95% interval of every difference under it lies on the expected side of 0 (+ above, - below)
  or within the margin (±), **does not hold** if one lies wholly outside, and is **not decided** otherwise.
- Differences are in points of R@1, text to image, unless a score is named. Each seed has its own training and scenes;
  intervals are Student's over seeds. Between equal models, 1 difference in 20 is decided by chance.
- This says nothing about the size of an effect on real images.{budget}{editions}

Rendered by `debias-diffusion reproduce claims` with [{file}](../{results}), which also has p values, each seed's
difference and the scores of all models ([how it works](reproduce.md#claims)).

## Summary

Of several differences the first with the claim's verdict is shown, with a link to all.
"""


def evidence_page(content: dict, results: str) -> str:
    """The page of a written `claims.json`: a line a claim, then the differences of each.

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
        file=results.rpartition("/")[2],
        budget=f" {content['budget']}" if content["budget"] else "",
        editions=f"\n- {content['editions']}" if content["editions"] else "",
        summary=f"Of {sum(verdicts.values())} claims: {summary}.",
    )
    groups, number = {}, 1
    for title, entries in content["claims"].items():
        groups[title] = list(enumerate(entries, start=number))
        number += len(entries)
    parts = [about.strip(), *(_summary_table(title, entries) for title, entries in groups.items())]
    for title, entries in groups.items():
        parts += [f"## {title}", _differences_table(entries), *_notes(entries)]
    return "\n\n".join(parts) + "\n"


_SUMMARY = {HOLDS: "hold", FAILS: "do not hold", UNDECIDED: "are not decided", UNTESTED: "are not tested"}


def _summary_table(title: str, entries: list[tuple[int, dict]]) -> str:
    """A line a claim, with the anchor that other pages link to: its verdict, and the difference that decided it."""
    rows = []
    for number, entry in entries:
        deciding = [part for part in entry["parts"] if part["verdict"] == entry["verdict"]] or entry["parts"]
        difference = signed(deciding[0]["difference"]) if deciding else "-"
        claim = f'<a id="{anchor(_title(entry))}"></a>{number}. {escaped(_title(entry))}'
        rows.append([claim, f"{entry['verdict']}, [{difference}](#row-{number})"])
    return _markdown([escaped(title), "verdict, difference"], rows)


def _differences_table(entries: list[tuple[int, dict]]) -> str:
    """A row a difference; the first of each claim has its number and what was published."""
    rows, said = [], None
    for number, entry in entries:
        first = f'<a id="row-{number}"></a>[{number}](#{anchor(_title(entry))})'
        published = f"{entry['published']} ({entry['source']})" if entry["published"] else entry["source"]
        if (entry["claim"], published) != said:  # a claim of several budgets says it once
            first += f": {escaped(published)}"
        said = entry["claim"], published
        cells = [list(map(escaped, _part_cells(part))) for part in entry["parts"]] or [["", "", ""]]
        rows += [[first if at == 0 else "", *part] for at, part in enumerate(cells)]
    return _markdown(["claim: published", "difference", "expected", "ours (95%)"], rows)


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are Markdown already: they hold links."""
    lines = [header, ["---", "---", *["--:"] * (len(header) - 2)], *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def _title(entry: dict) -> str:
    return entry["claim"] + (f" ({entry['steps']} steps)" if entry.get("steps") else "")


def anchor(title: str) -> str:
    """What follows # in the address of a claim's row."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def _part_cells(part: dict) -> list[str]:
    """What is compared; the sign or margin that is expected; the difference with its interval."""
    text = part["text"].removesuffix(" t2i") + (f" [{part['file'].rpartition('/')[2]}]" if part.get("file") else "")
    ends = "" if part["low"] is None else f" ({signed(part['low'])} to {signed(part['high'])})"
    expected = f"±{part['margin']:g}" if part["sign"] == "=" else part["sign"]
    return [text, expected, signed(part["difference"]) + ends]


def signed(value: float) -> str:
    """A difference with its sign: one decimal from 10 on, else two, more below 0.1; 0 for an error of rounding."""
    if abs(value) < 1e-5:
        return "0"
    return f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"


def _notes(entries: list[tuple[int, dict]]) -> list[str]:
    """What else is to be said on claims, each text once, with the numbers of its claims."""
    numbers: dict[str, list[int]] = {}
    for number, entry in entries:
        if text := " ".join(text for text in (entry["note"], entry["reason"]) if text):
            numbers.setdefault(text, []).append(number)
    lines = [f"- {', '.join(map(str, of))}: {text}" for text, of in numbers.items()]
    return ["\n".join(lines)] if lines else []
