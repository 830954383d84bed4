"""The demo without its page: images equal those of `generate`, whatever was drawn before or failed."""

import gc
import json
import math
import struct
import threading
import tracemalloc
import zlib
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from helpers.tiny_sdxl import stretched, text_encoder
from helpers.vocabulary import tiny_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPTextModelWithProjection

from debias_diffusion.app.demo import live_generation
from debias_diffusion.app.demo.analysis import attention, movement, tokens
from debias_diffusion.app.demo.checks import check, unweighted
from debias_diffusion.app.demo.live_generation import Drawn, Step, as_png, check_budget, draw, settings_of
from debias_diffusion.app.demo.models import DemoModels, _check_names
from debias_diffusion.app.demo.request import BUDGET
from debias_diffusion.app.demo.restore import MOST_PNG, image_of_png, request_of_png
from debias_diffusion.app.demo.toy_scenes import Marks, ObjectMark, mark, random_scene
from debias_diffusion.app.generate import GenerateConfig, generate
from debias_diffusion.app.options import AppConfig
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import load_reader, look_at_prompt
from debias_diffusion.eval.encoder_names import labels
from debias_diffusion.pipelines import PromptLayout
from debias_diffusion.pipelines.checkpoints import load_pipeline
from debias_diffusion.pipelines.png import parameters, read_settings
from debias_diffusion.pipelines.rendering import cleaned
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import clean
from debias_diffusion.toyworld.render import render
from debias_diffusion.toyworld.scenes import Scene, Thing

CPU = torch.device("cpu")
TOYS = ["toy/clip", "toy/long-clip", "toy/debias-clip"]
SCENE = random_scene(3)
PROMPT = SCENE.caption  # of 93 tokens
NEVER = bool


@pytest.fixture(scope="module")
def toy() -> DemoModels:
    return DemoModels("toy/sdxl", TOYS, CPU)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sdxl_folder) -> dict[str, str]:
    """A base, and encoders for it of 77 positions, of 248, and of another width."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "base").symlink_to(sdxl_folder)
    models = {
        "short": text_encoder(seed=5),
        "long": stretched(text_encoder(seed=5), 248),
        "wide": text_encoder(width=64),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer(model.config.max_position_embeddings).save_pretrained(root / name)
    return {name: str(root / name) for name in ("base", *models)}


@pytest.fixture(scope="module")
def tiny(folders) -> DemoModels:
    return DemoModels(folders["base"], ["original", folders["long"]], CPU)


def ask(models: DemoModels, **changes):
    return replace(models.defaults, **{"prompt": PROMPT, "steps": 2, "images": 1} | changes)


def pictures(models: DemoModels, **changes) -> list[Drawn]:
    return [item for item in draw(models, ask(models, **changes), NEVER) if isinstance(item, Drawn)]


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(pixels(a), pixels(b))


# DemoModels


def test_encoders_share_all_other_models_and_have_weights_of_their_own(toy):
    pipes = {label: toy.pipeline(label, ask(toy)) for label in toy.labels}
    for name in ("unet", "vae", "text_encoder_2", "text_encoder"):
        places = [[weight.data_ptr() for weight in getattr(pipe, name).parameters()] for pipe in pipes.values()]
        assert len(places[0]) > 10
        shared = all(place == places[0] for place in places)
        assert shared == (name != "text_encoder"), name


def test_models_know_what_they_are(toy, tiny, folders):
    assert toy.labels == TOYS and toy.is_toy and toy.size == (48, 48)
    assert toy.schedulers[0] == "Euler" and len(set(toy.schedulers)) == len(toy.schedulers) == 5
    assert toy.defaults.steps == 20 and toy.defaults.guidance_scale == 3.0
    assert tiny.labels == ["original", "long"] and not tiny.is_toy and tiny.size == (64, 64) and tiny.base == "base"
    assert tiny.encoders["original"].context_length == 77 and tiny.longest_context == 248


def test_names_say_how_an_encoder_reads(toy):
    names = ["toy/clip", "overlap:toy/clip", "chunks:toy/clip"]
    models = DemoModels("toy/sdxl", names, CPU)
    cut, overlapping, separate = models.labels
    assert models.labels == ["toy/clip", "toy/clip, overlapping chunks", "toy/clip, separate chunks"]
    assert len({id(encoder.model) for encoder in models.encoders.values()}) == 1  # loaded once
    drawn = {item.label: item for item in pictures(models)}
    for label, long_prompts in ((cut, "cut"), (overlapping, "chunks"), (separate, "separate")):
        (policy,) = pictures(toy, encoders=("toy/clip",), long_prompts=long_prompts)
        assert same(drawn[label].image, policy.image), label
        assert request_of_png(policy.png, toy)[0].long_prompts == long_prompts
        # Whatever the others do.
        for other in ("auto", "chunks", "separate", "cut"):
            if label != cut:
                (again,) = pictures(models, encoders=(label,), long_prompts=other)
                assert same(again.image, drawn[label].image)
                assert request_of_png(again.png, models)[0] == ask(models, encoders=(label,), long_prompts=other)
    assert not same(drawn[cut].image, drawn[overlapping].image)
    assert not same(drawn[separate].image, drawn[overlapping].image)


def test_the_toy_world_opens_with_the_quickstarts_encoders():
    config = AppConfig()
    assert labels(config.encoders) == [
        "toy/clip",
        "toy/clip, overlapping chunks",
        "toy/long-clip",
        "toy/debias-clip",
        "toy/debias-clip-sdxl",
    ]
    _check_names(config.encoders)


def test_original_is_the_base_as_it_is(folders, tiny):
    pipe = load_pipeline(folders["base"], None, CPU)
    pipe.set_progress_bar_config(disable=True)
    drawn = pictures(tiny, encoders=("original",), long_prompts="chunks")[0]
    reference = pipe(
        clean(PROMPT), generator=torch.Generator().manual_seed(0), num_inference_steps=2, guidance_scale=7.0
    )
    assert same(drawn.image, reference.images[0])


@pytest.mark.parametrize(
    "base, encoders, message",
    [
        ("base", [], "at least one"),
        ("base", ["short"] * 2, "none twice"),
        ("base", ["original", "overlap:original", "chunks:original", "short", "long", "wide"], "at most 5"),
        ("base", ["overlaps:original"], "'overlap:original' to read long prompts in overlapping chunks"),
        ("base", ["wide"], "width 64; the UNet of .* reads 32"),
        ("base", ["nowhere/at/all"], "not there"),
        ("nowhere/at/all", ["short"], "checkpoint .* is not there"),
        ("toy/sdxl", ["toy/clipp"], "Did you mean toy/clip"),
    ],
)
def test_models_that_do_not_fit_are_refused(folders, base, encoders, message):
    with pytest.raises(UserError, match=message):
        DemoModels(folders.get(base, base), [folders.get(name, name) for name in encoders], CPU)


# Drawing


LONG_NEGATIVE = f"Not: {PROMPT}"


@pytest.mark.parametrize(
    "encoder, changes",
    [
        ("toy/debias-clip", {}),
        ("toy/clip", {"long_prompts": "separate"}),
        ("toy/clip", {"long_prompts": "chunks", "prompt": f"A &lt; B &amp; C. {PROMPT}"}),
        ("toy/debias-clip", {"guidance_scale": 1.0, "prompt": "a red ring", "negative_prompt": LONG_NEGATIVE}),
        (
            "toy/long-clip",
            {"negative_prompt": "A Red circle", "weighting": True, "prompt": "A (Red circle:1.4) BREAK a [ring]"},
        ),
        ("toy/long-clip", {"negative_prompt": "A &lt; B", "seed": 2**40}),
    ],
)
def test_pictures_are_those_that_generate_draws(toy, tmp_path, encoder, changes):
    drawn = pictures(toy, encoders=(encoder,), **changes)[0]
    request = ask(toy, **changes)
    names = ("prompt", "seed", "steps", "guidance_scale", "weighting")
    config = GenerateConfig(
        base="toy/sdxl",
        encoder=encoder,
        negative_prompt=request.negative_prompt or None,
        overlap=request.long_prompts != "separate",
        output=str(tmp_path / "picture.png"),
        device="cpu",
        **{name: getattr(request, name) for name in names},
    )
    path = generate(config)
    assert same(drawn.image, Image.open(path)) and same(drawn.image, Image.open(BytesIO(drawn.png)))
    theirs = read_settings(path)
    ours = settings_of_png(drawn.png)
    # Only the command writes digests of files.
    assert {name: ours[name] for name in theirs if "sha256" not in name} == {
        name: value for name, value in theirs.items() if "sha256" not in name
    }
    restored, notes = request_of_png(str(path), toy)
    expected = replace(request, encoders=(encoder,), long_prompts=changes.get("long_prompts", "chunks"))
    assert restored == expected and not notes


def settings_of_png(png: bytes) -> dict:
    return json.loads(Image.open(BytesIO(png)).info["settings"])


def stock(models: DemoModels, label: str) -> StableDiffusionXLPipeline:
    """diffusers' own pipeline, which cuts what is longer than 77 tokens."""
    pipe = models.pipeline(label, ask(models))
    parts = dict(pipe.components)
    parts["tokenizer"] = deepcopy(parts["tokenizer"])
    parts["tokenizer"].model_max_length = 77
    plain = StableDiffusionXLPipeline(**parts, force_zeros_for_empty_prompt=True, add_watermarker=False)
    plain.set_progress_bar_config(disable=True)
    return plain


