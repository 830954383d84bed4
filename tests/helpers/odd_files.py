"""What lies where a file should: a folder, a FIFO, a socket, a device."""

import os
import stat
import threading
from pathlib import Path

ODD = ("folder", "FIFO", "socket", "device")


def put_odd(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(path)
        threading.Thread(target=_end_reads, args=(path,), daemon=True).start()


def _end_reads(fifo: Path) -> None:
    """Lets whoever waits at the FIFO find it empty, so that a test of code that waits fails and does not wait, too."""
    while True:
        try:
            os.close(os.open(fifo, os.O_WRONLY))  # waits for a reader
        except OSError:
            return
