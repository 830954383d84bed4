"""Every evaluation in one command, and one page of all results: of several encoders and runs side by side."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debias_diffusion.data.bad_records import BadRecord, leave_out, print_left_out
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import read_file, read_json, write_text

from .all_options import AllConfig, ReportConfig
from .options import check_output
from .registry import EVALUATIONS, with_reports
from .report import Table, escaped, figure_png, image_url, write_page, write_png
from .story import tell

TEMPLATE = "page.html.j2"
# Settings that may differ between results in one table: paths, speed, and the encoders themselves. So may all that have
# a digest.
_IGNORED = ("output", "device", "batch_size", "images_at_once", "max_bad", "images", "root", "examples")
_COUNTS = ("images", "captions", "items", "classes", "prompts", "questions")


def evaluate_all(config: AllConfig) -> Path:
    """Runs every evaluation that the settings allow, one after the other, and writes one page of their results.

    Returns:
        The path of report.html.

    Raises:
        UserError: a setting cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "evaluate all runs in one process. To generate on several GPUs, run `accelerate launch -m debias_diffusion "
            "evaluate generation` with the same output first; its images are then there."
        )
    settings, output, results = settings_of_all(config), Path(config.output), []
    for number, (name, chosen) in enumerate(settings.items(), 1):
        print(f"\n[{number}/{len(settings)}] {name}", flush=True)
        results.append(Result(output / f"{name}.json", EVALUATIONS[name].run(chosen)))
    return write_report(output, results)


def settings_of_all(config: AllConfig) -> dict[str, Any]:
    """The settings of each evaluation that `config` allows, by its name in `EVALUATIONS`, in the order to run them."""
    chosen = {name: entry.settings(config, entry.options) for name, entry in with_reports().items()}
    return {name: settings for name, settings in chosen.items() if settings is not None}


@dataclass(frozen=True)
class Result:
    """The result of one evaluation: its JSON file, and the report in it."""

    file: Path
    report: dict

    def comparable(self) -> str:
        """A key that is equal for results that fit in one table: same data, as much of it, and same settings."""
        digests, ignored = self.report["digests"], {*_IGNORED, *self.report["digests"]}
        digests = {name: value for name, value in digests.items() if name != "encoders"}
        settings = {name: value for name, value in self.report["settings"].items() if name not in ignored}
        counts = {name: self.report.get(name) for name in _COUNTS}  # fewer where images of one run cannot be read
        return json.dumps([self.report["evaluation"], digests, settings, counts], sort_keys=True)


@dataclass(frozen=True)
class Section:
    """One evaluation on one set of data: numbers, PNG files by name, caveats and facts about its runs."""

    title: str
    tables: list[Table]
    figures: dict[str, bytes]
    notes: list[str]


def evaluate_report(config: ReportConfig) -> Path:
    """Writes one page of all results in a folder, see `write_report`. Files of other versions are named and left out.

    Returns:
        The path of report.html.

    Raises:
        UserError: there is no such folder, or no result in it.
    """
    check_output(config.output or config.folder)
    results, bad = read_results(Path(config.folder))
    print_left_out(bad)
    return write_report(Path(config.output or config.folder), results)


def write_report(output: Path, results: Sequence[Result]) -> Path:
    """Writes `report.html`, one file that needs no other, and `report.md` with its figures in `report/`.

    Results of the same evaluation on the same data with the same settings stand in one table. Where two runs measured
    the same weights under one name, the later one counts. Results in the toy world are also told as a story.

    Args:
        results: the oldest first.

    Returns:
        The path of report.html.
    """
    sections = [section(group) for group in grouped(results)]
    _write_markdown(output, sections)
    story = tell([(result.file.parent, result.report) for result in results])
    shown = [(section, {name: image_url(png) for name, png in section.figures.items()}) for section in sections]
    write_page(output / "report.html", TEMPLATE, sections=shown, has_story=story is not None, **(story or {}))
    if story:
        print("", story["lead"] or "", "", story["scores"], "", sep="\n")
    print(f"{len(results)} results in {len(sections)} sections: {output / 'report.html'}, {output / 'report.md'}")
    return output / "report.html"


# What a report holds, by the type of its values.
_SHAPE = {"evaluation": str, "settings": dict, "versions": dict, "digests": dict, "encoders": dict}
_SHAPE |= {"compared": list, "notes": list, "left_out": list, "seconds": int | float}


