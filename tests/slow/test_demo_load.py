"""A demo in a process of its own, under many clients and under those that never fetch their answers.

    DEMO_SECONDS=180 DEMO_ABANDONED=500 pytest -s tests/slow/test_demo_load.py

takes as long as one likes, and prints what came of it.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from helpers.demo_clients import LONG
from PIL import Image

SECONDS = float(os.environ.get("DEMO_SECONDS", "10"))
ABANDONED = int(os.environ.get("DEMO_ABANDONED", "100"))
CLIENTS = 50
MOST_GROWTH = 100 * 2**20  # bytes, most of which the allocator takes once


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, process)"""
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "debias_diffusion.app.cli", "app", "--encoders", "toy/clip"]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(folder), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "console.txt").open("w") as console:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=console, text=True, env=environment)
        try:
            line = next((line for line in process.stdout if "demo is at" in line), None)
            assert line, (folder / "console.txt").read_text()
            yield re.search(r"http://[^ ]+", line)[0], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert "Traceback" not in (folder / "console.txt").read_text()


def call(http: httpx.Client, prompt: str, seed: int) -> str:
    """Asks for one image in one step; the number of the request, "" where the queue is full."""
    rest = ["", str(seed), 1, 3.0, 48, 48, 1, "Euler", False, "cut"]
    response = http.post("gradio_api/call/generate", json={"data": [prompt, ["toy/clip"], *rest]})
    return response.json()["event_id"] if response.is_success else ""


def fetch(http: httpx.Client, event: str) -> dict:
    """The settings in the PNG that a request gave."""
    kind, answer = None, None
    with http.stream("GET", f"gradio_api/call/generate/{event}") as stream:
        for line in stream.iter_lines():
            key, _, value = line.partition(": ")
            kind = value if key == "event" else kind
            assert kind != "error", line
            answer = json.loads(value) if key == "data" and kind in ("generating", "complete") else answer
    [[image]] = answer
    file = http.get(f"gradio_api/file={image['image']['path']}").content
    with Image.open(io.BytesIO(file)) as opened:
        return json.loads(opened.info["settings"])


def test_fifty_clients_get_their_own_images(server):
    url, end = server[0], time.monotonic() + SECONDS

    def work(client: int) -> int:
        done = 0
        with httpx.Client(base_url=url, timeout=600) as http:
            while not done or time.monotonic() < end:
                prompt, seed = f"A red ring. Client {client}, image {done}.", 1000 * client + done
                settings = fetch(http, call(http, prompt, seed))
                assert (settings["prompt"], settings["seed"]) == (prompt, seed)
                done += 1
        return done

    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(work, range(CLIENTS)))
    print(
        f"\n{CLIENTS} clients got {sum(done)} images of their own in {SECONDS:.0f} s, {min(done)} to {max(done)} each"
    )


def test_memory_stands_calls_that_nobody_fetches(server):
    url, process = server
    with httpx.Client(base_url=url, timeout=600) as http:

        def abandon(count: int) -> None:
            for seed in range(count):
                while not call(http, LONG, seed):
                    time.sleep(0.2)
            assert fetch(http, call_when_free(http))["seed"] == 7  # and the last of them is through

        abandon(20)  # what is loaded and kept once
        before = process.memory_info().rss
        abandon(ABANDONED)
        after = process.memory_info().rss
    print(f"\n{ABANDONED} abandoned calls: memory {before / 2**20:,.0f} MB, then {after / 2**20:,.0f} MB")
    assert after - before < MOST_GROWTH


def call_when_free(http: httpx.Client) -> str:
    while not (event := call(http, LONG, 7)):
        time.sleep(0.2)
    return event
