"""Commands in processes of their own: killed, asked to stop, shared by several, and how each of these ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
from helpers import tiny_llava
from helpers.processes import as_options, run_in_processes, start, start_ranks
from helpers.stops import stopped_at
from helpers.training_runs import (
    checkpoint,
    command_of_two_processes,
    config,
    is_the_same_run,
    log,
    losses,
    run_in_a_process,
    run_in_two_processes,
    wait_for_step,
)
from PIL import Image
from test_jobs import check_that_it_continues, work

from debias_diffusion.app.align.command import align
from debias_diffusion.app.cli import main
from debias_diffusion.app.options import AlignConfig, SynthesizeConfig
from debias_diffusion.app.synthesize.command import synthesize
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.jobs import Job
from debias_diffusion.training.loop import train

# ---- killed: begun again, a command leaves what an undisturbed one leaves


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_killed_at_any_write(tmp_path, sent, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
    for number in count(1):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
            try:
                with stopped_at(number, lambda name: os.kill(os.getpid(), sent)):
                    work(tmp_path / str(number))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if "last" in Job.read(tmp_path / str(number)):
            break
        check_that_it_continues(tmp_path / str(number))
    assert number > 30


def test_a_killed_training_continues_bit_identically(world, tmp_path):
    # Far from its end, so that no kill comes too late on a busy machine.
    settings = dict(max_steps=60, checkpoint_every=5, eval_every=1000)
    train(config(world, tmp_path / "alone", **settings))
    # Before the first checkpoint, and between two: a kill right after a checkpoint would prove less.
    for step in (1, 8):
        process = run_in_a_process(config(world, tmp_path / "run", **settings))
        wait_for_step(tmp_path / "run", step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "run" / "last").exists()
    train(config(world, tmp_path / "run", workers=2, **settings))
    is_the_same_run(tmp_path / "run", tmp_path / "alone")


# The command line, killed when it is about to put the file after the first COUNT of this ENDING in its place.
KILLED = """
import os, signal, sys
from debias_diffusion.app.cli import main

ending, left, replace = sys.argv[1], int(sys.argv[2]), os.replace


def replace_or_die(source, target):
    global left
    left -= str(target).endswith(ending)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


