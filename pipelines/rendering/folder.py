"""The images of a job folder: what is missing is rendered in batches, by one process or several."""

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from tqdm import tqdm

from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.jobs import Job
from debias_diffusion.processes import Processes
from debias_diffusion.text.options import PromptLayout

from .images import read_layout
from .png import first_difference, png_bytes
from .prompts import ImagePrompt, ImageTask
from .renderer import Renderer

Made = tuple[int, bytes | str, dict]  # an image's index; its PNG, or in words why there is none; its notes


def plan_batches(
    prompts: Sequence[ImagePrompt], layouts: Mapping[int, PromptLayout], size: int, wanted: Collection[int]
) -> list[list[int]]:
    """Indices of prompts in batches of one length, so that none is padded further than it would be alone.

    In a batch either all or no prompts have a negative prompt, and all have the same LoRAs. Finished images keep their
    place in their batch, so that a resumed run renders the rest with the same batch-mates, bit for bit. Batches without
    a `wanted` image are left out.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, layout in layouts.items():
        key = layout.positions, prompts[index].negative_prompt is None, prompts[index].loras
        groups.setdefault(key, []).append(index)
    batches = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    wanted = set(wanted)
    batches = [batch for batch in batches if not wanted.isdisjoint(batch)]
    return sorted(batches, key=lambda batch: (prompts[batch[0]].loras, batch))  # each LoRA is loaded once


@dataclass(frozen=True)
class Rendered:
    """The images of one encoder.

    Attributes:
        folder: of the job.
        files: of the images that are there, in the order of the tasks.
        reading: for reports. "cut_at": the number of tokens, BOS and EOS included, at which prompts are cut, None if
            they are not; "prompts_cut": how many were; "seconds": of rendering, in all runs, without loading models.
    """

    folder: Path
    files: list[Path]
    reading: dict


def render_into(
    job: Job | None,
    renderer: Renderer,
    encoder: EncoderSpec,
    tasks: Sequence[ImageTask],
    left_out: dict[str, str] | None = None,
    processes: Processes | None = None,
    unread: list[str] | None = None,
) -> Rendered:
    """Renders the images that are missing in a job folder, each with its settings in its PNG.

    Images of a resumed run, and of several processes, equal those of one uninterrupted run, bit for bit.

    Args:
        job: with the renderer's settings and inputs. Images are its items, `NAME.png`. None in all processes but the
            main one, which writes for all.
        tasks: all images, finished or not; a finished one must be of the same prompt.
        left_out: gets, by its place, why an image was not rendered.
        unread: gets what is not read of the prompts of missing images, in sentences.
        processes: that share the work, by default this one alone; all make this call.

    Raises:
        UserError: an image is of another prompt or was not made by this job, or no prompt can be read.
        FailedError: some images have values that are not finite, see `render_batch`. All others are rendered.
    """
    left_out, processes = {} if left_out is None else left_out, processes or Processes(renderer.device)
    folder, missing = processes.from_main(lambda: (job.folder, _missing(job, renderer, encoder, tasks)))
    if not missing:
        return processes.from_main(lambda: _finished(job, tasks))
    prompts, failed = [renderer.cleaned(encoder, task.prompt) for task in tasks], {}
    pipe = renderer.pipeline(encoder)
    layouts = _layouts(renderer, pipe, tasks, prompts, left_out)
    if unread is not None:
        unread += dict.fromkeys(sentence for layout in layouts.values() for sentence in layout.warnings)
    batches = plan_batches(prompts, layouts, renderer.batch, missing)

    def share() -> Iterator[list[Made]]:
        """What this process makes of each of its batches."""
        mine, started = batches[processes.index :: processes.count], time.monotonic()
        rendered = renderer.render_batches(pipe, encoder, [[prompts[index] for index in batch] for batch in mine])
        for batch, images in zip(mine, rendered, strict=True):
            seconds, made = (time.monotonic() - started) / len(batch) / processes.count, []
            for index, image in zip(batch, images, strict=True):
                if index in missing:
                    prompt, layout = tasks[index].prompt, layouts[index]
                    if not isinstance(image, str):
                        image = png_bytes(image, renderer.png_text(pipe, encoder, prompt, layout))
                    notes = renderer.identity(encoder, prompt) | layout.settings() | {"seconds": seconds}
                    made.append((index, image, notes))
            yield made
            started = time.monotonic()

    title = f"render{f', {processes.count} processes' if processes.count > 1 else ''}, {folder.name}"
    total = sum(index in missing for batch in batches for index in batch)
    with tqdm(desc=title, total=total, unit="image", disable=not processes.is_main) as bar:
        for made in processes.gathered_by_round(share(), math.ceil(len(batches) / processes.count)):
            for index, image, notes in made:
                task = tasks[index]
                if isinstance(image, str):
                    failed[f"{task.where}, seed {task.prompt.seed}"] = image
                elif job:
                    with job.write(task.file, **notes) as temporary:
                        temporary.write_bytes(image)
            bar.update(len(made))
    left_out |= failed
    if failed:
        raise FailedError(explain_failures(failed, f"{len(tasks):,} images in {str(folder)!r}", renderer.dtype))
    return processes.from_main(lambda: _finished(job, tasks))


def _finished(job: Job, tasks: Sequence[ImageTask]) -> Rendered:
    there = [task.file for task in tasks if task.file in job]
    notes = [job.notes(name) for name in there]
    reading = {
        "cut_at": max((entry["cut_at"] or 0 for entry in notes), default=0) or None,
        "prompts_cut": sum(entry["tokens"] + 2 > (entry["cut_at"] or math.inf) for entry in notes),
        "seconds": round(sum(entry["seconds"] for entry in notes), 3),
    }
    return Rendered(job.folder, [job.folder / name for name in there], reading)


def explain_failures(failed: dict[str, str], images: str, dtype: torch.dtype) -> str:
    """What to do about those of the images, "7 images", that were not rendered: their places and why."""
    return (
        f"{len(failed):,} of {images} were not rendered, the first: {': '.join(next(iter(failed.items())))}. Where "
        "values are not finite, weights of an encoder or of the SDXL checkpoint are damaged, or too large for "
        f"{str(dtype).removeprefix('torch.')}. Try another encoder or, in `generate`, precision fp32. The other "
        "images are kept."
    )


def _missing(job: Job, renderer: Renderer, encoder: EncoderSpec, tasks: Sequence[ImageTask]) -> set[int]:
    """Indices of the images that are not there or damaged. Raises UserError for one that is something else."""
    missing, differing, damaged = set(), [], []
    finished = set(job.names())
    for index, task in enumerate(tasks):
        name = task.file
        if name not in finished:
            missing.add(index)
            if os.path.lexists(job.folder / name):
                differing.append(f"{name} ({task.where}): it was not made by this job")
        elif difference := first_difference(job.notes(name), renderer.identity(encoder, task.prompt)):
            differing.append(f"{name} ({task.where}): {difference}")
        elif not job.is_whole(name):
            missing.add(index)
            damaged.append(name)
    if differing:
        raise UserError(
            f"{len(differing):,} of the images in {str(job.folder)!r} are others, the first {differing[0]}. Give "
            "another output, return to those prompts, or remove the images to replace."
        )
    print(f"Images: {len(tasks) - len(missing):,} are in {job.folder}, {len(missing):,} to render")
    if damaged:
        print(f"Damaged: {len(damaged):,} of the images, rendered again, the first {damaged[0]}")
    return missing


def _layouts(
    renderer: Renderer,
    pipe: DiffusionPipeline,
    tasks: Sequence[ImageTask],
    prompts: Sequence[ImagePrompt],
    left_out: dict[str, str],
) -> dict[int, PromptLayout]:
    """How the prompt of each image, cleaned, is read, by the image's index; prints it."""
    read, layouts = cache(lambda prompt: read_layout(pipe, prompt, renderer.sampling)), {}
    for index, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
        try:
            layouts[index] = read(replace(prompt, seed=0))
        except UserError as error:
            left_out[task.where] = str(error)
    if not layouts:
        place, why = next(iter(left_out.items()))
        raise UserError(f"No prompt can be rendered. {place.capitalize()}: {why}")
    counts = sorted(Counter(layout.positions for layout in layouts.values()).items())
    print("Positions:", ", ".join(f"{length} for {count:,} image{'s' * (count > 1)}" for length, count in counts))
    return layouts
