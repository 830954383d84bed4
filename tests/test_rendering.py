"""Images in job folders: the same bits whatever is loaded, resumed, shared or freed; as stock SDXL where it reads."""

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.draw import aligned, load
from helpers.ranks import forked
from helpers.tiny_sdxl import assemble
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from debias_diffusion.encoders.spec import EncoderSpec, load_text_encoder
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.eval.images.generation import GenerationConfig
from debias_diffusion.eval.images.rendered import folder_names, image_task, render_all
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines import with_long_prompts
from debias_diffusion.pipelines.rendering import loading
from debias_diffusion.pipelines.rendering import renderer as rendering
from debias_diffusion.pipelines.rendering.folder import render_into
from debias_diffusion.pipelines.rendering.images import encode_batch, read_layout, render_batch
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.options import Sampling
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask
from debias_diffusion.pipelines.rendering.renderer import Renderer
from debias_diffusion.processes import Processes
from debias_diffusion.text.options import LongPromptOptions

CPU = torch.device("cpu")
# of 77, 227 and 248 positions, in mixed order
TEXTS = [" ".join(["A cat, a dog and a bird sit on the wide red sofa."] * count) for count in (1, 9, 2, 9, 8)]
TASKS = [ImageTask(f"{seed:06}", ImagePrompt(text, seed), f"{seed:06}") for seed, text in enumerate(TEXTS)]
SAMPLING = Sampling(steps=1, guidance_scale=7.0)


@pytest.fixture(scope="module")
def renderer(base):
    return Renderer(base, SAMPLING, CPU, batch=2)


@pytest.fixture(scope="module")
def long(long_clip_folder):
    return EncoderSpec.parse(long_clip_folder)


def own(reading="overlap"):
    return EncoderSpec.parse("original", reading)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def pixels(folder):
    return {path.stem: Image.open(path).tobytes() for path in folder.glob("*.png")}


def into(folder, renderer, encoder, tasks=TASKS, left_out=None):
    with Job.open(folder, "images", renderer.settings(encoder), renderer.inputs(encoder)) as job:
        return render_into(job, renderer, encoder, tasks, left_out)


@pytest.fixture(scope="module")
def expected(renderer, long, tmp_path_factory):
    """The folder of each encoder's images, by its name."""
    folders = {encoder.name: tmp_path_factory.mktemp(f"folder{n}") for n, encoder in enumerate((own(), long))}
    for encoder in (own(), long):
        into(folders[encoder.name], renderer, encoder)
    return folders


def test_each_encoder_renders_as_if_it_were_loaded_alone(renderer, long, expected, tmp_path):
    for encoder in (long, own()):
        pipe = load_pipeline(renderer.base, None if encoder.name == "original" else encoder.name, CPU)
        [image] = render_batch(pipe, encode_batch(pipe, [TASKS[4].prompt], renderer.sampling), [4], renderer.sampling)
        assert image.tobytes() == pixels(expected[encoder.name])["000004"]  # alone in its batch
    a, b = (pixels(folder) for folder in expected.values())
    assert all(a[task.name] != b[task.name] for task in TASKS)
    into(tmp_path, renderer, long)  # which now takes the place of the checkpoint's own
    assert files(tmp_path) == files(expected[long.name])


def test_a_resumed_run_renders_what_is_missing_or_damaged_bit_for_bit(renderer, expected, copy_of, capsys, monkeypatch):
    folder = copy_of(expected["original"])
    whole = files(folder)
    (folder / "000003.png").unlink()
    (folder / "000001.png").write_bytes(whole["000001.png"][:-20])
    into(folder, renderer, own())
    assert files(folder) == whole and "Damaged: 1 of the images" in capsys.readouterr().out
    monkeypatch.setattr(rendering, "load_pipeline", None)  # finished images load no model
    into(folder, Renderer(renderer.base, SAMPLING, CPU, batch=2), own())


