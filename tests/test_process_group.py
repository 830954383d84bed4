"""Each of several processes leaves with its own exit code."""

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from dataclasses import dataclass

from debias_diffusion.app import cli
from debias_diffusion.errors import UserError
from debias_diffusion.eval.common.processes import Processes


@dataclass
class Nothing:
    '''No options.'''


def work(_):
    processes = Processes("cpu")
    for number in range(20):
        assert processes.from_main(lambda: number) == number
        processes.together(lambda: None)
    print("done", flush=True)
    if sys.argv[1] == "alone":
        if processes.index:
            raise UserError("A fault of one process.")
        processes.from_main(lambda: 0)
        processes.together(lambda: None)
    if processes.index:
        raise [UserError("A fault of one process."), KeyboardInterrupt(), RuntimeError("A bug.")][processes.index - 1]


sys.modules["debias_diffusion.work"] = sys.modules["__main__"]
cli.COMMANDS["work"] = ("work", "work:Nothing:work")
cli.main(["work"])
"""


def run_processes(count: int, case: str) -> tuple[list[int], list[tuple[str, str]]]:
    """The exit codes of `SCRIPT`'s processes, and what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    environment = os.environ | place | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, case],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    told = [process.communicate(timeout=180) for process in processes]
    return [process.returncode for process in processes], told


@pytest.mark.slow
def test_every_process_leaves_with_its_own_exit_code():
    codes, told = run_processes(4, "together")
    assert codes == [0, 2, 130, 1], told
    assert all(out == "done\n" for out, _ in told)
    for (_, error), expected in zip(
        told[1:], ("error: A fault of one process.", "Interrupted.", "A bug."), strict=True
    ):
        assert expected in error


def test_a_process_whose_partner_fails_says_so_without_a_traceback():
    codes, told = run_processes(2, "alone")
    assert codes == [1, 2], told
    assert "error: Another process of this run has failed" in told[0][1] and "Traceback" not in told[0][1]
    assert "error: A fault of one process." in told[1][1]


FINISHES = """
import atexit

import torch

atexit.register(lambda: print(f"group at exit: {torch.distributed.is_initialized()}"))  # after all registered later

from debias_diffusion.eval.common.processes import Processes

processes = Processes()
for number in range(20):
    assert processes.from_main(lambda: number) == number
    processes.together(lambda: None)
print(f"done by {processes.count}")
"""


def test_processes_that_have_finished_are_not_aborted(tmp_path):
    # Where the group is left to the interpreter, some launches end with -6; so its end is looked at too.
    (tmp_path / "script.py").write_text(FINISHES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", "--master_port=0", "--standalone"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done by 4") == 4
    assert done.stdout.count("group at exit: False") == 4
