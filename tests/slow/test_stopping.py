"""Runs that are asked to stop, in whichever of their processes, and those that are killed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.processes import start, start_ranks
from helpers.tiny_data import make_tiny_data
from helpers.training_runs import command_of_two_processes, config, is_the_same_run, wait_for_step

from debias_diffusion.training.loop import train

SETTINGS = dict(checkpoint_every=1000, max_steps=100, eval_every=1000)


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """An uninterrupted run."""
    output = tmp_path_factory.mktemp("alone")
    train(config(world, output, **SETTINGS))
    return output


def command_of_one_process(settings) -> list[str]:
    """`train` from the command line."""
    launch = command_of_two_processes(settings)
    return [sys.executable, *launch[launch.index("--standalone") + 1 :]]


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def has_stopped_and_can_continue(world, output, alone):
    assert len(list(output.glob("checkpoint-*"))) == 1
    train(config(world, output, **SETTINGS))
    is_the_same_run(output, alone)


@pytest.mark.parametrize(("workers", "asked_with"), [(2, signal.SIGTERM), (0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_to_all_processes_of_a_run_writes_a_checkpoint(world, alone, tmp_path, workers, asked_with):
    process = start(command_of_one_process(config(world, tmp_path, workers=workers, **SETTINGS)))
    wait_for_step(tmp_path, 2, process)
    assert len(workers_of(process)) == workers
    for _ in range(3 if asked_with == signal.SIGTERM else 1):  # schedulers repeat it
        os.killpg(process.pid, asked_with)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output[-3000:]
    assert "The same command continues from there" in output
    has_stopped_and_can_continue(world, tmp_path, alone)


def test_a_signal_to_both_processes_of_a_run_writes_one_checkpoint(world, tmp_path):
    processes = start_ranks(command_of_one_process(config(world, tmp_path, workers=1, **SETTINGS)), 2)
    wait_for_step(tmp_path, 2, processes[0])
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0].count("The same command continues from there") == 1
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_signal_to_a_launcher_and_all_its_processes_writes_one_checkpoint(world, tmp_path):
    settings = config(world, tmp_path, workers=1, **SETTINGS)
    process = start(command_of_two_processes(settings))
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


def test_workers_end_with_a_run_that_fails(world, tmp_path):
    data, images = make_tiny_data(tmp_path / "world", count=200)
    for index in range(6, 200):
        Path(images, f"{index}.png").write_text("not an image")
    settings = config((world[0], data, images), tmp_path / "run", workers=2, max_bad=0.1)
    done = subprocess.run(command_of_one_process(settings), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "cannot be read" in done.stderr, done.stderr[-3000:]


FORKSERVER = """
import multiprocessing, time
from torch.utils.data import DataLoader
from debias_diffusion.data.workers import load_batches

class Slow:
    def __getitem__(self, index):
        time.sleep(2)
        return index

    def __len__(self):
        return 2

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")  # the default from Python 3.14 on
    with load_batches(DataLoader(Slow(), batch_size=None, num_workers=2)) as batches:
        print(list(batches))
"""


def test_workers_live_however_python_starts_processes(tmp_path):
    (tmp_path / "forkserver.py").write_text(FORKSERVER)
    command = [sys.executable, str(tmp_path / "forkserver.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "[0, 1]" in done.stdout, done.stderr[-3000:]
