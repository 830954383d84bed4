"""Watches the steps that a running demo takes."""

import pytest

from debias_diffusion.app.demo import device
from debias_diffusion.app.demo.live_generation import Step, draw


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that the demo takes from now on."""
    taken = []

    def counted(*arguments):
        for item in draw(*arguments):
            taken.extend([item] if isinstance(item, Step) else [])
            yield item

    monkeypatch.setattr(device, "draw", counted)
    return taken
