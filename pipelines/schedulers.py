"""diffusers' schedulers that SDXL's images can be sampled with, in place of the checkpoint's own."""

import diffusers
from diffusers import DiffusionPipeline, SchedulerMixin

from debias_diffusion.errors import UserError, near_matches

# Of one UNet evaluation per step, by class, with changes to the checkpoint's configuration: DDIM would clip latents as
# if they were pixels.
SCHEDULERS: dict[str, dict] = {
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {},
    "DDIMScheduler": {"clip_sample": False},
    "UniPCMultistepScheduler": {},
}


def check_scheduler(name: str) -> None:
    """Raises UserError unless `name` is one of SCHEDULERS."""
    if name not in SCHEDULERS:
        hint = near_matches(name, tuple(SCHEDULERS))
        raise UserError(f"Unknown scheduler {name!r}.{hint} Choose from: {', '.join(SCHEDULERS)}.")


def make_scheduler(pipe: DiffusionPipeline, name: str) -> SchedulerMixin:
    """A new scheduler of a class in SCHEDULERS, with the configuration of the pipeline's."""
    return getattr(diffusers, name).from_config(pipe.scheduler.config, **SCHEDULERS[name])
