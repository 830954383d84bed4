"""A request to the demo: every setting that decides its images, and their limits."""

from dataclasses import dataclass
from typing import Literal

LongPrompts = Literal["auto", "chunks", "separate", "cut"]
MOST_STEPS = 100
MOST_GUIDANCE = 30.0
MOST_IMAGES = 8
MOST_SCENES = 2**31
BUDGET = 1000  # denoising steps of one request: 6 images by 5 encoders in 30 steps
# Settings of a PNG that have the same name and meaning in a request.
SHARED_SETTINGS = (
    *("prompt", "steps", "guidance_scale", "height", "width"),
    *("weighting", "images", "scheduler", "long_prompts"),
)


@dataclass(frozen=True)
class Request:
    """Everything that decides the images; `dataclasses.asdict` of it is JSON.

    Attributes:
        prompt: the prompt.
        encoders: labels of the encoders, which take turns.
        negative_prompt: "" for none.
        seed: of the first image's noise; image i, from 0, has seed + i.
        steps: denoising steps.
        guidance_scale: 1 or less is no guidance.
        height, width: in pixels.
        images: images by each encoder.
        scheduler: one of `DemoModels.schedulers`.
        weighting: read (word:1.3), [word], word++ and BREAK as weights.
        long_prompts: "auto": encoders with the context length of stock SDXL cut there, as stock SDXL does, and longer
            ones read everything, in overlapping chunks if one does not suffice; "chunks": all read everything in
            overlapping chunks; "separate": in chunks that do not overlap; "cut": all cut there. Encoders whose name
            says how they read (overlap:NAME, chunks:NAME) always read so.
        scene: number of the toy world's scene that has the prompt as its caption, below MOST_SCENES. It changes no
            image; what an image shows of it is marked.
    """

    prompt: str
    encoders: tuple[str, ...]
    negative_prompt: str = ""
    seed: int = 0
    steps: int = 30
    guidance_scale: float = 7.0
    height: int = 1024
    width: int = 1024
    images: int = 1
    scheduler: str = "Euler"
    weighting: bool = False
    long_prompts: LongPrompts = "auto"
    scene: int | None = None
