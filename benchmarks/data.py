"""Samples a second and core, decoded and tokenized: a plain loop, our data set on a folder, and on two kinds of shards.

    python benchmarks/data.py [--width 640] [--height 480] [--pairs 256] [--repeats 5]

plain     Pillow, torchvision's transforms to a normalised tensor, open_clip's own tokenizer for the caption and for a
          random subset of its sentences
folder    CaptionDataset on the same files
shards    CaptionDataset on shards of size 256, which `debias-diffusion shards` writes of the same files
lossless  CaptionDataset on shards of --size 224 --lossless

In one process of one thread, by the second of its processor time. Pairs are made of scikit-image's photographs and of
sentences from captions of them, at ShareGPT4V's lengths; everything is read from the system's cache of the disk. The
candidates take turns. Prints a table and writes it to benchmarks/results/.
"""

import json
import random
import re
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import skimage
import torch
from harness import by_turns, publish, read_options
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from tqdm import tqdm

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_data_file
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import open_data
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.eval.report import Table
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.training.batches import CaptionDataset

ROOT = Path(__file__).parent.parent
CAPTIONS = ROOT / "tests" / "photographs" / "captions.json"
WANTED = 1800  # samples a second, which a ViT-B/16 takes on one H200
SENTENCES = 9  # with 173 tokens, ShareGPT4V's averages


def make_pairs(folder: Path, count: int, size: tuple[int, int]) -> tuple[str, str]:
    """(data file, image folder): crops of photographs, with some grain, so that a JPEG is as large as a camera's."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    described = read_data_file(CAPTIONS).records
    photographs = [ImageFolder(skimage.data_dir).open(record.image) for record in described]
    sentences = [sentence for record in described for sentence in split_sentences(record.caption)]
    lines = []
    for index in tqdm(range(count), desc="making pairs"):
        photograph = rng.choice(photographs)
        share = rng.uniform(0.6, 1)
        width, height = (int(share * side) for side in photograph.size)
        left, top = rng.randint(0, photograph.width - width), rng.randint(0, photograph.height - height)
        image = photograph.crop((left, top, left + width, top + height)).resize(size, Image.Resampling.BICUBIC)
        grainy = np.asarray(image) + noise.normal(0, 4, (size[1], size[0], 1))
        Image.fromarray(grainy.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.jpg", quality=90)
        lines.append({"image": f"{index}.jpg", "caption": " ".join(rng.sample(sentences, SENTENCES))})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "pairs.jsonl"), str(folder)


class Plain(Dataset):
    """What one would write first."""

    def __init__(self, records: list[Record], folder: Path, context_length: int):
        self.records, self.folder = records, folder
        resize, crop = transforms.Resize(224, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(224)
        normalize = transforms.Normalize(open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        self.transform = transforms.Compose([resize, crop, transforms.ToTensor(), normalize])
        self.tokenizer = open_clip.SimpleTokenizer(context_length=context_length)

    def __getitem__(self, key: tuple[int, int, int]):
        record = self.records[key[1]]
        image = self.transform(Image.open(self.folder / record.image).convert("RGB"))
        details = re.split(r"(?<=\.) ", record.caption)[1:]
        short = " ".join(random.sample(details, random.randint(1, len(details))))
        return image, self.tokenizer([record.caption, short])


def samples_per_second(dataset: Dataset, keys: list[tuple[int, int, int]]) -> float:
    """Of processor time."""
    started = time.process_time()
    for key in keys:
        dataset[key]
    return len(keys) / (time.process_time() - started)


def main() -> None:
    arguments = read_options(__doc__, width=640, height=480, pairs=256, repeats=5)
    torch.set_num_threads(1)
    backbone = load_backbone("ViT-B-16")
    backbone.stretch()
    tokenizer, recipe, size = backbone.tokenizer, RECIPES["debias-clip"], (arguments.width, arguments.height)
    with tempfile.TemporaryDirectory() as there:
        folder, output, lossless = Path(there), str(Path(there) / "shards"), str(Path(there) / "lossless")
        data, images = make_pairs(folder, arguments.pairs, size)
        write_shards(ShardsConfig(data, output, images))
        write_shards(ShardsConfig(data, lossless, images, size=224, lossless=True))
        records = open_data(data, images)[0].records
        candidates: dict[str, Dataset] = {"plain": Plain(records, folder, backbone.context_length)}
        sources = {"folder": open_data(data, images), "shards": open_data(output), "lossless": open_data(lossless)}
        for name, (captions, source) in sources.items():
            candidates[name] = CaptionDataset(
                captions.records, source, backbone.read_pixels, 0, None, tokenizer, recipe
            )
        runs = {name: partial(samples_per_second, dataset) for name, dataset in candidates.items()}
        keys = [(0, index, 0) for index in range(arguments.pairs)]
        speeds = by_turns(runs, arguments.repeats, lambda run: run(keys))
        kilobytes = statistics.mean((folder / record.image).stat().st_size for record in records) / 1000

    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {name: value / medians["plain"] for name, value in medians.items()}
    tokens = statistics.mean(tokenizer.count(record.caption) for record in records)
    sentences = statistics.mean(len(split_sentences(record.caption)) for record in records)
    result = {
        "image": {"width": size[0], "height": size[1], "kilobytes": round(kilobytes)},
        "caption": {"tokens": round(tokens, 1), "sentences": round(sentences, 1)},
        "pairs": arguments.pairs,
        "repeats": arguments.repeats,
        "samples_per_second_and_core": {name: round(value, 1) for name, value in medians.items()},
        f"cores_for_{WANTED}": {name: round(WANTED / value, 1) for name, value in medians.items()},
        "all": {name: [round(value, 1) for value in values] for name, values in speeds.items()},
        "of_the_plain_loop": {name: round(value, 2) for name, value in ratios.items()},
    }
    header = [
        f"{kilobytes:.0f} kB an image",
        "samples a second and core",
        "times the plain loop",
        f"cores for {WANTED:,}",
    ]
    rows = [[name, f"{speed:.1f}", ratios[name], f"{WANTED / speed:.1f}"] for name, speed in medians.items()]
    publish(f"data-cpu-{size[0]}x{size[1]}", result, Table(header, rows))


if __name__ == "__main__":
    main()
