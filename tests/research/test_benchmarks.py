"""COCO-CN, Flickr30k-CNA and ReCoS in their published layouts."""

from pathlib import Path

import pytest
from helpers.benchmarks import check_benchmark, draw, lay_out, write

from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval_sets import find_root, read_retrieval_set
from research.evaluations.benchmarks import BENCHMARKS as OWN
from research.evaluations.benchmarks import COCO_CN_FILE

pytestmark = pytest.mark.usefixtures("with_research")
ALL = ("train", "val", "test")
SPLITS = {"val": ("val",), "test": ("test",), "all": ALL}


def coco_cn(root: Path, splits: tuple[str, ...]) -> dict:
    """coco-cn_SPLIT.txt and imageid.human-written-caption.txt, beside train2014/ and val2014/ of COCO"""
    numbers = {"train": [9], "val": [42, 30], "test": [25, 3]}
    names = {
        split: [f"COCO_{'val' if split == 'val' else 'train'}2014_{number:012}" for number in members]
        for split, members in numbers.items()
    }
    every = [name for members in names.values() for name in members]
    captions = {name: [f"{name[-2:]}号：一只猫 {n}。" for n in range(1 + (name[-2:] in "2542"))] for name in every}
    lines = [(name, f"{name}#{n}\t{caption}\n") for name, texts in captions.items() for n, caption in enumerate(texts)]
    write(root / COCO_CN_FILE, "".join(line for _, line in sorted(lines)))
    write(root / "imageid.manually-translated-caption.txt", "".join(f"{name}#0\t翻译。\n" for name in captions))
    for split, members in names.items():
        write(root / f"coco-cn_{split}.txt", "".join(f"{name}\n" for name in members))
    for number, name in enumerate(captions):
        draw(root / name.split("_")[1] / f"{name}.jpg", number)
    return {f"{name.split('_')[1]}/{name}.jpg": captions[name] for split in splits for name in names[split]}


def flickr30k_cna(*splits: str) -> tuple[dict, dict, str]:
    """A file of captions in each of train/, val/ and test/, where keys have another form."""
    paths = ("train/flickr30k_cna_train.txt", "val/flickr30k_cna_val.txt", "test/flickr30k_cn_test.txt")
    files, expected = {}, {}
    for number, (split, path) in enumerate(zip(ALL, paths, strict=True)):
        of_split = {i: [f"第{n}个人， {i}。" for n in range(5)] for i in (622 + 2 * number, 623 + 2 * number)}
        ending = "#zhb#{}" if split == "test" else ""
        lines = (f"{i}{ending.format(n)}\t{text}\n" for i, texts in of_split.items() for n, text in enumerate(texts))
        files[path] = "".join(lines)
        expected |= {f"{image}.jpg": texts for image, texts in of_split.items()} if split in splits else {}
    return files, expected, "flickr30k-images"


RECOS = (
    {
        "recos_v1.json": [
            {"image": "1.jpg", "caption": ["Four  elephants."]},
            {"image": "2.jpg", "caption": ["Five elephants."]},
            {"image": "1.jpg", "caption": "A herd."},
        ]
    },
    {"1.jpg": ["Four elephants.", "A herd."], "2.jpg": ["Five elephants."]},
    "images",
)


def lay(name: str, root: Path) -> dict:
    data, _, split = name.rpartition("-")
    if data == "coco-cn":
        return coco_cn(root, SPLITS[split])
    return lay_out(root, *(flickr30k_cna(*SPLITS[split]) if data == "flickr30k-cna" else RECOS))


@pytest.mark.parametrize("name", OWN)
def test_a_benchmark_in_its_authors_layout(name, tmp_path):
    check_benchmark(name, tmp_path, lay(name, tmp_path))


def test_one_without_a_caption_is_named_and_the_folder_of_the_data_set_is_found(tmp_path):
    lay("coco-cn-test", tmp_path / "coco-cn")
    assert find_root("coco-cn-test", tmp_path) == tmp_path / "coco-cn"
    write(tmp_path / "coco-cn" / COCO_CN_FILE, f"COCO_train2014_{25:012}#0\t一只猫。\n")
    with pytest.raises(UserError, match="coco-cn_test.txt, line 2 .*no caption"):
        read_retrieval_set("coco-cn-test", tmp_path)
