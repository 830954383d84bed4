import json
import multiprocessing
import signal
from functools import partial

import pytest
import torch
from helpers.tiny_data import entry
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from debias_diffusion.data import json_files
from debias_diffusion.data.dataset import CaptionDataset, collate
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import read_captions
from debias_diffusion.data.workers import count_workers, load_batches, usable_cores
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS as RECIPES
from debias_diffusion.text.tokens import CaptionTokenizer

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)


def as_tensor(image):
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32).view(2, 2, 3).permute(2, 0, 1)


@pytest.fixture
def images(tmp_path):
    for index in range(6):
        Image.new("RGB", (8, 8), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    return ImageFolder(tmp_path)


def dataset(images, count=6, recipe="debias-clip", extra=(), stand_ins=None):
    records = [Record(f"{i}.png", f"{i}.png", f"Scene {i}. A red cat. A blue dog. A bird.") for i in range(count)]
    records += [Record(name, name, "A. B.") for name in extra]
    return CaptionDataset(records, images, as_tensor, 5, stand_ins, TOKENIZER, RECIPES[recipe])


@pytest.mark.parametrize("in_memory", [1 << 20, -1])
def test_sharegpt4vs_layout_is_read_and_its_bad_entries_named(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(json_files, "_IN_MEMORY", in_memory)  # bytes of the largest file that is kept there
    entries = [
        entry("a/1.jpg", "One.\nTwo.\n\n Three. "),
        entry("2.jpg", "  "),
        entry("3.jpg", 7),
        {"image": "4.jpg", "conversations": [{"value": "?"}]},
        {"conversations": []},
        "nonsense",
    ]
    parts = [*map(json.dumps, entries), '{"image": "6.jpg", "caption": "A \n control."}', '{"caption": "\udcff"}']
    (tmp_path / "d.json").write_bytes(f"[\n{', '.join(parts)}]".encode(errors="surrogateescape"))
    captions = read_captions(tmp_path / "d.json")
    expected = {"a/1.jpg": "One. Two. Three.", "6.jpg": "A control."}
    assert list(captions.records) == [Record(name, name, caption) for name, caption in expected.items()]
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("entry 1", "empty or non-text caption"),
        ("entry 2", "empty or non-text caption"),
        ("entry 3", "no caption"),
        ("entry 4", "no image path"),
        ("entry 5", "not an object"),
        ("entry 7", "bad JSON"),
    ]
    assert "2.jpg" in captions.bad[0].detail


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b'{"a": 1}', "is not a JSON list: it begins with '{\"a\": 1}'"),
        ("d.json", b"[1, 2]", "no usable record, and 2 bad ones.*entry 0: not an object"),
        ("d.jsonl", b"{}\n\nx", "no usable record, and 2 bad ones.*line 1: no image path"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_captions(tmp_path / name)


def test_jsonl_is_read_and_its_bad_lines_named(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps({"image": "1.jpg", "caption": "One.\n Two."}).encode(),
        b"",
        json.dumps(entry("2.jpg", "Größe – 大きい."), ensure_ascii=False).encode(),
        b'{"image": "3.jpg", "caption": "cut off',
        b"[" * 100_000,
        b'{"image": "4.jpg", "text": "?"}',
        b'{"image": "\\ud800.jpg", "caption": "?"}',
        b'{"image": "7.jpg", "caption": "\xff"}',
        b'{"image": "8.jpg", "caption": "Last."}',
    ]
    (tmp_path / "d.jsonl").write_bytes(b"\r\n".join(lines))
    captions = read_captions(tmp_path / "d.jsonl")
    expected = {"1.jpg": "One. Two.", "2.jpg": "Größe – 大きい.", "8.jpg": "Last."}
    assert list(captions.records) == [Record(name, name, caption) for name, caption in expected.items()]
    broken = "bad JSON"
    faults = {4: broken, 5: broken, 6: "no caption", 7: "no image path", 8: broken}
    assert [(bad.where, bad.kind) for bad in captions.bad] == [(f"line {n}", kind) for n, kind in faults.items()]


def test_links_out_are_followed_and_lines_of_pixels_refused(images, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for size in ((1, 200), (1, 201)):
        Image.new("RGB", size).save(outside / f"{size[1]}.png")
    (images.root / "link.png").symlink_to(outside / "200.png")
    assert images.open("link.png").size == images.open(str(outside / "200.png")).size == (1, 200)
    with pytest.raises(ValueError, match="1 x 201 pixels are no picture"):
        images.open(str(outside / "201.png"))


def test_draws_do_not_depend_on_workers_or_order(images):
    data = dataset(images)
    keys = [[(epoch, index, place) for place, index in enumerate((3, 0, 5))] for epoch in range(2)]

    def read(workers, order):
        to_batch = partial(collate, tokenizer=TOKENIZER, recipe=data.recipe)
        loader = DataLoader(data, batch_sampler=order, collate_fn=to_batch, num_workers=workers)
        return {batch.keys[0]: (batch.images, batch.tokens.padded()) for batch in loader}

    alone, shared, backwards = read(0, keys), read(2, keys), read(1, keys[::-1])
    assert alone.keys() == shared.keys() == backwards.keys() and len(alone) == 2
    for key, tensors in alone.items():
        assert all(map(torch.equal, tensors, shared[key])) and all(map(torch.equal, tensors, backwards[key]))
    (_, first), (_, second) = alone.values()
    assert torch.equal(first[:3], second[:3]) and not torch.equal(first[3:], second[3:])


class _BlockedSignals:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_workers_share_the_cores_that_affinity_and_cgroups_leave(tmp_path, monkeypatch):
    """In a container the root has the quota, under a batch system any group above this process's own."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(40)))
    assert usable_cores(tmp_path) == 40 and count_workers("auto", tmp_path) == 16 and count_workers(3) == 3
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:cpu:/\n0::/job/step\n")
    own = tmp_path / "sys" / "fs" / "cgroup" / "job" / "step"
    own.mkdir(parents=True)
    for folder, quota, cores in ((own, "max", 40), (own.parent, "1250000", 12), (own.parents[1], "50000", 1)):
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(tmp_path) == cores
    assert count_workers("auto", tmp_path) == 2
    (own.parents[1] / "cpu.max").write_text("max 100000\n")
    assert count_workers("auto", tmp_path) == 11
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert count_workers("auto", tmp_path) == 3


def test_workers_hear_no_stop_signal_even_while_they_start():
    stops = {signal.SIGTERM, signal.SIGINT}
    with load_batches(DataLoader(_BlockedSignals(), batch_size=None, num_workers=2)) as batches:
        assert all(stops <= blocked for blocked in batches)
    assert not stops & _BlockedSignals()[0] and not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, of what it had not set
@pytest.mark.parametrize("interrupted", ["start", "end"])
def test_no_worker_is_left_by_an_interrupted_start_or_end(interrupted, monkeypatch):
    """Python's exit would wait for it."""
    process = multiprocessing.get_context("fork").Process
    started, start = [], process.start

    def start_one(self):
        if started and interrupted == "start":
            raise KeyboardInterrupt
        start(self)
        started.append(self)

    def end(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "start", start_one)
    if interrupted == "end":
        monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_shutdown_workers", end)
    with pytest.raises(KeyboardInterrupt), load_batches(DataLoader(range(2), num_workers=2)):
        pass
    exit_codes = [worker.exitcode for worker in started]
    for worker in started:
        worker.kill()
    assert exit_codes and set(exit_codes) == {-signal.SIGKILL}


def test_a_batch_holds_the_long_captions_then_the_short_ones(images):
    data = dataset(images, recipe="long-clip")
    batch = collate([data[(0, 1, 0)], data[(0, 4, 1)]], TOKENIZER, data.recipe)
    texts = [TOKENIZER.tokenizer.decode(row, skip_special_tokens=True).strip("!") for row in batch.tokens.padded()]
    assert [text.split(" .")[0] for text in texts] == ["scene 1", "scene 4", "scene 1", "scene 4"]
    assert "bird" in texts[0] and "bird" not in texts[2]
    assert torch.equal(batch.images[0], as_tensor(images.open("1.png")))


def test_unreadable_images_are_replaced_the_same_way_each_time_and_named(images):
    (images.root / "text.png").write_text("not an image")
    (images.root / "cut.png").write_bytes((images.root / "5.png").read_bytes()[:40])
    data = dataset(images, extra=["gone.png", "text.png", "cut.png"], stand_ins=lambda epoch: [6, 4, 5])
    expected = {6: ["gone.png", "4.png"], 7: ["4.png"], 8: ["5.png"]}  # 6 is bad itself
    for place, index in enumerate(expected):
        sample, again = (data[(0, index, place)] for _ in range(2))
        assert sample.bad[0].where == data.records[index].image
        assert sample.bad[0].kind == ("missing image" if index == 6 else "unreadable image")
        assert [*(bad.where for bad in sample.bad[1:]), sample.sample_id] == expected[index]
        assert torch.equal(sample.image, again.image) and sample.captions == again.captions
    assert data[(0, 2, 0)].bad == []


def test_nothing_but_unreadable_images_stops_with_an_explanation(images):
    data = dataset(images, count=0, extra=[f"gone{i}.png" for i in range(40)], stand_ins=lambda epoch: range(30))
    with pytest.raises(UserError, match="20 images in a row cannot be read.*--check-data"):
        data[(0, 39, 7)]
