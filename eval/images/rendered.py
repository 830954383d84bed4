"""Images of several text encoders in one SDXL checkpoint, from equal noise: a job folder for each encoder.

A killed run continues with the missing images, and several processes share them. Either way the images equal those of
one uninterrupted run, bit for bit.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from debias_diffusion.devices import explain_memory
from debias_diffusion.encoders.spec import Kind
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines.rendering.folder import Rendered, render_into
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.processes import Processes
from debias_diffusion.toyworld.shipped import shipped

FOLDER = "images"  # in an evaluation's output
_COMMAND = "evaluate generation"  # and following
_SETTINGS = (
    *("base", "steps", "guidance_scale", "images_at_once", "prefix", "seed"),
    *("encoder_2", "refiner", "layer", "scheduler", "height", "width", "sharpen"),
    "zero_empty_negative",
)


def make_renderer(config: Any, device: torch.device) -> Renderer:
    """The renderer of an evaluation's images, without its models.

    Raises:
        UserError: there is no such SDXL checkpoint, or it cannot render images of this size.
    """
    is_toy = config.base != shipped(config.base)  # as many of its small images as fill two cores
    batch = (20 if is_toy else 1) if config.images_at_once == "auto" else config.images_at_once
    models = {"encoder_2": config.encoder_2, "refiner": config.refiner}
    renderer = Renderer(config.base, Sampling.of(vars(config)), device, **models, batch=batch)
    renderer.checkpoint.check_kind()
    return renderer


def rendering_settings(config: Any) -> dict:
    """How an evaluation renders: the fields of its `Drawing`, with "auto" and null resolved for the checkpoint.

    Raises:
        UserError: as `make_renderer`.
    """
    renderer = make_renderer(config, torch.device("cpu"))
    resolved = {name: getattr(renderer.sampling, name) for name in ("steps", "guidance_scale")}
    return {name: getattr(config, name) for name in _SETTINGS} | resolved | {"images_at_once": renderer.batch}


def image_task(config: Any, name: str, prompt: str, number: int) -> ImageTask:
    """The image of a prompt, whose noise has the seed of the settings plus `number`."""
    return ImageTask(name, ImagePrompt(config.prefix + prompt, config.seed + number), name)


def folder_names(labels: Sequence[str]) -> dict[str, str]:
    """A folder name for each label: at most 200 bytes, without characters special to file systems and shells."""
    plain = [re.sub(r"[^\w.-]+", "-", label).strip(".-") or "encoder" for label in labels]
    plain = [name.encode()[:190].decode(errors="ignore").rstrip(".-") for name in plain]
    taken = [name.lower() for name in plain]  # some file systems tell no cases apart
    return {
        label: f"{name}-{number}" if taken.count(name.lower()) > 1 else name
        for number, (label, name) in enumerate(zip(labels, plain, strict=True), 1)
    }


def render_all(config: Any, processes: Processes, tasks: Sequence[ImageTask]) -> tuple[dict[str, Rendered], dict]:
    """Renders the missing images with one encoder after the other, into `images/LABEL` of the output.

    Each encoder takes the place of SDXL's first one. All are checked before anything is rendered, and their models are
    gone from memory when this returns.

    Args:
        processes: share the work; all must make this call.

    Returns:
        (the images by label, the digests "base", "encoder_2" and, by label, "encoders")

    Raises:
        UserError: an encoder cannot be loaded or does not fit the checkpoint, a seed is out of range, a folder holds
            images of other settings, or memory does not suffice.
        FailedError: some images have values that are not finite.
    """
    renderer, encoders = make_renderer(config, processes.device), config.labelled
    folders = {label: Path(config.output, FOLDER, name) for label, name in folder_names(list(encoders)).items()}

    def check() -> dict[str, tuple[dict, dict]]:
        """The settings and inputs of each job."""
        jobs = {}
        for label, encoder in encoders.items():
            jobs[label] = settings, inputs = renderer.settings(encoder), renderer.inputs(encoder)
            if folders[label].exists():
                with Job.open(folders[label], _COMMAND, settings, inputs):
                    pass
            if encoder.kind is not Kind.ORIGINAL:
                renderer.checkpoint.check_fits("text_encoder", encoder.load_text_encoder()[0], encoder.name)
        return jobs

    jobs, rendered = processes.from_main(check), {}
    with explain_memory(processes.device, "Lower images_at_once."):
        for label, encoder in encoders.items():
            opened = Job.open(folders[label], _COMMAND, *jobs[label]) if processes.is_main else nullcontext()
            with opened as job:
                rendered[label] = render_into(job, renderer, encoder, tasks, processes=processes)
    inputs = {label: digests for label, (_, digests) in jobs.items()}
    first = next(iter(inputs.values()))
    base, refiner = first["base"], {"refiner": first["refiner"]} if config.refiner else {}
    of_encoders = {label: digests["encoder"] or base for label, digests in inputs.items()}
    return rendered, {"base": base, "encoder_2": renderer.digest(config.encoder_2), "encoders": of_encoders} | refiner
