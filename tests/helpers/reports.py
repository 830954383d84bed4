"""What every report of an evaluation holds."""

from debias_diffusion.eval.registry import EVALUATIONS

KEYS = {"evaluation", "settings", "versions", "digests", "encoders", "compared", "notes", "left_out", "seconds"}


def check_report(report: dict) -> None:
    evaluation = EVALUATIONS[report["evaluation"]]
    assert report.keys() >= KEYS and "data" in report["digests"]
    assert report["digests"]["encoders"].keys() == report["encoders"].keys() and report["encoders"]
    assert evaluation.tables(report) and evaluation.figures(report)
