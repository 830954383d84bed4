"""Each of several processes leaves with its own exit code."""

import sys

from helpers.processes import run_in_processes, start_ranks

SCRIPT = """
import sys
from dataclasses import dataclass

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
    if sys.argv[1] == "alone":
        if processes.index:
            raise UserError("A fault of one process.")
        processes.from_main(lambda: 0)
        processes.gathered([0])
    if processes.index:
        raise [UserError("A fault of one process."), KeyboardInterrupt(), RuntimeError("A bug.")][processes.index - 1]


sys.modules["debias_diffusion.work"] = sys.modules["__main__"]
cli.COMMANDS["work"] = cli.Command("work", "work:Nothing", "work:work", "")
cli.main(["work"])
"""


def run_processes(count: int, case: str) -> tuple[list[int], list[str]]:
    """The exit codes of `SCRIPT`'s processes, and what each prints."""
    processes = start_ranks([sys.executable, "-c", SCRIPT, case], count)
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def test_every_process_leaves_with_its_own_exit_code():
    codes, outputs = run_processes(4, "together")
    assert codes == [0, 2, 130, 1], outputs
    for output, error in zip(outputs, ("", "error: A fault of one process.", "Interrupted.", "A bug."), strict=True):
        assert "done\n" in output and error in output


def test_a_process_whose_partner_fails_says_so_without_a_traceback():
    codes, outputs = run_processes(2, "alone")
    assert codes == [1, 2], outputs
    assert "error: Another process of this run has failed" in outputs[0] and "Traceback" not in outputs[0]
    assert "error: A fault of one process." in outputs[1]


FINISHES = """
import atexit

import torch

atexit.register(lambda: print(f"group at exit: {torch.distributed.is_initialized()}"))  # after all registered later

from debias_diffusion.eval.session import Processes

processes = Processes()
for number in range(20):
    assert processes.from_main(lambda: number) == number
    processes.gathered([number])
print(f"done by {processes.count}")
"""


def test_processes_that_have_finished_are_not_aborted(tmp_path):
    # Where the group is left to the interpreter, some launches end with -6; so its end is looked at too.
    (tmp_path / "script.py").write_text(FINISHES)
    output = run_in_processes(4, str(tmp_path / "script.py"))
    assert output.count("done by 4") == 4
    assert output.count("group at exit: False") == 4
