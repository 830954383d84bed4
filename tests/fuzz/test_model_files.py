"""Folders and files of models with one file damaged: loading either succeeds or says why not, and runs no code."""

import collections
import contextlib
import os
import pickle
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.fuzzing import SECONDS, fuzz, no_hang
from helpers.model_folders import KINDS
from helpers.mutations import damaged_bytes, damaged_safetensors
from helpers.ranks import forked
from helpers.text_encoders import Runs
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint

MEMORY = 6 << 30  # bytes of addresses that loading may take besides what is taken before
FOR = 10  # seconds


def test_damaged_models_are_loaded_or_refused(tmp_path):
    # In a process of its own, whose memory is limited and which may crash.
    (counts,) = forked(1, lambda _: search_models(tmp_path), group=False, patience=(SECONDS or FOR) + 300)
    print(counts)
    assert counts


def search_models(root: Path) -> dict[str, int]:
    """How many damaged models were loaded, and refused."""
    warnings.simplefilter("ignore")
    code_ran, loads, counts = root / "code-ran", models(root), collections.Counter()
    for name, load in loads.items():
        load(root / name)  # undamaged; and what is imported late is imported
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

    @given(st.sampled_from(sorted(loads)), st.data())
    def search(name, data):
        folder = root / name
        file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
        whole = file.read_bytes()
        hostile = data.draw(st.integers(0, 29)) == 0
        damaged = damaged_safetensors if file.suffix == ".safetensors" else damaged_bytes
        file.write_bytes(pickle.dumps({"state_dict": Runs(code_ran)}) if hostile else data.draw(damaged(whole)))
        try:
            with no_hang(), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
                loads[name](folder)
            counts["loaded"] += 1
        except UserError as error:
            assert not isinstance(error.__cause__, MemoryError) and "allocate memory" not in str(error.__cause__)
            counts["refused"] += 1
        finally:
            file.write_bytes(whole)
        assert not code_ran.exists()

    fuzz(search, FOR, count=10)
    return dict(counts)


def models(root: Path) -> dict[str, Callable[[Path], object]]:
    """Writes a valid model of each kind to a folder of its name: what loads it."""

    def load_sdxl(folder: Path):
        _ = Checkpoint.parse(folder).size
        return KINDS["sdxl"][-1](folder)

    loads = {}
    for name, (save, weights, _, load) in KINDS.items():
        if not name.startswith("sdxl "):
            save(root / name)
            loads[name] = load_sdxl if name == "sdxl" else load
        if name == "file":  # and in torch's format
            (root / "torch").mkdir()
            torch.save(load_file(root / name / weights), root / "torch" / "pytorch_model.bin")
            loads["torch"] = load
    return loads
