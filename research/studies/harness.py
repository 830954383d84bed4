"""What studies take from benchmarks/. They write their results to research/results/."""

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import harness
from harness import CPU, read_options

from debias_diffusion.devices import machine_name

RESULTS = Path(__file__).parents[1] / "results"
publish = partial(harness.publish, folder=RESULTS)
__all__ = ["CPU", "RESULTS", "machine_name", "publish", "read_options"]