def test_low_memory_has_half_of_the_models_at_a_time(renderer, long, expected, tmp_path, monkeypatch):
    load, alive = rendering.load_pipeline, []

    def load_watched(*arguments):
        gc.collect()
        assert not any(model() for model in alive)
        pipe = load(*arguments)
        parts = [pipe.text_encoder, pipe.unet, pipe.vae]
        alive[:] = [weakref.ref(part) for part in parts if part is not None]
        assert len(alive) == (1 if pipe.unet is None else 2)
        return pipe

    monkeypatch.setattr(rendering, "load_pipeline", load_watched)
    into(tmp_path, Renderer(renderer.base, SAMPLING, CPU, batch=2, low_memory=True), long)
    assert files(tmp_path) == files(expected[long.name]) and len(alive) == 2


@pytest.mark.needs("gpu")
def test_low_memory_on_a_gpu_offloads_the_models(base, long, tmp_path):
    for name, low in (("whole", False), ("low", True)):
        renderer = Renderer(base, SAMPLING, torch.device("cuda"), batch=2, low_memory=low)
        for place, encoder in (("own", own()), ("long", long)):
            into(tmp_path / name / place, renderer, encoder)
            assert (renderer.pipeline(encoder).unet.device.type == "cpu") == low
            assert pixels(tmp_path / name / place) == pixels(tmp_path / "whole" / place)


def test_images_that_are_not_finite_are_named_and_the_rest_is_rendered(renderer, long, tmp_path, monkeypatch):
    text_encoder, tokenizer = load_text_encoder(long.name)
    word = tokenizer("alone", add_special_tokens=False).input_ids[0]
    with torch.no_grad():
        text_encoder.get_input_embeddings().weight[word] = float("nan")
    monkeypatch.setattr(loading, "load_text_encoder", lambda name: (text_encoder, tokenizer))
    fresh = Renderer(renderer.base, SAMPLING, CPU, batch=2)
    fresh._pipe, fresh._loaded = renderer.pipeline(own()), (None, None)
    tasks, left_out = [*TASKS, ImageTask("alone", ImagePrompt("alone", 5), "line 9")], {}
    with pytest.raises(FailedError, match="1 of 6 images .*line 9, seed 5: its embeddings"):
        into(tmp_path, fresh, long, tasks, left_out)
    assert list(left_out) == ["line 9, seed 5"] and len(pixels(tmp_path)) == len(TASKS)


def test_shares_of_a_schedule_are_of_the_steps_that_are_drawn():
    pipe = with_long_prompts(assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()), reading="a1111")
    prompt, sampling = ImagePrompt("a [cat:dog:0.5]"), Sampling(steps=4, guidance_scale=1.0)
    assert [last for last, _ in encode_batch(pipe, [prompt], sampling)] == [2, 4]
    few = replace(sampling, steps=1)  # a share of 0.5 is over before its only step
    assert read_layout(pipe, prompt, sampling).texts == ((("a cat", 2),),)
    assert read_layout(pipe, prompt, few).texts == ((("a dog", 2),),)


def test_settings_are_all_that_affects_an_image(renderer, long):
    samplings = {"scheduler": "DDIMScheduler", "layer": "last", "height": 80}
    changes = [{"encoder_2": "stretch"}, {"dtype": torch.float16}]
    changes += [{"sampling": replace(SAMPLING, **{name: value})} for name, value in samplings.items()]
    reading = {"emphasis": "ignore", "breaks": "average", "sharpen": 1.5}
    options = [LongPromptOptions(**{name: value}) for name, value in reading.items()]
    changes += [{"sampling": replace(SAMPLING, long_prompt=each)} for each in options]

    def record(encoder, **changed):
        other = replace(renderer, **changed)
        return other.settings(encoder), other.inputs(encoder)

    records = [*map(record, (own(), long, own("cut"))), *(record(own(), **change) for change in changes)]
    assert len({str(entry) for entry in records}) == len(records)
    assert record(own(), sampling=replace(SAMPLING, height=64, width=64)) == records[0]


