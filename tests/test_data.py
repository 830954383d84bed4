import json
import pickle

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from debias_diffusion.data import ImageFolder, PackedRecords, Record, read_sharegpt4v
from debias_diffusion.data.dataset import CaptionDataset, Collate
from debias_diffusion.errors import UserError
from debias_diffusion.recipes import RECIPES
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

TOKENIZER = CaptionTokenizer(clip_tokenizer(77), 77)


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


def dataset(images, count=6, recipe="debias-clip", extra=()):
    captions = [entry(f"{i}.png", f"Scene {i}. A red cat. A blue dog. A bird.") for i in range(count)]
    path = write(images.root / "data.json", captions + [entry(name, "A. B.") for name in extra])
    records = read_sharegpt4v(path).records
    return CaptionDataset(records, images, as_tensor, TOKENIZER, RECIPES[recipe], seed=5)


def test_reads_sharegpt4vs_layout(tmp_path):
    entries = [entry("a/1.jpg", "One.\nTwo.\n\n Three. "), entry("a/2.jpg", "Four.")]
    captions = read_sharegpt4v(write(tmp_path / "d.json", entries))
    assert [(r.image, r.caption) for r in captions.records] == [("a/1.jpg", "One. Two. Three."), ("a/2.jpg", "Four.")]
    assert captions.bad == []


def test_packed_records_are_the_records():
    records = [Record(str(i), f"{i}.jpg", f"Größe {i}. 猫 \u2028 " * i) for i in range(5)]
    packed = PackedRecords(records)
    assert len(packed) == 5 and list(packed) == records
    assert packed[-1] == records[-1] and packed[1:4:2] == records[1:4:2]
    with pytest.raises(IndexError):
        packed[5]


def test_bad_records_are_left_out_and_named(tmp_path):
    entries = [
        entry("1.jpg", "Good."),
        entry("2.jpg", "  "),
        entry("3.jpg", 7),
        {"image": "4.jpg", "conversations": [{"value": "?"}]},
        {"conversations": []},
        "nonsense",
    ]
    captions = read_sharegpt4v(write(tmp_path / "d.json", entries))
    assert [record.image for record in captions.records] == ["1.jpg"]
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("entry 1", "empty or non-text caption"),
        ("entry 2", "empty or non-text caption"),
        ("entry 3", "no caption"),
        ("entry 4", "no image path"),
        ("entry 5", "not an object"),
    ]
    assert "2.jpg" in captions.bad[0].detail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not there"),
        ("{", "is not JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), "is not JSON"),
        ('{"a": 1}', "holds a dict, not a list"),
        ("[]", "has 0 entries and none is usable"),
        ("[1, 2]", "has 2 entries and none is usable.*entry 0, not an object"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, content, message):
    path = tmp_path / "d.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_sharegpt4v(path)
    with pytest.raises(UserError, match="is a folder"):
        read_sharegpt4v(tmp_path)


def test_no_path_leaves_the_image_folder(images, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    Image.new("RGB", (2, 2)).save(outside)
    (images.root / "link.png").symlink_to(outside)
    for path in ("../x.png", str(outside), "link.png", "a/../../x.png"):
        with pytest.raises(ValueError, match="leaves the image folder"):
            images.open(path)
    assert images.open("sub/../1.png").mode == "RGB"
    with pytest.raises(UserError, match="is not there"):
        ImageFolder(images.root / "nowhere")


def test_draws_do_not_depend_on_workers_or_order(images):
    data = dataset(images)
    keys = [[(epoch, index) for index in (3, 0, 5)] for epoch in range(2)]

    def read(workers, order):
        batches = {}
        for batch in DataLoader(data, batch_sampler=order, collate_fn=Collate(TOKENIZER), num_workers=workers):
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
    batch = Collate(TOKENIZER)([data[(0, 1)], data[(0, 4)]])
    texts = [TOKENIZER.tokenizer.decode(row, skip_special_tokens=True).strip("!") for row in batch.tokens.padded()]
    assert [text.split(" .")[0] for text in texts] == ["scene 1", "scene 4", "scene 1", "scene 4"]
    assert "bird" in texts[0] and "bird" not in texts[2]
    assert torch.equal(batch.images[0], as_tensor(images.open("1.png")))


def test_unreadable_images_are_replaced_the_same_way_each_time_and_named(images):
    (images.root / "text.png").write_text("not an image")
    whole = (images.root / "5.png").read_bytes()
    (images.root / "cut.png").write_bytes(whole[: len(whole) // 2])
    data = dataset(images, extra=["gone.png", "text.png", "cut.png", "../x.png"])
    for index in range(6, 10):
        sample = data[(0, index)]
        assert sample.bad[0].where == data.records[index].image
        assert sample.bad[0].kind == ("missing image" if index == 6 else "unreadable image")
        again = pickle.loads(pickle.dumps(data))[(0, index)]
        assert torch.equal(sample.image, again.image) and sample.captions == again.captions
    assert data[(0, 2)].bad == []


def test_nothing_but_unreadable_images_stops_with_an_explanation(images):
    data = dataset(images, count=0, extra=["gone.png", "away.png"])
    with pytest.raises(UserError, match="20 images in a row cannot be read.*--check-data"):
        data[(0, 0)]
