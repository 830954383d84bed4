"""Data files, what opens and replaces images, the workers that read them, and bad records."""

import json
import multiprocessing
import signal

import pytest
import torch
from helpers.tiny_data import entry
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from torch.utils.data import DataLoader

from debias_diffusion.data import json_files
from debias_diffusion.data.bad_records import BadRecord, check_share, report_bad, too_many
from debias_diffusion.data.check import describe_captions, measure_caption
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import read_captions
from debias_diffusion.data.workers import count_workers, load_batches, usable_cores
from debias_diffusion.errors import UserError
from debias_diffusion.methods import METHODS
from debias_diffusion.text.tokens import CaptionTokenizer, clip_tokenizer
from debias_diffusion.training.batches import CaptionDataset

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)


def as_tensor(image):
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32).view(2, 2, 3).permute(2, 0, 1)


@pytest.fixture
def images(tmp_path):
    for index in range(6):
        Image.new("RGB", (8, 8), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    return ImageFolder(tmp_path)


def dataset(images, count, more, stand_ins):
    records = [Record(f"{i}.png", f"{i}.png", f"Scene {i}. A red cat. A blue dog. A bird.") for i in range(count)]
    records += [Record(name, name, "A. B.") for name in more]
    return CaptionDataset(records, images, as_tensor, 5, stand_ins, TOKENIZER, METHODS["debias-clip"])


@pytest.mark.parametrize("in_memory", [1 << 20, -1])
def test_sharegpt4vs_layout_is_read_and_its_bad_entries_named(tmp_path, monkeypatch, in_memory):
    monkeypatch.delattr("os.pread")  # as on Windows
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
    assert "2.jpg" in captions.bad[0].detail and "only image, conversations" in captions.bad[2].detail


def test_links_out_are_followed_and_lines_of_pixels_refused(images, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for size in ((1, 200), (1, 201)):
        Image.new("RGB", size).save(outside / f"{size[1]}.png")
    (images.root / "link.png").symlink_to(outside / "200.png")
    assert images.open("link.png").size == images.open(str(outside / "200.png")).size == (1, 200)
    with pytest.raises(ValueError, match="1 x 201"):
        images.open(str(outside / "201.png"))


class _Handlers:
    """What a worker does on a stop signal."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_workers_share_the_cores_that_affinity_and_cgroups_leave(tmp_path, monkeypatch):
    """In a container the root has the quota, under a batch system any group above this process's own."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(40)))
    assert usable_cores(tmp_path) == 40 and count_workers("auto", tmp_path) == 16
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:cpu:/\n0::/job/step\n")
    own = tmp_path / "sys" / "fs" / "cgroup" / "job" / "step"
    own.mkdir(parents=True)
    for folder, quota, cores in ((own, "max", 40), (own.parent, "1250000", 12), (own.parents[1], "50000", 1)):
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(tmp_path) == cores
    assert count_workers("auto", tmp_path) == 2


def test_workers_ignore_stop_signals_and_end_with_the_loading():
    with load_batches(DataLoader(_Handlers(), batch_size=None, num_workers=2)) as batches:
        assert list(batches) == [[signal.SIG_IGN] * 2] * 2
    assert signal.SIG_IGN not in _Handlers()[0] and not multiprocessing.active_children()


def test_unreadable_images_are_replaced_the_same_way_each_time_and_named(images):
    (images.root / "text.png").write_text("not an image")
    (images.root / "cut.png").write_bytes((images.root / "5.png").read_bytes()[:40])
    data = dataset(images, 6, ["gone.png", "text.png", "cut.png"], stand_ins=lambda epoch: [5, 6, 4])
    expected = {6: ["gone.png", "4.png"], 7: ["4.png"], 8: ["5.png"]}  # 6 is bad itself
    for place, index in enumerate(expected):
        sample, again = (data[(0, index, place)] for _ in range(2))
        assert sample.bad[0].where == data.records[index].image
        assert sample.bad[0].kind == ("missing image" if index == 6 else "unreadable image")
        assert [*(bad.where for bad in sample.bad[1:]), sample.sample_id] == expected[index]
        assert torch.equal(sample.image, again.image) and sample.captions == again.captions
    assert data[(0, 2, 0)].bad == []


# ---- bad records: how many stop a command, and how they are shown

BAD = [BadRecord(f"{index}.png", "unreadable image" if index else "missing image", "\x1b[2J") for index in range(7)]


def test_more_than_one_and_more_than_the_share_are_too_many():
    for max_bad, count, most in (
        *((0, 10**6, 0), (0.01, 1, 1), (0.01, 199, 1), (0.01, 200, 2), (0.01, 10**6, 10**4)),
        *((0.5, 3, 1), (1, 7, 7)),
    ):
        assert not too_many(most, count, max_bad) and too_many(most + 1, count, max_bad)
    check_share(BAD[:1], 7, 0.01)
    check_share([], 7, 0)
    with pytest.raises(UserError, match=r"^7 of 9 .* The first: 0.png: .* Do this.$"):
        check_share(BAD, 9, 0.5, "Do this.")


def test_bad_records_are_counted_by_kind_shown_without_control_characters_and_all_listed(tmp_path, capsys):
    report_bad(BAD, tmp_path / "run")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("7 bad records (6 unreadable image, 1 missing image), all in ")
    assert printed[1] == "Left out: 0.png: missing image (\N{REPLACEMENT CHARACTER}[2J)" and len(printed) == 7
    lines = (tmp_path / "run" / "bad-records.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [vars(record) for record in BAD]


def test_hand_counted_captions():
    tokenizer = CaptionTokenizer(clip_tokenizer(248), 248)  # to which each word of these captions is one token
    room = "A dog and a cat share a sofa. The dog sleeps. Its ears hang down. The sofa is old. The cats purr."
    measures = [measure_caption(caption, tokenizer) for caption in (room, "A dog sleeps.")]
    assert measures == [(5, 29, 15), (1, 6, 6)]  # words, full stops, SOT and EOT
    expected = "3.0 sentences and 17.5 tokens on average, 95% within 28; the first two sentences have 10.5."
    assert describe_captions(measures) == expected
