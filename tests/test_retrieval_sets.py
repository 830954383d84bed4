"""Each retrieval benchmark from a tiny folder in the layout that its authors publish, and what is wrong with some."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.benchmarks import check_benchmark, lay_out, write
from helpers.tiny_clip import save_tiny_clip
from helpers.tiny_data import entry

from debias_diffusion.data.seen import SEEN
from debias_diffusion.errors import UserError
from debias_diffusion.eval import retrieval_sets
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval
from debias_diffusion.eval.retrieval_sets import SHAREGPT4V_FILE, read_retrieval_set

ALL = ("train", "val", "test")


def jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def dci_entry(image: str, short: str, extra: str) -> dict:
    return {"image": image, "short_caption": short, "extra_caption": extra, "mask_data": {"0": {"caption": "no"}}}


def docci_row(split: str, number: int) -> dict:
    name = f"{split}_{number:05}"
    return {"split": split, "image_file": f"{name}.jpg", "description": f"A view of {name}. A leaf."}


def coco(*splits: str, most: int = 6) -> tuple[dict, dict, str]:
    """Captions of each image in no order, six of each; with both splits, images of the same name."""
    files, expected = {}, {}
    for split in dict.fromkeys([*splits, "val2017"]):
        ids = (9 if split == "train2017" else 397133, 37777)
        images = [{"id": i, "file_name": f"{i:012}.jpg"} for i in ids]
        rows = [{"image_id": i, "id": 10 * n + i, "caption": f"{i} {n}. "} for n in range(6) for i in reversed(ids)]
        files[f"annotations/captions_{split}.json"] = {"images": images, "annotations": rows}
        if split in splits:
            names = {i: f"{split}/{i:012}.jpg" if len(splits) > 1 else f"{i:012}.jpg" for i in ids}
            expected |= {name: [f"{i} {n}." for n in range(most)] for i, name in names.items()}
    return files, expected, "." if len(splits) > 1 else splits[0]


def karpathy(*splits: str) -> tuple[dict, dict, str]:
    names = {"1.jpg": "train", "2.jpg": "test", "3.jpg": "val", "4.jpg": "test"}
    captions = {name: [f"Man {n} of {name}." for n in range(5)] for name in names}
    sentences = {name: [{"tokens": ["man"], "raw": raw} for raw in texts] for name, texts in captions.items()}
    images = [{"filename": name, "split": split, "sentences": sentences[name]} for name, split in names.items()]
    expected = {name: captions[name] for name, split in names.items() if split in splits}
    return {"dataset_flickr30k.json": {"images": images, "dataset": "flickr30k"}}, expected, "flickr30k-images"


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
            "annotations/1-data.json": dci_entry("sa_38.jpg", "A balcony", "It has  a\nrail."),
            "annotations/2-data.json": dci_entry("sa_18.jpg", "A pump.", "It is red."),
            "annotations/3-data.json": dci_entry("sa_73.jpg", "A cat!", ""),
            "splits.json": {"train": ["1-data.json"], "valid": ["2-data.json"], "test": ["3-data.json"]},
        },
        {"sa_38.jpg": ["A balcony. It has a rail."], "sa_18.jpg": ["A pump. It is red."], "sa_73.jpg": ["A cat!"]},
        "photos",
    ),
    "dci-as-released": (
        {
            "annotations/1-data.json": dci_entry("sa_38.jpg", " A balcony.", "It has  a\nrail. "),
            "annotations/2-data.json": dci_entry("sa_18.jpg", "", "It is red."),
            "splits.json": {"train": ["1-data.json"], "test": ["2-data.json"]},
        },
        {"sa_38.jpg": ["A balcony.It has a rail."], "sa_18.jpg": ["It is red."]},
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
                *(docci_row(*row) for row in (("train", 0), ("test", 0), ("qual_test", 0), ("test", 1))),
                docci_row("test", 0) | {"description": "Again."},
            )
        },
        {f"test_{n:05}.jpg": [f"A view of test_{n:05}. A leaf.", *["Again."][n:]] for n in range(2)},
        "images",
    ),
    "iiw": (
        {
            "IIW-400/data.jsonl": jsonl({"IIW": "A globe.", "IIW-P5B": "No.", "image/key": "aar_46"}),
            "DCI_Test/data.jsonl": jsonl({"IIW": "A rail.", "ex_id": "1-data.json", "image": "sa_15.jpg"}),
            "DOCCI_Test/data.jsonl": jsonl({"DOCCI": "No.", "IIW": "Towels.", "image": "test_731"}),
        },
        {"images_aar/aar_46.jpg": ["A globe."], "photos/sa_15.jpg": ["A rail."], "images/test_731.jpg": ["Towels."]},
        ".",
    ),
    "sharegpt4v-1k": (
        {SHAREGPT4V_FILE: [entry(f"sam/images/sa_{n}.jpg", f"It is {n}.\nIt is small.") for n in range(4)]},
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
}


def lay(name: str, root: Path) -> dict:
    return lay_out(root, *LAYOUTS[name])


@pytest.fixture(autouse=True)
def fewer_of_sharegpt4v(monkeypatch):
    assert retrieval_sets.SHAREGPT4V_HELD_OUT == 1000
    monkeypatch.setattr(retrieval_sets, "SHAREGPT4V_HELD_OUT", 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_benchmark_in_its_authors_layout(name, tmp_path):
    check_benchmark(name, tmp_path, lay(name, tmp_path))


# (benchmark, file or folder, None: removed, else (old, new) or all of its text, message)
FAULTS = [
    ("urban1k", "image/2.jpg", None, "1 of the 3 images.*'2.jpg', of caption/2.txt"),
    ("urban1k", "caption", None, "hold caption, image;.*huggingface.co/datasets/BeichenZhang"),
    ("dci", "annotations/2-data.json", None, "names .*2-data.json"),
    ("long-dci", "dci_long.csv", ("Plain.", ""), "dci_long.csv, image sa_3.jpg.*no caption"),
    ("docci", "docci_descriptions.jsonlines", '{"split": "val"}', "no usable record.* from https"),
    ("flickr30k-test", "dataset_flickr30k.json", '[{"image": "1.jpg"}]', "a list, not a dict.*'images'"),
    ("iiw", "DCI_Test/data.jsonl", ('"IIW"', '"no"'), "DCI_Test/.*line 1.*no caption"),
]


@pytest.mark.parametrize(("name", "file", "change", "message"), FAULTS)
def test_what_is_missing_is_an_error_that_names_its_file(name, file, change, message, tmp_path):
    lay(name, tmp_path)
    path = tmp_path / file
    if change is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        write(path, change if isinstance(change, str) else path.read_text().replace(*change, 1))
    with pytest.raises((UserError, OSError), match=message):
        read_retrieval_set(name, tmp_path)


def test_what_cannot_be_decoded_is_left_out_and_named(tmp_path):
    captions = [caption for captions in lay("docci", tmp_path).values() for caption in captions]
    with open(tmp_path / "docci_descriptions.jsonlines", "a") as lines:
        lines.write("{broken\n[1]\n\n")
    read = read_retrieval_set("docci", tmp_path)
    assert [one.kind for one in read.bad] == ["bad JSON", "not an object"] and "line 6" in read.bad[0].where
    assert read.captions == captions


def test_benchmarks_are_found_below_a_folder_and_misspelt_ones_named(tmp_path):
    for name, folder in {"coco-five": "coco", "long-dci": "dci", "urban1k": "."}.items():
        lay(name, tmp_path / folder)
        assert retrieval_sets.find_root(name, tmp_path).resolve() == (tmp_path / folder).resolve()
    for name, root, message in (("urban", ".", "Did you mean urban1k"), ("coco", "nowhere", "in none of .*'nowhere'")):
        with pytest.raises(UserError, match=message):
            read_retrieval_set(name, root)


def test_benchmarks_are_evaluated_without_their_unreadable_images(tmp_path, coarse_results):
    names, data = ["coco-five", "urban1k"], tmp_path / "data"
    for name in names:
        lay(name, data / name)
    write(data / "coco-five" / "val2017" / "000000397133.jpg", "no image")
    clip = save_tiny_clip(tmp_path / "clip")
    reports = evaluate_retrieval(RetrievalConfig([clip], str(tmp_path), dataset=names, root=str(data)))
    assert [(reports[name]["images"], reports[name]["captions"]) for name in names] == [(1, 5), (3, 3)]
    assert [bad["kind"] for bad in reports["coco-five"]["left_out"]] == ["unreadable image"]
    for name, report in reports.items():
        assert report["digests"]["data"] == read_retrieval_set(name, data / name).digest
    # A search on the first image of urban1k: of it and no other is said that the model has seen it.
    (tmp_path / "clip" / SEEN).write_text(json.dumps({reports["urban1k"]["digests"]["data"]: [[0, 1]]}))
    [name] = reports["urban1k"]["encoders"]
    for settings, images, seen in (({}, 3, 1), ({"limit": 2}, 2, 1), ({"held_out": True, "limit": 1}, 1, 0)):
        given = {"dataset": ["urban1k"], "root": str(data / "urban1k")} | settings
        report = evaluate_retrieval(RetrievalConfig([clip], str(tmp_path), **given))
        assert (report["images"], report["trained_on"]) == (images, {name: seen})
