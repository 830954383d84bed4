"""A demo under clients that never read, cancel, vanish and abandon: it keeps its memory and answers the others.

    FUZZ_SECONDS=3600 pytest -s tests/fuzz/test_demo_soak.py

runs for an hour, and prints the server's memory before and after.
"""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress

import httpx
import psutil
from helpers.demo_clients import LARGE, LONG, Visitor, drawing

SECONDS = float(os.environ.get("FUZZ_SECONDS", "20"))
MOST_GROWTH = 400 * 2**20  # bytes: 64 MiB of answers that wait, what connections hold, and room for the allocator


@contextmanager
def served(folder):
    """(address, process) of a demo in a process of its own."""
    command = [sys.executable, "-m", "debias_diffusion.app.cli", "app"]
    command += ["--encoders", "toy/clip", "--device", "cpu", "--port", "17890"]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(folder), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "console.txt").open("w") as console:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=console, text=True, env=environment)
        try:
            line = next(line for line in server.stdout if "demo is at" in line)
            yield re.search(r"http://[^ ]+", line)[0], psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait(timeout=60)


def behaviours(url: str) -> dict[str, Callable[[Visitor, int], object]]:
    """What clients do, by name, each called with a visitor and a number that is another every time."""
    number = {name: Visitor(url).number(name) for name in ("tokens", "generate")}
    stuck: list = []

    def never_read(visitor: Visitor, count: int) -> None:
        stuck.append(visitor.never_read(number["tokens"], [LARGE, False], f"stuck {count}", times=3))
        if len(stuck) > 20:
            stuck.pop(0).close()

    return {
        "abandons a count": lambda visitor, count: visitor.abandon("tokens", [LARGE, False]),
        "abandons a drawing": lambda visitor, count: visitor.abandon("generate", drawing(steps=50)),
        "vanishes": lambda visitor, count: visitor.vanish("generate", drawing(steps=50)),
        "cancels": lambda visitor, count: visitor.cancel(number["generate"], drawing(steps=50), f"cancels {count}"),
        "cancels a count": lambda visitor, count: visitor.cancel(number["tokens"], [LARGE, False], f"counts {count}"),
        "never reads": never_read,
        "takes no turn": lambda visitor, count: visitor.http.post(
            "gradio_api/run/tokens", json={"data": [LARGE, False]}
        ),
        "sends nonsense": lambda visitor, count: visitor.http.post("gradio_api/queue/join", json={"data": count}),
        "behaves": lambda visitor, count: visitor.ask("tokens", [LONG, False]),
    }


def soak(url: str, seconds: float) -> Counter:
    """Lets one client of every kind do what it does, one time after the other; how often each did."""
    done, end, counter = Counter(), time.monotonic() + seconds, itertools.count()

    def work(name: str, act: Callable, address: str) -> None:
        while time.monotonic() < end:
            # What a client that misbehaves is told, or that it is cut off, is its own affair.
            with suppress(httpx.HTTPError, OSError, RuntimeError):
                act(Visitor(url, address), next(counter))
                done[name] += 1

    threads = [
        threading.Thread(target=work, args=(name, act, f"203.0.113.{place}"))
        for place, (name, act) in enumerate(behaviours(url).items())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def test_memory_and_answers_stand_clients_that_misbehave(tmp_path):
    with served(tmp_path) as (url, process):
        first = Visitor(url, "198.51.100.1").ask("generate", drawing())
        done = soak(url, 10)  # what is loaded and kept once
        before = process.memory_info().rss
        done += soak(url, SECONDS)
        after = process.memory_info().rss
        print(f"\nIn {SECONDS:.0f} s: {dict(done)}; memory {before / 2**20:,.0f} MB, then {after / 2**20:,.0f} MB")
        assert len(done) == 9 and min(done.values()) > 0, done
        assert Visitor(url, "198.51.100.2").ask("generate", drawing()) == first
        assert Visitor(url, "198.51.100.3").ask("tokens", [LONG, False])[0]["count"] == 93
        assert after - before < MOST_GROWTH
    assert "Traceback" not in (tmp_path / "console.txt").read_text()