@pytest.mark.parametrize("label, long_prompts", [("toy/clip", "auto"), ("toy/clip", "cut"), ("toy/debias-clip", "cut")])
@pytest.mark.parametrize("negative", ["", PROMPT + " No objects."])
def test_cut_prompts_are_read_as_stock_sdxl_reads_them(toy, label, long_prompts, negative):
    drawn = pictures(toy, encoders=(label,), long_prompts=long_prompts, negative_prompt=negative)[0]
    reference = stock(toy, label)(
        clean(PROMPT),
        negative_prompt=clean(negative) or None,
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=2,
        guidance_scale=3.0,
    )
    assert same(drawn.image, reference.images[0])
    assert drawn.read == "reads the first 75 of 93 tokens"


def test_what_was_read_is_said(toy):
    reads = {item.label: item.read for item in pictures(toy, steps=1)}
    assert reads == {
        "toy/clip": "reads the first 75 of 93 tokens",
        "toy/long-clip": "reads all 93 tokens at once",
        "toy/debias-clip": "reads all 93 tokens at once",
    }
    several = pictures(toy, steps=1, prompt=f"{PROMPT} {PROMPT} {PROMPT}", long_prompts="chunks")
    assert [item.read for item in several] == [
        "reads all 279 tokens in 8 overlapping chunks",
        "reads all 279 tokens in 2 overlapping chunks",
        "reads all 279 tokens in 2 overlapping chunks",
    ]
    brief = pictures(toy, steps=1, prompt="(a red circle:1.2)", weighting=True, encoders=("toy/clip",))
    assert brief[0].read == "reads all 3 tokens at once"


def test_steps_and_pictures_come_one_after_the_other(toy):
    request = ask(toy, encoders=("toy/clip", "toy/debias-clip"), images=2, seed=7)
    items = list(draw(toy, request, NEVER))
    steps = [item for item in items if isinstance(item, Step)]
    assert [(item.label, item.picture, item.step, item.steps) for item in steps] == [
        (label, picture, step, 2)
        for picture in (1, 2)
        for label in ("toy/clip", "toy/debias-clip")
        for step in (0, 1, 2)
    ]
    shares = [item.done_share for item in steps]
    assert shares[0] == 0 and shares[-1] == 1 and all(a <= b for a, b in pairwise(shares))
    drawn = [item for item in items if isinstance(item, Drawn)]
    assert [(item.label, item.picture, item.seed) for item in drawn] == [
        ("toy/clip", 1, 7),
        ("toy/debias-clip", 1, 7),
        ("toy/clip", 2, 8),
        ("toy/debias-clip", 2, 8),
    ]
    assert all(isinstance(items[place], Drawn) for place in (3, 7, 11, 15))
    for item in drawn:
        assert settings_of_png(item.png)["seed"] == item.seed and request_of_png(item.png, toy) == (request, [])
    again = pictures(toy, encoders=("toy/debias-clip",), seed=8)[0]
    assert same(drawn[3].image, again.image) and not same(drawn[1].image, again.image)