def read_results(folder: Path) -> tuple[list[Result], list[BadRecord]]:
    """All results in a folder, the oldest first, and the JSON files that are named like results and are none.

    Raises UserError where there is none.
    """
    names = with_reports()
    files = [file for name in names for file in folder.rglob(f"{name}.json")]
    results, bad = [], []
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, str(file))):
        # Others are of another program, or of another version of this one.
        with leave_out(str(file.relative_to(folder)), bad), explain_failure("no result of this version"):
            report = read_json(file)
            if not all(isinstance(report.get(key), _SHAPE[key]) for key in _SHAPE):
                raise ValueError("it lacks what reports hold")
            results.append(Result(file, report))
    if not results:
        raise UserError(
            f"The folder {str(folder)!r} holds no results ({', '.join(f'{name}.json' for name in names)})"
            + (f"; the first that cannot be used: {bad[0]}. " if bad else ". ")
            + "Give the output of earlier evaluations."
        )
    return results, bad


def grouped(results: Sequence[Result]) -> list[list[Result]]:
    """Results that fit in one table each, in the order of the page."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.comparable(), []).append(result)
    order = list(EVALUATIONS)
    return sorted(groups.values(), key=lambda group: order.index(group[0].report["evaluation"]))


def section(group: Sequence[Result]) -> Section:
    """The section of comparable results."""
    report = merged(group)
    evaluation = EVALUATIONS[report["evaluation"]]
    figures = {name: figure_png(figure) for name, figure in evaluation.figures(report).items()}
    for number, result in enumerate(group):  # beside the results, those that cannot be drawn again from their numbers
        for name in evaluation.saved:
            if (file := result.file.parent / name).is_file():
                figures[f"{number}-{name}" if len(group) > 1 else name] = read_file(file)
    settings = report["settings"]
    named = (settings.get(name) for name in ("dataset", "data", "prompts"))
    data = next(filter(None, named), "one prompt")
    data = data[0] if isinstance(data, list) else data  # of retrieval, a report has one benchmark
    name = data if data.startswith("toy/") else Path(data).name
    return Section(f"{evaluation.title}: {name}", evaluation.tables(report), figures, report["notes"] + _about(group))


def merged(group: Sequence[Result]) -> dict:
    """Comparable results as one, with the encoders, comparisons and notes of all.

    Different weights under one name get the folder of their result added to the name.
    """
    report = {**group[0].report, "encoders": {}, "compared": {}, "notes": []}
    digests: dict[str, str] = {}
    for result in group:
        names = {}
        for label, numbers in result.report["encoders"].items():
            digest, folder = result.report["digests"]["encoders"].get(label), result.file.parent
            candidates = (label, f"{label} ({folder.name})", f"{label} ({folder})")
            names[label] = next(name for name in candidates if digests.setdefault(name, digest) == digest)
            report["encoders"][names[label]] = numbers
        for line in result.report["compared"]:
            line = {**line, "a": names[line["a"]], "b": names[line["b"]]}
            report["compared"][line["a"], line["b"], line["score"]] = line
        report["notes"] += [note for note in result.report["notes"] if note not in report["notes"]]
    return report | {"compared": list(report["compared"].values())}


def _about(group: Sequence[Result]) -> list[str]:
    facts = []
    for result in group:
        report, versions = result.report, result.report["versions"]
        left_out = f", {len(report['left_out'])} records left out" if report["left_out"] else ""
        facts.append(
            f"{', '.join(report['encoders'])}: {report['seconds']:.0f} s{left_out}; torch {versions['torch']}, "
            f"debias-diffusion {versions['debias-diffusion']}; {result.file.parent.name}/{result.file.name}"
        )
    digest = group[0].report["digests"].get("data")
    return [*facts, f"data {digest[:16]}"] if digest else facts


def _write_markdown(output: Path, sections: Iterable[Section]) -> None:
    lines = ["# Evaluation", ""]
    for number, section in enumerate(sections, 1):
        lines += [f"## {escaped(section.title)}", ""]
        for table in section.tables:
            lines += [table.markdown(), ""]
        for name, content in section.figures.items():
            figure = f"report/{number}-{name}"
            write_png(output / figure, content)
            lines += [f"![{escaped(section.title)}]({figure})", ""]
        lines += [f"- {escaped(text)}" for text in section.notes] + [""]
    write_text(output / "report.md", "\n".join(lines))
