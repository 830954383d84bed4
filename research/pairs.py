"""Pairs of COCO's and ImageNet's training sets in one JSONL file, for `ablate` and `train`: D of AAT's Table 8."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import open_clip
from timm.data import ImageNetInfo

from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval_sets import read_retrieval_set
from debias_diffusion.files import write_text

from .options import PairsConfig

COCO, IMAGENET = "coco/train2017", "imagenet/train"  # below the root


def write_pairs(config: PairsConfig) -> Path:
    """Writes a line for each pair, whose image is named from the root. Returns the file.

    Raises:
        UserError: a data set is not there, or has fewer images.
    """
    pairs = [*coco_pairs(config.root, config.coco), *imagenet_pairs(Path(config.root), config.imagenet)]
    write_text(config.output, "".join(json.dumps({"image": image, "caption": text}) + "\n" for image, text in pairs))
    print(f"Wrote {len(pairs)} pairs to {config.output}. Give --data {config.output} --images {config.root}")
    return Path(config.output)


def coco_pairs(root: str, count: int) -> Iterator[tuple[str, str]]:
    """(image, caption) of the first images of COCO's train2017, each with its first caption."""
    if not count:
        return
    for record in read_retrieval_set("coco-train", os.path.join(root, "coco")).records[:count]:
        yield f"{COCO}/{record.image}", record.caption


def imagenet_pairs(root: Path, count: int) -> Iterator[tuple[str, str]]:
    """(image, caption) of classes evenly over ImageNet-1k's: the first image by name, "a photo of a tench."."""
    classes = [*zip(ImageNetInfo("imagenet-1k").label_names(), open_clip.IMAGENET_CLASSNAMES, strict=True)]
    for number in range(count):
        folder, title = classes[number * len(classes) // count]
        names = [file.name for file in (root / IMAGENET / folder).glob("*") if file.name[0] != "."]
        if not names:
            raise UserError(
                f"{str(root / IMAGENET / folder)!r} holds no image. Give a --root with {IMAGENET}, whose folders are "
                "named by WordNet id, or --imagenet 0."
            )
        yield f"{IMAGENET}/{folder}/{min(names)}", f"a photo of a {title}."
