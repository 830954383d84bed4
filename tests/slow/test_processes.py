"""Commands in processes of their own: asked to stop, shared by several, on a GPU, and how each of these ends.

Commands that are killed anywhere: tests/fuzz/test_commands.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.processes import as_options
from helpers.training_runs import config, is_the_same_run, losses, settings_of

from debias_diffusion.training.config import TrainConfig
from debias_diffusion.training.two_tower import train

PROGRAM = [sys.executable, "-m", "debias_diffusion.app.cli"]
# accelerate's own launcher starts several processes on GPUs only; underneath it is this one.
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *PROGRAM[1:]]


def start(command: list[str], **environment: str) -> subprocess.Popen:
    """The first process of a process group of its own, as a scheduler starts it."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def printed(process: subprocess.Popen) -> str:
    """What a process prints that ends well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def train_options(settings: TrainConfig) -> list[str]:
    return ["train", *as_options({name: value for name, value in asdict(settings).items() if name != "betas"})]


def wait_for_step(output: Path, step: int, process: subprocess.Popen) -> None:
    file, end = output / "log.jsonl", time.monotonic() + 120
    while not (file.exists() and f'{{"step": {step},' in file.read_text()):
        assert time.monotonic() < end and process.poll() is None, f"no step {step}: {process.communicate()[0][-2000:]}"
        time.sleep(0.01)


# ---- asked to stop


STOPPED = dict(checkpoint_every=1000, max_steps=100, eval_every=1000)


@pytest.fixture(scope="module")
def unbroken(world, tmp_path_factory):
    return train(config(world, tmp_path_factory.mktemp("unbroken"), **STOPPED)).parent


@pytest.mark.parametrize("asked_with", [signal.SIGTERM, signal.SIGINT, None])
def test_a_signal_to_all_processes_of_a_run_writes_a_checkpoint(world, unbroken, tmp_path, asked_with):
    """With None SIGTERM, to two processes."""
    command, output = PROGRAM if asked_with else LAUNCHER, tmp_path / "run"
    process = start([*command, *train_options(config(world, output, workers=2, **STOPPED))])
    wait_for_step(output, 2, process)
    assert len(workers_of(process)) == (2 if asked_with else 6)
    for _ in range(1 if asked_with == signal.SIGINT else 3):  # schedulers repeat SIGTERM, and a launcher passes it on
        os.killpg(process.pid, asked_with or signal.SIGTERM)
    said = process.communicate(timeout=120)[0]
    assert said.count("The same command continues from there") == 1, said[-3000:]
    assert len(list(output.glob("checkpoint-*"))) == 1
    if asked_with:
        assert process.returncode == 0
        train(config(world, output, **STOPPED))
        is_the_same_run(output, unbroken)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


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


def test_workers_end_with_a_killed_main_process_whatever_they_do():
    process = start([sys.executable, "-c", READS])
    assert process.stdout.readline() == "one\n"
    workers = workers_of(process)
    process.kill()
    process.wait()  # not `communicate`: a worker that is left holds the pipe
    waiting = psutil.wait_procs(workers, timeout=20)[1]
    # One that has ended may be a zombie until the first process of a container looks.
    left = [worker for worker in waiting if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    for worker in left:
        worker.kill()
    assert len(workers) == 2 and left == []


# ---- how several processes end

EXITS = """
import atexit, sys
from dataclasses import dataclass

import torch

atexit.register(lambda: print(f"group at exit: {torch.distributed.is_initialized()}"))  # after all registered later

from debias_diffusion.app import cli
from debias_diffusion.errors import UserError
from debias_diffusion.processes import Processes


@dataclass
class Nothing:
    '''No options.'''
    __module__ = "debias_diffusion.work"


def work(_):
    processes = Processes.connect("cpu")
    for number in range(20):
        assert processes.from_main(lambda: number) == number
        processes.gathered([number])
    print("done", flush=True)
    case = sys.argv[1]
    if case == "alone" and not processes.index:
        processes.gathered([0])
    if case != "finished" and processes.index:
        raise [UserError("A fault of one process."), KeyboardInterrupt(), RuntimeError("A bug.")][processes.index - 1]


sys.modules[Nothing.__module__] = sys.modules["__main__"]
cli.COMMANDS["work"] = cli.Command(Nothing, "work:work", "")
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(len(codes))}
    command = [sys.executable, "-c", EXITS, case]  # as Slurm starts them, without a launcher
    processes = [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(len(codes))]
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == codes, outputs
    for output, message in zip(outputs, messages, strict=True):
        assert "done\n" in output and message in output
    assert case != "alone" or "Traceback" not in outputs[0]


# ---- on an NVIDIA GPU, which this process need not have chosen

HOW_NEAR = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}  # losses, in relation to a CPU's in fp32


def start_training(settings: TrainConfig, on_cpu: str = "false") -> subprocess.Popen:
    return start([*PROGRAM, *train_options(settings)], ACCELERATE_USE_CPU=on_cpu)


@pytest.mark.needs("gpu")
def test_a_gpu_trains_as_a_cpu_in_every_precision_and_continues(world, tmp_path):
    printed(start_training(config(world, tmp_path / "cpu"), on_cpu="true"))
    expected = losses(tmp_path / "cpu")
    for precision, chunk in product(HOW_NEAR, (None, 3)):
        printed(
            start_training(config(world, output := tmp_path / f"{precision}-{chunk}", precision=precision, chunk=chunk))
        )
        steps = 1 if precision == "fp16" else 3  # its first steps find the scale, and are not applied
        np.testing.assert_allclose(losses(output)[:steps], expected[:steps], rtol=HOW_NEAR[precision])
    process = start_training(config(world, killed := tmp_path / "killed"))
    wait_for_step(killed, 5, process)
    process.kill()
    process.wait()
    printed(start_training(config(world, killed)))
    assert settings_of(killed)["precision"] == "bf16"  # auto, on this GPU
    # Kernels for gradients of attention may add in any order, so not the same bits.
    np.testing.assert_allclose(losses(killed), losses(tmp_path / "bf16-None"), rtol=2e-2)
