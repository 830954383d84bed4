"""The renderer: the same bits whatever is loaded, resumed, shared or freed in between."""

import gc
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import load
from PIL import Image

from debias_diffusion.encoders import EncoderSpec, load_text_encoder
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines import rendering
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.png import read_settings
from debias_diffusion.pipelines.rendering import (
    ImagePrompt,
    ImageTask,
    Renderer,
    Sampling,
    encode,
    render,
    render_batch,
    render_into,
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
def long(long_clip_folder):
    return EncoderSpec.parse(long_clip_folder)


def own(reading="overlap"):
    return EncoderSpec.parse("original", reading)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def pixels(folder):
    return {path.stem: Image.open(path).tobytes() for path in folder.glob("*.png")}


def into(folder, renderer, encoder, tasks=TASKS, left_out=None, **settings):
    settings = renderer.settings(encoder) | settings
    with Job.open(folder, "images", settings, renderer.inputs(encoder)) as job:
        return render_into(job, renderer, encoder, tasks, left_out)


@pytest.fixture(scope="module")
def expected(renderer, long, tmp_path_factory):
    """The folder of each encoder's images, by its name."""
    folders = {encoder.name: tmp_path_factory.mktemp(f"folder{n}") for n, encoder in enumerate((own(), long))}
    for encoder in (own(), long):
        rendered = into(folders[encoder.name], renderer, encoder)
        assert rendered.files == [folders[encoder.name] / f"{task.name}.png" for task in TASKS]
        assert rendered.reading | {"seconds": 1} == {"cut_at": None, "prompts_cut": 0, "seconds": 1}
    return folders


def test_each_encoder_renders_as_if_it_were_loaded_alone(renderer, long, expected, tmp_path):
    for encoder in (long, own()):
        pipe = load_pipeline(renderer.checkpoint.name, None if encoder.name == "original" else encoder.name, CPU)
        [image] = render_batch(pipe, [TASKS[4].prompt], renderer.sampling)
        assert image.tobytes() == pixels(expected[encoder.name])["000004"]  # alone in its batch
    a, b = (pixels(folder) for folder in expected.values())
    assert a.keys() == b.keys() == ALL and all(a[name] != b[name] for name in ALL)
    into(tmp_path, renderer, long)  # which now takes the place of the checkpoint's own
    assert files(tmp_path) == files(expected[long.name])


def test_a_resumed_run_renders_what_is_missing_or_damaged_bit_for_bit(renderer, expected, tmp_path, capsys):
    folder = tmp_path / "a"
    shutil.copytree(expected["original"], folder)
    whole = files(folder)
    (folder / "000003.png").unlink()
    (folder / "000001.png").write_bytes(whole["000001.png"][:-20])
    kept = {name: (folder / name).stat().st_mtime_ns for name in ("000000.png", "000002.png", "000004.png")}
    into(folder, renderer, own())
    assert files(folder) == whole and "Damaged: 1 of the images" in capsys.readouterr().out
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept
    assert [len(Job.read(folder).names("00000")), capsys.readouterr().out] == [5, ""]


def test_finished_images_load_no_model(renderer, expected):
    fresh = Renderer(renderer.checkpoint.name, SAMPLING, CPU, batch=2)
    into(expected["original"], fresh, own())
    assert fresh._pipe is None


def test_low_memory_gives_the_same_files_with_half_of_the_models_at_a_time(
    renderer, long, expected, tmp_path, monkeypatch
):
    load, alive, loaded = rendering.load_pipeline, [], []

    def load_watched(*arguments):
        gc.collect()
        assert not any(model() for model in alive)
        pipe = load(*arguments)
        parts = [pipe.text_encoder, pipe.text_encoder_2, pipe.unet, pipe.vae]
        loaded.append([part is not None for part in parts])
        alive[:] = [weakref.ref(part) for part in parts if part is not None]
        return pipe

    monkeypatch.setattr(rendering, "load_pipeline", load_watched)
    monkeypatch.setattr(rendering, "ENCODED_AT_ONCE", 4)  # of 5 images in batches of 2
    low = Renderer(renderer.checkpoint.name, SAMPLING, CPU, batch=2, low_memory=True)
    into(tmp_path, low, long)
    assert files(tmp_path) == files(expected[long.name])
    assert loaded == [[True, True, False, False], [False, False, True, True]] * 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "The memory of cpu does not suffice .CUDA out.* Try less"),
        (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), "does not suffice .*allocate .* Try"),
        (MemoryError("Unable to allocate 7.11 PiB"), "does not suffice .*allocate .* Try less"),
        (RuntimeError("size mismatch"), "^size mismatch$"),  # another error stays as it is
    ],
)
def test_too_little_memory_is_explained(error, message):
    kind = RuntimeError if message[0] == "^" else UserError
    with pytest.raises(kind, match=message), rendering.explain_memory(CPU, "Try less."):
        raise error


