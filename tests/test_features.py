import hashlib
import io
import json
import os
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.tiny_clip import tiny_clip
from helpers.tiny_data import make_tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.data import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.files import folder_lock
from debias_diffusion.training.feature_cache import FeatureCache, FrozenTower, cache_key, cached_images

CPU = Accelerator(cpu=True)
DIM = 5


def stamp(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def feature(number: int) -> torch.Tensor:
    return torch.arange(DIM, dtype=torch.float32) + 10 * number


def write(cache, process, numbers):
    cache.writer(process).add([stamp(n) for n in numbers], torch.stack([feature(n) for n in numbers]))


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 99), min_size=1, max_size=9)), max_size=8))
@settings(max_examples=30, deadline=None)
def test_what_was_written_is_found_and_nothing_else(tmp_path_factory, writes):
    folder = tmp_path_factory.mktemp("cache")
    cache = FeatureCache(folder, {"weights": "a"}, DIM)
    for process, numbers in writes:
        write(cache, process, sorted(numbers))
    cache.read()
    known = set().union(*(numbers for _, numbers in writes))
    rows = cache.find([stamp(n) for n in range(100)])
    assert {n for n in range(100) if rows[n] >= 0} == known
    assert all(torch.equal(cache[int(rows[n])], feature(n)) for n in known)
    assert not FeatureCache(folder, {"weights": "b"}, DIM).find([stamp(n) for n in known] or [stamp(0)]).max() >= 0


@pytest.mark.parametrize(("name", "row"), [("stamps-0000", 24), ("features-0000", 4 * DIM)])  # bytes of a row
def test_what_a_kill_left_half_written_is_not_used(tmp_path, name, row):
    for cut in range(1, row + 1):
        cache = FeatureCache(tmp_path / str(cut), {}, DIM)
        write(cache, 0, [1, 2])
        path = cache.folder / name
        path.write_bytes(path.read_bytes()[:-cut])
        again = FeatureCache(tmp_path / str(cut), {}, DIM)
        assert again.find([stamp(1), stamp(2)]).tolist() == [0, -1]
        write(again, 0, [2, 3])
        again.read()
        rows = again.find([stamp(1), stamp(2), stamp(3)])
        assert [again[int(row)].tolist() for row in rows] == [feature(n).tolist() for n in (1, 2, 3)]


def test_features_are_on_the_disk_before_their_stamps_are_written(tmp_path, monkeypatch):
    cache, fsync, synced = FeatureCache(tmp_path, {}, DIM), os.fsync, []
    files = [cache.folder / "features-0000", cache.folder / "stamps-0000"]

    def noted(descriptor):
        name = {file.stat().st_ino: file.name for file in files}[os.fstat(descriptor).st_ino]
        synced.append((name, *(file.stat().st_size for file in files)))
        fsync(descriptor)

    writer = cache.writer(0)
    monkeypatch.setattr(os, "fsync", noted)
    for _ in range(2):
        writer.add([stamp(1), stamp(2)], torch.stack([feature(1), feature(2)]))
    features, stamps = 2 * 4 * DIM, 2 * 24  # bytes that are in the files at each call
    assert synced == [
        ("features-0000", features, 0),
        ("stamps-0000", features, stamps),
        ("features-0000", 2 * features, stamps),
        ("stamps-0000", 2 * features, 2 * stamps),
    ]


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


def sizes(folder: Path) -> dict:
    return {str(path): path.stat().st_size for path in folder.rglob("features-*")}


def test_cached_features_are_the_image_towers(world):
    images, bad = fill(world)
    assert bad == [] and len(images.cache) == 9
    for record in world[1]:
        torch.testing.assert_close(images.open(record.image), plain_features(world, record), rtol=0, atol=1e-5)


def test_features_are_computed_once_and_the_rest_is_added(world):
    fill(world, records=world[1][:5])
    first = sizes(world[3])
    fill(world, records=world[1][:5])
    assert sizes(world[3]) == first
    images, _ = fill(world)
    assert len(images.cache) == 9
    (size,), (grown,) = first.values(), sizes(world[3]).values()
    assert (size, grown) == (5 * 24 * 4, 9 * 24 * 4)


def test_when_asked_to_stop_what_was_computed_is_kept(world):
    backbone, records, source, folder = world
    asked = iter([False, True])
    tower = FrozenTower(backbone, CPU, "fp32")
    images, _ = cached_images(tower, records, source, folder, batch=2, stop=lambda: next(asked))
    assert len(images.cache) == 4
    assert len(fill(world)[0].cache) == 9


class OneOfTwo:
    """What `cached_images` asks of accelerate, for one of two processes played by threads."""

    num_processes, device = 2, torch.device("cpu")

    def __init__(self, process_index: int, meeting: threading.Barrier):
        self.process_index, self.is_main_process = process_index, process_index == 0
        self.wait_for_everyone = meeting.wait


def test_a_slow_process_shares_the_same_list_as_a_fast_one(world, monkeypatch):
    backbone, records, source, folder = world
    is_late, meeting = iter([False, True]), threading.Barrier(2, timeout=60)

    def slow_key(*inputs):
        if next(is_late):  # reads the cache when the other waits, which could have filled its share
            while not meeting.n_waiting:
                time.sleep(0.001)
        return cache_key(*inputs)

    monkeypatch.setattr("debias_diffusion.training.feature_cache.cache_key", slow_key)
    monkeypatch.setattr("debias_diffusion.training.feature_cache.gather_object", lambda bad: bad)
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(
                cached_images, FrozenTower(backbone, OneOfTwo(index, meeting), "fp32"), records, source, folder, batch=4
            )
            for index in range(2)
        ]
        caches = [run.result()[0].cache for run in runs]
    assert [len(cache) for cache in caches] == [9, 9]


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
    keys = [cache_key(backbone, "fp32"), cache_key(backbone, "bf16")]
    with torch.no_grad():
        backbone.model.visual.proj[0, 0] += 1e-3
    keys.append(cache_key(backbone, "fp32"))
    backbone.preprocess.transforms[0].size = 16
    keys.append(cache_key(backbone, "fp32"))
    with torch.no_grad():
        backbone.model.token_embedding.weight[0] += 1
    assert cache_key(backbone, "fp32") == keys[-1]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 4


def test_other_weights_are_not_served_the_old_features(world):
    fill(world)
    other = tiny_clip(seed=1).eval()
    images, _ = fill(world, backbone=other)
    with torch.no_grad():
        expected = other.encode_image(other.preprocess(world[2].open(world[1][0].image))[None])[0]
    torch.testing.assert_close(images.open(world[1][0].image), expected, rtol=0, atol=1e-5)
    assert len(sizes(world[3])) == 2


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


def test_two_runs_do_not_fill_one_cache_at_once(world):
    images, _ = fill(world)
    with folder_lock(images.cache.folder, "x"), pytest.raises(UserError, match="Another run is filling"):
        fill(world)


def test_features_that_are_not_finite_are_refused(world):
    with torch.no_grad():
        world[0].model.visual.proj.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite in fp32"):
        fill(world)
