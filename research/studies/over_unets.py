"""What three UNets agree on: each row's difference as a mean over them, with an interval over UNets.

    python -m research.studies.over_unets

Reads research/results/worlds.json, whose intervals are over prompts. A t interval of three UNets is wide: it speaks of
other UNets that are trained like these, and not of other prompts. Writes research/results/over_unets.md and .json.
"""

import json
from statistics import fmean

from scipy.stats import sem, t

from debias_diffusion.eval.report import Table

from .harness import RESULTS, publish

UNETS = ("as shipped", "another UNet", "a third UNet")


def over_unets(rows: dict) -> dict[str, dict]:
    """By row, the differences in points, their mean, and the ends of its 95% interval."""
    found = {}
    for name, row in rows.items():
        if "minus" in row[UNETS[0]]:
            points = [row[unet]["minus"]["difference"] for unet in UNETS]
            low, high = t.interval(0.95, len(points) - 1, fmean(points), sem(points))
            less = row[UNETS[0]]["minus"]["row"]
            found[name] = {"minus": less, "points": points, "mean": fmean(points), "low": low, "high": high}
    return found


if __name__ == "__main__":
    found = over_unets(json.loads((RESULTS / "worlds.json").read_text(encoding="utf-8"))["rows"])
    cells = [
        [
            name,
            row["minus"],
            *(f"{each:+.1f}" for each in row["points"]),
            "{mean:+.1f} ({low:+.1f} to {high:+.1f})".format(**row),
        ]
        for name, row in found.items()
    ]
    publish("over_unets", {"rows": found}, Table(["row", "minus", *UNETS, "mean (95%, over UNets)"], cells))
