"""What programs ask for, with gradio_client or any HTTP client: no part of the page, and pictures come as bytes."""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from html import escape
from typing import Any

import gradio as gr

from debias_diffusion.errors import UserError, reason

from .device import Device
from .drawing import Drawn
from .reading import attention, movement, tokens
from .requests import LongPrompts, request_of_png

# All that use the device are in one line, and one of them at a time is let through.
TURN = {"concurrency_id": "device", "concurrency_limit": 1}


@contextmanager
def _told() -> Iterator[None]:
    """What a user can mend is told; gradio shows it as HTML, where a browser sees it."""
    try:
        yield
    except UserError as error:
        raise gr.Error(escape(str(error), quote=False), print_exception=False) from None


def add_endpoints(device: Device) -> None:
    """Adds /generate, /tokens, /attention and /settings to the page that is being built."""
    models = device.models

    def generate(
        prompt: str,
        encoders: list[str] | None = None,
        negative_prompt: str = "",
        seed: int = 0,
        steps: int | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        images: int = 1,
        scheduler: str | None = None,
        weighting: bool = False,
        long_prompts: LongPrompts = "auto",
    ) -> list[dict]:
        """Draws a prompt with each encoder. A picture is a dict: label, seed, read (what the encoder read, in words)
        and png, the file in base64 with its settings inside. What is None is as the page has it.

        Parameters:
            prompt: what to draw
            encoders: labels of those that draw it, all if None
            negative_prompt: what not to draw
            seed: of the first picture's noise
            steps: denoising steps
            guidance_scale: how strongly the prompt is followed; 1 is no guidance
            height: pixels
            width: pixels
            images: pictures by each encoder, with this seed, the next one, and so on
            scheduler: one of those that the page offers
            weighting: (word:1.3), [word] and BREAK in prompts are weights
            long_prompts: auto, windows or cut
        """
        given = {
            "encoders": tuple(encoders) if isinstance(encoders, list) else encoders,
            "steps": steps,
            "guidance_scale": guidance_scale,
            "height": height,
            "width": width,
            "scheduler": scheduler,
        }
        request = replace(
            models.defaults,
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=seed,
            images=images,
            weighting=weighting,
            long_prompts=long_prompts,
            **{name: value for name, value in given.items() if value is not None},
        )
        pictures = []
        drawing = device.draw(request)
        try:
            with _told():
                for news in drawing:
                    if isinstance(news, Drawn):
                        pictures.append(_picture(news))
                    else:
                        # Where a request that nobody waits for any more is broken off.
                        yield []
        finally:
            drawing.close()
        yield pictures

    def count(prompt: str, weighting: bool = False) -> dict:
        """Counts a prompt's tokens with the encoders' own tokenizer: count, sentences, original and long (how many of
        the first are read by every encoder, and by the longest in one piece), and each token's text, sentence, window.

        Parameters:
            prompt: any text
            weighting: (word:1.3), [word] and BREAK in prompts are weights
        """
        with _told():
            return _counted(tokens(models, prompt, weighting))

    def look(prompt: str, encoders: list[str] | None = None) -> dict:
        """What each encoder reads of a prompt. attention: by encoder, how much the end of the text attends to each word
        in the last layer; movement: by edit of the prompt, 1 - cosine of each encoder's embedding before and after.

        Parameters:
            prompt: any text
            encoders: labels of those that read it, all if None
        """
        labels = models.labels if encoders is None else encoders
        with _told(), device.alone():
            looked = attention(models, prompt, labels)
            try:
                moved = [asdict(row) for row in movement(models, prompt, labels)]
            except UserError:  # of a single sentence nothing can be removed
                moved = []
            return {"attention": looked, "movement": moved}

    def settings(png: str) -> dict:
        """What a picture was asked for with: request, the settings for /generate, and notes, what of them is not here.

        Parameters:
            png: a PNG that was made here, in base64
        """
        with _told():
            request, notes = request_of_png(decoded(png), models)
        return {"request": asdict(request), "notes": notes}

    gr.api(generate, api_name="generate", **TURN)
    gr.api(count, api_name="tokens", queue=False)
    gr.api(look, api_name="attention", **TURN)
    gr.api(settings, api_name="settings", queue=False)


def decoded(png: Any) -> bytes:
    """A file from base64. Raises UserError if it is none."""
    try:
        return base64.b64decode(png, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UserError(f"What was given is no file in base64 ({reason(error)}). Give a PNG.") from None


def _picture(drawn: Drawn) -> dict:
    png = base64.b64encode(drawn.png).decode()
    return {"label": drawn.label, "seed": drawn.seed, "read": drawn.read, "png": png}


def _counted(found) -> dict:
    return {"count": found.count} | asdict(found)
