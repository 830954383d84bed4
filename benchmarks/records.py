"""What 1.2 million captions cost before the first step: seconds and memory, against `json.load` and a list.

    python benchmarks/records.py [--pairs 1246000] [--folder FOLDER]

A JSON file as large as ShareGPT4V's, of sentences from captions of scikit-image's photographs, is written to FOLDER (a
temporary one, removed afterwards: 1.3 GB). Then, each in processes of its own, and the file in the system's cache:

list      json.load, and a list of Record objects with folded white space
ours      `read_sharegpt4v`
plan      `train` from its start to the plan: with 1,000 pairs, then with all

Each in seconds on the clock and of the processors, since other work on the machine makes the former longer. Memory is
what belongs to a process alone (USS), in MB: of the reader once it has read, of each of two forked workers
once it has looked at every seventh record, and of `train` at its plan; and the reader's peak. Prints a table and writes
it to benchmarks/results/. With --read, one reader alone on the file FOLDER.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import psutil
from harness import CPU, publish, read_options
from machine import PeakMemory
from PIL import Image
from tqdm import tqdm

from debias_diffusion.data.json_files import read_sharegpt4v
from debias_diffusion.data.records import Record
from debias_diffusion.eval.report import Table
from debias_diffusion.sentences import split_sentences

CAPTIONS = Path(__file__).parent.parent / "tests" / "photographs" / "captions.json"
QUESTION = "<image>\nWhat do you see happening in this image?"
READERS = ("list", "ours")
SMALL = 1000
WORKERS = 2


def make_data(folder: Path, name: str, pairs: int) -> Path:
    """A data file of so many pairs, and the few images that `train` looks for before its plan."""
    rng = random.Random(0)
    sentences = [part for record in read_sharegpt4v(CAPTIONS).records for part in split_sentences(record.caption)]
    with open(folder / name, "w") as file:
        for index in tqdm(range(pairs), desc=f"writing {name}"):
            caption = "\n".join([" ".join(rng.sample(sentences, rng.randint(5, 13))), f"It is number {index}."])
            turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": caption}]
            line = json.dumps({"id": str(index), "image": f"sam/sa_{index}.jpg", "conversations": turns})
            file.write(f"{', ' if index else '['}{line}")
        file.write("]")
    (folder / "sam").mkdir(exist_ok=True)
    for index in {0, 1, *range(0, pairs, pairs // 200)}:
        Image.new("RGB", (64, 64)).save(folder / "sam" / f"sa_{index}.jpg")
    return folder / name


def read_list(path: Path) -> list[Record]:
    """What one would write first."""
    with open(path, encoding="utf-8") as file:
        entries = json.load(file)
    names = [entry["image"] for entry in entries]
    captions = [" ".join(entry["conversations"][1]["value"].split()) for entry in entries]
    return [Record(name, name, caption) for name, caption in zip(names, captions, strict=True)]


def megabytes(process: psutil.Process | None = None) -> float:
    """What belongs to a process alone."""
    return round((process or psutil.Process()).memory_full_info().uss / 1e6, 1)


def process_seconds(process: psutil.Process) -> float:
    """Of all its threads."""
    times = process.cpu_times()
    return times.user + times.system


def look(records: Sequence[Record], results) -> None:
    sum(len(records[index].caption) for index in range(0, len(records), 7))
    results.put(megabytes())


def read(kind: str, path: Path) -> dict:
    """What one reader costs. For a process of its own."""
    process, peak, before = psutil.Process(), PeakMemory(CPU), megabytes()
    peak.start()
    started, used = time.perf_counter(), process_seconds(process)
    records = read_list(path) if kind == "list" else read_sharegpt4v(path).records
    result = {
        "seconds": round(time.perf_counter() - started, 2),
        "processor_seconds": round(process_seconds(process) - used, 2),
        "reader_mb": round(megabytes() - before, 1),
        "peak_mb": round((peak.read() or 0) / 1e6, 1),
    }
    context = get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=look, args=(records, results)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    result["workers_mb"] = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return result


def plan(data: Path, output: Path) -> dict:
    """Seconds from the start of `train` to the last line of its plan, and its memory then."""
    options = dict(data=data, images=data.parent, output=output, model="toy/clip", validation=0, batch=64, workers=0)
    command = [f"--{name}={value}" for name, value in options.items()]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "debias_diffusion.app.cli", "train", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    if not any(line.startswith("  time") for line in process.stdout):
        raise SystemExit("train has printed no plan")
    result = {
        "seconds": round(time.perf_counter() - started, 2),
        "processor_seconds": round(process_seconds(psutil.Process(process.pid)), 2),
        "mb": megabytes(psutil.Process(process.pid)),
    }
    process.kill()
    process.wait()
    return result


def main() -> None:
    arguments = read_options(__doc__, pairs=1_246_000, folder=None, read=("", *READERS))
    if arguments.read:
        print(json.dumps(read(arguments.read, Path(arguments.folder))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as there:
        folder = Path(there)
        data, small = make_data(folder, "data.json", arguments.pairs), make_data(folder, "small.json", SMALL)
        load = os.getloadavg()[0]
        readers = {}
        for kind in READERS:
            command = [sys.executable, __file__, "--read", kind, "--folder", data]
            readers[kind] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        plans = {"small": plan(small, folder / "small"), "all": plan(data, folder / "run")}
        size = data.stat().st_size
    compared = ("seconds", "processor_seconds", "reader_mb", "peak_mb")
    result = {
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "pairs": arguments.pairs,
        "megabytes": round(size / 1e6),
        "readers": readers,
        "list_over_ours": {name: round(readers["list"][name] / readers["ours"][name], 1) for name in compared},
        "plan": plans,
        "plan_mb_beside_small": round(plans["all"]["mb"] - plans["small"]["mb"], 1),
    }
    of_readers = Table(["reader", *readers["list"]], [[kind, *map(str, row.values())] for kind, row in readers.items()])
    of_plans = Table(["plan", *plans["all"]], [[kind, *map(str, row.values())] for kind, row in plans.items()])
    publish("records-cpu", result, of_readers, of_plans)


if __name__ == "__main__":
    main()
