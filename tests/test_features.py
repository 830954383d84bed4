"""Cached image features: found by an image's stamp, never those of another image or encoder."""

import json
import os
from dataclasses import replace

import pytest
import torch
from helpers.ranks import ranks
from helpers.steps import CPU
from helpers.tiny_clip import byte_tokenizer, tiny_clip
from helpers.tiny_data import make_tiny_data
from PIL import Image

from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.training import feature_cache
from debias_diffusion.training.feature_cache import cached_images, frozen_tower


@pytest.fixture
def world(tmp_path):
    """(backbone, nine records, their images, cache folder)"""
    captions, source = open_data(*make_tiny_data(tmp_path / "world", count=9))
    return tiny_clip().eval(), captions.records, source, tmp_path / "cache"


def fill(world):
    backbone, *data = world
    return cached_images(frozen_tower(backbone, CPU, "fp32"), *data, batch=4)


def features(world):
    images, bad = fill(world)
    assert bad == []
    return torch.stack([images.open(record.image) for record in world[1]])


def check_features(world):
    torch.testing.assert_close(features(world), plain_features(world), rtol=0, atol=1e-5)


@torch.no_grad()
def plain_features(world):
    backbone, records, source, _ = world
    return backbone.encode_image(torch.stack([backbone.preprocess(source.open(record.image)) for record in records]))


@pytest.fixture
def encoded(monkeypatch):
    """The number of images of each batch that was encoded."""
    sizes = []

    def counted(*arguments):
        tower = feature_cache.frozen_tower(*arguments)
        return replace(tower, encode=lambda pixels: sizes.append(len(pixels)) or tower.encode(pixels))

    monkeypatch.setitem(globals(), "frozen_tower", counted)
    return sizes


def test_features_are_each_image_towers_own_and_computed_once(world, encoded):
    for sizes in ([4, 4, 1], []):
        fill(world)
        assert encoded == sizes
        encoded.clear()
    for each in (world, (tiny_clip(seed=1).eval(), *world[1:])):
        check_features(each)
    assert encoded == [4, 4, 1]  # of the other tower alone


def test_features_that_are_not_finite_are_refused(world):
    world[0].model.visual.proj.data.fill_(torch.inf)
    with pytest.raises(UserError, match="features of an image are not finite"):
        fill(world)


def test_a_file_that_is_damaged_or_not_there_is_computed_again_and_the_others_stay(world, encoded, monkeypatch):
    monkeypatch.setattr(feature_cache, "ITEM", 4)
    check_features(world)
    *_, damaged, gone = sorted(world[3].rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    gone.unlink()
    encoded.clear()
    check_features(world)
    assert encoded == [4, 1]


def test_other_images_of_equal_names_sizes_and_times_are_not_served_the_old_features(world, tmp_path):
    for folder, colour in ((tmp_path / "a", "red"), (tmp_path / "b", "green")):
        folder.mkdir()
        Image.new("RGB", (32, 32), colour).save(folder / "1.bmp")
        os.utime(folder / "1.bmp", ns=(1, 1))
        (folder / "data.jsonl").write_text('{"image": "1.bmp", "caption": "A colour."}')
        captions, images = open_data(folder / "data.jsonl", folder)
        of_colour = world[0], captions.records, images, world[3]
        check_features(of_colour)


def test_everything_that_changes_features_changes_the_key(world):
    backbone = world[0]
    visual = backbone.model.visual
    visual.preprocess_cfg = {"size": 32}

    def key(precision="fp32"):
        return json.dumps(frozen_tower(backbone, CPU, precision).key, sort_keys=True)

    keys = [key(), key("bf16")]
    for change in (
        lambda: visual.proj.data[0, 0].add_(1e-3),
        lambda: backbone.config["model_cfg"].update(quick_gelu=True),
        lambda: visual.preprocess_cfg.update(fill_color=127),  # which is shown by no transform
    ):
        change()
        keys.append(key())
    assert len(set(keys)) == 5


def test_runs_with_one_frozen_image_tower_share_its_features(world, encoded):
    before = features(world)
    encoded.clear()
    other = tiny_clip(seed=1, context_length=248, tokenizer=byte_tokenizer(248)).eval()
    other.model.visual.load_state_dict(world[0].model.visual.state_dict())
    assert other.digest() != world[0].digest()
    assert torch.equal(features((other, *world[1:])), before) and encoded == []


def test_a_changed_image_has_no_old_features(world):
    images, _ = fill(world)
    Image.new("RGB", (40, 40), (1, 2, 3)).save(world[2].root / world[1][3].image)
    with pytest.raises(OSError, match="has changed"):
        images.open(world[1][3].image)
    check_features(world)


def test_processes_share_the_work_and_each_serves_all_images(world, encoded, monkeypatch):
    monkeypatch.setattr(feature_cache, "ITEM", 3)
    backbone, records, source, _ = world
    gone, *there = (record.image for record in records)
    (source.root / gone).unlink()

    def work(accelerator):
        images, bad = cached_images(frozen_tower(backbone, accelerator, "fp32"), *world[1:], batch=2)
        return torch.stack([images.open(image) for image in there]), encoded, [record.kind for record in bad]

    served = ranks(2, work)
    assert [sizes for _, sizes, _ in served] == [[1, 1, 2, 1], [2, 1]]
    again = ranks(2, work)
    assert all(sizes == [] for _, sizes, _ in again)
    expected = plain_features((backbone, records[1:], source, None))
    for features_of_rank, _, bad in served + again:
        assert bad == ["missing image"]
        torch.testing.assert_close(features_of_rank, expected, rtol=0, atol=1e-5)
