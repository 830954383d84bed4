"""What reading 1.2 million captions costs: seconds and memory, against `json.load` and a list.

    python benchmarks/records.py [--pairs 1246000] [--folder FOLDER]

A JSON file as large as ShareGPT4V's, of sentences from captions of scikit-image's photographs, is written to FOLDER (a
temporary one, removed afterwards: 1.3 GB). Then, each in a process of its own, and the file in the system's cache:

list      json.load, and a list of Record objects with folded white space
ours      `read_data_file`

Each in seconds on the clock and of the processors, since other work on the machine makes the former longer. Memory is
what belongs to a process alone (USS) once it has read, and its peak, in MB. Prints a table and writes it to
benchmarks/results/. With --read, one reader alone on the file FOLDER.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import CPU, PeakMemory, publish, read_options
from tqdm import tqdm

from debias_diffusion.data.json_files import read_data_file
from debias_diffusion.data.records import Record
from debias_diffusion.eval.report import Table
from debias_diffusion.text.sentences import split_sentences

CAPTIONS = Path(__file__).parent.parent / "tests" / "photographs" / "captions.json"
QUESTION = "<image>\nWhat do you see happening in this image?"
READERS = ("list", "ours")


def make_data(file: Path, pairs: int) -> None:
    """A data file of so many pairs, without their images."""
    rng = random.Random(0)
    sentences = [part for record in read_data_file(CAPTIONS).records for part in split_sentences(record.caption)]
    with open(file, "w") as written:
        for index in tqdm(range(pairs), desc=f"writing {file.name}"):
            caption = "\n".join([" ".join(rng.sample(sentences, rng.randint(5, 13))), f"It is number {index}."])
            turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": caption}]
            line = json.dumps({"id": str(index), "image": f"sam/sa_{index}.jpg", "conversations": turns})
            written.write(f"{', ' if index else '['}{line}")
        written.write("]")


def read_list(path: Path) -> list[Record]:
    """What one would write first."""
    with open(path, encoding="utf-8") as file:
        entries = json.load(file)
    names = [entry["image"] for entry in entries]
    captions = [" ".join(entry["conversations"][1]["value"].split()) for entry in entries]
    return [Record(name, name, caption) for name, caption in zip(names, captions, strict=True)]


def megabytes() -> float:
    """What belongs to this process alone."""
    return psutil.Process().memory_full_info().uss / 1e6


def read(kind: str, path: Path) -> dict[str, float]:
    """What one reader costs. For a process of its own."""
    peak, before = PeakMemory(CPU), megabytes()
    peak.start()
    started, used = time.perf_counter(), time.process_time()
    records = read_list(path) if kind == "list" else read_data_file(path).records
    result = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - used,
        "reader_mb": megabytes() - before,
        "peak_mb": (peak.read() or 0) / 1e6,
    }
    assert len(records)  # they are held until here
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    arguments = read_options(__doc__, pairs=1_246_000, folder=None, read=("", *READERS))
    if arguments.read:
        print(json.dumps(read(arguments.read, Path(arguments.folder))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as there:
        data, readers = Path(there) / "data.json", {}
        make_data(data, arguments.pairs)
        for kind in READERS:
            command = [sys.executable, __file__, "--read", kind, "--folder", data]
            readers[kind] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        size = data.stat().st_size
    ours = readers["ours"]
    result = {
        "cores": os.cpu_count(),
        "pairs": arguments.pairs,
        "megabytes": round(size / 1e6),
        "readers": readers,
        "list_over_ours": {name: value / ours[name] for name, value in readers["list"].items() if ours[name]},
    }
    publish("records-cpu", result, Table(["reader", *ours], [[kind, *row.values()] for kind, row in readers.items()]))


if __name__ == "__main__":
    main()
