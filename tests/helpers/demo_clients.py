"""Clients of a running demo, well-behaved and not, over plain HTTP: for tests, and to try a server by hand."""

import json
import os
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from debias_diffusion.app.demo import launch
from debias_diffusion.app.demo.toy_scenes import random_scene

LONG = random_scene(3).caption  # 93 tokens in 9 sentences; the page's first example
LARGE = "a " * 10_000  # 10,000 tokens, an answer of half a megabyte


def worker_port() -> int:
    """The first port to try: pytest-xdist's workers serve demos side by side."""
    return 17860 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@contextmanager
def opened_page(**settings):
    """(page, address) of a demo within this process."""
    page, url = launch.open_app(launch.AppConfig(port=worker_port(), device="cpu", **settings))
    try:
        yield page, url
    finally:
        page.close(verbose=False)


def drawing(prompt: str = LONG, encoders: list[str] | None = None, steps: int | None = 2, **settings) -> list:
    """The values that /generate takes, in its order."""
    names = ("negative_prompt", "seed", "steps", "guidance_scale", "height", "width", "images", "scheduler")
    defaults = dict.fromkeys(names) | {"negative_prompt": "", "seed": 0, "steps": steps, "images": 1}
    values = defaults | {"weighting": False, "long_prompts": "auto"} | settings
    return [prompt, encoders, *values.values()]


def wait_until(happened, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@dataclass
class Visitor:
    """A client at one address.

    Attributes:
        url: of the demo.
        address: the client's address as forwarded by a proxy on the server's machine, which the server trusts.
        http: the HTTP client.
    """

    url: str
    address: str | None = None
    http: httpx.Client = field(init=False)

    def __post_init__(self):
        headers = {"x-forwarded-for": self.address} if self.address else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def number(self, name: str) -> int:
        """The number of an endpoint's function."""
        functions = self.http.get("config").json()["dependencies"]
        return next(function["id"] for function in functions if function["api_name"] == name)

    def call(self, name: str, data: list) -> httpx.Response:
        """Sends a request; `fetch` gets its answer."""
        return self.http.post(f"gradio_api/call/{name}", json={"data": data})

    def fetch(self, name: str, event: str) -> list:
        """The answer to a request. Raises RuntimeError with the message of an error."""
        kind = None
        with self.http.stream("GET", f"gradio_api/call/{name}/{event}") as stream:
            for line in stream.iter_lines():
                key, _, value = line.partition(": ")
                kind = value if key == "event" else kind
                if key == "data" and kind == "complete":
                    return json.loads(value)
                if key == "data" and kind == "error":
                    raise RuntimeError(value)
        raise RuntimeError("The stream ended without an answer.")

    def ask(self, name: str, data: list) -> list:
        """Sends a request and waits for its answer."""
        response = self.call(name, data)
        response.raise_for_status()
        return self.fetch(name, response.json()["event_id"])

    def join(self, function: int, data: list, session: str) -> httpx.Response:
        """Sends a request as the page does."""
        body = {"data": data, "fn_index": function, "session_hash": session}
        return self.http.post("gradio_api/queue/join", json=body)

    # Misbehaviour

    def abandon(self, name: str, data: list) -> int:
        """Sends a request and never fetches the answer; returns the status."""
        return self.call(name, data).status_code

    def vanish(self, name: str, data: list) -> None:
        """Sends a request, reads the beginning of the answer and disconnects."""
        response = self.call(name, data)
        if response.is_success:
            with self.http.stream("GET", f"gradio_api/call/{name}/{response.json()['event_id']}") as stream:
                next(stream.iter_lines(), None)

    def cancel(self, function: int, data: list, session: str) -> None:
        """Sends a request and cancels it."""
        response = self.join(function, data, session)
        if response.is_success:
            body = {"session_hash": session, "fn_index": function, "event_id": response.json()["event_id"]}
            self.http.post("gradio_api/cancel", json=body)

    def never_read(self, function: int, data: list, session: str, times: int = 1) -> socket.socket:
        """Sends requests, and waits for their answers on a connection without reading; the caller closes it."""
        for _ in range(times):
            self.join(function, data, session)
        return self.send(f"GET /gradio_api/queue/data?session_hash={session} HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def send(self, text: str) -> socket.socket:
        """Sends bytes on a new connection with a small buffer, and reads nothing."""
        address = httpx.URL(self.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((address.host, address.port))
        connection.sendall(text.encode())
        return connection