def test_nothing_that_was_drawn_before_shows(toy):
    before = pictures(toy, encoders=("toy/debias-clip",))[0]
    for name in toy.schedulers:
        pictures(toy, encoders=("toy/clip",), scheduler=name, steps=3, prompt="(red:1.5) circle", weighting=True)
        for item in draw(toy, ask(toy, scheduler=name, steps=9), NEVER):
            if item.step == 2:
                break  # the iterator is closed
        after = pictures(toy, encoders=("toy/debias-clip",))[0]
        assert after.png == before.png, name


@pytest.mark.parametrize("name", ["Euler", "Euler a", "DPM++ 2M", "DDIM", "UniPC"])
def test_every_scheduler_draws_the_toy_world(toy, name):
    drawn = pictures(toy, encoders=("toy/debias-clip",), scheduler=name, steps=12, images=2, prompt=SCENE.caption)
    right = [item.correct for picture in drawn for item in mark(SCENE, picture.image).objects]
    assert len(right) == 8 and sum(right) >= 3  # 1 in 48 by chance
    made = settings_of_png(drawn[0].png)["scheduler"]
    assert made == name and f"Sampler: {name}," in Image.open(BytesIO(drawn[0].png)).info["parameters"]


def test_schedulers_leave_the_bases_own_as_it_was(toy):
    before = dict(toy.pipeline("toy/clip", ask(toy)).scheduler.config)
    drawn = {name: pixels(pictures(toy, encoders=("toy/clip",), scheduler=name)[0].image) for name in toy.schedulers}
    assert all(not np.array_equal(drawn["Euler"], image) for name, image in drawn.items() if name != "Euler")
    fresh = toy.pipeline("toy/clip", ask(toy)).scheduler
    assert dict(fresh.config) == before and fresh.num_inference_steps is None


# Breaking off


@pytest.fixture
def unet_calls(toy):
    """A list with an item for each call of the UNet."""
    calls = []
    handle = toy.pipeline("toy/clip", ask(toy)).unet.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_no_step_is_taken_after_a_cancel(toy, unet_calls, after):
    items = list(draw(toy, ask(toy, steps=3), lambda: len(unet_calls) >= after))
    assert len(unet_calls) == after
    assert sum(isinstance(item, Drawn) for item in items) == (after - 1) // 3 * (after > 0)


def test_no_step_is_taken_after_a_cancel_while_a_prompt_is_encoded(toy, unet_calls):
    encoded = threading.Event()
    hook = toy.encoders["toy/clip"].model.register_forward_hook(lambda *_: encoded.set())
    try:
        items = list(draw(toy, ask(toy), encoded.is_set))
    finally:
        hook.remove()
    assert encoded.is_set() and not unet_calls and [item.step for item in items] == [0]


