"""Options that several commands have, each explained once. Nothing large is imported here, so that help is fast."""

from dataclasses import dataclass

from .limits import Checked, Precision, Share


@dataclass(kw_only=True)
class OnDevice(Checked):
    """Where a command runs.

    Attributes:
        device: cpu, cuda, cuda:1 or mps; the fastest available by default. Under `accelerate launch` each process has
            its own.
    """

    device: str | None = None


@dataclass(kw_only=True)
class InPrecision(OnDevice):
    """Where models run, and how precisely.

    Attributes:
        precision: fp32, bf16 or fp16 of the models. auto is fp16 on an accelerator and fp32 on the CPU.
    """

    precision: Precision = "auto"


@dataclass(kw_only=True)
class AllowsBad(Checked):
    """How much of the data may be unusable.

    Attributes:
        max_bad: Largest share of bad records, such as unreadable images and unusable captions, from 0 to 1.
    """

    max_bad: Share = 0.01
