"""The first run of docs/training.md, with a ViT-B/16; the released DeBias-CLIP's file."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.modules import ROOT
from helpers.released import INVENTORY, checkpoint
from PIL import Image

from debias_diffusion.encoders.spec import load_two_tower
from research.as_released import AsReleasedConfig, rewrite

FIRST_RUN_BYTES = 8_000_000_000  # checkpoints of a ViT-B/16 with AdamW's state, and what is exported of it


def test_the_first_run_at_true_size(tmp_path):
    if (free := shutil.disk_usage(tmp_path).free) < FIRST_RUN_BYTES:
        pytest.skip(f"{free / 1e9:.1f} GB are free on the disk of {str(tmp_path)!r}, and this needs 8 GB")
    lines = re.search(r"<!-- first run -->\n```bash\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)[
        1
    ]
    # The environment of these tests instead of .venv; a copy of what the lines name, so that runs/ is not this tree's.
    lines = lines.replace("make .venv/installed && . .venv/bin/activate", f'PATH="{Path(sys.executable).parent}:$PATH"')
    for name in ("configs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", lines], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "12 of 12 pairs can be used" in done.stdout
    assert "RANDOM weights" in done.stdout
    # The prompt of 199 tokens with SOT and EOT is past 77 and read by the new encoder at once.
    assert re.search(r"Prompt: 197 tokens, encoded at 227 positions \(1 chunk of the first", done.stdout)
    with Image.open(tmp_path / "runs" / "coffee.png") as picture:
        assert picture.size == (64, 64)
    config = json.loads((tmp_path / "runs" / "encoder" / "text_encoder" / "config.json").read_text())
    assert (config["hidden_size"], config["max_position_embeddings"]) == (512, 248)


def test_a_file_with_the_released_names_and_sizes_loads_with_either_table_of_positions(tmp_path):
    torch.manual_seed(0)
    state = {name: (0.02 * torch.randn(shape)).half() for name, shape in INVENTORY["tensors"].items()}
    torch.save(checkpoint(state), file := tmp_path / "debias_vitb_3e.pt")
    first, second = (state[f"text.positional_embedding{end}"].float() for end in ("", "_res"))
    rewritten = rewrite(AsReleasedConfig(str(file), str(tmp_path / "as-released.safetensors")))
    for weights, table in ((file, torch.cat([first[:20], second[20:]])), (rewritten, first)):
        backbone = load_two_tower(f"ViT-B-16-quickgelu:{weights}")
        assert torch.equal(backbone.text.tower.positional_embedding, table)
        assert sum(tensor.numel() for tensor in backbone.parameters()) == INVENTORY["value_count"] - second.numel()
        with torch.no_grad():
            features = backbone.encode_text(backbone.tokenize(["A red cat. " * 100]))
        assert features.shape == (1, 512) and features.isfinite().all()
