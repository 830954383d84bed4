import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.ranks import ranks
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import make_tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job
from debias_diffusion.training import feature_cache
from debias_diffusion.training.feature_cache import FeatureCache, FrozenTower, cached_images

CPU = Accelerator(cpu=True)
DIM = 5


def stamp(number: int) -> bytes:
    return bytes([1] * 15 + [number])


def feature(number: int) -> torch.Tensor:
    return torch.arange(DIM, dtype=torch.float32) + 10 * number


@given(st.lists(st.sets(st.integers(0, 99), min_size=1, max_size=9), max_size=8))
@settings(max_examples=20, deadline=None)
def test_what_was_written_is_found_and_nothing_else(tmp_path_factory, writes):
    with Job.open(tmp_path_factory.mktemp("cache"), "cache", shared=True) as job:
        cache, other = (FeatureCache(job, {"weights": weights}) for weights in "ab")
        for numbers in writes:
            cache.add([(stamp(n + 100), stamp(n), feature(n)) for n in sorted(numbers)])
        for read in (cache, other):
            read.read(job.names(read.prefix))
        known, rows = set().union(*writes), cache.find([stamp(n + 100) for n in range(100)])
        assert {n for n in range(100) if rows[n] >= 0} == known
        assert {n for n in range(100) if cache.find_pixels(stamp(n)) >= 0} == known
        assert all(torch.equal(cache[int(rows[n])], feature(n)) for n in known)
        assert (other.find([stamp(n + 100) for n in range(100)]) < 0).all()


@pytest.fixture
def world(tmp_path):
    data, images = make_tiny_data(tmp_path / "world", count=9)
    captions, source = open_data(data, images)
    return tiny_clip().eval(), captions.records, source, tmp_path / "cache"


def fill(world, backbone=None, records=None):
    tower = FrozenTower(backbone or world[0], CPU, "fp32")
    return cached_images(tower, records or world[1], *world[2:], batch=4)


def plain_features(world, record):
    backbone, _, source, _ = world
    with torch.no_grad():
        return backbone.encode_image(backbone.preprocess(source.open(record.image))[None])[0]


