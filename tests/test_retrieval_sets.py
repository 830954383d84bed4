"""Each retrieval benchmark from a tiny folder in the layout that its authors publish, and what is wrong with some."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from helpers.coco_cn import coco_cn, draw, write
from helpers.tiny_clip import save_tiny_clip

from debias_diffusion.data import retrieval_layouts
from debias_diffusion.data.retrieval_layouts import BENCHMARKS, COCO_CN_FILE, SHAREGPT4V_FILE
from debias_diffusion.data.retrieval_sets import find_root, read_retrieval_set
from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.robustness import RobustnessConfig, evaluate_robustness

ALL = ("train", "val", "test")


def jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def dci_entry(image: str, short: str, extra: str) -> dict:
    masks = {"0": {"idx": 0, "label": "a", "caption": "not used", "mask_quality": 0, "parent": -1}}
    return {"image": image, "short_caption": short, "extra_caption": extra, "mask_data": masks, "mask_keys": ["0"]}


def docci_row(split: str, number: int) -> dict:
    name = f"{split}_{number:05}"
    return {
        "example_id": name,
        "split": split,
        "image_file": f"{name}.jpg",
        "description": f"A view of {name}. A leaf.",
    }


def sharegpt4v_entry(number: int) -> dict:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": f"It is {number}.\nIt is small."}]
    return {"id": f"sa_{number}", "image": f"sam/images/sa_{number}.jpg", "conversations": turns}


def coco(*splits: str, most: int = 6) -> tuple[dict, dict, str]:
    """Captions of each image in no order, six of each; with both splits, images of the same name."""
    files, expected = {}, {}
    for split in dict.fromkeys([*splits, "val2017"]):
        ids = (9 if split == "train2017" else 397133, 37777)
        images = [{"id": i, "file_name": f"{i:012}.jpg", "license": 4, "height": 32} for i in ids]
        rows = [{"image_id": i, "id": 10 * n + i, "caption": f"{i} {n}. "} for n in range(6) for i in reversed(ids)]
        files[f"annotations/captions_{split}.json"] = {"info": {}, "images": images, "annotations": rows}
        if split in splits:
            names = {i: f"{split}/{i:012}.jpg" if len(splits) > 1 else f"{i:012}.jpg" for i in ids}
            expected |= {name: [f"{i} {n}." for n in range(most)] for i, name in names.items()}
    return files, expected, "." if len(splits) > 1 else splits[0]


def karpathy(*splits: str) -> tuple[dict, dict, str]:
    images = []
    for imgid, (split, name) in enumerate([("train", "1.jpg"), ("test", "2.jpg"), ("val", "3.jpg"), ("test", "4.jpg")]):
        sentences = [{"tokens": ["man"], "raw": f"Man {n} of {name}.", "imgid": imgid} for n in range(5)]
        images.append({"imgid": imgid, "sentences": sentences, "split": split, "filename": name})
    expected = {
        image["filename"]: [sentence["raw"] for sentence in image["sentences"]]
        for image in images
        if image["split"] in splits
    }
    return {"dataset_flickr30k.json": {"images": images, "dataset": "flickr30k"}}, expected, "flickr30k-images"


def flickr30k_cna(*splits: str) -> tuple[dict, dict, str]:
    """A file of captions in each of train/, val/ and test/, where keys have another form."""
    paths = ("train/flickr30k_cna_train.txt", "val/flickr30k_cna_val.txt", "test/flickr30k_cn_test.txt")
    files, expected = {}, {}
    for number, (split, path) in enumerate(zip(ALL, paths, strict=True)):
        of_split = {
            image: [f"第{n}个人， {image}。" for n in range(5)] for image in (622 + 2 * number, 623 + 2 * number)
        }
        ending = "#zhb#{}" if split == "test" else ""
        lines = (f"{i}{ending.format(n)}\t{text}\n" for i, texts in of_split.items() for n, text in enumerate(texts))
        files[path] = "".join(lines)
        expected |= {f"{image}.jpg": texts for image, texts in of_split.items()} if split in splits else {}
    return files, expected, "flickr30k-images"


FLICKR = ("1000092795.jpg", "10002456.jpg")
# {benchmark: (files by path, captions by image in the order of the benchmark, folder of the images)}
LAYOUTS = {
    "urban1k": (
        {f"caption/{n}.txt": f"Street {n}.  A car  stands there.\nNot part of it.\n" for n in (1, 2, 10)}
        | {"caption/.DS_Store": "macOS"},
        {f"{n}.jpg": [f"Street {n}. A car stands there."] for n in (1, 10, 2)},
        "image",
    ),
    "dci": (
        {
            "annotations/113029-data.json": dci_entry("sa_38.jpg", "A balcony", "It has  a rail.\nIt is grey."),
            "annotations/113106-data.json": dci_entry("sa_18.jpg", "A pump.", "It is red."),
            "annotations/113159-data.json": dci_entry("sa_73.jpg", "A cat!", ""),
            "annotations/9-data.json": dci_entry("x.jpg", "In no split.", ""),
            "splits.json": {"train": ["113029-data.json"], "valid": ["113106-data.json"], "test": ["113159-data.json"]},
        },
        {
            "sa_38.jpg": ["A balcony. It has a rail. It is grey."],
            "sa_18.jpg": ["A pump. It is red."],
            "sa_73.jpg": ["A cat!"],
        },
        "photos",
    ),
    "long-dci": (
        {"dci_long.csv": 'filepath\ttitle\nsa_1.jpg\t"A ""sign""."\nsa_2.jpg\t"One.\nTwo."\nsa_3.jpg\tPlain.\n'},
        {"sa_1.jpg": ['A "sign".'], "sa_2.jpg": ["One. Two."], "sa_3.jpg": ["Plain."]},
        "photos",
    ),
    "docci": (
        {
            "docci_descriptions.jsonlines": jsonl(
                docci_row("train", 0), docci_row("test", 0), docci_row("qual_test", 0), docci_row("test", 1)
            )
        },
        {f"test_0000{n}.jpg": [f"A view of test_0000{n}. A leaf."] for n in (0, 1)},
        "images",
    ),
    "iiw": (
        {
            "IIW-400/data.jsonl": jsonl({"IIW": "A globe.", "IIW-P5B": "No.", "image/key": "aar_test_04600"}),
            "DCI_Test/data.jsonl": jsonl({"IIW": "A rail.", "ex_id": "1-data.json", "image": "sa_15.jpg"}),
            "DOCCI_Test/data.jsonl": jsonl({"DOCCI": "No.", "IIW": "Towels.", "image": "test_00731"}),
        },
        {
            "images_aar/aar_test_04600.jpg": ["A globe."],
            "photos/sa_15.jpg": ["A rail."],
            "images/test_00731.jpg": ["Towels."],
        },
        ".",
    ),
    "sharegpt4v-1k": (
        {SHAREGPT4V_FILE: [sharegpt4v_entry(number) for number in range(4)]},
        {f"sam/images/sa_{number}.jpg": [f"It is {number}. It is small."] for number in range(3)},
        ".",
    ),
    "coco": coco("val2017"),
    "coco-five": coco("val2017", most=5),
    "coco-train": coco("train2017"),
    "coco-all": coco("train2017", "val2017"),
    "flickr30k": (
        {"results_20130124.token": "".join(f"{x}#{n}\tMan {n} of {x} .\n" for x in FLICKR for n in range(5))},
        {name: [f"Man {n} of {name} ." for n in range(5)] for name in FLICKR},
        "flickr30k-images",
    ),
    "flickr30k-test": karpathy("test"),
    "flickr30k-karpathy": karpathy(*ALL),
    "flickr30k-cna-val": flickr30k_cna("val"),
    "flickr30k-cna-test": flickr30k_cna("test"),
    "flickr30k-cna-all": flickr30k_cna(*ALL),
    "recos-v1": (
        {
            "recos_v1.json": [
                {"image": "1.jpg", "caption": ["Four  elephants."], "task": "count"},
                {"image": "2.jpg", "caption": ["Five elephants."], "task": "count"},
                {"image": "1.jpg", "caption": "A herd.", "task": "figure"},
            ]
        },
        {"1.jpg": ["Four elephants.", "A herd."], "2.jpg": ["Five elephants."]},
        "images",
    ),
}
COCO_CN = {"coco-cn-val": ("val",), "coco-cn-test": ("test",), "coco-cn-all": ALL}


def lay(name: str, root: Path) -> dict:
    """Writes a benchmark. Returns {image: captions} in its order."""
    if name in COCO_CN:
        return coco_cn(root, COCO_CN[name])
    files, expected, images = LAYOUTS[name]
    for path, content in files.items():
        write(root / path, content if isinstance(content, str) else json.dumps(content))
    for number, image in enumerate(expected):
        draw(root / images / image, number)
    return expected


@pytest.fixture(autouse=True)
def fewer_of_sharegpt4v(monkeypatch):
    assert retrieval_layouts.SHAREGPT4V_HELD_OUT == 1000
    monkeypatch.setattr(retrieval_layouts, "SHAREGPT4V_HELD_OUT", 3)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_in_its_authors_layout(name, tmp_path):
    expected = lay(name, tmp_path)
    read = read_retrieval_set(name, tmp_path)
    assert read.bad == [] and read.images == list(expected)
    assert read.captions == [caption for captions in expected.values() for caption in captions]
    assert [read.images[i] for i in read.image_of] == [image for image, texts in expected.items() for _ in texts]
    assert {read.source.open(image).size for image in read.images} == {(32, 32)}
    first = read.first(1)
    assert (first.images, first.captions) == (read.images[:1], expected[read.images[0]])
    assert first.image_of == [0] * len(first.captions)
    assert first.digest() != read.digest() == read_retrieval_set(name, str(tmp_path)).digest()


def test_images_may_lie_beside_their_folder_or_behind_links_and_files_may_have_their_other_name(tmp_path):
    expected = lay("long-dci", tmp_path)
    for photo in (tmp_path / "photos").iterdir():
        photo.rename(tmp_path / photo.name)
    (tmp_path / "photos").rmdir()
    assert read_retrieval_set("long-dci", tmp_path).images == list(expected)
    lay("iiw", linked := tmp_path / "linked")
    (linked / "photos").rename(tmp_path / "elsewhere")
    (linked / "photos").symlink_to(tmp_path / "elsewhere")
    read = read_retrieval_set("iiw", linked)
    assert len([read.source.open(image) for image in read.images]) == 3
    expected = lay("flickr30k-cna-test", cna := tmp_path / "cna")
    (cna / "test" / "flickr30k_cn_test.txt").rename(cna / "test" / "flickr30k_cna_test.txt")
    assert read_retrieval_set("flickr30k-cna-test", cna).images == list(expected)
    lay("coco-cn-test", tmp_path)
    shutil.rmtree(tmp_path / "val2014")  # which the test split names no image of
    assert len(read_retrieval_set("coco-cn-test", tmp_path).images) == 2


CHINESE = f"COCO_train2014_{25:012}#0\t一只猫。\n"
# (benchmark, file or folder, None: removed, else (old, new) or all of its text, message)
FAULTS = [
    ("urban1k", "image/2.jpg", None, r"1 of the 3 images.*'2.jpg', of caption/2.txt"),
    ("urban1k", "caption/2.txt", None, r"caption/2.txt.*no caption for the image '2.jpg'"),
    ("urban1k", "caption/1.txt", " \nNot read.", r"caption/1.txt.*no caption"),
    ("urban1k", "caption", None, r"no 'caption'.*huggingface.co/datasets/BeichenZhang"),
    ("dci", "annotations/113106-data.json", None, r"names .*113106-data.json"),
    ("dci", "photos/sa_18.jpg", None, r"'sa_18.jpg', of annotations/113106"),
    ("dci", "splits.json", "[1", r"splits.json' cannot be read as JSON"),
    ("dci", "splits.json", "{}", "no entry that can be read"),
    ("long-dci", "dci_long.csv", ("Plain.", ""), r"dci_long.csv, image sa_3.jpg.*no caption"),
    ("long-dci", "dci_long.csv", ("filepath", "file"), r"dci_long.csv, image None .*names no image"),
    ("docci", "images/test_00001.jpg", None, r"'test_00001.jpg', of docci_desc.*line 4"),
    ("iiw", "DOCCI_Test/data.jsonl", None, "DOCCI_Test/data.jsonl"),
    ("iiw", "DCI_Test/data.jsonl", ('"IIW"', '"no"'), r"DCI_Test/.*line 1.*no caption"),
    ("iiw", "DCI_Test/data.jsonl", ('"image"', '"no"'), "DCI_Test/.*line 1.*no image"),
    ("sharegpt4v-1k", "sam/images/sa_2.jpg", None, r"sa_2.jpg', of share-.*entry 2"),
    ("sharegpt4v-1k", SHAREGPT4V_FILE, "{}", "holds a dict, not a list"),
    ("coco", "val2017/000000037777.jpg", None, "1 of the 2 images.*image 37777"),
    ("coco", "annotations/captions_val2017.json", '{"images": []}', "'annotations'"),
    ("flickr30k", "flickr30k-images/10002456.jpg", None, "10002456.jpg', of res.*line 6"),
    ("flickr30k-test", "dataset_flickr30k.json", ('"images"', '"x"'), "named 'images'"),
    ("coco-all", "train2017/000000000009.jpg", None, "1 of the 4 images.*'train2017/000000000009.jpg'"),
    ("coco-all", "annotations/captions_train2017.json", None, "no 'annotations/captions_train2017.json'"),
    ("coco-cn-val", "val2014", None, "2 of the 2 images.*'val2014/COCO_val2014_0+42.jpg'"),
    ("coco-cn-all", "val2014", None, "2 of the 5 images.*'val2014/"),
    (
        "coco-cn-test",
        COCO_CN_FILE,
        CHINESE,
        "coco-cn_test.txt, line 2 .*no caption for the image 'train2014/COCO_.*3.jpg",
    ),
    ("coco-cn-all", "coco-cn_train.txt", None, "no 'coco-cn_train.txt'.*huggingface.co/datasets/AIMClab-RUC"),
    ("flickr30k-cna-all", "flickr30k-images/624.jpg", None, "'624.jpg', of val/flickr30k_cna_val.txt"),
    ("flickr30k-cna-test", "test/flickr30k_cn_test.txt", None, "neither 'test/flickr30k_cna_test.txt' nor"),
    ("recos-v1", "recos_v1.json", ('"2.jpg"', "2"), "recos_v1.json, entry 1 .*names no image"),
    ("recos-v1", "images/2.jpg", None, "'2.jpg', of recos_v1.json, entry 1"),
    ("recos-v1", "recos_v1.json", '[{"img": "1.jpg", "text": "A."}, {"id": 1}]', "with the keys id, img, text"),
    ("recos-v1", "recos_v1.json", '{"count": [{"image": "1.jpg"}]}', "is a dict of .*the keys count"),
    ("recos-v1", "recos_v1.json", "[1]", "with the keys none.*image and caption"),
]


@pytest.mark.parametrize(("name", "file", "change", "message"), FAULTS)
def test_an_entry_without_image_or_caption_is_an_error_that_names_its_file(name, file, change, message, tmp_path):
    lay(name, tmp_path)
    path = tmp_path / file
    if change is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        write(path, change if isinstance(change, str) else path.read_text().replace(*change, 1))
    with pytest.raises(UserError, match=message):
        read_retrieval_set(name, tmp_path)


CUT = "not a line of image#number, tab, caption"
# (benchmark, file, the change to its bytes, [(line or entry, kind of bad record)])
LEFT_OUT = [
    (
        "docci",
        "docci_descriptions.jsonlines",
        lambda text: text + b"{broken\n[1]\n\n",
        [("line 5", "bad JSON"), ("line 6", "not an object")],
    ),
    (
        "flickr30k",
        "results_20130124.token",
        lambda text: text.replace(b"#1\tMan 1 of 1000092795.jpg .", b"#1\t ").replace(b"#2\tMan", b" Man", 1),
        [("line 3", CUT), ("line 1", "empty caption")],
    ),
    ("urban1k", "caption/2.txt", lambda text: b"\xff\xfe\xff", [("caption/2.txt", "bad caption file")]),
    (
        "coco-cn-test",  # a key that ends at a space, a line without a key, one without a caption
        COCO_CN_FILE,
        lambda text: text.replace(b"\t", b" ", 3) + f"没有图像的句子\nCOCO_train2014_{25:012}#9\t \t\n".encode(),
        [("line 8", "not a line of COCO image#number, tab, caption"), ("line 3", "empty caption")],
    ),
    (
        "flickr30k-cna-val",
        "val/flickr30k_cna_val.txt",
        lambda text: text + "一只猫\n624\n".encode() + b"\xff\xfe\tcat\n",
        [("line 11", CUT.replace("#number", "")), ("line 13", CUT.replace("#number", "")), ("line 1", "empty caption")],
    ),
    (
        "recos-v1",
        "recos_v1.json",
        lambda text: text[:-1] + b', [1], {"image": "1.jpg", "caption": null}]',
        [("entry 3", "not an object"), ("entry 0", "empty caption")],
    ),
]


@pytest.mark.parametrize(("name", "file", "change", "bad"), LEFT_OUT)
def test_what_cannot_be_decoded_is_left_out_and_named(name, file, change, bad, tmp_path):
    lay(name, tmp_path)
    (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    read = read_retrieval_set(name, tmp_path)
    assert [(record.where.split(", ")[-1], record.kind) for record in read.bad] == bad
    assert read.captions and not any("翻译" in caption for caption in read.captions)


def test_entries_of_one_image_are_one_image_with_several_captions(tmp_path):
    lay("docci", tmp_path)
    with open(tmp_path / "docci_descriptions.jsonlines", "a") as file:
        file.write(jsonl(docci_row("test", 0) | {"description": "Again."}))
    read = read_retrieval_set("docci", tmp_path)
    assert read.images == ["test_00000.jpg", "test_00001.jpg"] and read.image_of == [0, 0, 1]
    assert read.captions[1] == "Again."


def test_benchmarks_are_found_below_a_folder_of_several_and_misspelt_ones_named(tmp_path):
    folders = {"coco-cn-val": "coco-cn", "flickr30k-karpathy": "flickr30k", "long-dci": "dci", "urban1k": "."}
    for name, folder in folders.items():
        lay(name, tmp_path / folder)
        assert find_root(name, tmp_path).resolve() == (tmp_path / folder).resolve()
    for name, root, message in (("urban", ".", "Did you mean urban1k"), ("coco", "nowhere", "nowhere' is not there")):
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
    lay("flickr30k", tmp_path)
    with open(tmp_path / "results_20130124.token", "a") as file:
        file.write(f"10002456.jpg#5\t{'word ' * 90}\n")
    report = evaluate("flickr30k", batch_size=3)
    (numbers,) = report["encoders"].values()
    assert (report["images"], report["captions"], numbers["captions_longer_than_context"]) == (2, 11, 1)
    assert report["digests"]["data"] == read_retrieval_set("flickr30k", tmp_path).digest()
    assert numbers["recall_percent"]["text_to_image"]["R@5"] == 100.0  # of 2 images
    assert numbers["recall_percent"]["image_to_text"]["R@1"] in (0.0, 50.0, 100.0)


def test_several_benchmarks_are_evaluated_in_one_call(tiny_clip, tmp_path, capsys):
    lay("coco-five", tmp_path / "data" / "coco")
    lay("urban1k", tmp_path / "data" / "urban1k")
    names = ["coco-five", "urban1k"]
    config = RetrievalConfig([tiny_clip], str(tmp_path / "out"), dataset=names, root=str(tmp_path / "data"))
    reports = evaluate_retrieval(config)
    assert list(reports) == names and "coco-five, text to image" in capsys.readouterr().out
    for name, folder in zip(names, ("coco", "urban1k"), strict=True):
        assert json.loads((tmp_path / "out" / name / "retrieval.json").read_text()) == reports[name]
        place = {"root": str(tmp_path / "data" / folder), "output": str(tmp_path / name)}
        alone = evaluate_retrieval(dataclasses.replace(config, dataset=[name], **place))
        assert alone["encoders"] == reports[name]["encoders"]
    for dataset, message in (
        (["urban1k", "docci"], r"docci is in none of .*data/docci'.*docci_descriptions"),
        (["urban1k", "urban1k"], "Name no benchmark twice"),
        (["urban1k", "coko"], "no retrieval benchmark 'coko'. Did you mean coco"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_retrieval(dataclasses.replace(config, dataset=dataset, output=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def test_an_unreadable_image_takes_its_captions_along_and_too_many_stop_the_evaluation(evaluate, tmp_path):
    lay("coco", tmp_path)
    assert evaluate("coco", limit=1)["captions"] == 6
    write(tmp_path / "val2017" / "000000397133.jpg", "no image")
    report = evaluate("coco")
    assert (report["images"], report["captions"]) == (1, 6)
    assert [bad["kind"] for bad in report["left_out"]] == ["unreadable image"]
    lay("urban1k", tmp_path)
    for name in ("1.jpg", "2.jpg"):
        write(tmp_path / "image" / name, "no image")
    with pytest.raises(UserError, match=r"2 of 3 records.*0.01.*--max-bad.*1.jpg"):
        evaluate("urban1k")
    assert evaluate("urban1k", max_bad=0.7)["images"] == 1


def test_a_benchmark_s_robustness(tiny_clip, tmp_path):
    expected, output = lay("urban1k", tmp_path), str(tmp_path / "out")
    config = RobustnessConfig([tiny_clip], output=output, dataset="urban1k", root=str(tmp_path))
    report = evaluate_robustness(config)
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
