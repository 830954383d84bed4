"""Folders and files of models with one file damaged: loading either succeeds or says why not, and runs no code.

The examples run in a process of their own, so that a hang or a crash is seen and named. `FOR SECONDS` of examples are
tried: FUZZ_SECONDS, 20 by default. By hand: `python tests/fuzz/test_model_files.py 3600`, which goes on after a
finding and lists all at its end.
"""

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
_LONGEST = 120  # seconds for one example, on whatever machine
_MEMORY = 6 << 30  # bytes of addresses that loading may take besides what is taken before


def test_damaged_models_are_loaded_or_refused():
    # Always the same examples in CI, others every time in a search by hand.
    seed = str(int.from_bytes(os.urandom(4), "little")) if "FUZZ_SECONDS" in os.environ else "0"
    command = [sys.executable, __file__, str(_SECONDS), seed]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS + 300)
    assert found.returncode == 0, f"seed {seed}\n{found.stdout[-8000:]}\n{found.stderr[-4000:]}"
    assert "examples" in found.stdout


@dataclass
class Target:
    """A valid model and what loads it."""

    name: str
    folder: Path
    load: Callable[[Path], object]

    def files(self) -> list[Path]:
        return sorted(file.relative_to(self.folder) for file in self.folder.rglob("*") if file.is_file())


class TooLong(BaseException):
    """An example that does not end."""


def _fuzz(seconds: float, seed: int) -> int:
    """Tries examples until the time is up. Returns how many kinds of findings there were."""
    import resource

    import hypothesis
    import torch
    from hypothesis import strategies as st
    from mutations import damaged_file, trap

    from debias_diffusion.errors import UserError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end, counts, findings = time.monotonic() + seconds, collections.Counter(), {}

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    with tempfile.TemporaryDirectory() as temporary:
        sentinel, targets = Path(temporary, "code-ran"), _targets(Path(temporary))
        for target in targets:
            target.load(target.folder)  # undamaged; and what is imported late is imported
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

        def attack(target: Target, file: Path, damaged: bytes) -> str:
            place = target.folder / file
            whole = place.read_bytes()
            place.write_bytes(damaged)
            signal.alarm(_LONGEST)
            try:
                with open(os.devnull, "w") as null, contextlib.redirect_stderr(null), contextlib.redirect_stdout(null):
                    target.load(target.folder)
                return "loaded"
            except UserError as error:
                cause = error.__cause__
                if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                    raise
                return "refused"
            finally:
                signal.alarm(0)
                place.write_bytes(whole)
                assert not sentinel.exists(), "code of a file was run"

        @hypothesis.settings(
            max_examples=10,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(st.data())
        def example(data):
            target = data.draw(st.sampled_from(targets))
            file = data.draw(st.sampled_from(target.files()))
            content = (target.folder / file).read_bytes()
            if data.draw(st.integers(0, 29)) == 0:
                damaged = trap(sentinel)
            else:
                damaged = data.draw(damaged_file(file.name, content))
            try:
                outcome = attack(target, file, damaged)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                at = [line.name for line in traceback.extract_tb(error.__traceback__) if "debias" in line.filename]
                kind = f"{target.name} {file.name}: {type(error).__name__} {str(error)[:150]!r} in {at[-1:]}"
                key = f"{target.name} {type(error).__name__} {at[-1:]}"
                counts["found"] += 1
                if key not in findings:
                    shown = damaged[:3000] if file.suffix == ".json" else damaged[:100]
                    findings[key] = kind
                    print(f"FOUND {kind}\n  {shown!r}", flush=True)
            else:
                counts[outcome] += 1

        rounds = 0
        while time.monotonic() < end:
            hypothesis.seed(seed + rounds)(example)()
            rounds += 1
    print(f"{sum(counts.values())} examples: {dict(counts)}; {len(findings)} kinds of findings", flush=True)
    return len(findings)


def _targets(root: Path) -> list[Target]:
    import torch
    from helpers.tiny_clip import byte_tokenizer, tiny_clip, tiny_siglip
    from helpers.tiny_sdxl import build_tiny_sdxl
    from safetensors.torch import load_file, save_file
    from transformers import ViTConfig, ViTModel

    from debias_diffusion.encoders import load_text_encoder, load_two_tower
    from debias_diffusion.eval.images.networks import ClsFeatures
    from debias_diffusion.interchange.clip_model import export_clip_model
    from debias_diffusion.interchange.transformers_folder import export_text_encoder
    from debias_diffusion.models.shipped import shipped
    from debias_diffusion.pipelines.checkpoints import Checkpoint, load_pipeline
    from debias_diffusion.tokens import clip_tokenizer

    def _sdxl(folder: Path):
        _ = Checkpoint.parse(folder).size
        load_pipeline(folder, None, torch.device("cpu"))

    small = tiny_clip(tokenizer=byte_tokenizer(77))
    small.save(root / "open_clip")
    tiny_siglip().save(root / "siglip")
    export_text_encoder(small, root / "text")
    export_clip_model(small, root / "clip")
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(root / "text" / name, root / "text_bin" / name)
    weights = root / "text_bin" / "text_encoder" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    build_tiny_sdxl(root / "sdxl")
    shutil.copytree(Path(shipped("toy/debias-clip")), root / "difference")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(root / "vit")
    state = {
        name: tensor.contiguous() for name, tensor in tiny_clip(tokenizer=clip_tokenizer(77)).model.state_dict().items()
    }
    for folder in ("file", "torch_file"):
        (root / folder).mkdir()
    save_file(state, root / "file" / "weights.safetensors")
    torch.save(state, root / "torch_file" / "weights.pt")
    loads = {
        "open_clip": load_two_tower,
        "siglip": load_two_tower,
        "text": load_text_encoder,
        "text_bin": load_text_encoder,
        "clip": load_two_tower,
        "sdxl": _sdxl,
        "difference": load_two_tower,
        "vit": lambda folder: ClsFeatures(folder, torch.device("cpu")),
        "file": lambda folder: load_text_encoder(next(folder.iterdir())),
        "torch_file": lambda folder: load_text_encoder(next(folder.iterdir())),
    }
    return [Target(name, root / name, load) for name, load in loads.items()]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(1 if _fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) else 0)
