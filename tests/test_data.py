import json
import pickle

import pytest
import torch
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from torch.utils.data import DataLoader

from debias_diffusion.data.bad_records import printable
from debias_diffusion.data.dataset import CaptionDataset, Collate
from debias_diffusion.data.images import ImageFolder, is_there
from debias_diffusion.data.json_files import read_jsonl, read_sharegpt4v
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.tokens import CaptionTokenizer

TOKENIZER = CaptionTokenizer(tiny_tokenizer(77), 77)


def entry(image, caption):
    return {"image": image, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": caption}]}


def write(path, entries):
    path.write_text(json.dumps(entries))
    return path


def as_tensor(image):
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32).view(2, 2, 3).permute(2, 0, 1)


@pytest.fixture
def images(tmp_path):
    for index in range(6):
        Image.new("RGB", (8, 8), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    return ImageFolder(tmp_path)


def dataset(images, count=6, recipe="debias-clip", extra=(), stand_ins=None):
    captions = [entry(f"{i}.png", f"Scene {i}. A red cat. A blue dog. A bird.") for i in range(count)]
    path = write(images.root / "data.json", captions + [entry(name, "A. B.") for name in extra])
    records = read_sharegpt4v(path).records
    return CaptionDataset(records, images, as_tensor, TOKENIZER, RECIPES[recipe], 5, stand_ins)


def test_sharegpt4vs_layout_is_read_and_its_bad_records_are_left_out_and_named(tmp_path):
    entries = [
        entry("a/1.jpg", "One.\nTwo.\n\n Three. "),
        entry("2.jpg", "  "),
        entry("3.jpg", 7),
        {"image": "4.jpg", "conversations": [{"value": "?"}]},
        {"conversations": []},
        "nonsense",
    ]
    captions = read_sharegpt4v(write(tmp_path / "d.json", entries))
    assert captions.records == [Record("a/1.jpg", "a/1.jpg", "One. Two. Three.")]
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("entry 1", "empty or non-text caption"),
        ("entry 2", "empty or non-text caption"),
        ("entry 3", "no caption"),
        ("entry 4", "no image path"),
        ("entry 5", "not an object"),
    ]
    assert "2.jpg" in captions.bad[0].detail


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_sharegpt4v, None, "No such file"),
        (read_sharegpt4v, b"", "is not a JSON list .it begins with ''"),
        (read_sharegpt4v, "\ud800".encode("utf-8", "surrogatepass"), "is not a JSON list"),
        (read_sharegpt4v, b"[" * 100_000, "is not a JSON list"),
        (read_sharegpt4v, b'{"a": 1}', "is not a JSON list .it begins with '{\"a\": 1}'"),
        (read_sharegpt4v, b"[]", "has 0 entries and none is usable"),
        (read_sharegpt4v, b"[1, 2]", "has 2 entries and none is usable.*entry 0: not an object"),
        (read_jsonl, None, "No such file.*It must have the shape .* in each line"),
        (read_jsonl, b"", "has 0 entries"),
        (read_jsonl, b"{}\n\nx", "has 2 entries and none is usable.*line 1: no image path"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, read, content, message):
    if content is not None:
        (tmp_path / "data").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "data")
    with pytest.raises(UserError, match="Is a directory"):
        read_sharegpt4v(tmp_path)


def test_jsonl_gives_its_records_and_names_its_bad_lines(tmp_path):
    lines = [
        "\ufeff" + json.dumps({"image": "1.jpg", "caption": "One.\n Two."}),
        "",
        json.dumps(entry("2.jpg", "Größe – 大きい."), ensure_ascii=False),
        '{"image": "3.jpg", "caption": "cut off',
        " \t",
        "[" * 100_000,
        "7" * 5000,
        json.dumps({"image": "4.jpg", "text": "?"}),
        json.dumps({"image": "\ud800.jpg", "caption": "?"}),
        json.dumps({"caption": "?"}),
        json.dumps({"image": "5.jpg", "caption": None, **entry("6.jpg", "Six.")}),
    ]
    content = (
        "\r\n".join(lines).encode() + b'\n{"image": "7.jpg", "caption": "\xff"}\n{"image": "8.jpg", "caption": "Last."}'
    )
    (tmp_path / "d.jsonl").write_bytes(content)
    captions, images = open_data(str(tmp_path / "d.jsonl"), str(tmp_path))
    assert [(record.sample_id, record.image, record.caption) for record in captions.records] == [
        ("1.jpg", "1.jpg", "One. Two."),
        ("2.jpg", "2.jpg", "Größe – 大きい."),
        ("6.jpg", "6.jpg", "Six."),
        ("8.jpg", "8.jpg", "Last."),
    ]
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("line 4", "bad line of JSON"),
        ("line 6", "bad line of JSON"),
        ("line 7", "bad line of JSON"),
        ("line 8", "no caption"),
        ("line 9", "no image path"),
        ("line 10", "no image path"),
        ("line 12", "bad line of JSON"),
    ]
    assert "cut off" in captions.bad[0].detail and images.root == tmp_path.resolve()