def items(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.fixture
def encoded(monkeypatch):
    """The number of images of each batch that was encoded."""
    sizes, encode = [], FrozenTower.encode
    monkeypatch.setattr(FrozenTower, "encode", lambda tower, pixels: sizes.append(len(pixels)) or encode(tower, pixels))
    return sizes


def test_cached_features_are_the_image_towers(world):
    images, bad = fill(world)
    assert bad == [] and len(items(world[3])) == 1
    for record in world[1]:
        torch.testing.assert_close(images.open(record.image), plain_features(world, record), rtol=0, atol=1e-5)


def test_features_are_computed_once_and_the_rest_is_added(world, encoded):
    for count, sizes in ((5, [4, 1]), (5, []), (9, [4])):
        images, _ = fill(world, records=world[1][:count])
        assert encoded == sizes and torch.isfinite(images.open(world[1][count - 1].image)).all()
        encoded.clear()


def test_features_are_kept_when_only_the_time_of_change_differs_and_found_by_the_pixels_once(world, encoded):
    before = [fill(world)[0].open(record.image) for record in world[1]]
    for record in world[1][:6]:
        (world[2].root / record.image).chmod(0o600)
    encoded.clear()
    for new_items in (1, 0):
        count = len(items(world[3]))
        images, _ = fill(world)
        assert all(torch.equal(images.open(r.image), old) for r, old in zip(world[1], before, strict=True))
        assert encoded == [] and len(items(world[3])) == count + new_items


def test_damaged_features_are_computed_again(world, encoded, monkeypatch):
    monkeypatch.setattr(feature_cache, "ITEM", 4)
    before = [fill(world)[0].open(record.image) for record in world[1]]
    encoded.clear()
    damaged = items(world[3])[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    images, _ = fill(world)
    assert sum(encoded) in (1, 4)
    assert all(torch.allclose(images.open(r.image), old, atol=1e-5) for r, old in zip(world[1], before, strict=True))


def test_when_asked_to_stop_what_was_computed_is_kept(world, encoded):
    backbone, records, source, folder = world
    asked = iter([False, True])
    tower = FrozenTower(backbone, CPU, "fp32")
    cached_images(tower, records, source, folder, batch=2, stop=lambda: next(asked))
    assert encoded == [2, 2]
    fill(world)
    assert encoded == [2, 2, 4, 1]


def test_processes_share_the_images(world):
    backbone, records, source, folder = world
    (source.root / records[1].image).write_text("not an image")

    def share(accelerator):
        images, bad = cached_images(FrozenTower(backbone, accelerator, "fp32"), records, source, folder, batch=4)
        return len(bad), [images.open(record.image) for record in records if record != records[1]]

    (bad, one), (other_bad, other) = ranks(2, share)
    assert bad == other_bad == 1 and all(map(torch.equal, one, other))
    assert len(items(folder)) == 2


def test_a_changed_image_has_no_old_features(world):
    images, _ = fill(world)
    record = world[1][3]
    old = images.open(record.image)
    Image.new("RGB", (40, 40), (1, 2, 3)).save(world[2].root / record.image)
    with pytest.raises(OSError, match="has changed since its features were computed"):
        images.open(record.image)
    images, _ = fill(world)
    assert not torch.equal(images.open(record.image), old)
    torch.testing.assert_close(images.open(record.image), plain_features(world, record), rtol=0, atol=1e-5)


def test_an_image_replaced_by_one_of_equal_size_and_time_has_no_old_features(world):
    old = fill(world)[0].open(world[1][3].image)
    file = world[2].root / world[1][3].image
    times, content = file.stat(), file.read_bytes()
    Image.open(io.BytesIO(content)).rotate(180).save(file)
    file.write_bytes(file.read_bytes()[: len(content)].ljust(len(content), b"\0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not torch.equal(fill(world)[0].open(world[1][3].image), old)


@pytest.mark.parametrize("shards", [False, True])
def test_other_images_of_equal_names_sizes_and_times_are_not_served_the_old_features(world, tmp_path, shards):
    backbone, _, _, cache = world
    features = []
    for root, colour in ((tmp_path / "a", "red"), (tmp_path / "b", "green")):
        root.mkdir()
        path, content = root / "1.bmp", io.BytesIO()
        Image.new("RGB", (32, 32), colour).save(content, "PNG" if shards else "BMP", compress_level=0)
        path.write_bytes(content.getvalue())
        (root / "1.txt").write_text("A colour.")
        if shards:
            path = root / "1.tar"
            with tarfile.open(path, "w") as file:
                file.add(root / "1.bmp", "1.png")
                file.add(root / "1.txt", "1.txt")
            captions, images = open_data(root)
        else:
            (root / "data.jsonl").write_text('{"image": "1.bmp", "caption": "A colour."}')
            captions, images = open_data(root / "data.jsonl", root)
        os.utime(path, ns=(1, 1))
        cached, bad = cached_images(FrozenTower(backbone, CPU, "fp32"), captions.records, images, cache)
        assert bad == []
        features.append(cached.open(captions.records[0].image))
        assert torch.equal(cached.open(captions.records[0].image), features[-1])
    assert not torch.allclose(*features, atol=1e-3)


def test_everything_that_changes_features_changes_the_key(world):
    backbone = world[0]
    keys = [FrozenTower(backbone, CPU, "fp32").key, FrozenTower(backbone, CPU, "bf16").key]
    with torch.no_grad():
        backbone.model.visual.proj[0, 0] += 1e-3
    keys.append(FrozenTower(backbone, CPU, "fp32").key)
    backbone.preprocess.transforms[0].size = 16
    keys.append(FrozenTower(backbone, CPU, "fp32").key)
    with torch.no_grad():
        backbone.model.token_embedding.weight[0] += 1
    assert FrozenTower(backbone, CPU, "fp32").key == keys[-1]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 4


def test_unreadable_images_are_named_and_the_others_served(world):
    records = world[1]
    (world[2].root / records[2].image).write_text("not an image")
    (world[2].root / records[5].image).unlink()
    images, bad = fill(world)
    assert {(fault.where, fault.kind) for fault in bad} == {
        (records[2].image, "unreadable image"),
        (records[5].image, "missing image"),
    }
    for index in (2, 5):
        with pytest.raises((OSError, SyntaxError)):
            images.open(records[index].image)
    assert images.open(records[0].image).shape == (24,)


def test_features_that_are_not_finite_are_refused(world):
    with torch.no_grad():
        world[0].model.visual.proj.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite in fp32"):
        fill(world)