os.replace = replace_or_die
main(sys.argv[3:])
"""


def program(arguments: list[str], ending: str, count: int) -> list[str]:
    return [sys.executable, "-c", KILLED, ending, str(count), *map(str, arguments)]


def content(folder: Path) -> dict[str, bytes]:
    records = (".lock", "job.json", "items.jsonl")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in records}


def stamps(files) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in files}


def generation(folder: Path) -> dict:
    (folder / "prompts.txt").write_text("a star\na red ring\na circle\na heart\na cross\na square")
    options = {"base": "toy/sdxl", "encoder": "toy/debias-clip", "steps": 2, "device": "cpu", "batch": 2}
    return options | {"prompts": folder / "prompts.txt", "images_per_prompt": 3}


def sharding(folder: Path) -> dict:
    (folder / "images").mkdir()
    for index in range(12):
        Image.effect_noise((70, 60), 9 * index).save(folder / "images" / f"{index}.png")
    lines = [{"image": f"{index}.png", "caption": f"Scene {index}. A red cat."} for index in range(12)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"data": folder / "data.jsonl", "images": folder / "images", "size": 32, "per_shard": 2, "workers": 0}


@pytest.mark.parametrize(
    ("name", "prepare", "pattern", "killed_after", "all_files"),
    [("generate", generation, "[0-9]*.png", 5, 18), ("shards", sharding, "*.tar", 3, 6)],
)
def test_a_killed_command_keeps_what_it_has_made(tmp_path, name, prepare, pattern, killed_after, all_files):
    arguments, folder = [name, *as_options(prepare(tmp_path))], tmp_path / "killed"
    main([*arguments, f"--output={tmp_path / 'whole'}"])
    command = [*arguments, f"--output={folder}"]
    done = subprocess.run(program(command, pattern[-4:], killed_after), timeout=200)
    before = stamps(folder.glob(pattern))
    assert done.returncode == -signal.SIGKILL and len(before) == killed_after
    if name == "shards":
        with pytest.raises(UserError, match="not finished"):
            open_data(str(folder))
    main(command)
    assert content(folder) == content(tmp_path / "whole") and len(list(folder.glob(pattern))) == all_files
    assert stamps(before) == before


def test_synthesize_in_two_processes(tmp_path):
    model, images = str(tmp_path / "model"), tmp_path / "images"
    assert tiny_llava.build(Path(model)) < 0.5
    images.mkdir()
    pictures, _ = tiny_llava.scenes()
    for index in range(16):
        pictures[index % 4].resize(((48, 48), (100, 40), (48, 48))[index % 3]).save(images / f"{index:02}.png")
    options = {"model": model, "images": str(images), "per_part": 2, "batch": 2, "workers": 0}
    synthesize(SynthesizeConfig(**options, device="cpu", output=str(tmp_path / "whole")))
    shared = tmp_path / "shared"
    arguments = ["synthesize", *as_options(options), f"--output={shared}"]

    def run_two(ending: str, count: int) -> list[tuple[int, str]]:
        processes = start_ranks(program(arguments, ending, count), 2)
        return [(process.communicate(timeout=200)[0], process.returncode) for process in processes]

    # Each is killed at its second part, or fails because the other is gone.
    assert all(code for _, code in run_two(".jsonl", 1))
    written = stamps((shared / "parts").glob("part-*.jsonl"))
    assert 0 < len(written) < 8 and not (shared / "captions.jsonl").exists()
    (first, code), (second, other) = run_two(".jsonl", 100)
    assert code == other == 0, first[-3000:]
    assert f"{len(written)} of 8 parts are finished" in first and "each of 2 processes" in first
    assert "Kept" in first and "Kept" not in second
    assert stamps(written) == written
    for name in ("captions.jsonl", "removed.jsonl", "report.html"):
        assert (shared / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (shared / "captions.jsonl").read_text()


# ---- asked to stop

SETTINGS = dict(checkpoint_every=1000, max_steps=100, eval_every=1000)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(("workers", "asked_with"), [(2, signal.SIGTERM), (0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_to_all_processes_of_a_run_writes_a_checkpoint(world, tmp_path, workers, asked_with):
    train(config(world, tmp_path / "alone", **SETTINGS))
    output = tmp_path / "run"
    launch = command_of_two_processes(config(world, output, workers=workers, **SETTINGS))
    process = start([sys.executable, *launch[launch.index("--standalone") + 1 :]])
    wait_for_step(output, 2, process)
    assert len(workers_of(process)) == workers
    for _ in range(3 if asked_with == signal.SIGTERM else 1):  # schedulers repeat it
        os.killpg(process.pid, asked_with)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "The same command continues from there" in printed, printed[-3000:]
    assert len(list(output.glob("checkpoint-*"))) == 1
    train(config(world, output, **SETTINGS))
    is_the_same_run(output, tmp_path / "alone")


def test_a_signal_to_a_launcher_and_all_its_processes_writes_one_checkpoint(world, tmp_path):
    process = start(command_of_two_processes(config(world, tmp_path, workers=1, **SETTINGS)))
    wait_for_step(tmp_path, 2, process)
    os.killpg(process.pid, signal.SIGTERM)  # which the launcher passes on to processes that have had it
    output = process.communicate(timeout=120)[0]
    assert output.count("The same command continues from there") == 1, output[-3000:]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


READS = """
import time
from torch.utils.data import DataLoader
from debias_diffusion.data.workers import load_batches


class Large:  # samples that fill a pipe, and one that is never read to its end
    def __getitem__(self, index):
        if index == 3:
            time.sleep(100_000)
        return bytes(1_000_000)

    def __len__(self):
        return 100


with load_batches(DataLoader(Large(), batch_size=None, num_workers=2)) as batches:
    next(batches)
    print("one", flush=True)
    time.sleep(100_000)
