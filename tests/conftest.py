import logging
import os
from contextlib import nullcontext

# Nothing in the tests may reach a hub. Cores are shared with worker processes, and with the tests beside these.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

import debias_diffusion

# On a busy machine any example may take long; no test asserts a time.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_report_header():
    """Which package the tests are of."""
    return f"debias_diffusion: {debias_diffusion.__file__}"


def pytest_collection_modifyitems(items):
    """The longest of the slow tests start first, so that in the end no process waits for another."""

    def minutes(item) -> float:
        marker = item.get_closest_marker("slow")
        return marker.kwargs.get("minutes", 0) if marker else 0

    items.sort(key=minutes, reverse=True)


@pytest.fixture(scope="module", autouse=True)
def restored_logging():
    """Files of tests run in any order in one process, and the command line makes libraries quieter."""
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="module")
def one_thread():
    """For tensors of the smallest models a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def full_precision():
    """No autocast: where a CPU has no units for bfloat16, training the toy models in it takes seven times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        yield


@pytest.fixture(scope="module")
def coarse_results():
    """Few bootstrap samples and blank figures: they take most of the time of evaluations of a few images."""
    from matplotlib.figure import Figure
    from PIL import Image

    from debias_diffusion.eval.common import intervals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "SAMPLES", 100)
        patch.setattr(Figure, "savefig", lambda _, file, **__: Image.new("RGB", (9, 9)).save(file, "PNG"))
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """(base model, data file, image folder), for the smallest of training runs. Not to be written to."""
    from helpers.tiny_clip import save_tiny_clip
    from helpers.tiny_data import make_tiny_data

    folder = tmp_path_factory.mktemp("world")
    return save_tiny_clip(folder / "base"), *make_tiny_data(folder)
