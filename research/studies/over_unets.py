"""What three UNets agree on: each row's difference as a mean over them, with a t-interval over UNets.

    python -m research.studies.over_unets

Reads research/results/worlds.json, whose own intervals are over prompts. The interval of three UNets is wide: it speaks
of other UNets that are trained like these, not of other prompts. Writes research/results/over_unets.md and .json.
"""

from statistics import fmean

from scipy.stats import sem, t

from debias_diffusion.eval.report import Table
from debias_diffusion.files import read_json_object

from .harness import RESULTS, publish

UNETS = ("as shipped", "another UNet", "a third UNet")

if __name__ == "__main__":
    found, cells = {}, []
    for name, row in read_json_object(RESULTS / "worlds.json")["rows"].items():
        if "minus" in row[UNETS[0]]:
            less = row[UNETS[0]]["minus"]["row"]
            points = [row[unet]["minus"]["difference"] for unet in UNETS]
            mean, (low, high) = fmean(points), t.interval(0.95, len(points) - 1, fmean(points), sem(points))
            found[name] = {"minus": less, "points": points, "mean": mean, "low": low, "high": high}
            cells.append([name, less, *(f"{each:+.1f}" for each in points), f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"])
    publish("over_unets", {"rows": found}, Table(["row", "minus", *UNETS, "mean (95%, over UNets)"], cells))
