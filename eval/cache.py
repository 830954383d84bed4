"""On-disk cache of evaluation results, keyed by every input that affects them."""

import json
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.files import write_json
from debias_diffusion.jobs import Job
from debias_diffusion.models.weight_files import save_tensors

from .report import versions

FOLDER = "cache"  # in an evaluation's output folder

Content = TypeVar("Content", dict, dict[str, Tensor])


class ResultCache:
    """Results in an output folder, each found by its key: settings, digests of data and models, library versions.

    So a killed evaluation resumes at the first unfinished result, changed settings find nothing, and evaluations of the
    same encoders on the same data share results, also at once. A damaged result is computed again.

    Args:
        output: of the evaluation; becomes a shared job with the first result.

    Attributes:
        folder: where results are kept.
        seconds: how long the results requested so far took to compute, in whichever run that was.
    """

    def __init__(self, output: str | os.PathLike):
        self.output, self.folder, self.seconds = Path(output), Path(output, FOLDER), 0.0

    def result(self, kind: str, depends: dict, compute: Callable[[], dict]) -> dict:
        """The result of `compute`, in JSON values, from the cache if it is there.

        Args:
            kind: of result, for its file.
            depends: JSON values: everything that affects the result.
        """
        file = self._file(kind, depends, ".json", compute, lambda content, path: write_json(path, content))
        return json.loads(file.read_text(encoding="utf-8"))  # so that a first run and a resumed one get the same

    def tensors(self, kind: str, depends: dict, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same for tensors on the CPU."""
        return load_file(self._file(kind, depends, ".safetensors", compute, save_tensors))

    def noted(self, kind: str, depends: dict, compute: Callable[[], dict]) -> dict:
        """The same for a few values, in the job's list of items instead of a file."""
        name = self._key(kind, depends)
        if name not in self._job:
            started = time.monotonic()
            values = compute()
            self._job.note(name, values=values, seconds=time.monotonic() - started)
        notes = self._job.notes(name)
        self.seconds += notes["seconds"]
        return notes["values"]

    def has_notes(self, kind: str) -> bool:
        """Whether there are values of a kind, in this run or an earlier one."""
        return bool(Job.read(self.output).names(f"{kind}-"))

    @cached_property
    def _job(self) -> Job:
        with Job.open(self.output, "evaluate", shared=True) as job:
            return job  # shared, so it holds nothing

    @staticmethod
    def _key(kind: str, depends: dict) -> str:
        return Job.key(kind, depends | {"versions": versions()})

    def _file(
        self,
        kind: str,
        depends: dict,
        suffix: str,
        compute: Callable[[], Content],
        save: Callable[[Content, Path], None],
    ) -> Path:
        name = f"{FOLDER}/{self._key(kind, depends)}{suffix}"
        if self._job.path(name, damaged="absent") is None:
            started = time.monotonic()
            content = compute()
            with self._job.write(name, seconds=time.monotonic() - started) as temporary:
                save(content, temporary)
        self.seconds += self._job.notes(name)["seconds"]
        return self.output / name