def working(before: set[threading.Thread]) -> list[threading.Thread]:
    """The threads that draw, and were not there before: other libraries have threads of their own."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if getattr(thread, "_target", None) is live_generation._work]


def test_a_closed_drawing_ends_within_a_step(toy, unet_calls):
    before = set(threading.enumerate())
    drawing = draw(toy, ask(toy, steps=50), NEVER)
    next(item for item in drawing if item.step == 2)
    threads = working(before)
    drawing.close()
    assert len(threads) == 1 and not threads[0].is_alive()
    taken = len(unet_calls)
    assert taken < 50
    assert not list(drawing) and len(unet_calls) == taken


def test_errors_reach_the_caller_and_end_the_thread(toy):
    def broken() -> bool:
        threads.extend(working(before))
        raise ZeroDivisionError("here")

    before, threads = set(threading.enumerate()), []
    with pytest.raises(ZeroDivisionError, match="here"):
        list(draw(toy, ask(toy), broken))
    assert len(threads) == 1 and not threads[0].is_alive()


def test_an_error_after_the_drawing_reaches_the_caller_too(toy, monkeypatch):
    monkeypatch.setattr(toy, "restore", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(draw(toy, ask(toy, steps=1, encoders=("toy/clip",)), NEVER))


def test_out_of_memory_is_told_and_harms_nothing(folders, monkeypatch):
    """In half precision, where diffusers casts the autoencoder while it decodes."""
    models = DemoModels(folders["base"], ["original"], CPU, torch.float16)
    vae = models.pipeline("original", ask(models)).vae
    vae.register_to_config(force_upcast=True)
    before = pictures(models, steps=1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(vae, "decode", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("of 3 GiB")))
        with pytest.raises(UserError, match="cpu is out of memory .of 3 GiB.*smaller"):
            pictures(models, steps=1)
    assert vae.dtype == torch.float16
    assert same(pictures(models, steps=1)[0].image, before.image)


def test_nothing_grows_with_requests(tiny):
    def tensors() -> dict[int, torch.Tensor]:
        gc.collect()
        return {id(item): item for item in gc.get_objects() if isinstance(item, torch.Tensor)}

    def work(count: int) -> None:
        for seed in range(count):
            drawn = pictures(tiny, steps=1, seed=seed, scheduler=tiny.schedulers[seed % 5], encoders=("long",))
            assert request_of_png(drawn[0].png, tiny)[0].seed == seed
            tokens(tiny, f"{PROMPT} {seed}")

    work(5)
    before = tensors()  # kept alive, so that no later one has the id of one of these
    tracemalloc.start()
    try:
        work(2)
        start = tracemalloc.get_traced_memory()[0]
        work(5)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert tensors().keys() <= before.keys()
    assert grown < 5 * 2000  # bytes; a picture of the smallest has 12,288


# Requests


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": None}, "prompt must be text, got None"),
        ({"prompt": "a" * 20_001}, "20,001 characters; at most 20,000"),
        ({"prompt": "a\x00b"}, r"control character '\\x00' at character 2"),
        ({"prompt": "a\x1b[31m"}, "control character"),
        ({"prompt": "a\ud800"}, "no character"),
        ({"negative_prompt": "a\x07"}, "negative prompt contains the control"),
        ({"negative_prompt": 3}, "negative prompt must be text"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 2**63 - 1, "images": 2}, "leaves no seeds"),
        ({"seed": float("nan")}, "seed must be a whole number"),
        ({"steps": 0}, "steps must be a whole number from 1 to 100, got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": float("nan")}, "steps must be a whole number"),
        ({"steps": "20"}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({"images": 9}, "images must be a whole number"),
        ({"images": 10**400}, "images must be a whole number"),
        ({"guidance_scale": float("nan")}, "guidance scale must be a number from 0 to 30, got nan"),
        ({"guidance_scale": 31}, "guidance scale"),
        ({"guidance_scale": None}, "guidance scale"),
        ({"height": 100}, "height must be a multiple of 8 pixels.*got 100"),
        ({"width": 8}, "width must be a multiple of 8 pixels, at least 16"),
        ({"width": float("nan")}, "width must be"),
        ({"height": 10**400}, "height must be"),
        ({"height": 96, "width": 96}, "96 x 96 are 9,216 pixels; at most 8,192"),
        ({"encoders": ()}, "No encoder is chosen"),
        ({"encoders": "original"}, "No encoder is chosen"),
        ({"encoders": ("orignal",)}, "no encoder 'orignal'. Did you mean original"),
        ({"encoders": (3,)}, "no encoder 3"),
        ({"encoders": ("long", "long")}, "named twice"),
        ({"scheduler": "euler"}, "no scheduler 'euler'. Did you mean Euler"),
        ({"scheduler": None}, "no scheduler None"),
        ({"long_prompts": "all"}, "Choose one of: auto, chunks, separate, cut"),
        ({"weighting": "yes"}, "weighting must be true or false"),
        ({"weighting": True, "prompt": "a (red"}, r"bracket '\(' of the prompt is never closed"),
        ({"weighting": True, "prompt": "a red) cat"}, r"bracket '\)' of the prompt at character 6 has no opening one"),
        ({"weighting": True, "prompt": "a (red] cat"}, "has no opening one"),
        ({"weighting": True, "negative_prompt": "[a"}, "negative prompt is never closed"),
        ({"weighting": True, "prompt": "(" * 9999 + "a" + ")" * 9999}, "more than 20 nested brackets"),
        ({"weighting": True, "prompt": f"(a:{'9' * 400})"}, "cannot be read"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        check(ask(tiny, **changes), tiny)
    with pytest.raises(UserError, match=message):
        next(draw(tiny, ask(tiny, **changes), NEVER))


def test_the_toys_size_is_fixed(toy):
    with pytest.raises(UserError, match="height of toy/sdxl is 48 pixels and cannot change, got 64"):
        check(ask(toy, height=64), toy)


def test_what_can_be_drawn_is_taken_with_whole_numbers(tiny):
    given_ = ask(tiny, steps=4.0, seed=7.0, images=1.0, height=128.0, width=64, encoders=["long"], guidance_scale=3)
    checked = check(given_, tiny)
    assert checked == ask(tiny, steps=4, seed=7, height=128, width=64, encoders=("long",), guidance_scale=3.0)
    assert all(type(number) is int for number in (checked.steps, checked.seed, checked.images, checked.height))
    for text in ("a (b) [c] ((d:1.2)) \\( :\\) BREAK e++", "one \\( and \\]", "tab\there\nand there\r\n"):
        check(ask(tiny, weighting=True, prompt=text), tiny)
    check(ask(tiny, prompt=":) and (a"), tiny)  # without weighting brackets are text
    assert json.loads(json.dumps(vars(checked)))["encoders"] == ["long"]


# Pictures that are given back

printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)
layouts = PromptLayout(5, 77, (1, 1))


@st.composite
def requests(draw_, models: DemoModels):
    return replace(
        models.defaults,
        prompt=draw_(printable.filter(clean)) + draw_(st.sampled_from(["", "\n", "\t", '"\\'])) + "end",
        negative_prompt=draw_(printable),
        encoders=tuple(draw_(st.lists(st.sampled_from(models.labels), min_size=1, unique=True))),
        seed=draw_(st.integers(0, 2**63 - 9)),
        steps=draw_(st.integers(1, 100)),
        guidance_scale=draw_(st.floats(0, 30)),
        height=draw_(st.integers(2, 8)) * 8,
        width=draw_(st.integers(2, 8)) * 8,
        images=draw_(st.integers(1, 8)),
        scheduler=draw_(st.sampled_from(models.schedulers)),
        long_prompts=draw_(st.sampled_from(["auto", "chunks", "separate", "cut"])),
    )


@given(st.data())
@settings(max_examples=50)
def test_a_png_gives_back_what_was_asked(tiny, data):
    request = check(data.draw(requests(tiny)), tiny)
    label = data.draw(st.sampled_from(request.encoders))
    picture = data.draw(st.integers(1, request.images))
    written = settings_of(tiny, request, label, picture, layouts)
    file = as_png(Image.new("RGB", (8, 8)), written, "EulerDiscreteScheduler")
    assert request_of_png(file, tiny) == (request, [])
    assert Image.open(BytesIO(file)).info["parameters"] == parameters(written, "EulerDiscreteScheduler")


def test_the_longest_prompts_fit_into_a_png(tiny):
    request = ask(tiny, prompt="😀" * 20_000, negative_prompt="😀" * 20_000)
    written = settings_of(tiny, request, "original", 1, layouts)
    assert request_of_png(as_png(Image.new("RGB", (8, 8)), written, "DDIMScheduler"), tiny) == (request, [])


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes, size: tuple[int, int] = (1, 1)) -> bytes:
    """A PNG made by hand."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(b"\0" * 4)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + end


def saying(text: str) -> bytes:
    return png_with(chunk(b"tEXt", b"settings\0" + text.encode()))


def saved_as(kind: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, format=kind)
    return file.getvalue()


def settings_with(**changes) -> bytes:
    return saying(json.dumps({"prompt": "a cat", "encoder": "long", "base": "base"} | changes))


def test_the_least_that_a_png_can_say(tiny):
    request, notes = request_of_png(settings_with(), tiny)
    assert request == replace(tiny.defaults, prompt="a cat", encoders=("long",), long_prompts="chunks") and not notes