"""


@pytest.mark.parametrize("killed_with", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_killed_main_process_whatever_they_do(killed_with):
    process = start([sys.executable, "-c", READS])
    try:
        assert process.stdout.readline() == "one\n"
        workers = workers_of(process)
        assert len(workers) == 2
        if killed_with == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, killed_with)  # which this main process does not handle
        process.wait()
        assert psutil.wait_procs(workers, timeout=60)[1] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


FORKSERVER = """
import multiprocessing
from torch.utils.data import DataLoader
from debias_diffusion.data.workers import load_batches

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")  # the default from Python 3.14 on
    with load_batches(DataLoader([0, 1], batch_size=None, num_workers=2)) as batches:
        print(list(batches))
"""


def test_workers_live_however_python_starts_processes(tmp_path):
    (tmp_path / "forkserver.py").write_text(FORKSERVER)
    command = [sys.executable, str(tmp_path / "forkserver.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "[0, 1]" in done.stdout, done.stderr[-3000:]


# ---- shared by several processes

# AdamW divides by the size of a gradient, so rounding of one near 0 could become a whole step. Not with this `eps`.
EPS = 1e-2


def test_two_processes_train_a_method_of_a_users_file(world, extended, tmp_path):
    settings = dict(recipe="predicting", method={"alpha": 0.75}, max_steps=5, eps=EPS)
    settings["import_file"] = str(extended / "predicting.py")
    train(config(world, tmp_path / "alone", **settings))
    out = run_in_two_processes(config(world, tmp_path / "run", workers=1, trackers=["tensorboard"], **settings))
    assert "long captions predicted with weight 0.75" in out and out.count("Done: 5 steps") == 1
    for one, other in zip(log(tmp_path / "alone"), log(tmp_path / "run"), strict=True):
        assert one["step"] == other["step"]
        assert other.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-5)
    for part in ("model", "modules"):
        one, other = (checkpoint(tmp_path / run, 5)[part] for run in ("alone", "run"))
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


def test_two_processes_align_as_one(world, sdxl_folder, long_clip_folder, tmp_path):
    _, data, images = world
    settings = dict(base=str(sdxl_folder), data=data, images=images, encoder=str(long_clip_folder), encoder_2="stretch")
    settings |= dict(validation=4, batch=4, epochs=9, max_steps=4, learning_rate=1e-3, warmup=1, workers=0, eps=EPS)
    settings |= dict(checkpoint_every=2, eval_every=4, log_every=1, latent_cache=str(tmp_path / "latents"))
    align(AlignConfig(output=str(tmp_path / "alone"), **settings))
    options = as_options(settings | {"output": tmp_path / "run"})
    output = run_in_processes(2, "-m", "debias_diffusion.app.cli", "align", *options)
    assert "2 x cpu" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


EXITS = """
import atexit, sys
from dataclasses import dataclass

import torch

atexit.register(lambda: print(f"group at exit: {torch.distributed.is_initialized()}"))  # after all registered later

from debias_diffusion.app import cli
from debias_diffusion.errors import UserError
from debias_diffusion.eval.session import Processes


@dataclass
class Nothing:
    '''No options.'''


def work(_):
    processes = Processes("cpu")
    for number in range(20):
        assert processes.from_main(lambda: number) == number
        processes.gathered([number])
    print("done", flush=True)
    case = sys.argv[1]
    if case == "alone" and not processes.index:
        processes.gathered([0])
    if case != "finished" and processes.index:
        raise [UserError("A fault of one process."), KeyboardInterrupt(), RuntimeError("A bug.")][processes.index - 1]


sys.modules["debias_diffusion.work"] = sys.modules["__main__"]
cli.COMMANDS["work"] = cli.Command("work", "work:Nothing", "work:work", "")
cli.main(["work"])
"""


@pytest.mark.parametrize(
    ("case", "codes", "messages"),
    [
        ("together", [0, 2, 130, 1], ["", "error: A fault of one process.", "Interrupted.", "A bug."]),
        ("alone", [1, 2], ["error: Another process of this run has failed", "error: A fault of one process."]),
        ("finished", [0] * 4, ["group at exit: False"] * 4),  # else some launches end with -6
    ],
)
def test_every_process_leaves_with_its_own_exit_code(case, codes, messages):
    processes = start_ranks([sys.executable, "-c", EXITS, case], len(codes))
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == codes, outputs
    for output, message in zip(outputs, messages, strict=True):
        assert "done\n" in output and message in output
    assert case != "alone" or "Traceback" not in outputs[0]
