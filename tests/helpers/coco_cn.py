"""COCO-CN in its published layout."""

from pathlib import Path

from PIL import Image

from debias_diffusion.eval.retrieval_sets import COCO_CN_FILE

COLOURS = ("red", "green", "blue", "white", "grey", "black")


def draw(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (32, 32), COLOURS[colour % len(COLOURS)])
    picture.putpixel((colour % 32, 0), (colour, 0, 0))
    picture.save(path, format="PNG")  # Pillow tells the kind by the bytes, and PNG keeps the pixel


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


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