@pytest.mark.parametrize(
    "file, message",
    [
        (b"", "cannot be read as a PNG"),
        (b"GIF89a" + bytes(50), "cannot be read as a PNG"),
        (saved_as("JPEG"), "cannot be read as a PNG"),
        (saved_as("TIFF"), "cannot be read as a PNG"),
        (png_with()[:20], "cannot be read as a PNG"),
        (b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"tEXt", "cannot be read as a PNG"),
        (png_with(), "contains no settings"),
        (png_with(chunk(b"tEXt", b"other\0{}")), "contains no settings"),
        (saying("no JSON"), "not JSON"),
        (saying("[" * 10_000 + "]" * 10_000), "not JSON"),
        (saying('{"prompt":' * 10_000), "not JSON"),
        (saying('{"prompt": "a", "steps": NaN}'), "NaN is not a number"),
        (saying('{"prompt": "a", "steps": -Infinity}'), "Infinity is not a number"),
        (saying('{"prompt": "a", "guidance_scale": 1e999}'), "guidance scale must be a number"),
        (saying('{"prompt": "a", "steps": 1' + "0" * 5000 + "}"), "not JSON"),
        (saying("[]"), r"settings are \[\]"),
        (saying("7"), "settings are 7"),
        (saying("{}"), "have no prompt"),
        (saying(" " * 2**20), "1,048,576 characters; 524,288 are read"),
        (
            png_with(chunk(b"zTXt", b"settings\0\0" + zlib.compress(b" " * 2**26))),
            "cannot be read|contains no settings",
        ),
        (png_with(chunk(b"iTXt", b"settings\0\1\0\0\0" + zlib.compress(b" " * 2**26))), "cannot be read|contains no"),
        (png_with(size=(60_000, 60_000)), "cannot be read as a PNG"),
        (b"\0" * (MOST_PNG + 1), "bytes; at most"),
        (settings_with(prompt=7), "prompt must be text"),
        (settings_with(prompt="a\0"), "control character"),
        (settings_with(negative_prompt=["a"]), "negative prompt must be text"),
        (settings_with(steps="many"), "steps must be"),
        (settings_with(steps=[[[[[[]]]]]]), "steps must be"),
        (settings_with(steps=10**6), "steps must be"),
        (settings_with(seed=0, picture=3), "seed must be"),
        (settings_with(seed=7, picture="x"), "picture must be"),
        (settings_with(encoders={}), "No encoder"),
        (settings_with(encoders=[["long"]]), "no encoder"),
        (settings_with(encoder=7), "no encoder 7"),
    ],
)
def test_hostile_files_are_refused_with_a_word(tiny, file, message, tmp_path):
    path = tmp_path / "file.png"
    path.write_bytes(file)
    for given_ in (file, str(path)):
        with pytest.raises(UserError, match=message) as caught:
            request_of_png(given_, tiny)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("depth", [10, 500, 900, 990])
def test_deep_values_are_shown_shortly(tiny, depth):
    with pytest.raises(UserError) as caught:
        request_of_png(saying('{"prompt": ' + "[" * depth + "]" * depth + "}"), tiny)
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=100)
def test_broken_files_raise_nothing_else(tiny, noise, at):
    file = settings_with()
    broken = file[:at] + noise + file[at + len(noise) :]
    try:
        request, _ = request_of_png(broken, tiny)
    except UserError as error:
        assert 0 < len(str(error)) < 600
    else:
        assert check(request, tiny) == request  # what is taken can be drawn


def test_the_picture_itself_is_never_decoded(tiny):
    text = chunk(b"tEXt", b'settings\0{"prompt": "a cat"}')
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + header + text + chunk(b"IDAT", b"no pixels at all")
    with pytest.raises(OSError):
        Image.open(BytesIO(file)).load()
    assert request_of_png(file, tiny)[0].prompt == "a cat"


def test_what_is_not_here_is_left_out_with_a_word(toy, tiny):
    encoders, unused = ["/home/me/long", "gone"], {"prompt_2": "a dog", "chunks": [1, 3]}
    request, notes = request_of_png(settings_with(encoders=encoders, base="other", scheduler="PLMS", **unused), tiny)
    assert request.encoders == ("long",) and request.scheduler == "Euler" and request.long_prompts == "separate"
    assert len(notes) == 4
    for note, words in zip(
        notes, ("SDXL checkpoint 'other'", "encoder 'gone'", "scheduler 'PLMS'", "prompt_2"), strict=True
    ):
        assert words in note
    request, notes = request_of_png(settings_with(chunks=[1, 3], overlap=True), tiny)
    assert request.long_prompts == "chunks" and not notes
    request, notes = request_of_png(settings_with(height=1024, width=768), toy)
    assert request.encoders == tuple(TOYS) and (request.height, request.width) == (48, 48) and len(notes) == 3


def scene_png(toy: DemoModels, **changes) -> bytes:
    """A PNG as the page writes it for the scene: its reference image, so that everything is right."""
    request = check(ask(toy, scene=3, **changes), toy)
    return as_png(SCENE.original, settings_of(toy, request, "toy/clip", 1, layouts), "EulerDiscreteScheduler")


def test_a_scenes_png_brings_its_marks_back(toy, tiny):
    (drawn,) = pictures(toy, encoders=("toy/clip",), steps=1, scene=3)
    assert drawn.png != pictures(toy, encoders=("toy/clip",), steps=1)[0].png
    request, notes = request_of_png(drawn.png, toy)
    assert request == ask(toy, encoders=("toy/clip",), steps=1, scene=3) and not notes
    again = image_of_png(drawn.png, request, toy)
    assert mark(SCENE, again.image) == mark(SCENE, drawn.image) != mark(SCENE, SCENE.original)
    assert (again.label, again.seed, again.read, again.png) == (drawn.label, drawn.seed, drawn.read, drawn.png)
    # Of other images there is nothing to mark.
    other = pictures(toy, encoders=("toy/clip",), steps=1)[0].png
    assert image_of_png(other, request_of_png(other, toy)[0], toy) is None
    request, _ = request_of_png(drawn.png, tiny)
    assert request.scene is None and image_of_png(drawn.png, request, tiny) is None


@pytest.mark.parametrize("scene", [4, -1, 2**31, 1.5, "3", [3], True])
def test_a_prompt_is_its_scenes_caption(toy, scene):
    with pytest.raises(UserError, match="scene"):
        check(ask(toy, scene=scene), toy)


def test_hostile_images_of_scenes_are_refused(toy):
    whole = scene_png(toy)
    request, _ = request_of_png(whole, toy)
    assert all(item.correct for item in mark(SCENE, image_of_png(whole, request, toy).image).objects)
    text = whole[whole.index(b"tEXt") - 4 : whole.index(b"IDAT") - 4]
    with pytest.raises(UserError, match="image cannot be read"):
        image_of_png(png_with(text, size=(48, 48)), request, toy)  # almost all of its pixels are missing
    assert image_of_png(png_with(text, size=(8000, 8000)), request, toy) is None  # without decoding it


