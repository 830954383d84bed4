"""The README's first run, its configurations and its data. tests/test_docs_snippets.py runs its examples."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import yaml
from PIL import Image
from skimage import data_dir

from debias_diffusion.app.ablate import AblateConfig
from debias_diffusion.app.align import AlignConfig
from debias_diffusion.data import ImageFolder, read_sharegpt4v
from debias_diffusion.sentences import split_sentences
from debias_diffusion.training import TrainConfig

ROOT = Path(__file__).parent.parent
README, TRAINING = (ROOT / "README.md").read_text(), (ROOT / "docs" / "training.md").read_text()


FIRST_RUN_BYTES = 8_000_000_000  # checkpoints of a ViT-B/16 with AdamW's state, and what is exported of it


@pytest.mark.slow(minutes=5)
def test_the_first_run_at_true_size(tmp_path):
    if (free := shutil.disk_usage(tmp_path).free) < FIRST_RUN_BYTES:
        pytest.skip(f"{free / 1e9:.1f} GB are free on the disk of {str(tmp_path)!r}, and this needs 8 GB")
    lines = re.search(r"<!-- first run -->\n```bash\n(.*?)```", README, re.DOTALL)[1]
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
        r"Prompt: 197 tokens, encoded at 227 positions \(1 chunk of the first .* 6 of the second\)", done.stdout
    )
    with Image.open(tmp_path / "runs" / "coffee.png") as picture:
        assert picture.size == (64, 64)
        assert len(set(picture.convert("RGB").getdata())) > 100
    config = json.loads((tmp_path / "runs" / "encoder" / "text_encoder" / "config.json").read_text())
    assert (config["hidden_size"], config["max_position_embeddings"]) == (512, 248)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_is_one_of_train_align_or_ablate(config):
    values = yaml.safe_load(config.read_text())
    if config.stem.startswith("aat"):
        assert AblateConfig(**values) and config.name in (ROOT / "docs" / "ablation.md").read_text()
        return
    values = {"images": "images"} | values
    assert AlignConfig(**values) if config.stem.startswith("align") else TrainConfig(**values).make_method()
    assert config.name in README + TRAINING


def test_all_backbones_of_figure_4_have_both_recipes():
    rows = re.findall(
        r"^\| ([^|]+) \| `(configs/[\w./-]+)`; Long-CLIP: (?:with )?`([^`]+)` \|$", TRAINING, re.MULTILINE
    )
    settings = {}
    for backbone, config, long_clip in rows:
        debias = yaml.safe_load((ROOT / config).read_text())
        if long_clip.startswith("configs/"):
            settings[backbone] = debias, yaml.safe_load((ROOT / long_clip).read_text())
        else:
            _, recipe, _, output = long_clip.split()
            settings[backbone] = debias, debias | {"recipe": recipe, "output": output}
    assert list(settings) == ["OpenAI", "LAION-2B", "SigLIP", "SigLIP 2"]
    for pair in settings.values():
        debias, long_clip = (TrainConfig(**values) for values in pair)
        assert (debias.recipe, long_clip.recipe) == ("debias-clip", "long-clip") and debias.output != long_clip.output
        ignored = {"recipe": "", "output": ""}
        assert pair[0] | ignored == pair[1] | ignored  # the same data, backbone and budget
        assert debias.pretrained in open_clip.list_pretrained_tags_by_model(debias.model)
    models = {pair[0]["model"] for pair in settings.values()}
    assert models == {"ViT-B-16-quickgelu", "ViT-B-16", "ViT-B-16-SigLIP", "ViT-B-16-SigLIP2"}


def test_the_photographs_are_there_and_described():
    captions = read_sharegpt4v(ROOT / "tests" / "photographs" / "captions.json")
    assert captions.bad == [] and len(captions.records) == 12
    images = ImageFolder(data_dir)
    for record in captions.records:
        assert min(images.open(record.image).size) >= 200
        assert 6 <= len(split_sentences(record.caption)) <= 12
    raw = json.loads((ROOT / "tests" / "photographs" / "captions.json").read_text())
    assert any("\n" in entry["conversations"][1]["value"] for entry in raw)
