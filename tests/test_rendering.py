"""The renderer: the same bits whatever is loaded, resumed, shared or freed in between."""

import dataclasses

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.drawing import load

from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering import (
    ImagePrompt,
    ImageTask,
    Renderer,
    Sampling,
    read_layout,
    render_batch,
)

CPU = torch.device("cpu")
TEXTS = [" ".join(["A cat, a dog and a bird sit on the wide red sofa."] * count) for count in (1, 9, 2, 9, 8)]
TASKS = [ImageTask(f"{seed:06}", ImagePrompt(text, seed)) for seed, text in enumerate(TEXTS)]
ALL = {task.name for task in TASKS}
SAMPLING = Sampling(steps=1)


@pytest.fixture(scope="module")
def renderer(sdxl_folder):
    return Renderer(str(sdxl_folder), SAMPLING, CPU, batch=2)


@pytest.fixture(scope="module")
def encoder(long_clip_folder):
    return str(long_clip_folder)


def rendered(renderer, encoder, reading="overlap", missing=ALL, **share):
    """{name: pixels}"""
    pipe = renderer.pipeline(encoder, reading)
    layouts = {index: read_layout(pipe, task.prompt, renderer.sampling) for index, task in enumerate(TASKS)}
    batches = list(renderer.render(pipe, encoder, reading, TASKS, layouts, missing, **share))
    rendered.batches = len(batches)
    return {task.name: image.tobytes() for batch in batches for task, image in batch}


@pytest.fixture(scope="module")
def expected(renderer, encoder):
    return {name: rendered(renderer, name) for name in (None, encoder)}


def test_each_encoder_renders_as_if_it_were_loaded_alone(renderer, encoder, expected):
    for name in (encoder, None):
        pipe = load_pipeline(renderer.checkpoint.name, name, CPU)
        [image] = render_batch(pipe, [TASKS[4].prompt], renderer.sampling)
        assert image.tobytes() == expected[name]["000004"]  # alone in its batch
        assert expected[name].keys() == ALL
    assert all(expected[None][name] != expected[encoder][name] for name in ALL)
    assert rendered(renderer, encoder) == expected[encoder]  # which now takes the place of the checkpoint's own


def test_batches_are_the_same_when_resumed_shared_or_in_low_memory(renderer, encoder, expected):
    some = rendered(renderer, None, missing={"000003", "nowhere"})
    assert some == {"000003": expected[None]["000003"]}
    shares = []
    for process in range(2):
        shares.append(rendered(renderer, None, process=process, processes=2))
        assert rendered.batches == 2  # of three, so one of them is empty
    assert not shares[0].keys() & shares[1].keys() and shares[0] | shares[1] == expected[None]
    low = Renderer(renderer.checkpoint.name, SAMPLING, CPU, batch=2, low_memory=True)
    assert rendered(low, encoder) == expected[encoder]


def test_how_prompts_are_read(renderer, encoder, expected):
    cut, separate = (rendered(renderer, None, reading) for reading in ("cut", "separate"))
    fits = {"000000", "000002"}
    for name in ALL:
        assert (cut[name] == expected[None][name]) == (separate[name] == expected[None][name]) == (name in fits)
    stock = load(StableDiffusionXLPipeline, renderer.checkpoint.name)
    assert rendered(renderer, None, "cut", {"000004"})["000004"] == cut["000004"]
    [image] = render_batch(stock, [TASKS[0].prompt], renderer.sampling)
    assert image.tobytes() == rendered(Renderer(renderer.checkpoint.name, SAMPLING, CPU), None, "cut")["000000"]


def test_settings_are_all_that_affects_an_image(renderer, encoder):
    base = renderer.checkpoint.name
    changes = [
        {"encoder_2": "stretch"},
        {"scheduler": "DDIMScheduler"},
        {"weighting": True},
        {"dtype": torch.bfloat16},
        {"sampling": dataclasses.replace(SAMPLING, layer="last")},
        {"sampling": dataclasses.replace(SAMPLING, height=80)},
    ]
    others = [Renderer(base, device=CPU, **({"sampling": SAMPLING} | change)).settings(None) for change in changes]
    records = [renderer.settings(None), renderer.settings(encoder), renderer.settings(None, "cut"), *others]
    assert len({str(record) for record in records}) == len(records)
    assert Renderer(base, dataclasses.replace(SAMPLING, height=64, width=64), CPU).settings(None) == records[0]


def test_an_encoder_that_does_not_fit_is_refused(renderer, expected, tmp_path):
    wide = str(tiny_sdxl.build_tiny_sdxl(tmp_path / "wide", text_width=64) / "text_encoder")
    with pytest.raises(UserError, match="has width 64; the UNet of .* reads 32 of its first encoder"):
        renderer.pipeline(wide)
