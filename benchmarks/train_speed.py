"""Training from JPEGs to updates: `train` with its defaults, pairs a second and the share of time waiting for data.

    python benchmarks/train_speed.py [--pairs 4096] [--seconds 30] [--limit 120] [--peer FOLDER] [--train="..."]

Images of --width x --height are low-frequency colours with grain, captions as long as ShareGPT4V's, weights random.
--train gives `train` further options. It is stopped --seconds after its first measured steps, or --limit seconds after
its start. With a checkout of github.com/beichenzbc/Long-CLIP as --peer, its model, losses and loop follow for as long:
its reading of images and 32 workers, fp16 with a scaler, the longer captions tokenized between the steps.

Three minutes on one GPU at most. Prints a table and writes it to benchmarks/results/.
"""

import json
import multiprocessing
import os
import random
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or a question for GPUs would keep forked processes from using them

import numpy as np
import open_clip
import torch
from harness import publish, read_options
from PIL import Image
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from train_step import SENTENCE_TOKENS, SENTENCES, load_peer

from debias_diffusion.app.cli import COMMANDS
from debias_diffusion.app.command_line import parse
from debias_diffusion.data.workers import usable_cores
from debias_diffusion.devices import autocast, pick_device
from debias_diffusion.encoders.loading import load_backbone
from debias_diffusion.eval.report import Table
from debias_diffusion.files import read_file
from debias_diffusion.training.two_tower import train

FORK = multiprocessing.get_context("fork")  # so each loop begins with an empty GPU
WORDS = "a red old lamp stands near the wooden door of small house and people walk across wet road under sky".split()
WARM_UP = 3  # steps of the peer that are not measured
PEER_WORKERS = 32


class Pairs:
    """Makes one pair after the other in a folder, whichever process makes it."""

    def __init__(self, folder: Path, size: tuple[int, int]):
        self.folder, self.size = folder, size

    def __call__(self, number: int) -> dict:
        """The entry of ShareGPT4V's layout for an image that is written."""
        noise, rng = np.random.default_rng(number), random.Random(number)
        colours = Image.fromarray(noise.integers(0, 256, (15, 20, 3), dtype=np.uint8))
        smooth = np.asarray(colours.resize(self.size, Image.Resampling.BICUBIC), dtype=np.int16)
        pixels = smooth + noise.integers(-12, 13, smooth.shape, dtype=np.int16)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(self.folder / f"{number}.jpg", quality=90)
        sentences = [rng.choices(WORDS, k=rng.randint(*SENTENCE_TOKENS) - 1) for _ in range(rng.randint(*SENTENCES))]
        caption = " ".join(f"{' '.join(words).capitalize()}." for words in sentences)
        return {"image": f"{number}.jpg", "conversations": [{"value": "Describe."}, {"value": caption}]}


