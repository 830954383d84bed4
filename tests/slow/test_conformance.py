import subprocess
import sys

from conformance.check import FILES, HERE


def test_the_checker_needs_no_library_and_the_second_reader_passes():
    command = ["-IS", HERE / "check.py", "--", sys.executable, HERE.parent / "tests/helpers/second_reader.py"]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(FILES), done.stdout