def rendered(pipe):
    embeddings = encode_batch(pipe, [ImagePrompt(text) for text in ("a red cat", "a dog")], SAMPLING)
    return render_batch(pipe, embeddings, range(2), SAMPLING)


@pytest.mark.parametrize(("part", "values"), [("unet", "latents after step 1"), ("vae", "pixels")])
def test_weights_that_are_not_finite_give_no_image(part, values):
    pipe = tiny_sdxl.assemble(StableDiffusionXLPipeline, tiny_sdxl.sdxl_parts())
    with torch.no_grad():
        [weight for weight in getattr(pipe, part).parameters() if weight.ndim > 1][-1].view(-1)[0] = torch.nan
    assert rendered(pipe) == [f"its {values} are not finite (NaN or infinite)"] * 2
    assert not pipe.vae.decoder._forward_hooks


def test_an_image_that_the_safety_checker_blacked_out_is_none():
    pipe = tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts())
    pipe.run_safety_checker = lambda image, device, dtype: (image, [True, False])
    images = rendered(pipe)
    assert "safety checker" in images[0] and images[1].size == (64, 64)


def evaluated(folder, base, *encoders, texts=TEXTS, processes=None, **settings):
    given = {"base": base, "output": str(folder), "data": "", "steps": 1, "device": "cpu"} | settings
    config = GenerationConfig(list(encoders), **given)
    tasks = [image_task(config, f"{index:06}", text, index) for index, text in enumerate(texts)]
    images, _ = render_all(config, processes or Processes.connect("cpu"), tasks)
    return [rendered.files for rendered in images.values()]


@pytest.fixture(scope="module")
def both(base, long, tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("both"), base, "cut:original", long.name)


def test_cut_encoders_read_what_stock_sdxl_reads(both, base):
    pipe = aligned(load(StableDiffusionXLPipeline, base))
    for seed, (text, file) in enumerate(zip(TEXTS, both[0], strict=True)):
        noise = torch.Generator().manual_seed(seed)
        [expected] = pipe(text, num_inference_steps=1, guidance_scale=7.0, generator=noise).images
        assert Image.open(file).tobytes() == expected.tobytes()


def test_images_of_others_are_refused_before_a_model_is_loaded(both, base, long, monkeypatch):
    monkeypatch.setattr(rendering, "load_pipeline", None)
    output = both[0][0].parents[2]
    assert evaluated(output, base, "cut:original", long.name) == both
    for changes, message in (
        ({"steps": 3}, "steps: 1 there, 3 here"),
        ({"prefix": "A. "}, "1 of the images .* others, the first 000000.png .*: prompt was 'A cat"),
        ({"seed": 1}, "seed was 0"),
    ):
        with pytest.raises(UserError, match=message):
            evaluated(output, base, "cut:original", long.name, texts=TEXTS[:1], **changes)


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1) | st.sampled_from(["x" * 255, "猫" * 85]), min_size=1, max_size=5, unique=True))
def test_folders_have_safe_and_different_names(labels):
    names = folder_names(labels)
    assert list(names) == labels and len({name.lower() for name in names.values()}) == len(labels)
    for name in names.values():
        assert Path("x", name).parent == Path("x") and not name.startswith(".") and not set(name) & set('/\\:*?"<>|\0 ')
        assert len(os.fsencode(name)) <= 200


def test_two_processes_render_the_same_images(base, long, tmp_path, capfd):
    (alone,) = evaluated(tmp_path / "alone", base, long.name, images_at_once=2)

    def work(_) -> None:
        processes = Processes.connect()
        with processes.only_main_prints():
            evaluated(tmp_path / "out", base, long.name, images_at_once=2, processes=processes)
            assert processes.gathered([processes.index]) == [0, 1]
            print(f"done by {processes.count}")

    forked(2, work)
    printed = capfd.readouterr().out
    assert printed.endswith("done by 2\n") and printed.count("Images: ") == 2  # the one alone has its own
    shared = sorted((tmp_path / "out").rglob("*.png"))
    assert [file.read_bytes() for file in shared] == [file.read_bytes() for file in alone]
