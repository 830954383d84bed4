"""Images of one prompt by several text encoders, generated step by step, so that a visitor can watch and stop."""

import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from PIL import Image

from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.images import encode_batch, read_layout, render_batch
from debias_diffusion.pipelines.rendering.png import write_png
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt

from ..prompt_options import AppConfig
from .models import DemoModels
from .reading import read_prompt
from .request import Request, check

Step = tuple[float, str]  # the finished share of a request, from 0 to 1, and in words where it is


@dataclass(frozen=True)
class RenderedImage:
    """A finished image."""

    label: str  # of the encoder
    seed: int
    image: Image.Image
    text: dict[str, str]  # chunks of its PNG, with its settings
    read: str  # in words, how much of the prompt the encoder read

    def save(self, folder: str | Path) -> Path:
        """Writes the PNG with its settings, and returns its path."""
        stem = re.sub(r"[^A-Za-z0-9]+", "-", self.label).strip("-")
        path = Path(folder) / f"{stem}-seed-{self.seed}.png"
        write_png(self.image, path, self.text)
        return path


def render_request(
    models: DemoModels, request: Request, budget: int = AppConfig.budget
) -> Iterator[Step | RenderedImage]:
    """Checks a request and generates its images: the first one by each encoder, then the second one, and so on.

    Images equal those of `debias-diffusion generate` with the same settings, bit for bit, whatever was generated
    before. Once the iterator is closed, no further step is taken; closing it does not wait for the current one.

    Raises UserError as `check`, and if the device runs out of memory.
    """
    request = check(request, models, budget)
    items: queue.SimpleQueue = queue.SimpleQueue()
    closed = threading.Event()

    def report(item: Step | RenderedImage) -> None:
        if closed.is_set():
            raise GeneratorExit  # ends the work; nobody reads its items any more
        items.put(item)

    def work() -> None:
        end = None
        try:
            with models.held():
                _render_all(models, request, report)
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


def _render_all(models: DemoModels, request: Request, report: Callable[[Step | RenderedImage], None]) -> None:
    renderer, encoded = request.renderer(models), {}
    asked = ImagePrompt(request.prompt, negative_prompt=request.negative_prompt or None)
    places = [(number, label) for number in range(1, request.images + 1) for label in request.encoders]

    def report_step(place: int, step: int, steps: int) -> None:
        number, label = places[place]
        title = models.title(label, request.reading)
        report(((place + step / steps) / len(places), f"{title}, image {number}, step {step} of {steps}"))

    for place, (number, label) in enumerate(places):
        report_step(place, 0, request.steps)
        encoder, seed = models.spec(label, request.reading), request.seed + number - 1
        pipe, prompt = renderer.prepare(models.encoders[label], encoder), replace(asked, seed=seed)
        if label not in encoded:
            cleaned = renderer.cleaned(encoder, prompt)
            embeddings = encode_batch(pipe, [cleaned], renderer.sampling)
            encoded[label] = embeddings, read_layout(pipe, cleaned, renderer.sampling)
            report_step(place, 0, request.steps)  # encoding a long prompt takes a while
        embeddings, layout = encoded[label]
        [image] = render_batch(pipe, embeddings, [seed], renderer.sampling, partial(report_step, place))
        if isinstance(image, str):
            raise UserError(f"The image by {label}, seed {seed}, was not rendered: {image}. Try other settings.")
        of_request = {name: getattr(request, name) for name in ("encoders", "images", "scene")}
        of_request |= {"image": number, "chosen_reading": request.reading, "base": models.base, "encoder": label}
        text = renderer.png_text(pipe, encoder, prompt, layout, of_request)
        read = read_prompt(models, label, request.prompt, renderer.options(encoder)).in_words()
        report(RenderedImage(label, seed, image, text, read))
