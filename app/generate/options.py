"""Settings of `generate`."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.models.shipped import shipped

# Options in the order of `generate --help`.
_GROUPS = {
    "Prompts": ("prompt", "prompts", "negative_prompt", "weighting", "strict", "overlap"),
    "Models": ("base", "encoder", "encoder_2"),
    "Images": ("output", "overwrite", "images_per_prompt", "seed", "steps", "guidance_scale", "height", "width"),
    "Speed and memory": ("batch", "low_memory", "device", "dtype"),
}


@dataclass
class GenerateConfig:
    """What to render, with which models, and where to write it.

    Args:
        prompt: what to render, in up to 20,000 characters; nothing of it is cut off.
        base: an SDXL or Stable Diffusion 1.5 checkpoint: a folder in diffusers' layout, a hub id, a single
            .safetensors file, or CONFIG:FILE.safetensors with the folder or hub id of its configuration and tokenizers.
        encoder: text encoder that replaces the checkpoint's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. An alignment's folder brings its second encoder, too, if it has one.
            The checkpoint's own encoder reads long prompts in chunks of 77 tokens.
        encoder_2: text encoder that replaces SDXL's second one, with a projection. "stretch" stretches the checkpoint's
            own to 248 positions, untrained, as Long-CLIP does.
        output: PNG to write, picture.png by default; for several images the folder, pictures by default. Each PNG
            holds the settings that made it.
        overwrite: replace an image at `output` that has other settings, such as another prompt.
        prompts: file of prompts, instead of `prompt`: .txt, one a line; .jsonl or .csv with prompt and, optionally,
            negative_prompt, seed and prompt_2 (for SDXL's second encoder). Run the command again to continue an
            interrupted run: finished images are kept.
        negative_prompt: what to avoid. Only used with a guidance scale above 1.
        seed: equal seeds start from equal noise, on every device. Entry i of a file of prompts, from 0, has this seed
            + i unless it names one.
        images_per_prompt: images of each prompt, with its seed, the next seed, and so on.
        batch: images rendered at once, of prompts of equal length; more are faster and need more memory.
        low_memory: encode all prompts first, then free the text encoders and load UNet and autoencoder. The images are
            the same.
        strict: skip prompts that a text encoder would have to read in several chunks.
        overlap: where a text encoder reads a prompt in several chunks, read each but the first together with the end of
            the text before it, so that "it" finds what it means; up to twice the work of the text encoders. false reads
            each chunk by itself, as earlier releases and other programs do.
        weighting: (word:1.3), ((word)), [word], word++ and BREAK in prompts are weights; otherwise they are text.
        steps: denoising steps, from 1 to 1000; more are slower and finer, up to about 50.
        guidance_scale: how strongly the prompt is followed; 1 is no guidance and half the time. The default is above
            diffusers' 5, for a closer reading of a long prompt's details; above 10 colours oversaturate, and 1000 is
            the maximum.
        height: pixels, a multiple of 8; the model's own size by default (1024 for SDXL).
        width: pixels, a multiple of 8; the model's own size by default.
        device: cpu, cuda, cuda:1, mps; the fastest available by default.
        dtype: precision of the models; by default float16 on an accelerator and float32 on the CPU.
    """

    GROUPS = _GROUPS  # without an annotation, so no option

    prompt: str | None
    base: str
    encoder: str | None = None
    output: str | None = None
    overwrite: bool = False
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
    overlap: bool = True

    def __post_init__(self):
        for name in filter(None, (self.base, self.encoder, self.encoder_2)):
            shipped(name)  # raises UserError for a misspelt toy model

    @property
    def several(self) -> bool:
        """Whether a folder of images is written, not a single file."""
        return self.prompts is not None or self.images_per_prompt > 1
