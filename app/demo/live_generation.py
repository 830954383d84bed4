"""Images of one prompt by several text encoders, generated step by step, so that a visitor can watch and stop."""

import io
import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from PIL import Image

from debias_diffusion.errors import UserError, reason
from debias_diffusion.pipelines import PromptLayout, StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.png import png_info, settings_text
from debias_diffusion.pipelines.rendering import (
    Embeddings,
    ImagePrompt,
    Sampling,
    cleaned,
    encode,
    is_out_of_memory,
    read_layout,
    render,
    runtime_settings,
)

from .checks import check
from .models import DemoModels
from .prompt_reading import prompt_reading, tokenize_prompt
from .request import SHARED_SETTINGS, Request


@dataclass(frozen=True)
class Step:
    """The progress of a request.

    Attributes:
        label: the encoder.
        picture: number of the image among those of the encoder, from 1.
        step: finished steps of this image.
        steps: all steps of this image.
        done_share: finished share of the request, from 0 to 1.
    """

    label: str
    picture: int
    step: int
    steps: int
    done_share: float


@dataclass(frozen=True)
class Drawn:
    """A finished image.

    Attributes:
        label: the encoder.
        picture: number of the image among those of the encoder, from 1.
        seed: of the noise.
        image: the image.
        png: the image as a file that contains its settings.
        read: in words, how much of the prompt the encoder read.
    """

    label: str
    picture: int
    seed: int
    image: Image.Image
    png: bytes
    read: str


@dataclass(frozen=True)
class _Encoded:
    """A prompt encoded by one encoder, with the pipeline that renders it."""

    pipe: StableDiffusionXLLongPromptPipeline
    sampling: Sampling
    embeddings: Embeddings
    layout: PromptLayout
    read: str


class _CancelledError(Exception):
    pass


def draw(
    models: DemoModels, request: Request, cancelled: Callable[[], bool], budget: int | None = None
) -> Iterator[Step | Drawn]:
    """Generates the images of a request: the first one by each encoder, then the second one by each, and so on.

    Images equal those of `debias-diffusion generate` with the same settings, bit for bit, whatever was drawn before.
    The caller must keep the models' device to this iterator.

    Args:
        models: the demo's models.
        request: unchecked.
        cancelled: called before every step, in another thread. Once it returns True, or the iterator is closed, no
            further step is taken and the iterator ends.
        budget: denoising steps allowed, as `check_budget` counts them; None for any number.

    Raises:
        UserError: the request cannot be drawn, takes too many steps, or the device runs out of memory.
    """
    request = check(request, models)
    if budget is not None:
        check_budget(models, request, budget)
    items: queue.SimpleQueue = queue.SimpleQueue()
    closed = threading.Event()

    def stop_if_asked() -> None:
        if closed.is_set() or cancelled():
            raise _CancelledError

    # diffusers renders an image in one call, so it runs in a thread that reports each step.
    drawing = threading.Thread(target=_work, args=(models, request, stop_if_asked, items.put), daemon=True)
    drawing.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        drawing.join()


def check_budget(models: DemoModels, request: Request, budget: int) -> None:
    """Raises UserError for a request of more denoising steps than allowed.

    A step counts in proportion to the pixels beyond the checkpoint's native size, and, for encoders that read the whole
    prompt, to the positions beyond the longest context length.

    Args:
        models: the demo's models.
        request: checked.
        budget: steps of all images by all encoders.
    """
    pixels = max(1.0, request.height * request.width / math.prod(models.size))
    lengths = [max(1.0, _positions(models, request, label) / models.longest_context) for label in request.encoders]
    steps = request.steps * request.images * pixels * sum(lengths)
    if steps <= budget:
        return
    counted = f"{request.steps} steps x {request.images} images x {len(request.encoders)} encoders"
    if pixels > 1:
        counted += f" x {pixels:.1f} for the size of the images"
    if max(lengths) > 1:
        counted += f" x {sum(lengths) / len(lengths):.1f} for the length of the prompt"
    raise UserError(
        f"This request takes {math.ceil(steps):,} steps ({counted}); one request may take {budget:,} here. Choose "
        "fewer steps, images or encoders, smaller images or a shorter prompt."
    )


