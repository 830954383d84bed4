"""A demo in a process of its own, under many clients and under those that never fetch their answers."""

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
from helpers.demo_clients import LONG
from PIL import Image

SECONDS, CLIENTS, ABANDONED = 10, 50, 100
MOST_GROWTH = 100 * 2**20  # bytes, most of which the allocator takes once


def call(http: httpx.Client, prompt: str, seed: int) -> str:
    """Asks for one image in one step, until there is a place in the queue; the number of the request."""
    body = {"data": [prompt, ["toy/clip"], "", str(seed), 1, 3.0, 48, 48, 1, "Euler", "", "cut", 1.0]}
    while not (answer := http.post("gradio_api/call/generate", json=body)).is_success:
        time.sleep(0.2)
    return answer.json()["event_id"]


def settings_of_answer(http: httpx.Client, event: str) -> dict:
    """The settings in the PNG that a request gave."""
    events = http.get(f"gradio_api/call/generate/{event}").text
    assert "event: error" not in events, events
    [[image]] = json.loads(events.strip().rpartition("data: ")[2])
    with Image.open(io.BytesIO(http.get(f"gradio_api/file={image['image']['path']}").content)) as opened:
        return json.loads(opened.info["settings"])


def test_fifty_clients_get_their_own_images_and_memory_stands_abandoned_calls(tmp_path):
    command = [sys.executable, "-m", "debias_diffusion.app.cli", "app", "--encoders", "toy/clip"]
    environment = os.environ | {"GRADIO_TEMP_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    console = tmp_path / "console.txt"
    with console.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            while not (address := re.search(r"demo is at (http://[^ ]+)", console.read_text())):
                assert process.poll() is None, console.read_text()
                time.sleep(0.1)
            check_clients(address[1])
            check_memory(address[1], psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert "Traceback" not in console.read_text()


def check_clients(url: str) -> None:
    end = time.monotonic() + SECONDS

    def work(client: int) -> None:
        done = 0
        with httpx.Client(base_url=url, timeout=600) as http:
            while not done or time.monotonic() < end:
                prompt, seed = f"A red ring. Client {client}, image {done}.", 1000 * client + done
                settings = settings_of_answer(http, call(http, prompt, seed))
                assert (settings["prompt"], settings["seed"]) == (prompt, seed)
                done += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(CLIENTS)))


def check_memory(url: str, process: psutil.Process) -> None:
    memory = []
    with httpx.Client(base_url=url, timeout=600) as http:
        for count in (20, ABANDONED):  # the first for what is loaded and kept once
            for seed in range(count):
                call(http, LONG, seed)
            assert settings_of_answer(http, call(http, LONG, 7))["seed"] == 7  # and the last of them is through
            memory.append(process.memory_info().rss)
    assert memory[1] - memory[0] < MOST_GROWTH
