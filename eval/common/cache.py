"""Pieces of an evaluation that are not done again: each is kept with everything that decides what comes of it."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from debias_diffusion.files import json_digest, read_json_object, sha256, whole_file, write_json
from debias_diffusion.models.weights import save_tensors

from .report import versions


class Parts:
    """Results of finished parts in one folder.

    A part is found again by what decides it: its settings, digests of its data and models, and the versions of the
    libraries. So a killed evaluation goes on with the first part that is not finished, a changed setting finds nothing,
    and evaluations of the same encoders on the same data share what they have in common. A damaged part is done again.

    Args:
        folder: where they are kept; made when the first part is.

    Attributes:
        seconds: how long all parts asked for so far took, in whichever run did them.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder, self.seconds = Path(folder), 0.0

    def result(self, name: str, depends: dict, work: Callable[[], dict]) -> dict:
        """What `work` returned, now or when it was done before.

        Args:
            name: of the part, for its file.
            depends: JSON values: everything that decides the result.
            work: returns JSON values.
        """
        depends, file = self._place(name, depends)
        kept = read_json_object(file)
        if kept.get("depends") != depends or kept.get("sha256") != json_digest(kept):
            started = time.monotonic()
            result = work()
            kept = {"depends": depends, "seconds": time.monotonic() - started, "result": result}
            write_json(file, kept | {"sha256": json_digest(kept)})
            kept = read_json_object(file)  # so that a first run and one that goes on see the same
        self.seconds += kept["seconds"]
        return kept["result"]

    def tensors(self, name: str, depends: dict, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same for tensors on the CPU, which lie beside the JSON."""
        _, file = self._place(name, depends)
        file = file.with_suffix(".safetensors")

        def keep() -> dict:
            with whole_file(file) as unfinished:
                save_tensors(work(), unfinished)
            return {"sha256": sha256(file)}

        told = read_json_object(file.with_suffix(".json")).get("result")
        if not file.is_file() or told != {"sha256": sha256(file)}:  # deleted, or cut short by what wrote no whole files
            file.with_suffix(".json").unlink(missing_ok=True)
        self.result(name, depends, keep)
        return load_file(file)

    def _place(self, name: str, depends: dict) -> tuple[dict, Path]:
        depends = json.loads(json.dumps({"part": name, **depends, "versions": versions()}))
        return depends, self.folder / f"{name}-{json_digest(depends)[:24]}.json"
