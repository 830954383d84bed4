"""Commands as processes that can be killed, each forked from one that has imported everything: a second and not ten."""

import multiprocessing
import os
import signal
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "debias_diffusion.training.two_tower",
        "debias_diffusion.app.generate",
        "debias_diffusion.app.shards",
        "jsonargparse",
    ]
)
PATIENCE = 300  # seconds, for what takes a few


def _run(arguments: list[str], output: str, begun) -> None:
    """The body of a process: one command, at the head of a group of its own."""
    os.setsid()
    screen = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    import torch

    from debias_diffusion.app.cli import main

    torch.set_num_threads(1)
    begun.set()
    try:
        main(arguments)
    finally:  # what is left is multiprocessing's own end, which an interrupt would spoil
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def start(arguments: list[str], screen: Path):
    begun = FORKS.Event()
    process = FORKS.Process(target=_run, args=(arguments, str(screen), begun))
    process.start()
    assert begun.wait(PATIENCE), "a process did not start"
    return process


def finish(arguments: list[str], screen: Path) -> None:
    process = start(arguments, screen)
    process.join(PATIENCE)
    shown = screen.read_text()
    assert process.exitcode == 0 and "Traceback" not in shown, f"{process.exitcode}\n{shown[-3000:]}"