def make_pairs(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """The data file of pairs whose images lie beside it."""
    with FORK.Pool(usable_cores()) as pool:
        entries = pool.map(Pairs(folder, size), range(count), chunksize=16)
    (folder / "data.json").write_text(json.dumps(entries))
    return folder / "data.json"


class PeerPairs(Dataset):
    """Image, caption and short caption as Long-CLIP's share4v_train_dataset reads them."""

    def __init__(self, data: Path, pixels: int):
        self.entries, self.folder = json.loads(data.read_text()), data.parent
        mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        resize = transforms.Resize(pixels, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(pixels)
        self.preprocess = transforms.Compose([*resize, transforms.ToTensor(), transforms.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str, str]:
        entry = self.entries[index]
        caption = entry["conversations"][1]["value"].replace("\n", " ")
        return self.preprocess(Image.open(self.folder / entry["image"])), caption, caption.split(". ")[0]


def run_peer(results, options, data: Path) -> None:
    """Long-CLIP's loop on one device; puts how many steps were measured, their seconds, and those that they waited."""
    torch.manual_seed(0)
    device, backbone = pick_device(), load_backbone(options.model)
    backbone.stretch()
    peer, tokenize = load_peer(Path(options.peer), backbone.to(device)), open_clip.SimpleTokenizer(context_length=248)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6, weight_decay=1e-2)
    is_half = device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type)  # which skips the steps whose gradient of the SVD is not finite
    pairs = PeerPairs(data, peer.visual.input_resolution)
    sampler = RandomSampler(pairs, replacement=True, num_samples=options.batch * 10**5)
    batches = iter(DataLoader(pairs, options.batch, sampler=sampler, num_workers=PEER_WORKERS, pin_memory=is_half))
    steps: list[tuple[float, float]] = []
    ends = time.monotonic() + options.limit
    while time.monotonic() < ends:
        started = time.perf_counter()
        images, long, short = next(batches)
        waited = time.perf_counter() - started
        rows = tokenize([*long, *short]).to(device)
        optimizer.zero_grad()
        with autocast("fp16" if is_half else "fp32", device):
            loss = sum(peer(images.to(device), *rows.chunk(2), 0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append((time.perf_counter() - started, waited))
        if len(steps) == WARM_UP:
            ends = min(ends, time.monotonic() + options.seconds)
    results.put(summed(steps[WARM_UP:]))


def summed(steps: Sequence[tuple[float, float]]) -> tuple[int, float, float]:
    """How many steps, their seconds, and those that they waited for data."""
    return len(steps), sum(seconds for seconds, _ in steps), sum(waited for _, waited in steps)


def run_train(results, words: list[str]) -> None:
    """`train` with these options; puts whether anything was compiled."""
    command = COMMANDS["train"]
    counters.clear()  # of what compiled before the fork
    train(parse("debias-diffusion train", command.options, command.example, words))
    results.put(counters["stats"]["unique_graphs"] > 0)


def watched(work: Callable, *arguments, stop_when: Callable[[], bool] = lambda: False) -> object:
    """What `work` puts as its result, from a process of its own, which gets a SIGTERM at `stop_when`."""
    results = FORK.SimpleQueue()
    process = FORK.Process(target=work, args=(results, *arguments))
    process.start()
    while process.is_alive() and not stop_when():
        process.join(0.1)
    if process.is_alive():
        process.terminate()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work.__name__} ended with exit code {process.exitcode}")
    return results.get()


def measure_training(options, data: Path, output: Path) -> tuple[tuple[int, float, float], bool, float]:
    """(the steps of `train` as `summed`, whether it was compiled, seconds until its first line about its pace)"""
    words = ["--data", str(data), "--images", str(data.parent), "--model", options.model, "--output", str(output)]
    words += ["--pretrained", "none"] * (not Path(options.model).exists())
    words += ["--epochs", "1000", "--log-every", "1", *shlex.split(options.train)]
    started, first = time.monotonic(), []

    def stop_when() -> bool:
        now = time.monotonic()
        if not first and any("left" in line["seconds"] for line in logged(output)):
            first.append(now - started)
        return now - started > min([options.limit, *(seconds + options.seconds for seconds in first)])

    is_compiled = watched(run_train, words, stop_when=stop_when)
    lines = [line["seconds"] for line in logged(output)]
    start = next((number for number, line in enumerate(lines) if "left" in line), len(lines))
    steps = [(line["step"], line["waiting"]) for line in lines[start + 1 :] if "left" not in line]
    if not steps:
        raise SystemExit(f"No step was measured in {options.limit:.0f} s. Give a larger --limit.")
    return summed(steps), is_compiled, first[0]


def logged(output: Path) -> Iterator[dict]:
    """The lines of a run's log that measure steps."""
    log = output / "log.jsonl"
    lines = read_file(log).splitlines(keepends=True) if log.exists() else []
    return (line for line in map(json.loads, (line for line in lines if line.endswith(b"\n"))) if "seconds" in line)


def main() -> None:
    options = read_options(
        __doc__,
        **dict(model="ViT-B-16-quickgelu", pairs=4096, width=640, height=480, batch=256, seconds=30.0, limit=120.0),
        **dict(peer=None, train=""),
    )
    with tempfile.TemporaryDirectory() as there:
        data = make_pairs(Path(there), options.pairs, (options.width, options.height))
        options.train = f"--batch {options.batch} {options.train}"
        steps, is_compiled, first = measure_training(options, data, Path(there) / "run")
        measured = {"train, compiled" if is_compiled else "train": steps}
        if options.peer:
            measured["Long-CLIP's loop"] = watched(run_peer, options, data)
    numbers = {}
    for name, (count, total, waited) in measured.items():
        speed, share = round(count * options.batch / total, 1), round(waited / total, 3)
        numbers[name] = {"steps": count, "samples_per_second": speed, "share_waiting": share}
    rows = [[name, *row.values()] for name, row in numbers.items()]
    device = pick_device()
    settings = {name: getattr(options, name) for name in ("model", "pairs", "width", "height", "train")}
    result = settings | {"cores": usable_cores(), "seconds_to_first_measured_steps": round(first, 1)}
    table = Table(["loop", "steps measured", "pairs a second", "share of the time waiting for data"], rows)
    title, note = f"train_speed-{Path(options.model).name}-{device.type}", f"First measured after {first:.0f} s."
    publish(title, result | {"loops": numbers}, table, note, device=device)


if __name__ == "__main__":
    main()
