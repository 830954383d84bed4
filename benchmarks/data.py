"""Samples a second and core, decoded and tokenized: a plain loop, our data set on a folder, and on shards.

    python benchmarks/data.py [--width 640] [--height 480] [--pairs 256] [--repeats 5]

plain     Pillow, torchvision's transforms to a normalised tensor, open_clip's own tokenizer for the caption and for a
          random subset of its sentences
folder    CaptionDataset on the same files
shards    CaptionDataset on shards of size 256, which `debias-diffusion shards` writes of the same files

Once in this process, by the second of its processor time, and once in batches through a DataLoader of two worker
processes, by the second on the clock, halved. Every process has one thread. Pairs are made of scikit-image's
photographs and of sentences from captions of them, at ShareGPT4V's lengths; everything is read from the system's cache
of the disk. The candidates take turns, so that what else the machine does falls on all. Prints a table and writes it to
benchmarks/results/.
"""

import os

# Before anything starts threads. A caption is tokenized in one thread in worker processes anyway.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import open_clip
import skimage
import torch
from harness import by_turns, publish, read_options
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms
from tqdm import tqdm

from debias_diffusion.app.shards import ShardsConfig, write_shards
from debias_diffusion.data.dataset import CaptionDataset, Collate
from debias_diffusion.data.images import ImageFolder
from debias_diffusion.data.json_files import read_sharegpt4v
from debias_diffusion.data.records import Record
from debias_diffusion.data.sources import open_data
from debias_diffusion.eval.report import Table
from debias_diffusion.methods.dual_caption import RECIPES
from debias_diffusion.models.loading import load_backbone
from debias_diffusion.sentences import split_sentences

ROOT = Path(__file__).parent.parent
CAPTIONS = ROOT / "tests" / "photographs" / "captions.json"
SENTENCES = 9  # with 173 tokens, ShareGPT4V's averages
WORKERS, BATCH = 2, 16


def make_pairs(folder: Path, count: int, size: tuple[int, int]) -> tuple[str, str]:
    """(data file, image folder): crops of photographs, with some grain, so that a JPEG is as large as a camera's."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    described = read_sharegpt4v(CAPTIONS).records
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


def per_second(items: Iterable, clock: Callable[[], float]) -> float:
    """Items a second, from the second one on, so that the start of worker processes does not count."""
    items, count = iter(items), 0
    next(items)
    started = clock()
    for _ in items:
        count += 1
    return count / (clock() - started)


def measure(candidates: dict[str, tuple[Dataset, Callable]], pairs: int, repeats: int) -> dict[str, list[float]]:
    """{name: samples a second and core in each repeat}, of data sets with what makes batches of their samples."""

    def speeds(repeat: int) -> dict[str, Callable[[], float]]:
        keys = [(repeat, index, 0) for index in range(pairs)]
        batches = [random.Random(number).sample(keys, BATCH) for number in range(4 * pairs // BATCH)]

        def alone(dataset: Dataset, _) -> float:
            return per_second((dataset[key] for key in keys), time.process_time)

        def with_workers(dataset: Dataset, collate: Callable) -> float:
            loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
            return BATCH * per_second(loader, time.perf_counter) / WORKERS

        kinds = {"one process": alone, f"{WORKERS} workers": with_workers}
        return {
            f"{name}, {kind}": partial(run, *parts) for kind, run in kinds.items() for name, parts in candidates.items()
        }

    return by_turns(speeds, repeats, lambda run: run())


def main() -> None:
    arguments = read_options(__doc__, width=640, height=480, pairs=256, repeats=5)
    torch.set_num_threads(1)
    backbone = load_backbone("ViT-B-16")
    backbone.stretch()
    tokenizer, recipe, size = backbone.tokenizer, RECIPES["debias-clip"], (arguments.width, arguments.height)
    with tempfile.TemporaryDirectory() as there:
        folder, output = Path(there), str(Path(there) / "shards")
        data, images = make_pairs(folder, arguments.pairs, size)
        write_shards(ShardsConfig(data, output, images))
        records = open_data(data, images)[0].records
        candidates = {"plain": (Plain(records, folder, backbone.context_length), default_collate)}
        for name, (captions, source) in {"folder": open_data(data, images), "shards": open_data(output)}.items():
            dataset = CaptionDataset(captions.records, source, backbone.read_pixels, tokenizer, recipe, seed=0)
            candidates[name] = dataset, Collate(tokenizer, recipe)
        speeds = measure(candidates, arguments.pairs, arguments.repeats)
        kilobytes = statistics.mean((folder / record.image).stat().st_size for record in records) / 1000

    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {name: value / medians[f"plain,{name.split(',')[1]}"] for name, value in medians.items()}
    tokens = statistics.mean(tokenizer.count(record.caption) for record in records)
    sentences = statistics.mean(len(split_sentences(record.caption)) for record in records)
    result = {
        "image": {"width": size[0], "height": size[1], "kilobytes": round(kilobytes)},
        "caption": {"tokens": round(tokens, 1), "sentences": round(sentences, 1)},
        "pairs": arguments.pairs,
        "repeats": arguments.repeats,
        "samples_per_second_and_core": {name: round(value, 1) for name, value in medians.items()},
        "all": {name: [round(value, 1) for value in values] for name, values in speeds.items()},
        "of_the_plain_loop": {name: round(value, 2) for name, value in ratios.items()},
    }
    header = [f"{kilobytes:.0f} kB an image", "samples a second and core", "times the plain loop"]
    rows = [[name, f"{speed:.1f}", ratios[name]] for name, speed in medians.items()]
    publish(f"data-cpu-{size[0]}x{size[1]}", result, Table(header, rows))


if __name__ == "__main__":
    main()
