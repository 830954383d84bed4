"""Settings of `app`."""

from dataclasses import dataclass, field
from typing import Literal

from debias_diffusion.eval.encoder_names import check_encoders
from debias_diffusion.eval.options import TOYS
from debias_diffusion.models.shipped import shipped

from .request import BUDGET


@dataclass
class AppConfig:
    """Models of the demo, and access to it.

    Attributes:
        base: SDXL checkpoint: a folder in diffusers' layout, a single .safetensors file, a hub id, or toy/sdxl.
        encoders: Text encoders to compare, up to five: folders written by `export`, any transformers CLIPTextModel
            folder, toy/clip, toy/long-clip, toy/debias-clip, or original, the checkpoint's own. overlap:NAME reads long
            prompts in overlapping chunks, chunks:NAME in others, instead of cutting them.
        host: Address to listen on. The default is this machine only; 0.0.0.0 or :: lets others in.
        port: Port to listen on, or the next free one.
        user: User name for the login, with a password.
        password: Password for the login. Other users of this machine can read it in the process list; password_file or
            the environment variable DEBIAS_DIFFUSION_PASSWORD hides it.
        password_file: File whose first line is the password.
        budget: Denoising steps of one request, over all its images and encoders. Images larger than the SDXL
            checkpoint's native size, and prompts beyond the longest context length, count more.
        device: cpu, cuda, cuda:1, mps; by default the fastest available.
        dtype: Precision of the models; by default float16 on an accelerator and float32 on the CPU.
    """

    base: str = "toy/sdxl"
    encoders: list[str] = field(default_factory=lambda: list(TOYS))
    host: str = "127.0.0.1"
    port: int = 7860
    user: str | None = None
    password: str | None = None
    password_file: str | None = None
    budget: int = BUDGET
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None

    def __post_init__(self):
        shipped(self.base)  # raises UserError for a misspelt toy model
        check_encoders(self.encoders, of_images=True)
