"""The README's configurations and its data. tests/slow has its first run (test_true_size.py) and its examples."""

import json
import re
from pathlib import Path

import open_clip
import pytest
import yaml
from skimage import data_dir

from debias_diffusion.app.options import AblateConfig, AlignConfig
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_sharegpt4v
from debias_diffusion.sentences import split_sentences
from debias_diffusion.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
README, TRAINING = (ROOT / "README.md").read_text(), (ROOT / "docs" / "training.md").read_text()


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
