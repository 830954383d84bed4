"""A demo within this process, for tests of its page and its endpoints."""

import time
from contextlib import contextmanager

from debias_diffusion.app.demo import launch
from debias_diffusion.app.demo.request import demo_scene

LONG = demo_scene(3)[1].text  # 93 tokens in 9 sentences; the page's first example


@contextmanager
def opened_page(**settings):
    """(page, address) of a demo at the next free port."""
    page, url = launch.open_app(launch.AppConfig(port=None, device="cpu", **settings))
    try:
        yield page, url
    finally:
        page.close(verbose=False)


def wait_until(happened, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
