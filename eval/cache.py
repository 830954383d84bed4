"""On-disk cache of evaluation results, keyed by every input that affects them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.files import atomic_file, json_digest, read_json_object, sha256, write_json
from debias_diffusion.models.weight_files import save_tensors

from .report import versions

FOLDER = "parts"  # of the cache, in an evaluation's output folder


class ResultCache:
    """Results in one folder, each found by its key: settings, digests of data and models, versions of the libraries.

    So a killed evaluation resumes at the first unfinished result, changed settings find nothing, and evaluations of the
    same encoders on the same data share results. A damaged result is computed again.

    Args:
        folder: where results are kept; created with the first one.

    Attributes:
        seconds: how long the results requested so far took to compute, in whichever run that was.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder, self.seconds = Path(folder), 0.0

    def result(self, name: str, depends: dict, compute: Callable[[], dict]) -> dict:
        """The result of `compute`, in JSON values, from the cache if it is there.

        Args:
            name: of the kind of result, for its file.
            depends: JSON values: everything that affects the result.
        """
        depends, file = self._key(name, depends)
        entry = read_json_object(file)
        if entry.get("depends") != depends or entry.get("sha256") != json_digest(entry):
            started = time.monotonic()
            result = compute()
            entry = {"depends": depends, "seconds": time.monotonic() - started, "result": result}
            write_json(file, entry | {"sha256": json_digest(entry)})
            entry = read_json_object(file)  # so that a first run and a resumed one get the same
        self.seconds += entry["seconds"]
        return entry["result"]

    def tensors(self, name: str, depends: dict, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same for tensors on the CPU, in a file beside the JSON."""
        _, entry_file = self._key(name, depends)
        file = entry_file.with_suffix(".safetensors")

        def save() -> dict:
            with atomic_file(file) as unfinished:
                save_tensors(compute(), unfinished)
            return {"sha256": sha256(file)}

        if not file.is_file() or read_json_object(entry_file).get("result") != {"sha256": sha256(file)}:
            entry_file.unlink(missing_ok=True)
        self.result(name, depends, save)
        return load_file(file)

    def _key(self, name: str, depends: dict) -> tuple[dict, Path]:
        """The whole key as JSON values, and the file that it names."""
        depends = json.loads(json.dumps({"part": name, **depends, "versions": versions()}))
        return depends, self.folder / f"{name}-{json_digest(depends)[:24]}.json"
