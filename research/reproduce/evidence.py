"""The page of all claims, rendered from their results and from nothing else."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from debias_diffusion.eval.report import escaped

from .claims import FAILS, HOLDS, UNDECIDED, UNTESTED

TEMPLATE = "evidence.md.j2"
_SUMMARY = {HOLDS: "hold", FAILS: "do not hold", UNDECIDED: "are not decided", UNTESTED: "are not tested"}


def evidence_page(content: dict) -> str:
    """The page of a written `claims.json`, as `reproduce` writes it: every claim with its verdict and differences."""
    groups, notes, count = {}, {}, 0
    for title, entries in content["claims"].items():
        groups[title], notes[title] = [], {}
        for entry in entries:
            count += 1
            groups[title].append(_claim(entry, count))
            if text := " ".join(filter(None, (entry["note"], entry["reason"]))):
                notes[title].setdefault(text, []).append(count)
    verdicts = Counter(claim["verdict"] for claims in groups.values() for claim in claims)
    summary = ", ".join(f"{verdicts[verdict]} {name}" for verdict, name in _SUMMARY.items() if verdicts[verdict])
    environment = Environment(  # Markdown: `escaped` escapes it
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"escaped": escaped, "anchor": anchor}
    page = environment.get_template(TEMPLATE)
    return page.render(
        content | {"count": count, "summary": summary, "groups": groups},
        notes=notes,
        mixed=mixed_note(content.get("made_with", ())),
    )


def mixed_note(made_with: Sequence[str]) -> str:
    """What is said of results of several versions or commits; empty of one."""
    return f"**Made of results of several commits**: {'; '.join(made_with)}." if len(made_with) > 1 else ""


def _claim(entry: dict, number: int) -> dict:
    """What the page shows of a claim."""
    source = f"{entry['published']} ({entry['source']})" if entry["published"] else entry["source"]
    return entry | {"number": number, "source": source, "parts": [_part(part) for part in entry["parts"]]}


def _part(part: dict) -> dict[str, str]:
    """What is compared; the sign or margin that is expected; the difference with its interval, and its unit."""
    text = part["text"].removesuffix(" t2i") + (f" [{Path(part['file']).name}]" if part.get("file") else "")
    ends = "" if part["low"] is None else f" ({signed(part['low'])} to {signed(part['high'])}; {part['unit']})"
    expected = f"±{part['margin']:g}" if part["sign"] == "=" else part["sign"]
    return {"text": text, "expected": expected, "ours": signed(part["difference"]) + ends}


def anchor(title: str) -> str:
    """What follows # in the address of a claim's row."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def signed(value: float) -> str:
    """A difference with its sign: one decimal from 10 on, else two, more below 0.1; 0 for an error of rounding."""
    if abs(value) < 1e-5:
        return "0"
    return f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"