# Tokens

_ODD = "( a )|=|ﬁ|ÃƒÂ©|&#46;|İ|ß|...|A red cat.|The dog sat!| |\n\n|e.g. this|No. 5|😀|&amp;|“So?” he said."
_ODD += "|a red collar.The grass|猫。犬"
pieces = st.lists(
    st.sampled_from([*_ODD.split("|"), "e\u0301", "\u0338", "\u00c2 ", "x" * 30])
    | st.just("<|endoftext|>")
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=12,
)


@pytest.mark.parametrize("weighting", [False, True])
@given(parts=pieces)
@example(parts=["", "[", "["])
@settings(max_examples=150)
def test_tokens_are_the_cleaned_prompt_and_sentences_are_contiguous(tiny, parts, weighting):
    prompt = " ".join(parts) if len(parts) % 2 else "".join(parts)
    prompt_tokens = tokens(tiny, prompt, weighting)
    text = "".join(token.text for token in prompt_tokens.tokens)
    tokenizer = tiny.encoders["original"].tokenizer
    without_weights = unweighted(prompt, weighting)
    assert text == (without_weights if without_weights.strip() else "")  # white space alone has no tokens
    assert weighting or text == clean(prompt)
    assert prompt_tokens.count == len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    sentences = [token.sentence for token in prompt_tokens.tokens]
    assert sentences == sorted(sentences)
    assert not sentences or (sentences[0] == 1 and sentences[-1] <= prompt_tokens.sentences)


def texts_by_sentence(models: DemoModels, prompt: str) -> list[str]:
    prompt_tokens = tokens(models, prompt)
    texts = dict.fromkeys(range(1, prompt_tokens.sentences + 1), "")
    for token in prompt_tokens.tokens:
        texts[token.sentence] += token.text
    return [text.strip() for text in texts.values()]


@pytest.mark.parametrize(
    "prompt",
    [
        *(random_scene(index).caption.replace("  ", "\n") for index in range(2)),
        # In lower case "st. the" and "wide. iPhone" would be other sentences.
        "He lives on 5th St. The house is red.  &quot;So?&quot; A CAT. A\ndog sat at 8 p.m. EST.",
    ],
)
def test_every_token_is_in_its_sentence(toy, tiny, prompt):
    expected = [clean(sentence) for sentence in split_sentences(prompt)]
    assert texts_by_sentence(toy, prompt) == texts_by_sentence(tiny, prompt) == expected


def test_what_is_mended_across_sentences_has_those_of_the_cleaned_text(tiny):
    prompt = "A red cat. \u00c2 =e\u0301. The dog sat down. A"  # as a whole, the broken space stays
    sentences = split_sentences(clean(prompt))
    assert "".join(map(clean, split_sentences(prompt))).replace(" ", "") != clean(prompt).replace(" ", "")
    assert texts_by_sentence(tiny, prompt) == sentences and len(sentences) > 1


def read_by(models: DemoModels, prompt: str, **how) -> list[str]:
    return [token.read_by for token in tokens(models, prompt, **how).tokens]


def test_colours_follow_the_encoders_and_how_they_read(toy):
    prompt = " ".join(["red"] * 300)
    assert read_by(toy, prompt) == ["all"] * 75 + ["some"] * 225
    assert read_by(toy, prompt, labels=["toy/clip"]) == ["all"] * 75 + ["none"] * 225
    assert read_by(toy, prompt, labels=TOYS[1:]) == ["all"] * 300
    for long_prompts in ("chunks", "separate"):
        assert read_by(toy, prompt, long_prompts=long_prompts) == ["all"] * 300
    assert read_by(toy, prompt, long_prompts="cut") == ["all"] * 75 + ["none"] * 225
    for how, message in (({"labels": []}, "No encoder"), ({"long_prompts": "all"}, "Choose one of")):
        with pytest.raises(UserError, match=message):
            tokens(toy, prompt, **how)


@pytest.mark.parametrize("long_prompts", ["auto", "chunks", "separate", "cut"])
@pytest.mark.parametrize(
    "prompt, weighting",
    [(PROMPT, False), (f"{PROMPT} {PROMPT} {PROMPT}", False), (f"A (red:1.3) ring BREAK {PROMPT} [cross]", True)],
)
def test_readings_are_those_of_the_drawing(toy, long_prompts, prompt, weighting):
    """By the ids that the first encoder gets while its pipeline encodes the prompt."""
    readings = tokens(toy, prompt, weighting, long_prompts=long_prompts).readings
    request = ask(toy, prompt=prompt, weighting=weighting, long_prompts=long_prompts)
    for label, reading in readings.items():
        encoder, rows = toy.encoders[label], []
        hook = encoder.model.register_forward_pre_hook(lambda _, given, rows=rows: rows.extend(given[0].tolist()))
        try:
            toy.pipeline(label, request).encode_prompt(cleaned(prompt, weighting), do_classifier_free_guidance=False)
        finally:
            hook.remove()
        ids = encoder.tokenizer(unweighted(prompt, weighting), add_special_tokens=False, verbose=False)["input_ids"]
        eos, sot = encoder.tokenizer.eos_token_id, encoder.tokenizer.bos_token_id
        read = [row[1 : row.index(eos)] for row in rows if row[0] == sot]
        expected = [ids[chunk.first : chunk.end] for chunk in reading.chunks]
        assert read[: len(expected)] == expected and not any(read[len(expected) :])  # an empty chunk may follow
        assert reading.tokens == len(ids) and reading.read == reading.chunks[-1].end
        assert [chunk.new for chunk in reading.chunks] == [0, *(chunk.end for chunk in reading.chunks[:-1])]


def test_counts_are_those_of_the_pipeline(toy):
    for prompt, weighting in ((PROMPT, False), ("a (red:1.3) [circle] BREAK A ((ring))", True), ("a (red", False)):
        pipe = toy.pipeline("toy/debias-clip", ask(toy, weighting=weighting))
        assert tokens(toy, prompt, weighting).count == pipe.prompt_layout(cleaned(prompt, weighting)).tokens


