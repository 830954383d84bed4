import gc
import logging
import os
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# Nothing in the tests may reach a hub. One thread from the first operation on: a second one only waits where models are
# so small, and a process that has used two cannot be forked.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch
from filelock import FileLock

import debias_diffusion

torch.set_num_threads(1)

# On a busy machine any example may take long; no test asserts a time.
# In CI examples are the same each time.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("default")

# The files of tests that take longest, slow ones and then fast ones, start first: else a process waits in the end.
LONGEST = """
test_toy_build test_reproduce test_shipped_weights test_true_size test_commands test_processes test_towers
test_docs_examples test_command_line test_generate test_pipeline_family test_training test_demo test_align test_families
""".split()


def pytest_report_header():
    return f"debias_diffusion: {debias_diffusion.__file__}"


# What few machines have, by the argument of the mark `needs`. `make manual` lists the tests that are skipped without.
NEEDS = {
    "gpu": ("an NVIDIA GPU", torch.cuda.is_available),
    "accelerator": ("a GPU or another accelerator", torch.accelerator.is_available),
    "comfyui": ("a checkout of ComfyUI, named by COMFYUI: its own code was NOT run", lambda: os.environ.get("COMFYUI")),
    "wandb": ("pip install wandb", lambda: find_spec("wandb")),
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        needed, is_there = NEEDS[mark.args[0]]
        if not is_there():
            pytest.skip(f"needs {needed}")


def pytest_collection_modifyitems(items):
    for item in items:
        if {"comfyui", "true_size"} & set(item.fixturenames):
            item.add_marker(pytest.mark.needs("comfyui"))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def warned_anew():
    """A process gives each kind of warning once; here each test does."""
    if prompt := sys.modules.get("debias_diffusion.text.prompt"):
        prompt._WARNED.clear()


# ---- folders that are made once


def shared(name: str, build):
    """A session fixture: a folder that one process makes for all by `build(folder, request)`, and that nobody changes.

    Its files are read-only. A test that needs to write there makes a copy (`copy_of`).
    """

    @pytest.fixture(scope="session", name=name)
    def fixture(tmp_path_factory, request):
        root = tmp_path_factory.getbasetemp()
        root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
        folder = root / name
        with FileLock(root / f"{name}.lock"):
            if not folder.exists():  # a build that fails leaves no folder
                unfinished = root / f"{name}-unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                build(unfinished, request)
                for path in unfinished.rglob("*"):
                    path.chmod(0o555 if path.is_dir() else 0o444)
                unfinished.rename(folder)
        return folder

    return fixture


@pytest.fixture
def copy_of(tmp_path):
    """Copies a shared folder to `tmp_path`, to be changed."""

    def copy(folder: Path, to: Path | None = None) -> Path:
        to = shutil.copytree(folder, to or tmp_path / folder.name)
        for path in (to, *to.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        return to

    return copy


def build_world(folder: Path, _) -> None:
    from helpers.tiny_clip import save_tiny_clip
    from helpers.tiny_data import make_tiny_data

    save_tiny_clip(folder / "base")
    make_tiny_data(folder)


def made_by(module: str, function: str, **settings):
    """What makes a folder by a helper's function, imported only then."""
    return lambda folder, _: getattr(import_module(f"helpers.{module}"), function)(folder, **settings)


def build_finished_run(folder: Path, request) -> None:
    from helpers.training_runs import config

    from debias_diffusion.training.two_tower import train

    train(config(request.getfixturevalue("world"), folder))


world_folder = shared("world_folder", build_world)
sdxl_folder = shared("sdxl_folder", made_by("tiny_sdxl", "build_tiny_sdxl"))
long_clip_folder = shared("long_clip_folder", made_by("tiny_clip", "save_tiny_clip", context_length=248))
finished_run = shared("finished_run", build_finished_run)  # the output of `train(config(world, ...))`


@pytest.fixture(scope="session")
def base(sdxl_folder):
    return str(sdxl_folder)


@pytest.fixture(scope="session")
def world(world_folder):
    """(base model, data file, image folder), for the smallest of training runs."""
    return str(world_folder / "base"), str(world_folder / "data.json"), str(world_folder / "images")


# ---- what else many tests need


@pytest.fixture(scope="module")
def parts():
    """Of a tiny SDXL, which no test changes."""
    from helpers import tiny_sdxl

    return tiny_sdxl.sdxl_parts()


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect():
    """A full garbage collection looks at a million objects of imported libraries, which takes a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def restored_logging():
    """Files of tests run in any order in one process, and the command line makes libraries quieter."""
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def known(tmp_path):
    """open_clip has a model of these sizes, with both activations."""
    from helpers.released import DEEP
    from helpers.tiny_clip import registered

    with registered(tmp_path / "configs", deep=DEEP, **{"deep-quickgelu": DEEP | {"quick_gelu": True}}):
        yield


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A folder with the file of docs/extending.md."""
    from helpers.pages import BLOCKS

    from debias_diffusion.methods import METHODS

    block = next(block for block in BLOCKS["extending.md"] if block.language == "python")
    folder = tmp_path_factory.mktemp("extending")
    (folder / "predicting.py").write_text(block.code)
    yield folder
    METHODS.pop("predicting", None)


@pytest.fixture
def with_research():
    """What research adds to the package's registries is there in this test alone."""
    from debias_diffusion.clip.families import FAMILIES
    from debias_diffusion.data.toy_scenes import KINDS
    from debias_diffusion.encoders.clip_model import MODEL_TYPES
    from debias_diffusion.eval.registry import EVALUATIONS
    from debias_diffusion.eval.retrieval_sets import BENCHMARKS
    from debias_diffusion.methods import METHODS
    from research import extensions

    before = [
        (registry, dict(registry)) for registry in (EVALUATIONS, BENCHMARKS, KINDS, METHODS, FAMILIES, MODEL_TYPES)
    ]
    extensions.register()
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="module")
def coarse_results():
    """Few bootstrap samples and blank figures: they take most of the time of evaluations of a few images."""
    from debias_diffusion.eval import intervals

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "SAMPLES", 100)
        draw_nothing(patch)
        yield


@pytest.fixture
def blank_figures(monkeypatch):
    """Blank figures, where other tests of the file look at theirs."""
    draw_nothing(monkeypatch)


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    patch.setattr(Figure, "savefig", lambda _, file, **__: Image.new("RGB", (9, 9)).save(file, "PNG"))
