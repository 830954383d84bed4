"""The demo under 1, 8 and 50 clients: latency, throughput, and the server's memory.

    python benchmarks/app.py [--requests 100] [--steps 2] [--clients 1 8 50]

Each client sends its next /generate (one toy encoder) when it has the answer to its last, as a new visitor. The server
runs in a process of its own, as `debias-diffusion app` starts it. The baseline is the same drawing in one process
without a server, one request after the other: what is left of its throughput is what the server costs. Prints a table
and writes it to benchmarks/results/.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psutil
from gradio_client import Client
from harness import publish, read_options
from tqdm import tqdm

from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.rendering import render_request
from debias_diffusion.app.demo.request import Request
from debias_diffusion.app.demo.toy import random_scene
from debias_diffusion.devices import pick_device
from debias_diffusion.eval.report import Table
from debias_diffusion.pipelines.png import read_settings

ENCODER = "toy/debias-clip"
PROMPT = random_scene(3).caption


@contextmanager
def served():
    """(address, process) of a demo on the embedded models."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "debias_diffusion.app.cli", "app", "--encoders", ENCODER, "--port", "17870"]
        environment = os.environ | {"GRADIO_TEMP_DIR": folder, "PYTHONUNBUFFERED": "1"}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            lines = iter(server.stdout.readline, "")
            address = next(match[0] for line in lines if (match := re.search(r"http://\S+", line)))
            yield address, psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait()


def without_server(requests: int, steps: int) -> float:
    """Requests a second."""
    models = DemoModels("toy/sdxl", [ENCODER], pick_device(None))
    request = replace(Request.default(models), prompt=PROMPT, steps=steps)
    for _ in render_request(models, request):  # the first one is slower
        pass
    started = time.perf_counter()
    for seed in tqdm(range(requests), desc="without a server"):
        for _ in render_request(models, replace(request, seed=seed)):
            pass
    return requests / (time.perf_counter() - started)


def with_clients(url: str, server: psutil.Process, clients: int, requests: int, steps: int) -> dict:
    """One row of the table."""
    connected = [Client(url, verbose=False) for _ in range(clients)]
    share = [range(first, requests, clients) for first in range(clients)]

    def work(client: Client, seeds: range) -> list[float]:
        taken = []
        for seed in seeds:
            client.reset_session()  # as another visitor, so that what is kept of each would show in the memory
            started = time.perf_counter()
            (image,) = client.predict(PROMPT, encoders=[ENCODER], seed=str(seed), steps=steps, api_name="/generate")
            assert read_settings(image["image"])["seed"] == seed
            taken.append(time.perf_counter() - started)
        return taken

    before, started = server.memory_info().rss, time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        latencies = sorted(taken for of_client in pool.map(work, connected, share) for taken in of_client)
    wall = time.perf_counter() - started
    return {
        "clients": clients,
        "requests": requests,
        "per_second": round(requests / wall, 2),
        "latency_median_s": round(statistics.median(latencies), 2),
        "latency_p95_s": round(latencies[int(0.95 * (len(latencies) - 1))], 2),
        "server_mb_before": round(before / 1e6),
        "server_mb_after": round(server.memory_info().rss / 1e6),
    }


def main() -> None:
    arguments = read_options(__doc__, requests=100, steps=2, clients=[1, 8, 50])
    baseline = without_server(arguments.requests, arguments.steps)
    rows = []
    with served() as (url, server):
        with_clients(url, server, 1, 5, arguments.steps)  # the first ones are slower
        for clients in arguments.clients:
            row = with_clients(url, server, clients, max(arguments.requests, clients), arguments.steps)
            rows.append(row | {"of_baseline": round(row["per_second"] / baseline, 2)})
    result = {"steps": arguments.steps, "without_server_per_second": round(baseline, 2), "rows": rows}
    device, table = pick_device(None), Table(list(rows[0]), [list(row.values()) for row in rows])
    publish(f"app-toy-{device.type}", result, f"Without a server {baseline:.2f} a second.", table, device=device)


if __name__ == "__main__":
    main()
