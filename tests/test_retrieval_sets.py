"""Each retrieval benchmark from a tiny folder in the layout that its authors publish, and what is wrong with some."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from helpers.coco_cn import coco_cn, draw, write
from helpers.tiny_clip import save_tiny_clip

from debias_diffusion.data import retrieval_layouts
from debias_diffusion.data.retrieval_layouts import BENCHMARKS
from debias_diffusion.data.retrieval_sets import find_root, read_retrieval_set
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness


def write_lines(path: Path, rows: list[dict]) -> None:
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def urban1k(root: Path) -> dict:
    """Urban1k/image/1.jpg beside Urban1k/caption/1.txt"""
    for number in (1, 2, 10):
        draw(root / "image" / f"{number}.jpg", number)
        write(root / "caption" / f"{number}.txt", f"Street {number}.  A car  stands there.\nNot part of it.\n")
    write(root / "caption" / ".DS_Store", "macOS")
    return {f"{number}.jpg": [f"Street {number}. A car stands there."] for number in (1, 10, 2)}


def dci(root: Path) -> dict:
    """densely_captioned_images/{splits.json, annotations/, complete/, photos/}"""
    entries = {
        "113029-data.json": ("sa_1545038.jpg", "A balcony", "It has  a rail.\nIt is grey."),
        "113106-data.json": ("sa_1545118.jpg", "A pump.", "It is red."),
        "113159-data.json": ("sa_1545173.jpg", "A cat!", ""),
    }
    for index, (name, (image, short, extra)) in enumerate(entries.items()):
        masks = {"0": {"idx": 0, "label": "a", "caption": "not used", "mask_quality": 0, "parent": -1}}
        entry = {"image": image, "short_caption": short, "extra_caption": extra, "mask_data": masks, "mask_keys": ["0"]}
        write(root / "annotations" / name, json.dumps(entry))
        draw(root / "photos" / image, index)
    write(root / "annotations" / "9-data.json", json.dumps({"image": "x.jpg", "short_caption": "In no split."}))
    names = list(entries)
    write(root / "splits.json", json.dumps({"train": names[:1], "valid": names[1:2], "test": names[2:]}))
    return {
        "sa_1545038.jpg": ["A balcony. It has a rail. It is grey."],
        "sa_1545118.jpg": ["A pump. It is red."],
        "sa_1545173.jpg": ["A cat!"],
    }


def long_dci(root: Path) -> dict:
    """dci_long.csv, tab-separated with quotes where needed, and DCI's photos"""
    rows = [("sa_1.jpg", 'A "sign" in a window.'), ("sa_2.jpg", "First line.\nSecond line."), ("sa_3.jpg", "Plain.")]
    with open(root / "dci_long.csv", "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([("filepath", "title"), *rows])
    for index, (image, _) in enumerate(rows):
        draw(root / "photos" / image, index)
    return {image: [" ".join(caption.split())] for image, caption in rows}


def docci(root: Path) -> dict:
    """docci_descriptions.jsonlines and images/"""
    rows = []
    for split, number in (("train", 0), ("test", 0), ("qual_test", 0), ("test", 1)):
        name = f"{split}_{number:05}"
        description = f"A high angle view of {name}. A leaf lies on it."
        rows.append({"example_id": name, "split": split, "image_file": f"{name}.jpg", "description": description})
        draw(root / "images" / f"{name}.jpg", number)
    write_lines(root / "docci_descriptions.jsonlines", rows)
    return {f"test_0000{n}.jpg": [f"A high angle view of test_0000{n}. A leaf lies on it."] for n in (0, 1)}


def iiw(root: Path) -> dict:
    """IIW-400/, DCI_Test/ and DOCCI_Test/ with a data.jsonl each; the images are DOCCI's, DCI's and DOCCI's"""
    write_lines(root / "IIW-400" / "data.jsonl", [{"IIW": "A globe.", "IIW-P5B": "No.", "image/key": "aar_test_04600"}])
    write_lines(root / "DCI_Test" / "data.jsonl", [{"IIW": "A rail.", "ex_id": "1-data.json", "image": "sa_15.jpg"}])
    write_lines(root / "DOCCI_Test" / "data.jsonl", [{"DOCCI": "No.", "IIW": "Towels.", "image": "test_00731"}])
    images = {
        "images_aar/aar_test_04600.jpg": "A globe.",
        "photos/sa_15.jpg": "A rail.",
        "images/test_00731.jpg": "Towels.",
    }
    for index, image in enumerate(images):
        draw(root / image, index)
    return {image: [caption] for image, caption in images.items()}


def sharegpt4v(root: Path) -> dict:
    """share-captioner_coco_lcs_sam_1246k_1107.json beside the folders that its paths start with"""
    entries = []
    for number in range(4):
        image = f"sam/images/sa_{number}.jpg"
        conversations = [{"from": "human", "value": "?"}, {"from": "gpt", "value": f"It is {number}.\nIt is small."}]
        entries.append({"id": f"sa_{number}", "image": image, "conversations": conversations})
        draw(root / image, number)
    write(root / "share-captioner_coco_lcs_sam_1246k_1107.json", json.dumps(entries))
    return {f"sam/images/sa_{number}.jpg": [f"It is {number}. It is small."] for number in range(3)}


def coco(root: Path, split: str = "val2017", first: int = 397133) -> dict:
    """annotations/captions_val2017.json and val2017/; captions in no order, six of each image"""
    ids = (first, 37777)
    images = [{"id": i, "file_name": f"{i:012}.jpg", "license": 4, "height": 32, "width": 32} for i in ids]
    rows = [{"image_id": i, "id": 10 * n + i, "caption": f"{i} {n}. "} for n in range(6) for i in reversed(ids)]
    content = {"info": {}, "licenses": [], "images": images, "annotations": rows}
    write(root / "annotations" / f"captions_{split}.json", json.dumps(content))
    for image in images:
        draw(root / split / image["file_name"], image["id"])
    return {f"{i:012}.jpg": [f"{i} {n}." for n in range(6)] for i in ids}


def coco_five(root: Path) -> dict:
    return {image: captions[:5] for image, captions in coco(root).items()}


def coco_train(root: Path) -> dict:
    coco(root)
    return coco(root, "train2017", 9)


def coco_all(root: Path) -> dict:
    """Both splits, train first; here both have an image of one name."""
    val, train = coco(root), coco(root, "train2017", 9)
    return {
        f"{split}/{name}": of for split, part in (("train2017", train), ("val2017", val)) for name, of in part.items()
    }


def flickr30k(root: Path) -> dict:
    """results_20130124.token and flickr30k-images/"""
    names = ["1000092795.jpg", "10002456.jpg"]
    write(
        root / "results_20130124.token",
        "".join(f"{name}#{number}\tMan {number} of {name} .\n" for name in names for number in range(5)),
    )
    for index, name in enumerate(names):
        draw(root / "flickr30k-images" / name, index)
    return {name: [f"Man {number} of {name} ." for number in range(5)] for name in names}


def flickr30k_test(root: Path, splits: tuple[str, ...] = ("test",)) -> dict:
    """Karpathy's dataset_flickr30k.json and flickr30k-images/"""
    images, expected = [], {}
    for imgid, (split, name) in enumerate([("train", "1.jpg"), ("test", "2.jpg"), ("val", "3.jpg"), ("test", "4.jpg")]):
        sentences = [
            {"tokens": ["man", str(n)], "raw": f"Man {n} of {name}.", "imgid": imgid, "sentid": 5 * imgid + n}
            for n in range(5)
        ]
        sentids = [sentence["sentid"] for sentence in sentences]
        images.append({"sentids": sentids, "imgid": imgid, "sentences": sentences, "split": split, "filename": name})
        draw(root / "flickr30k-images" / name, imgid)
        if split in splits:
            expected[name] = [f"Man {n} of {name}." for n in range(5)]
    write(root / "dataset_flickr30k.json", json.dumps({"images": images, "dataset": "flickr30k"}))
    return expected


def flickr30k_karpathy(root: Path) -> dict:
    return flickr30k_test(root, ("train", "val", "test"))


def flickr30k_cna(root: Path, splits: tuple[str, ...]) -> dict:
    """A file of captions in each of train/, val/ and test/, where keys have another form; flickr30k-images/"""
    files = {"train": "flickr30k_cna_train", "val": "flickr30k_cna_val", "test": "flickr30k_cn_test"}
    expected = {}
    for number, (split, file) in enumerate(files.items()):
        lines = []
        for image in (str(6228559980 + 2 * number), str(6228559981 + 2 * number)):
            texts = [f"第{n}个人， {image}。" for n in range(5)]
            keys = [f"{image}#zhb#{n}" if split == "test" else image for n in range(5)]
            lines += [f"{key}\t{text}\n" for key, text in zip(keys, texts, strict=True)]
            draw(root / "flickr30k-images" / f"{image}.jpg", int(image[-1]))
            if split in splits:
                expected[f"{image}.jpg"] = texts
        write(root / split / f"{file}.txt", "".join(lines))
    return expected


def recos(root: Path) -> dict:
    """recos_v1.json under the keys that the reader expects, and images/"""
    expected = {"1.jpg": ["Four elephants.", "A herd."], "2.jpg": ["Five elephants."]}
    draw(root / "images" / "1.jpg", 1)
    draw(root / "images" / "2.jpg", 2)
    entries = [
        {"image": "1.jpg", "caption": ["Four  elephants."], "task": "count"},
        {"image": "2.jpg", "caption": ["Five elephants."], "task": "count"},
        {"image": "1.jpg", "caption": "A herd.", "task": "figure"},
    ]
    write(root / "recos_v1.json", json.dumps(entries))
    return expected


def part(layout, *splits: str):
    return lambda root: layout(root, splits)


ALL = ("train", "val", "test")
LAYOUTS = {
    "urban1k": urban1k,
    "dci": dci,
    "long-dci": long_dci,
    "docci": docci,
    "iiw": iiw,
    "sharegpt4v-1k": sharegpt4v,
    "coco": coco,
    "coco-five": coco_five,
    "coco-train": coco_train,
    "coco-all": coco_all,
    "flickr30k": flickr30k,
    "flickr30k-test": flickr30k_test,
    "flickr30k-karpathy": flickr30k_karpathy,
    "coco-cn-val": part(coco_cn, "val"),
    "coco-cn-test": part(coco_cn, "test"),
    "coco-cn-all": part(coco_cn, *ALL),
    "flickr30k-cna-val": part(flickr30k_cna, "val"),
    "flickr30k-cna-test": part(flickr30k_cna, "test"),
    "flickr30k-cna-all": part(flickr30k_cna, *ALL),
    "recos-v1": recos,
}


@pytest.fixture
def fewer_of_sharegpt4v(monkeypatch):
    monkeypatch.setattr(retrieval_layouts, "SHAREGPT4V_HELD_OUT", 3)


@pytest.mark.usefixtures("fewer_of_sharegpt4v")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_in_its_authors_layout(name, tmp_path):
    expected = LAYOUTS[name](tmp_path)
    found = read_retrieval_set(name, tmp_path)
    assert found.bad == [] and found.images == list(expected)
    assert [found.captions[i] for i in range(len(found.captions))] == [c for own in expected.values() for c in own]
    assert [found.images[i] for i in found.image_of] == [image for image, own in expected.items() for _ in own]
    for image in found.images:
        assert found.source.open(image).size == (32, 32) and len(found.source.stamp(image)) == 16
    # the first so many images, with their captions
    first = found.first(1)
    assert (first.images, first.captions) == (found.images[:1], expected[found.images[0]])
    assert first.image_of == [0] * len(first.captions)
    assert first.digest() != found.digest() == read_retrieval_set(name, str(tmp_path)).digest()


def test_the_held_out_entries_of_sharegpt4v_are_the_first_thousand():
    assert retrieval_layouts.SHAREGPT4V_HELD_OUT == 1000


def test_the_photos_of_long_dci_may_lie_beside_it_and_image_folders_may_be_links(tmp_path):
    expected = long_dci(tmp_path)
    for photo in (tmp_path / "photos").iterdir():
        shutil.move(photo, tmp_path / photo.name)
    (tmp_path / "photos").rmdir()
    assert read_retrieval_set("long-dci", tmp_path).images == list(expected)
    linked = tmp_path / "linked"
    linked.mkdir()
    iiw(linked)
    shutil.move(linked / "photos", tmp_path / "elsewhere")
    (linked / "photos").symlink_to(tmp_path / "elsewhere")
    found = read_retrieval_set("iiw", linked)
    assert len([found.source.open(image) for image in found.images]) == 3


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def remove(name: str):
    return lambda root: (root / name).unlink()


def replace(name: str, old: str, new: str):
    return lambda root: change(root / name, old, new)


def overwrite(name: str, text: str):
    return lambda root: write(root / name, text)


FAULTS = [
    ("urban1k", remove("image/2.jpg"), r"1 of the 3 images.*'2.jpg', of caption/2.txt"),
    ("urban1k", remove("caption/2.txt"), r"caption/2.txt.*no caption for the image '2.jpg'"),
    ("urban1k", overwrite("caption/1.txt", " \nNot read."), r"caption/1.txt.*no caption"),
    ("urban1k", lambda root: shutil.rmtree(root / "caption"), r"no 'caption'.*huggingface.co/datasets/BeichenZhang"),
    ("dci", remove("annotations/113106-data.json"), r"names .*113106-data.json"),
    ("dci", remove("photos/sa_1545118.jpg"), r"'sa_1545118.jpg', of annotations/113106"),
    ("dci", overwrite("splits.json", "[1"), r"splits.json' cannot be read as JSON"),
    ("dci", overwrite("splits.json", "{}"), "no entry that can be read"),
    ("long-dci", replace("dci_long.csv", "Plain.", ""), r"dci_long.csv, image sa_3.jpg.*no caption"),
    ("docci", remove("images/test_00001.jpg"), r"'test_00001.jpg', of docci_desc.*line 4"),
    ("iiw", remove("DOCCI_Test/data.jsonl"), "DOCCI_Test/data.jsonl"),
    ("iiw", replace("DCI_Test/data.jsonl", '"IIW"', '"no"'), r"DCI_Test/.*line 1.*no caption"),
    ("iiw", replace("DCI_Test/data.jsonl", '"image"', '"no"'), "DCI_Test/.*line 1.*no image"),
    ("sharegpt4v-1k", remove("sam/images/sa_2.jpg"), r"sa_2.jpg', of share-.*entry 2"),
    ("sharegpt4v-1k", overwrite(retrieval_layouts.SHAREGPT4V_FILE, "{}"), "holds a dict, not a list"),
    ("coco", remove("val2017/000000037777.jpg"), "1 of the 2 images.*image 37777"),
    ("coco", overwrite("annotations/captions_val2017.json", '{"images": []}'), "'annotations'"),
    ("flickr30k", remove("flickr30k-images/10002456.jpg"), "10002456.jpg', of res.*line 6"),
    ("flickr30k-test", replace("dataset_flickr30k.json", '"images"', '"x"'), "named 'images'"),
    ("coco-all", remove("train2017/000000000009.jpg"), "1 of the 4 images.*'train2017/000000000009.jpg'"),
    ("coco-all", remove("annotations/captions_train2017.json"), "no 'annotations/captions_train2017.json'"),
    ("coco-cn-val", lambda root: shutil.rmtree(root / "val2014"), "2 of the 2 images.*'val2014/COCO_val2014_0+42.jpg'"),
    (
        "coco-cn-test",
        overwrite(retrieval_layouts.COCO_CN_FILE, f"COCO_train2014_{25:012}#0\t一只猫。\n"),
        "coco-cn_test.txt, line 2 .*no caption for the image 'train2014/COCO_train2014_0+3.jpg'",
    ),
    ("coco-cn-all", remove("coco-cn_train.txt"), "no 'coco-cn_train.txt'.*huggingface.co/datasets/AIMClab-RUC"),
    ("flickr30k-cna-all", remove("flickr30k-images/6228559982.jpg"), "'6228559982.jpg', of val/flickr30k_cna_val.txt"),
    (
        "flickr30k-cna-test",
        remove("test/flickr30k_cn_test.txt"),
        "neither 'test/flickr30k_cna_test.txt' nor",
    ),
    ("recos-v1", replace("recos_v1.json", '"image": "2.jpg"', '"image": 2'), "recos_v1.json, entry 1 .*names no image"),
    ("recos-v1", remove("images/2.jpg"), "'2.jpg', of recos_v1.json, entry 1"),
    (
        "recos-v1",
        overwrite("recos_v1.json", '[{"img": "1.jpg", "text": "A."}, {"id": 1}]'),
        "with the keys id, img, text",
    ),
    ("recos-v1", overwrite("recos_v1.json", '{"count": [{"image": "1.jpg"}]}'), "is a dict of .*the keys count"),
    ("recos-v1", overwrite("recos_v1.json", "[1]"), "with the keys none.*image and caption"),
]


@pytest.mark.usefixtures("fewer_of_sharegpt4v")
@pytest.mark.parametrize(("name", "spoil", "message"), FAULTS)
def test_an_entry_without_image_or_caption_is_an_error_that_names_its_file(name, spoil, message, tmp_path):
    LAYOUTS[name](tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        read_retrieval_set(name, tmp_path)


def test_what_cannot_be_decoded_is_left_out_and_named(tmp_path):
    docci(tmp_path)
    with open(tmp_path / "docci_descriptions.jsonlines", "a") as file:
        file.write("{broken\n[1]\n\n")
    found = read_retrieval_set("docci", tmp_path)
    assert [(bad.kind, bad.where.split(", ")[1]) for bad in found.bad] == [
        ("bad JSON", "line 5"),
        ("not an object", "line 6"),
    ]
    assert len(found.images) == 2
    flickr = tmp_path / "flickr"
    flickr.mkdir()
    flickr30k(flickr)
    change(flickr / "results_20130124.token", "#1\tMan 1 of 1000092795.jpg .", "#1\t ")
    change(flickr / "results_20130124.token", "#2\tMan", " Man")
    found = read_retrieval_set("flickr30k", flickr)
    assert [bad.kind for bad in found.bad] == ["not a line of image#number, tab, caption", "empty caption"]
    assert [found.image_of.count(image) for image in (0, 1)] == [3, 5]
    urban = tmp_path / "urban"
    urban1k(urban)
    (urban / "caption" / "2.txt").write_bytes(b"\xff\xfe\xff")
    (bad,) = read_retrieval_set("urban1k", urban).bad
    assert (bad.where, bad.kind) == ("caption/2.txt", "bad caption file")


def test_bad_lines_of_the_chinese_sets_are_left_out_and_named(tmp_path):
    coco_cn(tmp_path, ALL)
    lines = (tmp_path / retrieval_layouts.COCO_CN_FILE).read_text().splitlines()
    # a key that ends at a space, a line without a key, one without a caption
    lines[2] = lines[2].replace("\t", " ")
    lines += ["没有图像的句子", f"COCO_train2014_{25:012}#9\t \t"]
    write(tmp_path / retrieval_layouts.COCO_CN_FILE, "\n".join(lines))
    write(tmp_path / "coco-cn_test.txt", f"COCO_train2014_{25:012}\n25\n")
    read = read_retrieval_set("coco-cn-test", tmp_path)
    assert [(bad.where.split(", ")[1], bad.kind) for bad in read.bad] == [
        ("line 8", "not a line of COCO image#number, tab, caption"),
        ("line 2", "not a line of COCO image#number, tab, caption"),
        ("line 3", "empty caption"),
    ]
    assert len(read.captions) == 2 and not any("翻译" in caption for caption in read.captions)
    assert read_retrieval_set("coco-cn-all", tmp_path).captions[0] == "09号：一只猫 0。"
    cna = tmp_path / "cna"
    cna.mkdir()
    flickr30k_cna(cna, ALL)
    with open(cna / "val" / "flickr30k_cna_val.txt", "ab") as file:
        file.write("一只猫\n6228559982\n".encode() + b"\xff\xfe\tcat\n")
    assert [bad.kind for bad in read_retrieval_set("flickr30k-cna-val", cna).bad] == [
        "not a line of image, tab, caption",
        "not a line of image, tab, caption",
        "empty caption",
    ]


def test_coco_cn_needs_only_the_folders_that_it_names(tmp_path):
    coco_cn(tmp_path, ALL)
    shutil.rmtree(tmp_path / "val2014")
    images = read_retrieval_set("coco-cn-test", tmp_path).images
    assert [image.partition("/")[0] for image in images] == ["train2014", "train2014"]
    with pytest.raises(UserError, match="2 of the 5 images.*'val2014/"):
        read_retrieval_set("coco-cn-all", tmp_path)


def test_the_test_file_of_flickr30k_cna_has_two_names(tmp_path):
    expected = flickr30k_cna(tmp_path, ("test",))
    (tmp_path / "test" / "flickr30k_cn_test.txt").rename(tmp_path / "test" / "flickr30k_cna_test.txt")
    assert read_retrieval_set("flickr30k-cna-test", tmp_path).images == list(expected)


def test_bad_entries_of_recos_are_left_out_and_named(tmp_path):
    recos(tmp_path)
    entries = json.loads((tmp_path / "recos_v1.json").read_text())
    write(tmp_path / "recos_v1.json", json.dumps([*entries, [1], {"image": "1.jpg", "caption": None}]))
    read = read_retrieval_set("recos-v1", tmp_path)
    assert [(bad.where, bad.kind) for bad in read.bad] == [
        ("recos_v1.json, entry 3", "not an object"),
        ("recos_v1.json, entry 0", "empty caption"),
    ]


def test_entries_of_one_image_are_one_image_with_several_captions(tmp_path):
    docci(tmp_path)
    again = {"example_id": "x", "split": "test", "image_file": "test_00000.jpg", "description": "Again."}
    with open(tmp_path / "docci_descriptions.jsonlines", "a") as file:
        file.write(json.dumps(again) + "\n")
    found = read_retrieval_set("docci", tmp_path)
    assert found.images == ["test_00000.jpg", "test_00001.jpg"] and found.image_of == [0, 0, 1]
    assert found.captions[1] == "Again."


@pytest.mark.parametrize(
    ("name", "root", "message"), [("urban", ".", "Did you mean urban1k"), ("coco", "nowhere", "nowhere' is not there")]
)
def test_no_such_benchmark_or_folder(name, root, message):
    with pytest.raises(UserError, match=message):
        read_retrieval_set(name, root)


# ---- evaluated


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("tiny-clip"))


@pytest.fixture
def evaluate(tiny_clip, tmp_path):
    """Evaluates the retrieval of a benchmark that lies in `tmp_path`."""
    where = dict(root=str(tmp_path), output=str(tmp_path / "out"))
    return lambda name, **options: evaluate_retrieval(RetrievalConfig([tiny_clip], dataset=[name], **where, **options))


def test_a_benchmark_with_five_captions_an_image_is_evaluated(evaluate, tmp_path):
    flickr30k(tmp_path)
    with open(tmp_path / "results_20130124.token", "a") as file:
        file.write(f"10002456.jpg#5\t{'word ' * 90}\n")
    report = evaluate("flickr30k", batch_size=3)
    assert report == json.loads((tmp_path / "out" / "retrieval.json").read_text())
    (numbers,) = report["encoders"].values()
    assert (report["images"], report["captions"], numbers["captions_longer_than_context"]) == (2, 11, 1)
    assert report["digests"]["data"] == read_retrieval_set("flickr30k", tmp_path).digest()
    assert set(numbers["recall_percent"]["text_to_image"]) == {"R@1", "R@5", "R@10"}
    assert numbers["recall_percent"]["text_to_image"]["R@5"] == 100.0  # of 2 images
    assert numbers["recall_percent"]["image_to_text"]["R@1"] in (0.0, 50.0, 100.0)
    assert report["settings"]["limit"] == "auto" and (tmp_path / "out" / "retrieval.png").stat().st_size > 1000


def test_several_benchmarks_are_evaluated_in_one_call(tiny_clip, tmp_path, capsys):
    coco(tmp_path / "data" / "coco")
    urban1k(tmp_path / "data" / "urban1k")
    config = RetrievalConfig(
        [tiny_clip], str(tmp_path / "out"), dataset=["coco-five", "urban1k"], root=str(tmp_path / "data")
    )
    reports = evaluate_retrieval(config)
    assert list(reports) == ["coco-five", "urban1k"] and "coco-five, text to image" in capsys.readouterr().out
    for name, folder in (("coco-five", "coco"), ("urban1k", "urban1k")):
        assert json.loads((tmp_path / "out" / name / "retrieval.json").read_text()) == reports[name]
        alone = RetrievalConfig(
            [tiny_clip], str(tmp_path / "alone"), dataset=[name], root=str(tmp_path / "data" / folder)
        )
        assert reports[name]["encoders"] == evaluate_retrieval(alone)["encoders"]
        assert reports[name]["captions"] == len(read_retrieval_set(name, tmp_path / "data" / folder).captions)
    for dataset, message in (
        (
            ["urban1k", "docci"],
            "docci is in none of .*(data/docci'.*docci_images|docci_descriptions)",
        ),
        (["urban1k", "urban1k"], "Name no benchmark twice"),
        (["urban1k", "coko"], "no retrieval benchmark 'coko'. Did you mean coco"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_retrieval(dataclasses.replace(config, dataset=dataset, output=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "folder"),
    [("coco-cn-val", "coco-cn"), ("flickr30k-karpathy", "flickr30k"), ("long-dci", "dci"), ("urban1k", ".")],
)
def test_a_benchmark_is_found_below_a_folder_of_several(name, folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    LAYOUTS[name](tmp_path / folder)
    assert find_root(name, tmp_path).resolve() == (tmp_path / folder).resolve()


def test_a_limit_counts_images_and_an_unreadable_image_takes_its_captions_along(evaluate, tmp_path):
    coco(tmp_path)
    assert evaluate("coco", limit=1)["captions"] == 6
    write(tmp_path / "val2017" / "000000397133.jpg", "no image")
    report = evaluate("coco")
    assert (report["images"], report["captions"]) == (1, 6)
    assert [bad["kind"] for bad in report["left_out"]] == ["unreadable image"]


def test_more_unreadable_images_than_the_share_stop_the_evaluation(evaluate, tmp_path):
    urban1k(tmp_path)
    for name in ("1.jpg", "2.jpg"):
        write(tmp_path / "image" / name, "no image")
    with pytest.raises(UserError, match=r"2 of 3 records.*0.01.*--max-bad.*1.jpg"):
        evaluate("urban1k")
    assert not (tmp_path / "out" / "retrieval.json").exists()
    assert evaluate("urban1k", max_bad=0.7)["images"] == 1


def test_a_benchmark_s_robustness(tiny_clip, tmp_path):
    expected = urban1k(tmp_path)
    report = evaluate_robustness(
        RobustnessConfig([tiny_clip], output=str(tmp_path / "out"), dataset="urban1k", root=str(tmp_path))
    )
    assert report["captions"] == len(expected) and report["one_sentence_captions"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "Give either --data"),
        ({"data": "x.json", "dataset": ["coco"]}, "Give either --data"),
        ({"data": "x.json", "root": "."}, "Give either --data"),
        ({"dataset": ["coco"], "root": ".", "images": "."}, "Give either --data"),
        ({"dataset": ["coco"]}, "needs the folder that it lies in"),
        ({"dataset": ["coco"], "root": ".", "output": ""}, "--output"),
    ],
)
def test_unusable_settings(change, message):
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(RetrievalConfig(**({"encoders": ["ViT-B-32:openai"], "output": "out"} | change)))
