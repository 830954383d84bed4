"""A request to the demo: every setting that decides its images."""

from dataclasses import dataclass

from debias_diffusion.encoders import Reading

MOST_STEPS = 100
MOST_GUIDANCE = 30.0
MOST_IMAGES = 8
BUDGET = 1000  # denoising steps of one request: 6 images by 5 encoders in 30 steps


@dataclass(frozen=True)
class Request:
    """Everything that decides the images.

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
        reading: how long prompts are read: "overlap", in overlapping chunks; "separate", in chunks that do not overlap;
            "cut", the first 77 positions, as stock SDXL does. Encoders whose name says how they read always read so.
        scene: number of the toy world's scene that has the prompt as its caption, below MOST_SCENES. It changes no
            image; what an image shows of it is told.
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
    reading: Reading = "overlap"
    scene: int | None = None
