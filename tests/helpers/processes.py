"""Processes of one run."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from debias_diffusion.app.command_line import flag


def as_options(settings: Mapping) -> list[str]:
    """Settings as they are typed; None and empty lists are left out."""
    options = []
    for name, value in settings.items():
        if isinstance(value, bool):
            options.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        elif isinstance(value, list):
            options += [flag(name), *map(str, value)] if value else []
        elif value is not None:
            options.append(f"{flag(name)}={value}")
    return options


def start(command: list[str], **environment: str) -> subprocess.Popen:
    """The first process of a process group of its own, as a scheduler starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def start_ranks(command: list[str], count: int) -> list[subprocess.Popen]:
    """The processes of one run as Slurm starts them, without a launcher of torch's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    return [start(command, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(count)]


def run_in_processes(count, *command):
    """What `count` processes of a Python program print, as torch's launcher starts them."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={count}", "--master_port=0", "--standalone"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
