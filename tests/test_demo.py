"""The demo without its page: images equal those of `generate`, whatever was generated before or failed."""

import json
import shutil
from copy import copy
from dataclasses import asdict, replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.tiny_sdxl import POSITIONS, stretched, text_encoder, text_encoder_2
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.app.demo.launch import AppConfig, is_of_other_site, open_app
from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.reading import attention, count_tokens, movement
from debias_diffusion.app.demo.rendering import RenderedImage, Step, render_request
from debias_diffusion.app.demo.request import Request, check, demo_scene, from_image, without_weights
from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig
from debias_diffusion.encoders.spec import READINGS, EncoderSpec
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import load_caption_reader, look_at_prompt
from debias_diffusion.pipelines import LongPromptOptions
from debias_diffusion.pipelines.rendering.png import read_settings
from debias_diffusion.pipelines.rendering.renderer import cleaned
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import clean

CPU = torch.device("cpu")
TOYS = ["toy/clip", "toy/long-clip", "toy/debias-clip"]
PROMPT = demo_scene(3)[1].text  # of 93 tokens in 9 sentences


@pytest.fixture(scope="module")
def toy() -> DemoModels:
    return DemoModels("toy/sdxl", TOYS, CPU)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sdxl_folder) -> dict[str, str]:
    """A base, and encoders for it of 77 positions, of 248, and of another width."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "base").symlink_to(sdxl_folder)
    short = text_encoder(seed=5)
    models = {"short": short, "long": stretched(short, 248), "wide": text_encoder(width=64)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        tiny_tokenizer(model.config.max_position_embeddings).save_pretrained(root / name)
    return {name: str(root / name) for name in ("base", *models)}


@pytest.fixture(scope="module")
def tiny(folders) -> DemoModels:
    return DemoModels(folders["base"], ["original", folders["long"]], CPU)


def ask(models: DemoModels, **changes) -> Request:
    return replace(Request.default(models), **{"prompt": PROMPT, "steps": 2} | changes)


def images(models: DemoModels, **changes) -> list[RenderedImage]:
    return [item for item in render_request(models, ask(models, **changes)) if isinstance(item, RenderedImage)]


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(np.asarray(a.convert("RGB")), np.asarray(b.convert("RGB")))


# ---- models


def test_encoders_share_all_other_models(toy, tiny):
    for name in ("unet", "vae", "text_encoder_2", "text_encoder"):
        parts = {id(getattr(pipe, name)) for pipe in toy.encoders.values()}
        assert len(parts) == (3 if name == "text_encoder" else 1)
    assert toy.labels == TOYS and toy.is_toy and toy.size == (48, 48)
    assert (Request.default(toy).steps, Request.default(toy).guidance_scale) == (20, 3.0)
    parts = {id(part): part for pipe in tiny.encoders.values() for part in pipe.components.values()}
    assert tiny.weights == sum(part.num_parameters() * 4 for part in parts.values() if hasattr(part, "num_parameters"))
    own = [part for part in tiny.encoders["original"].components.values() if hasattr(part, "num_parameters")]
    assert tiny.renderer.checkpoint.count_weights() == sum(part.num_parameters() for part in own)
    assert tiny.labels == ["original", "long"] and not tiny.is_toy and tiny.size == (64, 64) and tiny.base == "base"


def test_names_say_how_an_encoder_reads(toy, tmp_path):
    models = DemoModels("toy/sdxl", ["toy/clip", "separate:toy/clip", "cut:toy/clip"], CPU)
    assert models.labels == ["toy/clip", "toy/clip, separate chunks", "toy/clip, cut at 77 tokens"]
    titles = ["SDXL, whole prompt (with_long_prompts)", "SDXL, separate chunks", "SDXL as it is (cut at 77)"]
    assert [models.title(label) for label in models.labels] == titles
    assert [models.title("toy/clip", reading) for reading in ("overlap", "separate", "cut")] == titles
    assert len({id(pipe.text_encoder) for pipe in models.encoders.values()}) == 1  # loaded once
    for reading, label in zip(READINGS, models.labels, strict=False):
        assert [models.spec(each, reading).reading for each in models.labels] == [reading, "separate", "cut"]
        (chosen,) = images(toy, encoders=["toy/clip"], reading=reading)
        (by_name,) = images(models, encoders=[label])
        assert same(chosen.image, by_name.image) and chosen.read == by_name.read
        assert from_image(chosen.save(tmp_path), toy)[0].reading == reading


def test_models_that_do_not_fit_are_refused(folders):
    for base, encoders, message in (
        ("base", ["original", "separate:original", "cut:original", "short", "long", "wide"], "at most 5"),
        ("base", ["short"] * 2, "none twice"),
        ("base", ["wide"], "has width 64; the UNet of .* reads 32 of its first encoder"),
        ("nowhere/at/all", ["short"], "checkpoint .* is not there"),
    ):
        with pytest.raises(UserError, match=message):
            DemoModels(folders.get(base, base), [folders.get(name, name) for name in encoders], CPU)


# ---- images


@pytest.mark.parametrize(
    "encoder, changes",
    [
        ("toy/clip", {"reading": "separate", "sharpen": 1.5, "sharpen_sentences": 4.0, "scheduler": "UniPC"}),
        ("toy/clip", {"prompt": f'😀 "A" \\ &lt; B and\ttabs\n{PROMPT}', "seed": 2**63 - 9, "reading": "cut"}),
        ("toy/debias-clip", {"guidance_scale": 1.0, "prompt": "a red ring", "negative_prompt": f"Not: {PROMPT}"}),
        ("toy/clip", {"prompt": "a [star:ring:0.5] [red|blue]", "reading": "a1111", "steps": 4}),
        ("toy/long-clip", {"negative_prompt": "A Red", "emphasis": "no_norm", "prompt": "A (Red star:2) BREAK [ring]"}),
    ],
)  # fmt: skip
def test_images_are_those_of_generate(toy, tmp_path, encoder, changes):
    (rendered,) = images(toy, encoders=[encoder], **changes)
    request = ask(toy, encoders=[encoder], **changes)
    names = ("prompt", "seed", "steps", "guidance_scale", "emphasis", "reading", "sharpen", "sharpen_sentences")
    options = {name: getattr(request, name) for name in names} | {"negative_prompt": request.negative_prompt or None}
    options["scheduler"] = toy.schedulers[request.scheduler]
    output = str(tmp_path / "image.png")
    path = generate(GenerateConfig(base="toy/sdxl", encoder=encoder, output=output, device="cpu", **options))
    saved = rendered.save(tmp_path)
    assert same(rendered.image, Image.open(path)) and same(rendered.image, Image.open(saved))
    of_demo, of_generate = read_settings(saved), read_settings(path)
    # only the command writes digests of files
    assert of_demo == of_demo | {name: value for name, value in of_generate.items() if "sha256" not in name}
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
    steps = [item for item in items if isinstance(item, Step)]
    ends = [item.place for item in steps if "step 2" in item.place]
    assert ends == [f"{toy.title(label)}, image {number}, step 2 of 2" for number, label in order]
    shares = [item.done_share for item in steps]
    assert (shares[0], shares[-1]) == (0, 1) and shares == sorted(shares)
    rendered = [item for item in items if isinstance(item, RenderedImage)]
    assert [(item.label, item.seed) for item in rendered] == [(label, 6 + number) for number, label in order]
    assert all(from_image(item.save(tmp_path), toy) == (request, []) for item in rendered)
    (again,) = images(toy, encoders=["toy/debias-clip"], seed=8)
    assert same(rendered[3].image, again.image) and not same(rendered[1].image, again.image)


def test_nothing_that_was_generated_before_shows(toy):
    (before,) = images(toy, encoders=["toy/debias-clip"])
    first = {}
    for name in toy.schedulers:
        (first[name],) = images(toy, encoders=["toy/clip"], scheduler=name, steps=3, emphasis="comfyui")
        items = render_request(toy, ask(toy, scheduler=name, steps=9))
        next(item for item in items if "step 2 of" in item.place)
        items.close()
        (after,) = images(toy, encoders=["toy/debias-clip"])
        assert same(after.image, before.image) and after.text == before.text, name
    assert all(not same(first["Euler"].image, other.image) for name, other in first.items() if name != "Euler")


def test_a_closed_request_ends_within_a_step_and_the_next_waits_for_it(toy):
    calls = []
    hook = toy.encoders["toy/clip"].unet.register_forward_hook(lambda *_: calls.append(1))
    try:
        items = render_request(toy, ask(toy, steps=50))
        next(item for item in items if "step 2 of" in item.place)
        items.close()
        taken = len(calls)
        with toy.alone():
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


# ---- requests


def test_what_cannot_be_generated_is_refused(tiny):
    for changes, message in (
        ({"prompt": ""}, "empty"),
        ({"prompt": "a" * 20_001}, "20,001 characters"),
        ({"seed": -1}, "got '-1'"),
        ({"images": 9}, "images is 9"),
        ({"height": 96, "width": 96}, "96 x 96 pixels are too many"),
        ({"encoders": []}, "No encoder is chosen"),
        ({"encoders": ["long", "longer"]}, "'longer' is no encoder. .*: original, long"),
        ({"scheduler": "Heun"}, "Unknown scheduler 'Heun'"),
        ({"emphasis": "comfyui", "negative_prompt": f"(a:{'9' * 400})"}, "weights cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            next(render_request(tiny, ask(tiny, **changes)))


def test_the_size_and_the_scenes_of_the_toy_world_are_fixed(toy, tiny):
    assert check(ask(toy, scene=3), toy).scene == 3
    for scene, models in ((4, toy), (-1, toy), (2**31, toy), (3, tiny)):
        assert check(ask(models, scene=scene), models).scene is None  # it is not the prompt's
    with pytest.raises(UserError, match="48 x 48 pixels only"):
        check(ask(toy, height=64), toy)


def test_a_request_beyond_the_budget_is_refused_before_it_begins(toy):
    request = ask(toy, steps=100, images=8)
    with pytest.raises(UserError, match="takes 2,400 steps"):
        next(render_request(toy, request, budget=2399))
    assert check(request, toy, budget=2400) == request


# ---- PNGs


def png_with(path, text: str):
    info = PngInfo()
    info.add_text("settings", text)
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)
    return path


def test_files_without_usable_settings_are_refused(tiny, tmp_path):
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\x7f\xff\xff\xfftEXt")
    with pytest.raises(UserError, match="cannot be read"):
        from_image(tmp_path / "b.png", tiny)
    for content, message in (
        ("[" * 10_000, "cannot be read"),
        ('{"prompt": 7}', "prompt is 7"),
        ('{"prompt": "a", "steps": NaN}', "steps is nan"),
        ('{"prompt": "a", "encoders": [["long"]]}', "cannot be used"),
    ):
        with pytest.raises(UserError, match=message):
            from_image(png_with(tmp_path / "a.png", content), tiny)


def test_what_is_not_here_is_left_out_and_noted(tiny, tmp_path):
    settings = {"prompt": "a cat", "encoder": "long", "encoders": ["/home/me/long", "gone"], "base": "other"}
    settings |= {"scheduler": "PLMS", "prompt_2": "a dog", "refiner": "r"}
    request, notes = from_image(png_with(tmp_path / "a.png", json.dumps(settings)), tiny)
    assert (request.encoders, request.scheduler, request.reading) == (["long"], "Euler", "overlap")
    for words in ("checkpoint 'other'", "encoder 'gone'", "scheduler 'PLMS'", "prompt_2 is not", "refiner is not"):
        assert words in " ".join(notes)


# ---- tokens


@pytest.mark.parametrize(
    "prompt, emphasis, reading",
    [
        (" \n", None, "overlap"),
        ("A &amp; (red:1.3) BREAK 😀 [Ring", "comfyui", "overlap"),
        ("a red(ring:1.3)(star).(cross:1)s", "comfyui", "overlap"),
        ("a red(ring:1.3) <lora:x:1> # star &amp;", None, "a1111"),
        ("a [red [big|small] star:blue ring, (old:1.2):0.5]", None, "a1111"),
    ],
)
def test_tokens_are_those_of_the_prompt_as_it_is_read(tiny, prompt, emphasis, reading):
    tokens, _, _ = count_tokens(tiny, ask(tiny, prompt=prompt, emphasis=emphasis, reading=reading))
    text = without_weights(prompt, LongPromptOptions(emphasis=emphasis, reading=reading))
    text = text if reading == "a1111" else clean(text)
    assert "".join(token for token, _ in tokens) == text
    ids = tiny.encoders["original"].tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert len(tokens) == len(ids)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    "prompt, emphasis", [(f"{PROMPT} {PROMPT} {PROMPT}", None), (f"A (red:1.3) ring BREAK {PROMPT} [cross]", "comfyui")]
)
def test_readings_are_those_of_the_images(toy, reading, prompt, emphasis):
    """By the ids that the first encoder gets while its pipeline encodes the prompt."""
    request = ask(toy, prompt=prompt, emphasis=emphasis, reading=reading)
    for label, counted in count_tokens(toy, request)[2].items():
        options = request.options(toy, label)
        pipe, rows = copy(toy.encoders[label]).set_long_prompt(**asdict(options)), []
        hook = pipe.text_encoder.register_forward_pre_hook(lambda _, given, rows=rows: rows.extend(given[0].tolist()))
        try:
            pipe.encode_prompt(cleaned(prompt, options), do_classifier_free_guidance=False)
        finally:
            hook.remove()
        text = clean(without_weights(prompt, options))
        ids = pipe.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        read = [row[1 : row.index(pipe.tokenizer.eos_token_id)] for row in rows]
        expected = [[ids[at] for at in chunk.read] for chunk in counted.chunks]
        assert read[: len(expected)] == expected and not any(read[len(expected) :])  # an empty chunk may follow
        assert counted.ids == ids


# ---- attention and movement


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
    plain, weighted = ask(toy, prompt="A red ring."), ask(toy, prompt="A (red:1.3) ring.", emphasis="comfyui")
    assert attention(toy, weighted) == attention(toy, plain) != attention(toy, replace(weighted, emphasis="none"))
    for prompt, message in ((" ", "empty"), ("(:1.3)", "holds no words")):
        with pytest.raises(UserError, match=message):
            attention(toy, ask(toy, prompt=prompt, emphasis="comfyui"))


@pytest.mark.parametrize("reading", ["overlap", "cut"])
def test_movement_is_that_of_the_chunks_mean_embedding(toy, reading):
    request, pipe = ask(toy, encoders=["toy/clip"], reading=reading), toy.encoders["toy/clip"]
    bos, eos = pipe.tokenizer.bos_token_id, pipe.tokenizer.eos_token_id

    @torch.no_grad()
    def mean(parts: list[str]) -> torch.Tensor:
        read = count_tokens(toy, replace(request, prompt=" ".join(parts)))[2]["toy/clip"]
        rows = [torch.tensor([[bos, *(read.ids[at] for at in chunk.read), eos]]) for chunk in read.chunks]
        pooled = [pipe.text_encoder(row).pooler_output[0].double() for row in rows]
        return sum(part / part.norm() for part in pooled)

    sentences, rows = split_sentences(PROMPT), movement(toy, request)
    swapped = [sentences[3], *sentences[1:3], sentences[0], *sentences[4:]]
    edits = [swapped, *(sentences[:k] + sentences[k + 1 :] for k in range(len(sentences)))]
    assert [row["text"] for row in rows] == ["", *sentences]
    for row, edited in zip(rows, edits, strict=True):
        expected = 1 - torch.cosine_similarity(mean(sentences), mean(edited), dim=0).item()
        assert row["distance"]["toy/clip"] == pytest.approx(expected, abs=2e-6)
    last = rows[-1]["distance"]["toy/clip"]
    assert last == 0.0 if reading == "cut" else last > 1e-4  # what is not read moves nothing


# ---- access


def test_a_user_needs_a_password_that_can_be_read(tmp_path):
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "empty").write_text("\nsecret\n")
    for user, file in (("ann", None), (None, "password"), ("ann", "empty")):
        with pytest.raises(UserError, match="go together"):
            open_app(AppConfig(user=user, password_file=file and str(tmp_path / file)))


def test_a_demo_for_others_without_a_password_is_warned_of(capsys, monkeypatch):
    monkeypatch.setenv("DEBIAS_DIFFUSION_PASSWORD", "secret")
    for host, user, warned in (("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "ann", False)):
        with pytest.raises(UserError, match="is not available"):  # nothing is served
            open_app(AppConfig(device="nowhere", host=host, user=user))
        assert ("it has no password" in capsys.readouterr().err) == warned


SITE, MODE = "sec-fetch-site", "sec-fetch-mode"


@pytest.mark.parametrize(
    "method, sent, refused",
    [
        ("POST", {}, False),  # a program
        ("POST", {"origin": "http://127.0.0.1:7860", SITE: "same-origin"}, False),
        ("POST", {"origin": "http://[::1]:7860"}, False),
        ("GET", {SITE: "cross-site", MODE: "navigate"}, False),  # a link
        ("GET", {SITE: "cross-site", MODE: "no-cors"}, True),  # an image
        ("POST", {SITE: "cross-site", MODE: "navigate"}, True),  # a form
        ("POST", {"origin": "https://elsewhere.example"}, True),
        ("GET", {"origin": "http://localhost.elsewhere.example"}, True),
        ("POST", {"origin": "null"}, True),
        ("POST", {"origin": "http://[::1"}, True),
        ("", {"origin": "https://elsewhere.example"}, True),  # a web socket
    ],
)
def test_a_local_demo_knows_requests_of_other_sites(method, sent, refused):
    assert is_of_other_site(method, [(name.encode(), value.encode()) for name, value in sent.items()]) is refused
