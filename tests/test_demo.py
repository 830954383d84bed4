"""The demo without its page: images equal those of `generate`, whatever was generated before or failed."""

import html
import json
import shutil
from copy import copy
from dataclasses import asdict, replace
from itertools import product
from unittest.mock import Mock

import gradio as gr
import numpy as np
import pytest
import torch
from helpers.tiny_sdxl import POSITIONS, stretched, text_encoder, text_encoder_2
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion import parse_prompt
from debias_diffusion.app.demo.launch import PASSWORD, AppConfig, is_of_other_site, open_app
from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.page import SETTINGS, _Endpoints
from debias_diffusion.app.demo.reading import attention, count_tokens
from debias_diffusion.app.demo.rendering import RenderedImage, render_request
from debias_diffusion.app.demo.request import Request, check, check_texts, demo_scene, from_image
from debias_diffusion.app.generate import generate
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.encoders.spec import READINGS, EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import load_caption_reader, look_at_prompt
from debias_diffusion.eval.judge import ToyJudge
from debias_diffusion.pipelines import LongPromptOptions
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.pipelines.rendering.prompts import cleaned
from debias_diffusion.text.tokens import clean

CPU = torch.device("cpu")
TOYS = ["toy/clip", "toy/long-clip", "toy/debias-clip"]
PROMPT = demo_scene(3)[1].text  # of 93 tokens in 9 sentences


