"""What images are rendered from: prompts, their texts as pipelines read them, and where they came from."""

import re
from dataclasses import dataclass, replace

from debias_diffusion.text.chunks import PROGRAMS
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.tokens import clean
from debias_diffusion.text.weighting import BREAK

from .loras import Lora


@dataclass(frozen=True)
class ImagePrompt:
    """What one image is rendered from. `render_into` cleans the texts; all other functions read them as they are.

    Attributes:
        prompt: what to render.
        seed: of the noise, equal on every device.
        negative_prompt: what to avoid; None for the checkpoint's default.
        prompt_2: for SDXL's second text encoder; None for `prompt`.
        loras: to draw with, where the tags of the prompt have been read.
    """

    prompt: str
    seed: int = 0
    negative_prompt: str | None = None
    prompt_2: str | None = None
    loras: tuple[Lora, ...] = ()

    def cleaned(self, options: LongPromptOptions) -> "ImagePrompt":
        """With the texts as pipelines of these options read them, see `cleaned`."""
        texts = {name: getattr(self, name) for name in ("prompt", "negative_prompt", "prompt_2")}
        return replace(self, **{name: text and cleaned(text, options) for name, text in texts.items()})


def cleaned(text: str, options: LongPromptOptions) -> str:
    """A prompt as pipelines read it: cleaned like training captions, BREAK in capitals if it is read, and A1111's AND,
    of which they warn.

    Where another program is imitated, the text stays as it is.
    """
    if options.reading in PROGRAMS:
        return text
    pieces, start = [], 0
    for match in re.finditer(r"\bAND\b" if options.weights == "none" else rf"{BREAK}|\bAND\b", text):
        pieces += [clean(text[start : match.start()]), match[0]]  # cleaning lowers case
        start = match.end()
    return " ".join([*pieces, clean(text[start:])])


@dataclass(frozen=True)
class ImageTask:
    """One image.

    Attributes:
        name: of its file, without .png; may begin with a folder's name.
        prompt: what it is rendered from, as a person wrote it.
        where: the prompt's place in words, such as "line 3".
    """

    name: str
    prompt: ImagePrompt
    where: str

    @property
    def file(self) -> str:
        """Its name in the job."""
        return f"{self.name}.png"
