"""A command in two processes, as launchers start them, but forked from one that has imported everything."""

import multiprocessing
import os
import socket

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["debias_diffusion.app.synthesize", "jsonargparse"])


def one_of_two(arguments, screen, environment):
    """The body of a process."""
    os.environ |= environment
    file = os.open(screen, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    from debias_diffusion.app.cli import main

    torch.set_num_threads(1)
    main(arguments)


def start_two(arguments, screen):
    """The two processes; what they print goes to `screen`-0 and `screen`-1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    processes = [
        FORKS.Process(
            target=one_of_two,
            args=(arguments, f"{screen}-{rank}", group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes
