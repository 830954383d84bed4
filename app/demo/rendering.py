"""Images of one prompt by several text encoders, generated step by step, so that a visitor can watch and stop."""

import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from diffusers import DiffusionPipeline
from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.png import settings_text, write_png
from debias_diffusion.pipelines.rendering.renderer import ImagePrompt, encode, read_layout, render

from ..options import AppConfig
from .models import DemoModels
from .reading import read_prompt
from .request import Request, check, to_settings


class Step(NamedTuple):
    """The progress of a request: its finished share, from 0 to 1, and in words where it is."""

    done_share: float
    place: str


@dataclass(frozen=True)
class RenderedImage:
    """A finished image.

    Attributes:
        label: the encoder.
        seed: of the noise.
        image: the image.
        text: chunks of its PNG, with its settings, also in the format of A1111's interface.
        read: in words, how much of the prompt the encoder read.
    """

    label: str
    seed: int
    image: Image.Image
    text: dict[str, str]
    read: str

    def save(self, folder: str | Path) -> Path:
        """Writes the PNG with its settings, and returns its path."""
        stem = re.sub(r"[^A-Za-z0-9]+", "-", self.label).strip("-")
        path = Path(folder) / f"{stem}-seed-{self.seed}.png"
        write_png(self.image, path, self.text)
        return path


class _StoppedError(Exception):
    pass


def render_request(
    models: DemoModels, request: Request, budget: int = AppConfig.budget
) -> Iterator[Step | RenderedImage]:
    """Generates the images of a request: the first one by each encoder, then the second one by each, and so on.

    Images equal those of `debias-diffusion generate` with the same settings, bit for bit, whatever was generated
    before. Once the iterator is closed, no further step is taken; closing it does not wait for the current one.

    Args:
        request: not yet checked.
        budget: denoising steps allowed, as `check_budget` counts them.

    Raises:
        UserError: the request cannot be generated, takes too many steps, or the device runs out of memory.
    """
    request = check(request, models)
    items: queue.SimpleQueue = queue.SimpleQueue()
    closed = threading.Event()

    def report(item: Step | RenderedImage) -> None:
        if closed.is_set():
            raise _StoppedError
        items.put(item)

    def work() -> None:
        end = None
        try:
            with models.alone():
                check_budget(models, request, budget)
                _render_all(models, request, report)
        except _StoppedError:
            pass
        except BaseException as error:
            end = error
        items.put(end)

    # diffusers renders an image in one call, so it runs in a thread that reports each step.
    threading.Thread(target=work, daemon=True).start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()


def _prepare(models: DemoModels, request: Request, label: str) -> tuple[DiffusionPipeline, ImagePrompt]:
    """The pipeline of an encoder, and the prompt as it reads it."""
    pipe = request.renderer(models).prepare(models.encoders[label], models.spec(label, request.reading))
    prompt = ImagePrompt(request.prompt, negative_prompt=request.negative_prompt or None)
    return pipe, prompt.cleaned(request.options(models, label))


def check_budget(models: DemoModels, request: Request, budget: int) -> None:
    """Raises UserError for a request, checked before, of more denoising steps than allowed, over all images.

    A step counts in proportion to the pixels beyond the checkpoint's native size, and, for encoders that read the whole
    prompt, to the positions beyond the longest context length.
    """

    def positions(label: str) -> int:
        """Of a prompt's embeddings, or of all its chunks, whichever are more."""
        pipe, prompt = _prepare(models, request, label)
        texts = filter(None, (prompt.prompt, prompt.negative_prompt))
        layouts = [pipe.prompt_layout(text, do_classifier_free_guidance=False) for text in texts]
        chunks = max(max(layout.chunks) for layout in layouts)
        second = pipe.text_encoder_2.config.max_position_embeddings
        return max(chunks * (second - 2) + 2, *(layout.positions for layout in layouts))

    pixels = max(1.0, request.height * request.width / math.prod(models.size))
    lengths = [max(1.0, positions(label) / models.longest_context) for label in request.encoders]
    steps = request.steps * request.images * pixels * sum(lengths)
    if steps > budget:
        counted = f"{request.steps} steps x {request.images} images x {len(lengths)} encoders"
        if pixels > 1:
            counted += f" x {pixels:.1f} for the size of the images"
        if max(lengths) > 1:
            counted += f" x {sum(lengths) / len(lengths):.1f} for the length of the prompt"
        raise UserError(
            f"This request takes {math.ceil(steps):,} steps ({counted}); one request may take {budget:,} here. Choose "
            "fewer steps, images or encoders, smaller images or a shorter prompt."
        )


def _render_all(models: DemoModels, request: Request, report: Callable[[Step | RenderedImage], None]) -> None:
    sampling, encoded = request.renderer(models).sampling, {}
    places = [(number, label) for number in range(1, request.images + 1) for label in request.encoders]

    def report_step(place: int, step: int, steps: int) -> None:
        number, label = places[place]
        report(Step((place + step / steps) / len(places), f"{label}, image {number}, step {step} of {steps}"))

    for place, (number, label) in enumerate(places):
        report_step(place, 0, request.steps)
        pipe, prompt = _prepare(models, request, label)
        if label not in encoded:
            encoded[label] = encode(pipe, [prompt], sampling), read_layout(pipe, prompt, sampling)
            report_step(place, 0, request.steps)  # encoding a long prompt takes a while
        embeddings, layout = encoded[label]
        seed = request.seed + number - 1
        [image] = render(pipe, embeddings, [seed], sampling, partial(report_step, place))
        if isinstance(image, str):
            raise UserError(f"The image by {label}, seed {seed}, was not rendered: {image}. Try other settings.")
        settings = to_settings(models, request, label, number, layout)
        text = settings_text(settings, type(pipe.scheduler).__name__)
        report(RenderedImage(label, seed, image, text, read_prompt(models, label, request).in_words()))