def _positions(models: DemoModels, request: Request, label: str) -> int:
    """Positions of a prompt's embeddings, or of all its chunks, whichever are more."""
    pipe = models.pipeline(label, request)
    texts = [cleaned(text, request.weighting) for text in (request.prompt, request.negative_prompt) if text]
    layouts = [pipe.prompt_layout(text, do_classifier_free_guidance=False) for text in texts]
    chunks = max(max(layout.chunks) for layout in layouts)
    return max(chunks * (models.stock_context - 2) + 2, *(layout.positions for layout in layouts))


def _work(models: DemoModels, request: Request, stop_if_asked: Callable, report: Callable) -> None:
    """Reports steps and images; at the end, whatever happens, None or the error."""
    end = None
    try:
        try:
            _draw_all(models, request, stop_if_asked, report)
        finally:
            models.restore()
    except _CancelledError:
        pass
    except BaseException as error:
        end = error
        if is_out_of_memory(error):
            # The error itself is dropped: its frames would hold the memory.
            end = UserError(f"{models.device} is out of memory ({reason(error)}). Choose a smaller image.")
    report(end)


def _draw_all(models: DemoModels, request: Request, stop_if_asked: Callable, report: Callable) -> None:
    encoded: dict[str, _Encoded] = {}
    places = [(image, label) for image in range(request.images) for label in request.encoders]
    for place, (image, label) in enumerate(places):

        def progress(step: int, steps: int, place: int = place, image: int = image, label: str = label) -> None:
            stop_if_asked()
            report(Step(label, image + 1, step, steps, (place + step / steps) / len(places)))

        progress(0, request.steps)
        if label not in encoded:
            encoded[label] = _encode(models, request, label)
            stop_if_asked()  # encoding a long prompt takes a while
        report(_draw_one(models, request, label, image, encoded[label], progress))


def _encode(models: DemoModels, request: Request, label: str) -> _Encoded:
    pipe = models.pipeline(label, request)
    texts = [cleaned(text, request.weighting) for text in (request.prompt, request.negative_prompt)]
    prompt = ImagePrompt(texts[0], negative_prompt=texts[1] if request.negative_prompt else None)
    sampling = Sampling(request.steps, request.guidance_scale, request.height, request.width)
    layout = read_layout(pipe, prompt, sampling)
    embeddings = encode(pipe, [prompt], sampling)
    tokens = tokenize_prompt(request.prompt, models.encoders[label].tokenizer, request.weighting)
    read = prompt_reading(models, label, tokens, request.long_prompts).in_words()
    return _Encoded(pipe, sampling, embeddings, layout, read)


def _draw_one(
    models: DemoModels,
    request: Request,
    label: str,
    image: int,
    encoded: _Encoded,
    progress: Callable[[int, int], None],
) -> Drawn:
    pipe = encoded.pipe
    # A new one: schedulers keep state of past steps.
    pipe.scheduler = models.make_scheduler(request.scheduler)
    seed = request.seed + image
    [picture] = render(pipe, encoded.embeddings, [seed], encoded.sampling, progress)
    if isinstance(picture, str):
        raise UserError(f"The image by {label} with the seed {seed} was not rendered: {picture}. Try other settings.")
    settings = settings_of(models, request, label, image + 1, encoded.layout)
    file = as_png(picture, settings, type(pipe.scheduler).__name__)
    return Drawn(label, image + 1, seed, picture, file, encoded.read)


def settings_of(models: DemoModels, request: Request, label: str, picture: int, layout: PromptLayout) -> dict:
    """The settings of an image as `debias-diffusion generate` writes them, and the rest of the request.

    Args:
        models: the demo's models.
        request: checked.
        label: the encoder.
        picture: number of the image among those of the encoder, from 1.
        layout: how the prompt was encoded.
    """
    scene = {} if request.scene is None else {"scene": request.scene}
    return (
        {name: getattr(request, name) for name in SHARED_SETTINGS}
        | scene
        | {
            "negative_prompt": request.negative_prompt or None,
            "prompt_2": None,
            "seed": request.seed + picture - 1,
            "picture": picture,
            "base": models.base,
            "encoder": label,
            "encoders": list(request.encoders),
            "encoder_2": None,
            "reading": models.how_read(label, request.long_prompts),
            **runtime_settings(models.device, models.dtype),
            **layout._asdict(),
        }
    )


def as_png(image: Image.Image, settings: dict, scheduler: str) -> bytes:
    """An image as a PNG that contains its settings, also in the format of A1111's interface.

    Args:
        settings: from `settings_of`.
        scheduler: name of diffusers' class.
    """
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=png_info(settings_text(settings, scheduler)))
    return file.getvalue()
