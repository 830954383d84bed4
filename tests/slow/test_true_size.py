"""The first run of docs/training.md, with a ViT-B/16."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.modules import ROOT
from PIL import Image

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
    assert re.search(
        r"Prompt: 197 tokens, encoded at 227 positions \(1 chunk of the first .* 6 chunks of the second", done.stdout
    )
    with Image.open(tmp_path / "runs" / "coffee.png") as picture:
        assert picture.size == (64, 64)
        assert len(set(picture.convert("RGB").getdata())) > 100
    config = json.loads((tmp_path / "runs" / "encoder" / "text_encoder" / "config.json").read_text())
    assert (config["hidden_size"], config["max_position_embeddings"]) == (512, 248)