def test_a_line_of_pixels_is_no_picture(images):
    for size in ((1, 200), (1, 201), (900, 3)):
        Image.new("RGB", size).save(images.root / "line.png")
        if size == (1, 200):
            assert images.open("line.png").size == size
            continue
        with pytest.raises(ValueError, match=f"{size[0]} x {size[1]} pixels are no picture"):
            images.open("line.png")


def test_what_data_say_cannot_move_the_cursor():
    assert printable("a\x1b[2Jb\nc\u202eé猫") == "a\ufffd[2Jb\ufffdc\ufffdé猫"


def test_links_out_of_the_image_folder_and_absolute_paths_are_followed(images, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "1.png"
    Image.new("RGB", (2, 2)).save(outside)
    (images.root / "link.png").symlink_to(outside)
    for path in (str(outside), "link.png"):
        assert images.open(path).size == (2, 2) and is_there(images, path) and images.stamp(path)
    with pytest.raises(UserError, match="is not there"):
        ImageFolder(images.root / "nowhere")


def test_draws_do_not_depend_on_workers_or_order(images):
    data = dataset(images)
    keys = [[(epoch, index, place) for place, index in enumerate((3, 0, 5))] for epoch in range(2)]
    collate = Collate(TOKENIZER, data.recipe)

    def read(workers, order):
        batches = {}
        for batch in DataLoader(data, batch_sampler=order, collate_fn=collate, num_workers=workers):
            batches[tuple(batch.keys)] = batch
        return batches

    alone, shared, backwards = read(0, keys), read(2, keys), read(1, keys[::-1])
    assert alone.keys() == shared.keys() == backwards.keys()
    for key, batch in alone.items():
        for other in (shared[key], backwards[key]):
            assert torch.equal(batch.images, other.images)
            assert torch.equal(batch.tokens.padded(), other.tokens.padded())
    first, second = alone.values()
    assert not torch.equal(first.tokens.padded()[3:], second.tokens.padded()[3:])
    assert torch.equal(first.tokens.padded()[:3], second.tokens.padded()[:3])


def test_a_batch_holds_the_long_captions_then_the_short_ones(images):
    data = dataset(images, recipe="long-clip")
    batch = Collate(TOKENIZER, data.recipe)([data[(0, 1, 0)], data[(0, 4, 1)]])
    texts = [TOKENIZER.tokenizer.decode(row, skip_special_tokens=True).strip("!") for row in batch.tokens.padded()]
    assert [text.split(" .")[0] for text in texts] == ["scene 1", "scene 4", "scene 1", "scene 4"]
    assert "bird" in texts[0] and "bird" not in texts[2]
    assert torch.equal(batch.images[0], as_tensor(images.open("1.png")))


def test_unreadable_images_are_replaced_the_same_way_each_time_and_named(images):
    (images.root / "text.png").write_text("not an image")
    whole = (images.root / "5.png").read_bytes()
    (images.root / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = dataset(images, extra=["gone.png", "text.png", "cut.png", "a\0b.png"], stand_ins=stand_ins)
    for place, index in enumerate(range(6, 10)):
        sample = data[(0, index, place)]
        assert sample.bad[0].where == data.records[index].image
        assert sample.bad[0].kind == ("missing image" if index == 6 else "unreadable image")
        # 6 is unreadable itself
        expected = [("gone.png", "4.png"), ("4.png",), ("5.png",), ("gone.png", "4.png")][place]
        assert (*(bad.where for bad in sample.bad[1:]), sample.sample_id) == expected
        again = pickle.loads(pickle.dumps(data))[(0, index, place)]
        assert torch.equal(sample.image, again.image) and sample.captions == again.captions
    assert data[(0, 2, 0)].bad == []


def stand_ins(epoch):
    return [6, 4, 5]


def test_nothing_but_unreadable_images_stops_with_an_explanation(images):
    data = dataset(images, count=0, extra=[f"gone{i}.png" for i in range(40)], stand_ins=lambda epoch: range(30))
    with pytest.raises(UserError, match="20 images in a row cannot be read.*--check-data"):
        data[(0, 39, 7)]
    alone = dataset(images, count=0, extra=["gone.png"], stand_ins=None)
    with pytest.raises(UserError, match="An image that no other may replace .--max-bad. cannot be read from"):
        alone[(0, 0, 0)]
