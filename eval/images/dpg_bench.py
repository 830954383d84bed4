"""DPG-Bench (Hu et al. 2024, ELLA): does an image show everything that its dense prompt says?

A visual question answering (VQA) model answers a question about each proposition of the prompt. A proposition holds
only if all propositions it depends on hold too: a truck that is missing is not red.
"""

import os
import time
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForVisualQuestionAnswering, AutoProcessor

from debias_diffusion.clip.model_files import load_pretrained
from debias_diffusion.data.bad_records import print_left_out
from debias_diffusion.data.images import OPENED_AS
from debias_diffusion.encoders.hub import place_digest
from debias_diffusion.encoders.spec import check_model
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import bytes_digest, sha256
from debias_diffusion.pipelines.rendering.renderer import ImageTask
from debias_diffusion.processes import Processes

from ..options import AllConfig, DpgBenchConfig
from ..report import Table, cell, compared_tables, draw_bars
from ..session import Session
from .dpg_questions import DpgBench, read_dpg_bench
from .dpg_scores import compare_outcomes, outcomes, score
from .networks import load_image
from .rendered import image_task, render_all, rendering_settings

NAME = "dpg_bench"
GRID = 2  # images on a side of a published file
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
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

    A killed run generates only missing images and asks only about prompts without answers. Started by `accelerate
    launch` it generates in several processes, one on each GPU; the main one asks.

    Returns:
        The content of `dpg_bench.json`: settings, versions, digests, numbers of prompts and propositions; by encoder
        (or by the name of the folder of images) the scores of `score`, how prompts were read, the digest of the images;
        the encoders compared in points; notes, the bad rows, seconds. In processes other than the main one, {}.

    Raises:
        UserError: the data or a model cannot be used, an image is missing or broken, or the images in the output
            folder have other settings.
    """
    started, processes, per_prompt = time.monotonic(), Processes.connect(config.device), config.images_per_prompt

    def read() -> tuple[DpgBench, list[ImageTask]]:
        """The benchmark, and the images to generate."""
        bench = read_dpg_bench(config.data)
        print_left_out(bench.bad)
        if config.images is None:
            VqaModel(config.vqa, torch.device("cpu"))  # what cannot be loaded should fail before hours of generating
        return bench, [
            image_task(config, f"{item}/{number}", prompt, number)
            for item, prompt in bench.prompts.items()
            for number in range(per_prompt)
        ]

    with processes.only_main_prints():
        bench, tasks = processes.from_main(read)
        if config.images is None:
            rendered, digests = render_all(config, processes, tasks)
            folders = {label: images.folder for label, images in rendered.items()}
        else:
            rendered, digests = {}, {"base": None, "encoder_2": None}
            folders = {Path(os.path.realpath(config.images)).name: Path(config.images)}
    if not processes.is_main:
        return {}
    session, vqa = Session(NAME, config, bench, processes.device), place_digest(config.vqa)
    model = cache(lambda: VqaModel(config.vqa, processes.device))

    def ask(files: Sequence[Path], questions: Sequence[str]) -> dict:
        starts = range(0, len(questions), config.batch_size)
        parts = [questions[start : start + config.batch_size] for start in starts]
        images = load_images(files, per_prompt)
        return {"answers": [[text for part in parts for text in model()(image, part)] for image in images]}

    results, encoders = {}, {}
    for label, folder in folders.items():
        files, yes, lines = find_images(str(folder), bench.prompts, per_prompt), {}, []
        for item, propositions in tqdm(bench.propositions.items(), desc=f"ask, {label}"):
            file_digests = [*map(sha256, files[item])]
            questions = [proposition.question for proposition in propositions]
            depends = {"vqa": vqa, "images": [OPENED_AS, *file_digests], "count": per_prompt}
            compute = partial(ask, files[item], questions)
            answers = session.cache.result("answers", depends | {"questions": questions}, compute)["answers"]
            yes[item] = [[text == "yes" for text in of_image] for of_image in answers]
            lines.append(f"{item}\0{' '.join(file_digests)}\n".encode())
        results[label] = outcomes(bench.propositions, yes)
        reading = rendered[label].reading if rendered else {}
        encoders[label] = score(results[label], per_prompt) | reading | {"images_digest": bytes_digest(sorted(lines))}
    of_images = {label: numbers["images_digest"] for label, numbers in encoders.items()}
    session.digests |= {"vqa": vqa, "encoders": of_images} | digests
    return session.report(
        tables,
        figures,
        encoders,
        compare_outcomes(results),
        [*NOTES, f"Answers are by {Path(config.vqa).name}."],
        seconds=time.monotonic() - started,
        drawing=rendering_settings(config) if rendered else None,
        prompts=len(bench.prompts),
        propositions=sum(map(len, bench.propositions.values())),
    )


# ---- images


def find_images(folder: str, items: Iterable[str], images_per_prompt: int) -> dict[str, list[Path]]:
    """The files of each prompt's images: one for each in a folder named as the prompt, or one for all.

    Raises:
        UserError: a prompt has no images, or another number of them.
        OSError: the folder cannot be read.
    """
    root, by_item, faults = Path(folder), {}, []
    paths = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    singles = {path.stem: path for path in reversed(paths)}  # the first of a name
    for item in items:
        if (root / item).is_dir():
            by_item[item] = sorted(path for path in (root / item).iterdir() if not path.name.startswith("."))
            if len(by_item[item]) != images_per_prompt:
                faults.append(f"the folder {item} holds {len(by_item[item])} files")
        elif item in singles and images_per_prompt in (1, GRID**2):
            by_item[item] = [singles[item]]
        else:
            faults.append(f"there is neither a folder {item} nor a file {item}.png")
    if faults:
        raise UserError(
            f"{folder!r} does not hold the images of {len(faults)} prompts: {faults[0]}. Each prompt needs "
            f"images_per_prompt={images_per_prompt} images: a file for each in a folder named as the prompt, or (for "
            "4) one file with a grid of 2 x 2."
        )
    return by_item


def load_images(files: Sequence[Path], count: int) -> list[Image.Image]:
    """The images of a prompt, as RGB: the files, or the quarters of a grid, in the published script's order, by rows.

    Raises:
        UserError: a file cannot be read, or a grid's sides are odd.
    """
    images = [load_image(path) for path in files]
    if len(files) == count:
        return images
    width, height = (side // GRID for side in images[0].size)
    if images[0].size != (width * GRID, height * GRID):
        raise UserError(f"{str(files[0])!r} is no grid of {GRID} x {GRID} images, because a side is odd.")
    places = [(column * width, row * height) for row in range(GRID) for column in range(GRID)]
    return [images[0].crop((left, top, left + width, top + height)) for left, top in places]


# ---- answers


class VqaModel:
    """A ViLT or a BLIP of transformers, by its folder or hub id, that answers questions about an image.

    Raises:
        UserError: the model cannot be loaded, lacks weights, or is neither ViLT nor BLIP.
    """

    def __init__(self, model: str, device: torch.device):
        advice = (
            "Give --vqa a folder or hub id of a ViLT or BLIP for visual question answering, such as "
            "dandelin/vilt-b32-finetuned-vqa or Salesforce/blip-vqa-base, with its processor's files."
        )
        with explain_failure(f"The VQA model {model!r} could not be loaded", advice):
            check_model(model)
            self.processor = AutoProcessor.from_pretrained(model)
            # Files other than safetensors are read with weights_only=True.
            loaded = load_pretrained(AutoModelForVisualQuestionAnswering, model, repr(model), dtype=torch.float32)
            kind = loaded.config.model_type
            if kind not in ("vilt", "blip"):
                raise ValueError(f"it is a {kind}, which is asked in another way")
        self.model, self.device = loaded.to(device), device

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[str]:
        """The answer to each question, in lower case, without a full stop, independent of the others."""
        # Grouped by length, because transformers' BLIP reads padding as part of the question.
        groups: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            groups.setdefault(len(self.processor.tokenizer(question)["input_ids"]), []).append(index)
        answers = [""] * len(questions)
        for group in groups.values():
            for index, answer in zip(group, self._answer(image, [questions[i] for i in group]), strict=True):
                answers[index] = answer.strip().lower().rstrip(".")
        return answers

    @torch.inference_mode()
    def _answer(self, image: Image.Image, questions: list[str]) -> list[str]:
        """The answers to questions of one length."""
        images = [image] * len(questions)
        inputs = self.processor(images=images, text=questions, truncation=True, return_tensors="pt").to(self.device)
        if self.model.config.model_type == "vilt":
            # It reads its patches in a random order, which changes the rounding.
            with torch.random.fork_rng():
                torch.manual_seed(0)
                best = self.model(**inputs).logits.argmax(dim=-1).tolist()
            return [self.model.config.id2label[index] for index in best]
        ids = self.model.generate(**inputs, max_new_tokens=10, do_sample=False, num_beams=1)
        return self.processor.batch_decode(ids, skip_special_tokens=True)


# ---- for people


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
    """The figure of a report, by file name: the share that holds, with 95% intervals, by category and by position."""
    encoders = report["encoders"]
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
    return {f"{NAME}.png": figure}


def settings_for(everything: AllConfig) -> DpgBenchConfig | None:
    """Its settings in `evaluate all`; None without its data."""
    if everything.dpg_bench is None:
        return None
    given = {"data": everything.dpg_bench, "images": None, "base": everything.sdxl, "encoders": everything.for_images}
    return everything.settings(DpgBenchConfig, **given)
