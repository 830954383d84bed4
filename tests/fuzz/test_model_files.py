"""Folders and files of models with one file damaged: loading either succeeds or says why not, and runs no code."""

import collections
import contextlib
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.fuzzing import SECONDS, fuzz, no_hang
from helpers.mutations import damaged_file, trap
from helpers.ranks import forked
from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip
from helpers.tiny_sdxl import build_tiny_sdxl
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTModel

from debias_diffusion.encoders.clip_model import export_clip_model
from debias_diffusion.encoders.spec import load_text_encoder, load_two_tower
from debias_diffusion.encoders.transformers_folder import export_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images.networks import ClsFeatures
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint, load_pipeline
from debias_diffusion.text.tokens import clip_tokenizer
from debias_diffusion.toyworld.shipped import shipped

MEMORY = 6 << 30  # bytes of addresses that loading may take besides what is taken before
FOR = 20  # seconds


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
        file.write_bytes(trap(code_ran) if hostile else data.draw(damaged_file(file.name, whole)))
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
        return load_pipeline(folder, None, torch.device("cpu"))

    small = tiny_clip(tokenizer=byte_tokenizer(77))
    small.save(root / "open_clip")
    tiny_siglip().save(root / "siglip")
    export_text_encoder(small, root / "text")
    export_clip_model(small, root / "clip")
    shutil.copytree(root / "text", root / "text_bin")
    weights = root / "text_bin" / "text_encoder" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    build_tiny_sdxl(root / "sdxl")
    shutil.copytree(shipped("toy/debias-clip"), root / "difference")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(root / "vit")
    state = tiny_clip(tokenizer=clip_tokenizer(77)).model.state_dict()
    for folder in ("file", "torch_file"):
        (root / folder).mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, root / "file" / "weights.safetensors")
    torch.save(state, root / "torch_file" / "weights.pt")
    of_file = dict.fromkeys(("file", "torch_file"), lambda folder: load_text_encoder(next(folder.iterdir())))
    towers = dict.fromkeys(("open_clip", "siglip", "clip", "difference"), load_two_tower)
    texts = dict.fromkeys(("text", "text_bin"), load_text_encoder)
    vit = {"sdxl": load_sdxl, "vit": lambda folder: ClsFeatures(folder, torch.device("cpu"))}
    return of_file | towers | texts | vit
