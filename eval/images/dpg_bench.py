"""DPG-Bench (Hu et al. 2024, ELLA): does an image show everything that its dense prompt says?

A visual question answering (VQA) model answers a question about each proposition of the prompt. A proposition holds
only if all propositions it depends on hold too: a truck that is missing is not red.
"""

import os
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from matplotlib.figure import Figure

from debias_diffusion.data.bad_records import print_left_out
from debias_diffusion.files import bytes_digest, path_digest, sha256
from debias_diffusion.pipelines.rendering import ImageTask
from debias_diffusion.tokens import clip_tokenizer

from ..options import AllConfig, DpgBenchConfig
from ..report import Table, cell, compared_tables, draw_bars
from ..session import Processes, ResultCache, Session
from .dpg_answers import Ask, VqaModel, answer, answers_of, find_pictures
from .dpg_questions import band, read_dpg_bench, token_position
from .dpg_scores import compare_outcomes, outcomes, score
from .rendered import Rendered, image_task, render_all, rendering_settings

NAME = "dpg_bench"
NOTES = (
    "The published numbers are of mPLUG-large. Another model gives another scale: compare only runs of the same VQA "
    "model.",
    "All rows of the CSV are read. The published script skips the first row, and with it the first prompt if other "
    "propositions depend on that row.",
    "A proposition holds if its answer is yes and all propositions it depends on hold. The published categories ignore "
    "dependencies and use only the last image of a prompt; yes_percent ignores dependencies too, but is of all images.",
)


def evaluate_dpg_bench(config: DpgBenchConfig) -> dict:
    """DPG-Bench on existing images, or on images generated with each encoder; writes a report and prints tables.

    A killed run generates only missing images and asks only about images without answers. Started by `accelerate
    launch` it generates in several processes, one on each GPU; the main one asks.

    Returns:
        The content of `dpg_bench.json`: settings, versions, digests, numbers of prompts and propositions; by encoder
        (or by the name of the folder of images) the scores of `score`, how prompts were read, the digest of the images;
        the encoders compared in points; notes, the bad rows, seconds. In processes other than the main one, {}.

    Raises:
        UserError: the data or a model cannot be used, an image is missing or broken, or the images in the output
            folder have other settings.
    """
    return _DpgBench(config).run()


class _DpgBench:
    """One evaluation. Only the main process reads and asks."""

    def __init__(self, config: DpgBenchConfig):
        self.config, self.processes = config, Processes(config.device)
        self.vqa = path_digest(config.vqa) if os.path.exists(config.vqa) else config.vqa
        self.cache = ResultCache(config.output)

    def run(self) -> dict:
        started, config = time.monotonic(), self.config
        with self.processes.only_main_prints():
            tasks, rendered = self.processes.from_main(self._read), {}
            digests = {"base": None, "encoder_2": None}
            if config.images is not None:
                folders = {Path(os.path.realpath(config.images)).name: Path(config.images)}
            else:
                rendered, digests = render_all(config, self.processes, tasks)
                folders = {label: images.folder for label, images in rendered.items()}
            return self._report(folders, rendered, digests, started) if self.processes.is_main else {}

    def _read(self) -> list[ImageTask]:
        """The images to generate."""
        config = self.config
        self.bench = read_dpg_bench(config.data)
        print_left_out(self.bench.bad)
        if config.images is not None:
            find_pictures(config.images, self.bench.prompts, config.images_per_prompt)
        elif not self.cache.has_notes(answers_of(self.vqa)):
            VqaModel(config.vqa, torch.device("cpu"))  # what cannot be loaded should fail before hours of generating
        return [
            image_task(config, f"{item}/{number}", prompt, number)
            for item, prompt in self.bench.prompts.items()
            for number in range(config.images_per_prompt)
        ]

    @cached_property
    def _ask(self) -> Ask:
        return VqaModel(self.config.vqa, self.processes.device)

    def _report(
        self, folders: Mapping[str, Path], rendered: Mapping[str, Rendered], digests: dict, started: float
    ) -> dict:
        config, bench = self.config, self.bench
        tokenizer = clip_tokenizer(77)
        bands = {
            (item, proposition.number): band(token_position(proposition.words, bench.prompts[item], tokenizer))
            for item, propositions in bench.propositions.items()
            for proposition in propositions
        }
        results, encoders, groups = {}, {}, {}
        for label, folder in folders.items():
            files = find_pictures(str(folder), bench.prompts, config.images_per_prompt)
            yes = answer(self.cache, bench, files, config, self.vqa, lambda: self._ask, label)
            results[label], groups = outcomes(bench.propositions, yes, config.images_per_prompt, bands)
            reading = rendered[label].reading if label in rendered else {}
            encoders[label] = score(results[label], groups, config.images_per_prompt) | reading
            encoders[label]["pictures"] = _digest_by_prompt(files)
        session = Session(NAME, config, bench.digest, bench.bad, self.processes.device)
        of_images = {label: numbers["pictures"] for label, numbers in encoders.items()}
        session.digests |= {"vqa": self.vqa, "encoders": of_images} | digests
        return session.report(
            encoders,
            compare_outcomes(results, groups),
            [*NOTES, f"Answers are by {Path(config.vqa).name}."],
            seconds=time.monotonic() - started,
            drawing=rendering_settings(config) if rendered else None,
            prompts=len(bench.prompts),
            propositions=sum(map(len, bench.propositions.values())),
        )


