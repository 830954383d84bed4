"""What a demo that is served draws, watched from within."""

import pytest

from debias_diffusion.app.demo import device
from debias_diffusion.app.demo.drawing import Step, draw


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that the demo takes from now on."""
    taken = []

    def counted(*arguments):
        for news in draw(*arguments):
            taken.extend([news] if isinstance(news, Step) else [])
            yield news

    monkeypatch.setattr(device, "draw", counted)
    return taken