def test_images_of_others_are_refused(renderer, expected, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(expected["original"], folder)
    other = [replace(TASKS[0], prompt=ImagePrompt("A dog.")), *TASKS[1:]]
    with pytest.raises(UserError, match="1 of the images .* others, the first 000000.png .*: prompt was 'A cat"):
        into(folder, renderer, own(), other)
    with pytest.raises(UserError, match="other settings .steps: 1 there, 3 here"):
        into(folder, renderer, own(), steps=3)
    with pytest.raises(UserError, match="other settings.*The encoder is another one"):
        into(folder, renderer, EncoderSpec.parse(renderer.checkpoint.name + "/text_encoder"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "000001.png").write_text("mine")
    with pytest.raises(UserError, match="000001.png .*: it was not made by this job"):
        into(tmp_path / "b", renderer, own())
    assert (tmp_path / "b" / "000001.png").read_text() == "mine"


def test_images_that_are_not_finite_are_named_and_the_rest_is_rendered(renderer, long, expected, tmp_path, monkeypatch):
    text_encoder, tokenizer = load_text_encoder(long.name)
    word = tokenizer("alone", add_special_tokens=False).input_ids[0]
    assert word not in tokenizer(" ".join(TEXTS)).input_ids
    with torch.no_grad():
        text_encoder.get_input_embeddings().weight[word] = float("nan")
    monkeypatch.setattr(rendering, "load_text_encoder", lambda name: (text_encoder, tokenizer))
    fresh, left_out = Renderer(renderer.checkpoint.name, SAMPLING, CPU, batch=2), {}
    fresh._pipe, fresh._loaded = renderer.pipeline(own()), (None, None)
    tasks = [*TASKS, ImageTask("alone", ImagePrompt("alone", 5), "line 9")]
    with pytest.raises(FailedError, match="^1 of 6 images in .*the first: line 9, seed 5: its embeddings .*float32"):
        into(tmp_path, fresh, long, tasks, left_out)
    assert list(left_out) == ["line 9, seed 5"] and pixels(tmp_path).keys() == ALL


def test_how_prompts_are_read(renderer, expected, tmp_path):
    rendered = {reading: into(tmp_path / reading, renderer, own(reading)) for reading in ("cut", "separate")}
    images = {reading: pixels(tmp_path / reading) for reading in rendered} | {"overlap": pixels(expected["original"])}
    fits = {"000000", "000002"}
    for name in ALL:
        for reading in rendered:
            assert (images[reading][name] == images["overlap"][name]) == (name in fits)
    assert [(part.reading["cut_at"], part.reading["prompts_cut"]) for part in rendered.values()] == [(77, 3), (None, 0)]
    stock = load(StableDiffusionXLPipeline, renderer.checkpoint.name)
    [image] = render_batch(stock, [TASKS[4].prompt], renderer.sampling)
    assert image.tobytes() == images["cut"]["000004"]  # alone in the last batch


def test_settings_are_all_that_affects_an_image(renderer, long):
    base = renderer.checkpoint.name
    changes = [
        {"encoder_2": "stretch"},
        {"scheduler": "DDIMScheduler"},
        {"weighting": True},
        {"dtype": torch.bfloat16},
        {"sampling": replace(SAMPLING, layer="last")},
        {"sampling": replace(SAMPLING, height=80)},
    ]

    def record(renderer, encoder):
        return renderer.settings(encoder), renderer.inputs(encoder)

    others = [record(Renderer(base, device=CPU, **({"sampling": SAMPLING} | change)), own()) for change in changes]
    records = [record(renderer, encoder) for encoder in (own(), long, own("cut"))] + others
    assert len({str(entry) for entry in records}) == len(records)
    assert record(Renderer(base, replace(SAMPLING, height=64, width=64), CPU), own()) == records[0]


def test_a_png_holds_its_settings(renderer, long, expected):
    settings = read_settings(expected[long.name] / "000003.png")
    assert settings["prompt"] == TEXTS[3] and settings["seed"] == 3 and settings["scheduler"] == "Euler"
    assert (settings["encoder"], settings["encoder_sha256"]) == (long.name, long.digest)
    assert (settings["reading"], settings["positions"], settings["encoder_2"]) == ("overlap", 227, None)


def test_an_encoder_that_does_not_fit_is_refused(renderer, tmp_path):
    wide = tiny_sdxl.build_tiny_sdxl(tmp_path / "wide", text_width=64) / "text_encoder"
    with pytest.raises(UserError, match="has width 64; the UNet of .* reads 32 of its first encoder"):
        renderer.pipeline(EncoderSpec.parse(wide))


# ---- values that are not finite

PROMPTS = ["a red cat", "a dog", "a blue bird"]
NOT_FINITE = "its {} are not finite (NaN or infinite)"


@pytest.fixture
def pipe():
    pipe = tiny_sdxl.assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rendered(pipe, count=3, embeddings=None, on_step=None, **changes):
    embeddings = embeddings or encode(pipe, [ImagePrompt(text) for text in PROMPTS[:count]], SAMPLING)
    return render(pipe, embeddings, range(count), replace(SAMPLING, **changes), on_step)


def rendered_by_diffusers(pipe, steps=1):
    noise = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return pipe(PROMPTS, num_inference_steps=steps, guidance_scale=SAMPLING.guidance_scale, generator=noise).images


def test_finite_images_are_the_pipelines(pipe):
    steps = []
    images = rendered(pipe, on_step=lambda step, of: steps.append((step, of)), steps=2)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in rendered_by_diffusers(pipe, 2)]
    assert steps == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("part", "value", "values"),
    [("unet", float("inf"), "latents after step 1"), ("vae", float("nan"), "pixels"), ("text_encoder_2", 1e38, None)],
)
def test_weights_that_are_not_finite_give_no_image(pipe, part, value, values):
    model = getattr(pipe, part)
    with torch.no_grad():
        [weight for weight in model.parameters() if weight.ndim > 1][-1].view(-1)[0] = value
        if values is None:
            model.get_input_embeddings().weight[:] = value
            pipe.unet = None  # is not run
    assert rendered(pipe) == [NOT_FINITE.format(values or "embeddings")] * 3
    assert not pipe.vae.decoder._forward_hooks


@pytest.mark.parametrize("slicing", [False, True])
def test_infinite_pixels_of_one_image_leave_the_others(pipe, slicing):
    """They are neither black nor NaN once they are clipped to [0, 1]."""
    (pipe.vae.enable_slicing if slicing else pipe.vae.disable_slicing)()
    expected, calls = rendered_by_diffusers(pipe), []

    def break_second(module, inputs, pixels):
        calls.append(len(pixels))
        if (1 if slicing else 0) == len(calls) - 1:
            pixels[0 if slicing else 1] = float("inf")
        return pixels

    pipe.vae.decoder.conv_out.register_forward_hook(break_second)
    images = rendered(pipe)
    assert images[1] == NOT_FINITE.format("pixels")
    assert [images[i].tobytes() for i in (0, 2)] == [expected[i].tobytes() for i in (0, 2)]


def test_an_image_that_the_safety_checker_blacked_out_is_none():
    pipe = tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts())
    pipe.set_progress_bar_config(disable=True)
    pipe.run_safety_checker = lambda image, device, dtype: (image, [True, False])
    images = rendered(pipe, 2)
    assert images[0] == "the safety checker of the checkpoint has blacked it out" and images[1].size == (64, 64)
