"""Settings of `generate`."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class GenerateConfig:
    """What to draw, with which models, and where to put it.

    Args:
        prompt: what to draw, in up to 20,000 characters; nothing of it is cut off.
        base: an SDXL or Stable Diffusion 1.5 folder in diffusers' layout, or a hub id.
        encoder: text encoder that takes the place of the base's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. The base's own reads long prompts too, in windows of 77 tokens.
        encoder_2: text encoder that takes the place of SDXL's second one, likewise, with a projection. "stretch" gives
            its own one 248 positions, untrained, as Long-CLIP does.
        output: PNG to write, picture.png if not given; of several pictures the folder, pictures if not given. Each
            carries the settings that made it.
        prompts: file of prompts, instead of `prompt`: .txt, one a line; .jsonl or .csv with prompt and, if wanted,
            negative_prompt, seed and prompt_2 (for SDXL's second encoder). Start again what was interrupted: pictures
            that are there are not drawn again.
        negative_prompt: what not to draw. Only used with a guidance scale above 1.
        seed: equal seeds start from equal noise, on every device. Entry i of a file of prompts, from 0, has this seed
            + i unless it names its own.
        images_per_prompt: pictures of each prompt, with its seed, the next one, and so on.
        batch: pictures drawn at once, of prompts of equal length; more are faster and need more memory.
        low_memory: encode prompts first, and load UNet and autoencoder only when the text encoders are gone. The
            pictures are the same.
        strict: leave out prompts that a text encoder would have to read in several windows.
        weighting: (word:1.3), ((word)), [word], word++ and BREAK in prompts are weights; otherwise they are text.
        steps: denoising steps, from 1 to 1000; more are slower and finer, up to about 50.
        guidance_scale: how strongly the prompt is followed; 1 is no guidance and half the time. The default is above
            diffusers' 5, for a closer reading of a long prompt's details; past 10 colours burn, and 1000 is the most.
        height: pixels, a multiple of 8; the model's own size if not given (1024 for SDXL).
        width: pixels, a multiple of 8; the model's own size if not given.
        device: cpu, cuda, cuda:1, mps; the fastest there is if not given.
        dtype: precision of the models; float16 on an accelerator and float32 on the CPU if not given.
    """

    prompt: str | None
    base: str
    encoder: str | None = None
    output: str | None = None
    negative_prompt: str | None = None
    seed: int = 0
    steps: int = 30
    guidance_scale: float = 7.0
    height: int | None = None
    width: int | None = None
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    encoder_2: str | None = None
    prompts: str | None = None
    images_per_prompt: int = 1
    batch: int = 1
    low_memory: bool = False
    strict: bool = False
    weighting: bool = False

    @property
    def several(self) -> bool:
        """Whether a folder is filled, and not one file written."""
        return self.prompts is not None or self.images_per_prompt > 1