@pytest.fixture(scope="module")
def toy() -> DemoModels:
    return DemoModels("toy/sdxl", TOYS, CPU)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sdxl_folder) -> dict[str, str]:
    """A base, and an encoder for it of 248 positions."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "base").symlink_to(sdxl_folder)
    stretched(text_encoder(seed=5), 248).save_pretrained(root / "long")
    tiny_tokenizer(248).save_pretrained(root / "long")
    return {name: str(root / name) for name in ("base", "long")}


@pytest.fixture(scope="module")
def tiny(folders) -> DemoModels:
    return DemoModels(folders["base"], ["original", folders["long"]], CPU)


def ask(models: DemoModels, **changes) -> Request:
    return replace(Request.default(models), **{"prompt": PROMPT, "steps": 2} | changes)


def images(models: DemoModels, **changes) -> list[RenderedImage]:
    return [item for item in render_request(models, ask(models, **changes)) if isinstance(item, RenderedImage)]


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(np.asarray(a.convert("RGB")), np.asarray(b.convert("RGB")))


def test_encoders_share_all_other_models(toy, tiny):
    for name in ("unet", "vae", "text_encoder_2", "text_encoder"):
        parts = {id(getattr(pipe, name)) for pipe in toy.encoders.values()}
        assert len(parts) == (3 if name == "text_encoder" else 1)
    assert toy.labels == TOYS and toy.is_toy and toy.size == (48, 48)
    assert (Request.default(toy).steps, Request.default(toy).guidance_scale) == (20, 3.0)
    parts = {id(part): part for pipe in tiny.encoders.values() for part in pipe.components.values()}
    assert tiny.weights == sum(part.num_parameters() * 4 for part in parts.values() if hasattr(part, "num_parameters"))
    assert tiny.labels == ["original", "long"] and not tiny.is_toy and tiny.size == (64, 64) and tiny.base == "base"


def test_names_say_how_an_encoder_reads(toy):
    models = DemoModels("toy/sdxl", ["toy/clip", "separate:toy/clip", "cut:toy/clip"], CPU)
    assert models.labels == ["toy/clip", "toy/clip, separate chunks", "toy/clip, cut at 77 tokens"]
    titles = ["SDXL, whole prompt (with_long_prompts)", "SDXL, separate chunks", "SDXL as it is (cut at 77)"]
    assert [models.title("toy/clip", reading) for reading in ("overlap", "separate", "cut")] == titles
    assert len({id(pipe.text_encoder) for pipe in models.encoders.values()}) == 1  # loaded once
    (chosen,) = images(toy, encoders=["toy/clip"], reading="separate")
    (by_name,) = images(models, encoders=[models.labels[1]])
    assert same(chosen.image, by_name.image) and chosen.read == by_name.read


@pytest.mark.parametrize(
    "encoder, changes",
    [
        ("toy/clip", {"reading": "separate", "sharpen": 1.5, "scheduler": "UniPC",
                      "karras": True, "clip_skip": 3}),
        ("toy/clip", {"prompt": f'😀 "A" \\ &lt; B and\ttabs\n{PROMPT}', "seed": 2**63 - 9, "reading": "cut"}),
        ("toy/debias-clip", {"guidance_scale": 1.0, "prompt": "a red ring", "negative_prompt": f"Not: {PROMPT}"}),
        ("toy/long-clip", {"negative_prompt": "A Red", "emphasis": "no_norm", "prompt": "A (Red star:2) BREAK [ring]"}),
    ],
)  # fmt: skip
def test_images_are_those_of_generate(toy, tmp_path, encoder, changes):
    (rendered,) = images(toy, encoders=[encoder], **changes)
    request = ask(toy, encoders=[encoder], **changes)
    names = ("prompt", "seed", "steps", "guidance_scale", "emphasis", "reading", "sharpen")
    names += ("karras", "clip_skip")
    options = {name: getattr(request, name) for name in names} | {"negative_prompt": request.negative_prompt or None}
    options["scheduler"] = toy.schedulers[request.scheduler]
    output = str(tmp_path / "image.png")
    path = generate(GenerateConfig(base="toy/sdxl", encoder=encoder, output=output, device="cpu", **options))
    saved = rendered.save(tmp_path)
    assert same(rendered.image, Image.open(path)) and same(rendered.image, Image.open(saved))
    assert read_settings(saved).items() >= read_settings(path).items()
    assert from_image(path, toy) == (request, [])


def test_an_alignment_renders_with_the_second_encoder_that_it_fitted(folders, tmp_path):
    fitted = shutil.copytree(folders["long"], tmp_path / "fitted")
    text_encoder_2(seed=7).save_pretrained(fitted / "encoder_2")
    tiny_tokenizer(POSITIONS).save_pretrained(fitted / "encoder_2")
    models = DemoModels(folders["base"], [str(fitted), folders["long"]], CPU)
    shown, options = images(models, steps=1), {"base": folders["base"], "steps": 1, "device": "cpu"}
    for rendered, encoder in zip(shown, (str(fitted), folders["long"]), strict=True):
        options |= {"encoder": encoder, "output": str(tmp_path / f"{rendered.label}.png")}
        assert same(rendered.image, Image.open(generate(GenerateConfig(PROMPT, **options))))
        assert from_image(rendered.save(tmp_path), models)[1] == []
    assert not same(shown[0].image, shown[1].image)


def test_steps_and_images_come_one_after_the_other(toy, tmp_path):
    request = ask(toy, encoders=["toy/clip", "toy/debias-clip"], images=2, seed=7)
    items = list(render_request(toy, request))
    order = list(product((1, 2), request.encoders))
    steps = [item for item in items if not isinstance(item, RenderedImage)]
    ends = [place for _, place in steps if "step 2" in place]
    assert ends == [f"{toy.title(label)}, image {number}, step 2 of 2" for number, label in order]
    shares = [share for share, _ in steps]
    assert (shares[0], shares[-1]) == (0, 1) and shares == sorted(shares)
    rendered = [item for item in items if isinstance(item, RenderedImage)]
    assert [(item.label, item.seed) for item in rendered] == [(label, 6 + number) for number, label in order]
    assert all(from_image(item.save(tmp_path), toy) == (request, []) for item in rendered)
    (again,) = images(toy, encoders=["toy/debias-clip"], seed=8)
    assert same(rendered[3].image, again.image) and not same(rendered[1].image, again.image)


def test_a_closed_request_ends_within_a_step_and_the_next_waits_for_it(toy):
    calls = []
    hook = toy.encoders["toy/clip"].unet.register_forward_hook(lambda *_: calls.append(1))
    try:
        items = render_request(toy, ask(toy, steps=50))
        next(item for item in items if "step 2 of" in item[1])
        items.close()
        taken = len(calls)
        with toy.held():
            assert len(calls) <= taken + 1 < 50
    finally:
        hook.remove()


def test_errors_reach_the_caller_and_free_the_device(folders, monkeypatch):
    """In half precision, where diffusers casts the autoencoder while it decodes."""
    models = DemoModels(folders["base"], ["original"], CPU, torch.float16)
    vae = models.encoders["original"].vae
    vae.register_to_config(force_upcast=True)
    (before,) = images(models, steps=1)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="of 3 GiB.*smaller"):
        patch.setattr(vae, "decode", Mock(side_effect=torch.OutOfMemoryError("of 3 GiB")))
        images(models, steps=1)
    assert vae.dtype == torch.float16
    assert same(images(models, steps=1)[0].image, before.image)


def test_what_cannot_be_generated_is_refused(tiny):
    for changes, message in (
        ({"prompt": ""}, "empty"),
        ({"images": 9}, "images is 9"),
        ({"encoders": ["long", "longer"]}, "'longer'.*: original, long"),
        ({"emphasis": "comfyui", "negative_prompt": f"(a:{'9' * 400})"}, "prompt cannot be read: the weight of"),
    ):
        with pytest.raises(UserError, match=message):
            next(render_request(tiny, ask(tiny, **changes)))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_null_is_a_default_or_refused_in_a_sentence(tiny, name):
    values = dict(zip(SETTINGS, ("a cat", ["long"], "", "1", 1, 1.0, 64, 64, 1, "Euler"), strict=False))
    values = values | {"emphasis": "", "reading": "cut", "sharpen": 1.0, "karras": False}
    progress, has_default = lambda *_: None, ("steps", "guidance_scale", "height", "width")
    asked = _Endpoints(tiny, 100).render(None, **values | {"clip_skip": 0, name: None}, progress=progress)
    if name in (*has_default, "emphasis", "karras", "clip_skip"):
        assert [shown for shown in asked if isinstance(shown, list)]
    else:
        with pytest.raises(gr.Error, match="None"):
            next(asked)


def test_a_request_beyond_the_budget_is_refused_before_it_begins(toy):
    request = ask(toy, steps=100, images=8)
    with pytest.raises(UserError, match="takes 2,400 steps"):
        next(render_request(toy, request, budget=2399))
    assert check(request, toy, budget=2400) == request


def test_what_is_not_here_is_left_out_and_noted(tiny, tmp_path):
    settings = {"prompt": "a cat", "encoder": "long", "encoders": ["/home/me/long", "gone"], "base": "other"}
    settings |= {"scheduler": "Euler a", "prompt_2": "a dog", "refiner": "r", "karras": True, "clip_skip": 2}
    (info := PngInfo()).add_text("settings", json.dumps(settings))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    request, notes = from_image(tmp_path / "a.png", tiny)
    assert (request.encoders, request.reading, request.clip_skip) == (["long"], "overlap", 2)
    assert (request.scheduler, request.karras) == ("Euler a", None)
    says = ("checkpoint 'other'", "encoder 'gone'", "prompt_2 is not", "refiner is not", "Euler a has no noise levels")
    assert [note for note in notes if not any(words in note for words in says)] == [] and len(notes) == len(says)
    (info := PngInfo()).add_text("settings", json.dumps(settings | {"scheduler": "PLMS"}))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    request, notes = from_image(tmp_path / "a.png", tiny)
    assert (request.scheduler, request.karras) == ("Euler", True) and "scheduler 'PLMS'" in " ".join(notes)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    "prompt, emphasis",
    [(f"{PROMPT} {PROMPT} {PROMPT}", None), (f"A red(ring:1.3)(star) BREAK 😀 {PROMPT} [cross]", "comfyui")],
)
def test_readings_are_those_of_the_images(toy, reading, prompt, emphasis):
    """By the ids that the first encoder gets while its pipeline encodes the prompt."""
    request = ask(toy, prompt=prompt, emphasis=emphasis, reading=reading)
    tokens, _, by_encoder = count_tokens(toy, request)
    weights = LongPromptOptions(emphasis=emphasis, reading=reading).weights
    text = clean(" ".join(run for part in parse_prompt(prompt, reading, weights) for run, _ in part.runs))
    assert clean("".join(token for token, _ in tokens)) == text
    for label, options in check_texts(request, toy).items():
        counted = by_encoder[label]
        pipe, rows = copy(toy.encoders[label]).set_long_prompt(**asdict(options)), []
        hook = pipe.text_encoder.register_forward_pre_hook(lambda _, given, rows=rows: rows.extend(given[0].tolist()))
        try:
            pipe.encode_prompt(cleaned(prompt, options), do_classifier_free_guidance=False)
        finally:
            hook.remove()
        read = [row[1 : row.index(pipe.tokenizer.eos_token_id)] for row in rows]
        expected = [[counted.ids[at] for at in chunk.read] for chunk in counted.chunks]
        assert counted.ids == pipe.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert read[: len(expected)] == expected and not any(read[len(expected) :])  # an empty chunk may follow


def test_what_is_not_read_stands_on_the_page(toy):
    """Beside how each encoder reads, once for all of them, and not as HTML."""
    prompt = "a (red:1.3) cat AND a <lora:x:1> dog"
    _, shown = _Endpoints(toy, 100).count(prompt, toy.labels, "", "overlap")
    assert "<lora" not in shown
    for words in ("'AND' does not join two prompts", "weights such as", "'<lora:x:1>' loads nothing"):
        assert html.unescape(shown).count(words) == 1


def test_attention_is_that_of_the_evaluation(toy):
    reader = load_caption_reader(EncoderSpec.parse("toy/clip"), CPU)
    for reading, chunks in (("cut", 1), ("overlap", 2)):
        share = attention(toy, ask(toy, encoders=["toy/clip"], reading=reading))["toy/clip"]
        assert len(share["chunks"]) == chunks
        for chunk in share["chunks"]:
            words = chunk["words"]
            assert words[0]["position"] == chunk["first"] + 1
            assert words[-1]["position"] + words[-1]["tokens"] == chunk["end"] + 1
            expected = look_at_prompt(reader, " ".join(word["word"] for word in words))
            values, reference = ([word["after_softmax"] for word in each["words"]] for each in (chunk, expected))
            assert values == pytest.approx(reference, abs=1e-6)
    with pytest.raises(UserError, match="holds no words"):
        attention(toy, ask(toy, prompt="(:1.3)", emphasis="comfyui"))


def test_a_judge_says_which_sentences_are_in_the_images(toy, tmp_path):
    prompt = "There is a lamp. The centre holds a ring that is large and red."
    shown = images(toy, encoders=toy.labels[::2], prompt=prompt)
    Image.new("RGB", (48, 48)).save(tmp_path / "reference.png")
    gallery = [(str(tmp_path / "reference.png"), "Reference image: a ring")]
    gallery += [(str(item.save(tmp_path)), f"{item.label}, seed 0: reads all") for item in shown]
    endpoints = _Endpoints(toy, 100, ToyJudge("toy/checker"))
    table = endpoints.judged(gallery)
    (p, q) = (f"{ToyJudge('toy/checker')(item.image, [prompt])[0]:.2f}" for item in shown)
    assert table.visible and table.headers[1:] == ["toy/clip, seed 0", "toy/debias-clip, seed 0"]
    ring_row = ["The centre holds a ring that is large and red.", p, q]
    assert table.value["data"] == [["There is a lamp.", "-", "-"], ring_row]
    assert not endpoints.judged(gallery[:1]).visible and not endpoints.judged(None).visible
    for given, message in (({"judge": "qwen"}, "needs a server"), ({"server": "http://s"}, "judge is None")):
        with pytest.raises(UserError, match=message):
            open_app(AppConfig(**given))


def test_a_user_needs_a_password(monkeypatch):
    for password in ("", None):
        monkeypatch.setenv(PASSWORD, password) if password is not None else monkeypatch.delenv(PASSWORD, raising=False)
        with pytest.raises(UserError, match="A user needs a password"):
            open_app(AppConfig(user="ann"))


SITE, MODE = "sec-fetch-site", "sec-fetch-mode"


@pytest.mark.parametrize(
    "method, sent, refused",
    [
        ("POST", {}, False),  # a program
        ("POST", {"origin": "http://127.0.0.1:7860", SITE: "same-origin"}, False),
        ("GET", {SITE: "cross-site", MODE: "navigate"}, False),  # a link
        ("GET", {SITE: "cross-site", MODE: "no-cors"}, True),  # an image
        ("POST", {SITE: "cross-site", MODE: "navigate"}, True),  # a form
        ("POST", {"origin": "https://elsewhere.example"}, True),
        ("GET", {"origin": "http://localhost.elsewhere.example"}, True),
        ("POST", {"origin": "null"}, True),
        ("", {"origin": "https://elsewhere.example"}, True),  # a web socket
    ],
)
def test_a_local_demo_knows_requests_of_other_sites(method, sent, refused):
    assert is_of_other_site(method, [(name.encode(), value.encode()) for name, value in sent.items()]) is refused