def test_tokens_of_what_is_being_typed(toy):
    assert tokens(toy, "").tokens == () and tokens(toy, "  \n").count == 0
    assert tokens(toy, "a (red", True).count == 2 and tokens(toy, "a red])", True).count == 4
    for prompt, message in (("(a" * 6000, "more than 20 nested brackets"), (f"(a:{'9' * 400})", "cannot be read")):
        with pytest.raises(UserError, match=message):
            tokens(toy, prompt, True)
    with pytest.raises(UserError, match="at most 20,000"):
        tokens(toy, "a" * 20_001)


def test_tokens_are_counted_while_others_draw(toy):
    drawing = draw(toy, ask(toy, steps=3), NEVER)
    counts = [tokens(toy, PROMPT).count for item in drawing for _ in range(3)]
    assert set(counts) == {93} and len(counts) > 20


# Attention and movement


def test_attention_is_that_of_the_evaluation(toy):
    shares = attention(toy, PROMPT, ["toy/debias-clip", "toy/clip"])
    assert list(shares) == ["toy/debias-clip", "toy/clip"]
    for label, share in shares.items():
        expected = look_at_prompt(load_reader(label, CPU), PROMPT)
        (chunk,) = share["chunks"]
        assert {name: chunk[name] for name in ("sot", "eot", "words")} == {
            name: expected[name] for name in ("sot", "eot", "words")
        }
        assert share["tokens"] == 93 and share["read"] == chunk["end"] == min(93, expected["window"] - 2)
    with pytest.raises(UserError, match="empty"):
        attention(toy, " ", TOYS)
    with pytest.raises(UserError, match="no encoder"):
        attention(toy, PROMPT, ["toy/sdxl"])
    with pytest.raises(UserError, match="holds no words"):
        attention(toy, "(:1.3)", TOYS, weighting=True)


def test_attention_and_movement_follow_the_chunks(toy):
    sentences = split_sentences(PROMPT)
    label, reader = "toy/clip", load_reader("toy/clip", CPU)
    moved = {}
    for long_prompts in ("chunks", "separate", "cut"):
        share = attention(toy, PROMPT, [label], long_prompts=long_prompts)[label]
        moved[long_prompts] = [row.distance[label] for row in movement(toy, PROMPT, [label], long_prompts=long_prompts)]
        if long_prompts == "cut":
            assert share["read"] == 75 and len(share["chunks"]) == 1
            continue
        chunks = tokens(toy, PROMPT, labels=[label], long_prompts=long_prompts).readings[label].chunks
        assert share["read"] == 93 and len(chunks) == 2
        overlaps = [chunk["first"] < chunk["new"] for chunk in share["chunks"]]
        assert overlaps == [False, long_prompts == "chunks"]
        for chunk, place in zip(share["chunks"], chunks, strict=True):
            words = chunk["words"]
            assert words[0]["position"] == place.first + 1
            assert words[-1]["position"] + words[-1]["tokens"] == place.end + 1
            text = " ".join(word["word"] for word in words)
            expected = look_at_prompt(reader, text)
            assert [word["after_softmax"] for word in words] == pytest.approx(
                [word["after_softmax"] for word in expected["words"]], abs=1e-6
            )
    # The last sentence is read in chunks alone.
    assert moved["cut"][-1] == 0.0 and moved["chunks"][-1] > 1e-4 and moved["separate"][-1] > 1e-4
    assert moved["chunks"] != moved["separate"] and len(moved["cut"]) == len(sentences) + 1
    long = movement(toy, PROMPT, ["toy/long-clip"], long_prompts="cut")
    assert long[-1].distance["toy/long-clip"] == 0.0


def test_movement_of_chunks_is_that_of_the_mean_of_their_embeddings(toy):
    sentences = split_sentences(PROMPT)
    encoder = toy.encoders["toy/clip"]

    def mean(parts: list[str]) -> torch.Tensor:
        prompt = " ".join(parts)
        ids = encoder.tokenizer(clean(prompt), add_special_tokens=False)["input_ids"]
        chunks = tokens(toy, prompt, labels=["toy/clip"], long_prompts="chunks").readings["toy/clip"].chunks
        bos, eos = encoder.tokenizer.bos_token_id, encoder.tokenizer.eos_token_id
        with torch.no_grad():
            rows = [torch.tensor([[bos, *ids[chunk.first : chunk.end], eos]]) for chunk in chunks]
            parts = [encoder.model(row).pooler_output[0].double() for row in rows]
        return sum(part / part.norm() for part in parts) / len(parts)

    whole = mean(sentences)
    for number, row in enumerate(movement(toy, PROMPT, ["toy/clip"], long_prompts="chunks")[1:]):
        edited = mean(sentences[:number] + sentences[number + 1 :])
        expected = 1 - float(whole @ edited / whole.norm() / edited.norm())
        assert row.distance["toy/clip"] == pytest.approx(expected, abs=2e-6)


def test_weights_are_no_text_for_attention_and_movement(toy):
    plain, weighted = "A red ring. A blue star.", "A (red:1.3) ring. A [blue] star."
    for look in (attention, movement):
        assert look(toy, weighted, TOYS, weighting=True) == look(toy, plain, TOYS) != look(toy, weighted, TOYS)


def test_reading_uses_the_models_that_draw(toy):
    for encoder in toy.encoders.values():
        assert encoder.reader().encoder is encoder.model


def embedding(models: DemoModels, label: str, sentences: list[str]) -> torch.Tensor:
    """One text, without pads, by the encoder itself."""
    encoder = models.encoders[label]
    ids = encoder.tokenizer(clean(" ".join(sentences)), truncation=True, max_length=encoder.context_length)["input_ids"]
    with torch.no_grad():
        return encoder.model(torch.tensor([ids])).pooler_output[0].double()


def test_movement_is_how_far_the_encoder_itself_moves(toy):
    rows = movement(toy, PROMPT, TOYS)
    sentences = split_sentences(PROMPT)
    swapped = [sentences[3], *sentences[1:3], sentences[0], *sentences[4:]]
    edits = [swapped] + [sentences[:k] + sentences[k + 1 :] for k in range(len(sentences))]
    assert [row.edit for row in rows] == ["sentences 1 and 4 swapped"] + [
        f"sentence {k + 1} removed" for k in range(len(sentences))
    ]
    assert [row.text for row in rows[1:]] == sentences
    for row, edited in zip(rows, edits, strict=True):
        for label in TOYS:
            a, b = embedding(toy, label, sentences), embedding(toy, label, edited)
            expected = 1 - float(a @ b / a.norm() / b.norm())
            assert row.distance[label] == pytest.approx(expected, abs=2e-6)
    # what an encoder does not read does not move it
    assert rows[-1].distance["toy/clip"] == 0.0 and rows[-1].distance["toy/long-clip"] > 1e-4