def _digest_by_prompt(files: Mapping[str, list[Path]]) -> str:
    lines = (f"{item}\0{' '.join(map(sha256, of_prompt))}\n" for item, of_prompt in sorted(files.items()))
    return bytes_digest(line.encode() for line in lines)


def tables(report: dict) -> list[Table]:
    """A report's shares by category and by position, and the encoders compared."""
    encoders = report["encoders"]
    row = ["all prompts", report["propositions"]]
    for numbers in encoders.values():
        row += [cell(numbers["score_percent"], *numbers["interval_percent"]), None]
    rows = [row]
    for group in ("by_category", "by_position"):
        for name, first in next(iter(encoders.values()))[group].items():
            row = [name, first["propositions"]]
            for numbers in encoders.values():
                member = numbers[group][name]
                row += [cell(member["holds_percent"], *member["interval_percent"]), member["yes_percent"]]
            rows.append(row)
    columns = [column for label in encoders for column in (f"{label}: hold", "yes")]
    return [Table(["DPG-Bench, percent", "propositions", *columns], rows), *compared_tables(report["compared"])]


def figures(report: dict) -> dict[str, Figure]:
    """The figure of a report, by file name."""
    return {f"{NAME}.png": plot(report["encoders"])}


def plot(encoders: dict[str, dict]) -> Figure:
    """The share that holds with 95% intervals, by category and by position: a colour for each encoder."""
    # Without pyplot, which would keep the figure and may open a window.
    figure = Figure(figsize=(12, 4.2), layout="constrained", dpi=150)
    titles = {"by_category": "by category", "by_position": "by position in the prompt (CLIP tokens)"}
    for axes, (group, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        groups = {}
        for label, numbers in encoders.items():
            members = numbers[group].values()
            groups[label] = [[member[name] for member in members] for name in ("holds_percent", "interval_percent")]
        draw_bars(axes, groups, list(numbers[group]), digits=int(len(encoders) == 1))
        axes.tick_params(axis="x", rotation=30)
        axes.set(title=title, ylim=(0, 115))
    figure.axes[0].set_ylabel("propositions that hold (%), 95% intervals")
    if len(encoders) > 1:
        figure.axes[1].legend(fontsize="small", loc="upper right")
    return figure


def settings_for(everything: AllConfig) -> DpgBenchConfig | None:
    """Its settings in `evaluate all`; None without its data."""
    if everything.dpg_bench is None:
        return None
    given = {"data": everything.dpg_bench, "images": None, "base": everything.sdxl, "encoders": everything.for_images}
    return everything.settings(DpgBenchConfig, **given)
