"""Pictures of one prompt by several text encoders, step by step, so that a person can watch and break off."""

import io
import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from PIL import Image

from debias_diffusion.errors import UserError, reason
from debias_diffusion.pipelines import PromptLayout, StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.memory import is_out_of_memory
from debias_diffusion.pipelines.rendering import (
    Embeddings,
    ImagePrompt,
    Sampling,
    encode,
    read_layout,
    render,
    runtime_settings,
)

from ..generate.png_settings import png_info, settings_text
from ..generate.prompts import cleaned
from .models import Models
from .requests import SAME, Request, check, unweighted


@dataclass(frozen=True)
class Step:
    """How far the drawing is.

    Attributes:
        label: of the encoder.
        picture: its number among the encoder's, from 1.
        step: steps that are done of this picture, 0 when it begins.
        steps: how many it takes.
        done_share: of the whole request, from 0 to 1.
    """

    label: str
    picture: int
    step: int
    steps: int
    done_share: float


@dataclass(frozen=True)
class Drawn:
    """A finished picture.

    Attributes:
        label: of the encoder.
        picture: its number among the encoder's, from 1.
        seed: of its noise.
        image: the picture.
        png: the same as a file, with the settings that made it in its text.
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
    """A prompt as one encoder reads it: what draws from it, and what it is drawn from."""

    pipe: StableDiffusionXLLongPromptPipeline
    sampling: Sampling
    embeddings: Embeddings
    layout: PromptLayout
    read: str


class _BrokenOffError(Exception):
    pass


def draw(
    models: Models, request: Request, cancelled: Callable[[], bool], budget: int | None = None
) -> Iterator[Step | Drawn]:
    """Draws what a request asks for: the first picture by each encoder, then the second by each, and so on.

    A picture is the one that `debias-diffusion generate` draws with the same settings, bit for bit, whatever was drawn
    before. Whoever calls sees to it that nothing else uses the models' device meanwhile.

    Args:
        models: what draws.
        request: what; it is checked.
        cancelled: asked before every step, in another thread. Once it says yes, or the iterator is closed, no further
            step is taken and the iterator ends.
        budget: denoising steps that it may take, as `check_budget` counts them; None for any number.

    Raises:
        UserError: the request cannot be drawn, takes too many steps, or memory does not suffice.
    """
    request = check(request, models)
    if budget is not None:
        check_budget(models, request, budget)
    news: queue.SimpleQueue = queue.SimpleQueue()
    closed = threading.Event()

    def stop_if_asked() -> None:
        if closed.is_set() or cancelled():
            raise _BrokenOffError

    # diffusers draws in one call and not step by step; so it runs beside, and says what it has.
    drawing = threading.Thread(target=_work, args=(models, request, stop_if_asked, news.put), daemon=True)
    drawing.start()
    try:
        while (item := news.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        drawing.join()


def check_budget(models: Models, request: Request, budget: int) -> None:
    """Raises UserError for a request that takes more denoising steps than it may, before any is taken.

    A step of an image larger than the base's own counts as often as it is larger. A step with a prompt of more
    positions than the longest encoder reads at once counts as often as there are more, for encoders that read all of
    it.

    Args:
        request: checked.
        budget: steps of all images by all encoders together.
    """
    pixels = max(1.0, request.height * request.width / math.prod(models.size))
    lengths = [max(1.0, _positions(models, request, label) / models.long_window) for label in request.encoders]
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


def _positions(models: Models, request: Request, label: str) -> int:
    """Positions of a prompt's embeddings, or of all the pieces that an encoder reads it in, whichever are more."""
    pipe = models.pipeline(label, request)
    texts = [cleaned(its, request.weighting) for its in (request.prompt, request.negative_prompt) if its]
    layouts = [pipe.prompt_layout(text, do_classifier_free_guidance=False) for text in texts]
    pieces = max(max(layout.windows) for layout in layouts)
    return max(pieces * (models.short_window - 2) + 2, *(layout.positions for layout in layouts))


def _work(models: Models, request: Request, stop_if_asked: Callable, report: Callable) -> None:
    """Reports what is drawn; at the end, whatever happens, None or what went wrong."""
    end = None
    try:
        try:
            _draw_all(models, request, stop_if_asked, report)
        finally:
            models.restore()
    except _BrokenOffError:
        pass
    except BaseException as error:
        end = error
        if is_out_of_memory(error):
            # Of the error itself nothing is kept, or its frames would keep the memory.
            end = UserError(
                f"The memory of {models.device} does not suffice ({reason(error)}). Draw a smaller picture."
            )
    report(end)


def _draw_all(models: Models, request: Request, stop_if_asked: Callable, report: Callable) -> None:
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


def _encode(models: Models, request: Request, label: str) -> _Encoded:
    pipe = models.pipeline(label, request)
    texts = [cleaned(text, request.weighting) for text in (request.prompt, request.negative_prompt)]
    prompt = ImagePrompt(texts[0], negative_prompt=texts[1] if request.negative_prompt else None)
    sampling = Sampling(request.steps, request.guidance_scale, request.height, request.width)
    layout = read_layout(pipe, prompt, sampling)
    embeddings = encode(pipe, [prompt], sampling)
    return _Encoded(pipe, sampling, embeddings, layout, _read(models, request, label, layout))


def _read(models: Models, request: Request, label: str, layout: PromptLayout) -> str:
    """How much of the prompt the first encoder reads."""
    encoder, text = models.encoders[label], unweighted(request.prompt, request.weighting)
    total = len(encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    room = min(encoder.window, models.short_window) - 2
    if total > room and models.cuts(label, request.long_prompts):
        return f"reads the first {room:,} of {total:,} tokens"
    windows = layout.windows[0]
    return f"reads all {total:,} tokens in {'one piece' if windows == 1 else f'{windows} windows'}"


def _draw_one(
    models: Models, request: Request, label: str, image: int, encoded: _Encoded, progress: Callable[[int, int], None]
) -> Drawn:
    pipe = encoded.pipe
    # A new one, because schedulers count steps and keep past ones.
    pipe.scheduler = models.make_scheduler(request.scheduler)
    seed = request.seed + image
    [picture] = render(pipe, encoded.embeddings, [seed], encoded.sampling, progress)
    if isinstance(picture, str):
        raise UserError(f"The image by {label} with the seed {seed} was not rendered: {picture}. Try other settings.")
    settings = settings_of(models, request, label, image + 1, encoded.layout)
    file = as_png(picture, settings, type(pipe.scheduler).__name__)
    return Drawn(label, image + 1, seed, picture, file, encoded.read)


def settings_of(models: Models, request: Request, label: str, picture: int, layout: PromptLayout) -> dict:
    """What made a picture, as `debias-diffusion generate` writes it, and what else the request asked for.

    Args:
        picture: its number among the encoder's, from 1.
        layout: how the prompt was read.
    """
    return {name: getattr(request, name) for name in SAME} | {
        "negative_prompt": request.negative_prompt or None,
        "prompt_2": None,
        "seed": request.seed + picture - 1,
        "picture": picture,
        "base": models.base,
        "encoder": label,
        "encoders": list(request.encoders),
        "encoder_2": None,
        **runtime_settings(models.device, models.dtype),
        **layout._asdict(),
    }


def as_png(image: Image.Image, settings: dict, scheduler: str) -> bytes:
    """A picture as a file with its settings in its text, also for viewers that read those of A1111's interface.

    Args:
        settings: of `settings_of`.
        scheduler: name of diffusers' class.
    """
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=png_info(settings_text(settings, scheduler)))
    return file.getvalue()