def test_movement_of_few_and_many_sentences(toy):
    rows = movement(toy, "A red cat. A blue ring.", ["toy/clip"])
    assert [row.edit for row in rows] == ["sentences 1 and 2 swapped", "sentence 1 removed", "sentence 2 removed"]
    many = movement(toy, "A red ring stands. " * 60, ["toy/clip"])
    assert len(many) == 41 and all(row.distance["toy/clip"] == 0.0 for row in many)  # whichever is gone
    with pytest.raises(UserError, match="one sentence"):
        movement(toy, "A red cat.", ["toy/clip"])
    with pytest.raises(UserError, match="empty"):
        movement(toy, "", ["toy/clip"])


def test_movement_takes_the_projected_feature_where_there_is_one(folders, tmp_path):
    config = deepcopy(text_encoder().config)
    config.projection_dim = 16
    torch.manual_seed(3)
    projected = CLIPTextModelWithProjection(config).eval()
    projected.save_pretrained(tmp_path / "projected")
    tiny_tokenizer(77).save_pretrained(tmp_path / "projected")
    models = DemoModels(folders["base"], [str(tmp_path / "projected")], CPU)
    encoder = models.encoders["projected"]
    assert isinstance(encoder.model, CLIPTextModelWithProjection)
    rows = movement(models, "A red cat. A blue ring.", ["projected"])
    features = [
        encoder.model(torch.tensor([encoder.tokenizer(clean(text))["input_ids"]])).text_embeds[0]
        for text in ("A red cat. A blue ring.", "A blue ring.")
    ]
    expected = 1 - torch.cosine_similarity(*features, dim=0).item()
    assert rows[1].distance["projected"] == pytest.approx(expected, abs=1e-5)
    assert pictures(models, steps=1)


# Scenes


def test_scenes_are_what_their_captions_say():
    for seed in range(20):
        toy_scene = random_scene(seed)
        sentences = split_sentences(toy_scene.caption)
        assert 9 <= len(sentences) <= 14 and toy_scene.original.size == (48, 48)
        assert len(toy_scene.objects) == len(toy_scene.scene.things) >= 4
        for (text, number), thing in zip(toy_scene.objects, toy_scene.scene.things, strict=True):
            assert text == f"{thing.size} {thing.colour} {thing.kind}, {thing.place}"
            mentions = [k for k, s in enumerate(sentences, 1) if thing.place in s and thing.kind in s]
            assert number in mentions
        everything = tuple(ObjectMark(name, True) for name, _ in toy_scene.objects)
        assert mark(toy_scene, toy_scene.original) == Marks(everything)
    assert random_scene(4) == random_scene(4) and random_scene(4).caption != random_scene(5).caption


def test_marks_say_what_is_missing_what_is_beside_it_and_what_is_wrong():
    asked = (Thing("star", "red", "small", "top"), Thing("ring", "blue", "large", "left"))
    shown = (
        replace(asked[0], size="large"),
        replace(asked[1], colour="pink"),
        Thing("cross", "green", "small", "right"),
    )
    image = render(Scene("black", shown))
    noise = np.random.default_rng(0).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    image.paste(Image.fromarray(noise), (33, 33))  # within the bottom right
    toy_scene = replace(SCENE, scene=Scene("pale blue", asked))
    assert mark(toy_scene, image) == Marks(
        (ObjectMark("small red star, top", True, "large"), ObjectMark("large blue ring, left", False)),
        ("small green cross, right", "something unclear, bottom right"),
        "pale blue",
    )
    assert mark(toy_scene, image.resize((96, 96), Image.Resampling.NEAREST)) == mark(toy_scene, image)


@pytest.mark.parametrize("seed", [-1, 1.0, None, True, "3"])
def test_scenes_have_whole_numbers(seed):
    with pytest.raises(UserError, match="whole number from 0"):
        random_scene(seed)


# Budget


def test_a_request_within_the_budget_is_drawn(toy):
    check_budget(toy, replace(toy.defaults, prompt=PROMPT), 60)
    check_budget(toy, replace(toy.defaults, prompt=PROMPT, steps=30, images=8), BUDGET)


@pytest.mark.parametrize(
    "changes, steps",
    [
        ({"steps": 100, "images": 8}, 2400),
        ({"prompt": "a red ring. " * 1600, "steps": 20, "encoders": ("toy/debias-clip",)}, 20 * 53),
        ({"prompt": "a red ring. " * 1600, "steps": 20, "encoders": ("toy/debias-clip",), "long_prompts": "cut"}, 20),
        ({"prompt": "a BREAK " * 2000, "weighting": True, "steps": 20, "encoders": ("toy/debias-clip",)}, 20 * 600),
        ({"prompt": "a", "negative_prompt": "a red ring. " * 1600, "encoders": ("toy/debias-clip",)}, 20 * 53),
    ],
    ids=["steps", "prompt", "cut", "breaks", "negative"],
)
def test_a_request_beyond_the_budget_is_told_before_it_begins(toy, changes, steps):
    request = check(replace(toy.defaults, **{"prompt": PROMPT} | changes), toy)
    least = math.floor(steps * 0.7)
    with pytest.raises(UserError, match=f"takes [0-9,]+ steps .*one request may take {least - 1:,} here. Choose fewer"):
        check_budget(toy, request, least - 1)
    check_budget(toy, request, math.ceil(steps * 1.5))


def test_larger_images_take_more_of_the_budget(tiny):
    request = check(ask(tiny, prompt="a red ring", steps=10, height=128, width=64, encoders=("original",)), tiny)
    check_budget(tiny, request, 20)
    with pytest.raises(UserError, match="takes 20 steps .10 steps x 1 images x 1 encoders x 2.0 for the size"):
        check_budget(tiny, request, 19)


def test_windows_is_the_old_name_of_chunks(tiny):
    old, new = (ask(tiny, long_prompts=name) for name in ("windows", "chunks"))
    with pytest.warns(FutureWarning, match='"windows" is now "chunks"'):
        assert check(old, tiny) == check(new, tiny)
    assert request_of_png(settings_with(long_prompts="windows"), tiny)[0].long_prompts == "chunks"
