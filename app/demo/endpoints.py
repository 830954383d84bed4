"""Endpoints for programs (gradio_client or any HTTP client), which return images as bytes."""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from html import escape
from typing import Any

import gradio as gr

from debias_diffusion.errors import UserError, reason

from .analysis import attention, movement, tokens
from .device import Device
from .live_generation import Drawn
from .request import LongPrompts
from .restore import request_of_png

# All functions that use the device share one line, which lets one through at a time.
TURN = {"concurrency_id": "device", "concurrency_limit": 1}


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Passes a UserError on to the visitor; escaped, because gradio shows it as HTML."""
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
        scene: int | None = None,
    ) -> list[dict]:
        """Generates images of a prompt with each encoder. Each image is a dict: label, seed, read (what the encoder
        read, in words) and png, the file in base64 with its settings inside. None stands for the page's default.

        Parameters:
            prompt: the prompt
            encoders: labels of the encoders, all if None
            negative_prompt: the negative prompt
            seed: of the first image's noise
            steps: denoising steps
            guidance_scale: 1 or less is no guidance
            height: pixels
            width: pixels
            images: images by each encoder, with this seed, the next one, and so on
            scheduler: one of those on the page
            weighting: read (word:1.3), [word] and BREAK in prompts as weights
            long_prompts: auto, chunks, separate or cut
            scene: number of the toy world's scene that has this caption, kept in the PNG to mark the image again
        """
        settings = {
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
            scene=scene,
            **{name: value for name, value in settings.items() if value is not None},
        )
        pictures = []
        drawing = device.draw(request)
        try:
            with _shown_errors():
                for item in drawing:
                    if isinstance(item, Drawn):
                        pictures.append(_picture(item))
                    else:
                        # gradio ends an abandoned request here.
                        yield []
        finally:
            drawing.close()
        yield pictures

    def count(
        prompt: str,
        weighting: bool = False,
        encoders: list[str] | None = None,
        long_prompts: LongPrompts = "auto",
    ) -> dict:
        """Counts a prompt's tokens with the encoders' tokenizer. Gives count, sentences, each token's text, sentence
        and read_by (whether all, some or none of the encoders read it), and readings: by encoder tokens, read (how many
        of them it reads) and chunks, each with first, new and end, as token numbers from 0: it is read from first to
        end, and what stands before new was read with the chunk before.

        Parameters:
            prompt: any text
            weighting: read (word:1.3), [word] and BREAK as weights
            encoders: labels of the encoders, all if None
            long_prompts: how they read long prompts, as for /generate
        """
        with _shown_errors():
            prompt_tokens = tokens(models, prompt, weighting, encoders, long_prompts)
            return {"count": prompt_tokens.count} | asdict(prompt_tokens)

    def look(
        prompt: str,
        encoders: list[str] | None = None,
        weighting: bool = False,
        long_prompts: LongPrompts = "auto",
    ) -> dict:
        """What each encoder reads of a prompt. attention: by encoder and chunk, how much EOT attends to each word in
        the last layer; movement: by edit of the prompt, 1 - cosine of each encoder's embedding before and after.

        Parameters:
            prompt: any text
            encoders: labels of the encoders, all if None
            weighting: read (word:1.3), [word] and BREAK as weights
            long_prompts: how they read long prompts, as for /generate
        """
        labels = models.labels if encoders is None else encoders
        with _shown_errors(), device.alone():
            shares = attention(models, prompt, labels, weighting, long_prompts)
            try:
                rows = movement(models, prompt, labels, weighting, long_prompts)
                movements = [asdict(row) for row in rows]
            except UserError:  # a single sentence has nothing to remove
                movements = []
            return {"attention": shares, "movement": movements}

    def settings(png: str) -> dict:
        """Reads the settings in a PNG: request, the parameters for /generate, and notes on what is missing here.

        Parameters:
            png: a PNG from this demo or from `debias-diffusion generate`, in base64
        """
        with _shown_errors():
            request, notes = request_of_png(decoded(png), models)
        return {"request": asdict(request), "notes": notes}

    gr.api(generate, api_name="generate", **TURN)
    gr.api(count, api_name="tokens", queue=False)
    gr.api(look, api_name="attention", **TURN)
    gr.api(settings, api_name="settings", queue=False)


def decoded(png: Any) -> bytes:
    """Bytes from base64. Raises UserError for anything else."""
    try:
        return base64.b64decode(png, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UserError(f"The file is not valid base64 ({reason(error)}). Give a PNG in base64.") from None


def _picture(drawn: Drawn) -> dict:
    png = base64.b64encode(drawn.png).decode()
    return {"label": drawn.label, "seed": drawn.seed, "read": drawn.read, "png": png}
