"""`generate`: one image, folders of images and what lies beside them, with tiny models of the real classes."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig
from debias_diffusion.encoders.spec import load_text_encoder
from debias_diffusion.encoders.stretch import stretch_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.files import path_digest
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.rendering.checkpoints import load_pipeline
from debias_diffusion.pipelines.rendering.png import read_settings, write_png

CPU = torch.device("cpu")
PROMPT = "A red cat sleeps on a blue sofa. " + "A small green bird sits on the table, near the window. " * 8
# For what happens to many images: the toy world's models load in a tenth of a second, their vocabulary being small.
TOY = {"base": "toy/sdxl", "encoder": "toy/debias-clip", "steps": 2, "guidance_scale": 7.0, "device": "cpu"}
LONG = "There is one star and one circle. " + 8 * "The object in the centre is a large blue star. "
BESIDE = {"index.jsonl", "contact-sheet.png", ".lock", "job.json", "items.jsonl"}  # in a folder of images
LINES = ["a star", LONG.strip(), "a circle", "a heart", LONG + "A ring.", "a square"]


def make(folder, prompt=LONG, name="a.png", **changes):
    return generate(GenerateConfig(prompt, output=str(folder / name), **TOY | {"overwrite": True} | changes))


def by_pipeline(pipe, *prompts, seed=0, **call):
    """The image of the pipeline itself, with the settings of the tests."""
    noise = torch.Generator().manual_seed(seed)
    return pipe(*prompts, num_inference_steps=2, guidance_scale=7.0, generator=noise, **call).images[0].tobytes()


def save_encoder(folder, width=None, encoder=None):
    encoder = encoder or tiny_sdxl.text_encoder(width, positions=248, seed=7)
    encoder.save_pretrained(folder / "text_encoder")
    tiny_tokenizer(encoder.config.max_position_embeddings).save_pretrained(folder / "tokenizer")
    return str(folder)


def content(path):
    return Image.open(path).tobytes()


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def images(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[0-9]*.png"))}


@pytest.fixture(scope="module")
def base(sdxl_folder):
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"), 32)


# ---- one image


def test_an_image_and_its_settings(base, encoder, tmp_path, capsys):
    settings = {"prompt": PROMPT, "base": base, "encoder": encoder, "steps": 2, "seed": 3, "device": "cpu"}
    path = generate(GenerateConfig(**settings, output=str(tmp_path / "new" / "a.png")))
    n_tokens = len(tiny_tokenizer(248)(PROMPT, add_special_tokens=False).input_ids)
    assert 75 < n_tokens <= 150
    assert f"Prompt: {n_tokens} tokens, encoded at 152 positions (1 chunk of" in capsys.readouterr().out
    image = Image.open(path)
    assert image.size == (64, 64) and image.format == "PNG"
    text_encoder, tokenizer = load_text_encoder(encoder)
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, text_encoder=text_encoder, tokenizer=tokenizer)
    assert image.tobytes() == by_pipeline(pipe, PROMPT, seed=3)
    assert json.loads(image.text["settings"]) == settings | {
        **dict.fromkeys(("encoder_2", "encoder_2_sha256", "negative_prompt", "prompt_2", "cut_at")),
        **{"encoder_sha256": path_digest(encoder), "reading": "overlap", "scheduler": "Euler"},
        **{"guidance_scale": 7.0, "height": 64, "width": 64, "dtype": "float32"},
        **{"tokens": n_tokens, "positions": 152, "chunks": [1, 3]},
    }


def test_an_image_of_other_settings_is_not_overwritten_unasked(tmp_path):
    path = make(tmp_path, "a star")
    before = path.read_bytes()
    with pytest.raises(UserError, match="a.png' is another image: prompt was 'a star', now 'a ring'. .* --overwrite"):
        make(tmp_path, "a ring", overwrite=False)
    assert make(tmp_path, "a star").read_bytes() == before != make(tmp_path, "a ring").read_bytes()
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(UserError, match="it holds no settings"):
        make(tmp_path, "a ring", overwrite=False)


def test_steps_guidance_and_size_are_the_checkpoint_s_unless_given(base, tmp_path):
    path = make(tmp_path, "a star", steps=None, guidance_scale=None)
    given = make(tmp_path, "a star", "given.png", steps=20, guidance_scale=3.0, height=48, width=48)
    assert given.read_bytes() == path.read_bytes()
    assert read_settings(make(tmp_path, "a star", steps=1, guidance_scale=0.0))["guidance_scale"] == 0
    tiny = {"base": base, "encoder": None, "steps": 1}
    assert Image.open(make(tmp_path, "a cat", **tiny, height=64, width=96)).size == (96, 64)
    for changes, message in (
        ({"width": 1000}, "This checkpoint renders 48 x 48 pixels only, got 48 x 1000. Leave the size out."),
        (tiny | {"width": 8 * 10**6}, "has 512,000,000; at most 89,478,485 can be"),
    ):
        with pytest.raises(UserError, match=message):
            make(tmp_path, "a star", **changes)


def test_every_setting_counts(tmp_path):
    one = partial(make, tmp_path, seed=3)
    path = one()
    assert one(name="again.png").read_bytes() == path.read_bytes()
    changes = [{"seed": 4}, {"encoder": None}, {"negative_prompt": "grey"}, {"steps": 3}, {"guidance_scale": 1.0}]
    changes += [{"sharpen": 1.5}, {"prompt": f"{PROMPT} BREAK a ring", "emphasis": "ignore", "breaks": "average"}]
    for change in changes:
        assert content(one(name="other.png", **change)) != content(path), change
    for name, sharpen in (("plain", 1.0), ("sharp", 1.5)):
        whole, low = (one(name=f"{name}{low}.png", sharpen=sharpen, low_memory=low) for low in (False, True))
        assert low.read_bytes() == whole.read_bytes() and read_settings(low).get("sharpen", 1.0) == sharpen
    with pytest.raises(UserError, match=r"is another image: sharpen was 1.5, now 1.0. Give another"):
        one(name="sharpTrue.png", overwrite=False)
    assert read_settings(one("a &amp; b <|endoftext|>", precision="bf16"))["dtype"] == "bfloat16"


MISTAKES = [
    ({"prompt": ""}, "The prompt is empty"),
    ({"output": "{tmp}/a.jpg"}, "must be a file that ends in .png"),
    ({"device": "cuda:99"}, "The device 'cuda:99' is not available"),
    ({"base": "{tmp}/nowhere"}, "The SDXL checkpoint '.*nowhere' is not there, or not read. Give an SDXL folder"),
    ({"base": "{tmp}"}, "cannot be read: .* has no readable model_index.json"),
    ({"base": "{tmp}/flux"}, "is a FluxPipeline, not a StableDiffusionXLPipeline or a StableDiffusionPipeline. Give"),
    ({"encoder": "{tmp}/wide"}, "has width 64; the UNet of .* reads 32 of its first encoder. Give one of width 32"),
    ({"encoder_2": "{tmp}/long_2"}, "has a projection to 32; the UNet of .* to 24 of its second encoder"),
    ({"encoder_2": "{tmp}/bare_2"}, "has no projection; the UNet of .*export`, with --projection"),
    ({"base": "{tmp}/sd15", "encoder": "{tmp}/second"}, "has a projection to .* reads no projection of its first"),
    ({"base": "{tmp}/sd15", "prompt": None, "prompts": "{tmp}/p.jsonl", "output": "{tmp}/x"}, "have a prompt_2, and"),
]


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """A folder of models that do not go together."""
    folder = tmp_path_factory.mktemp("unfit")
    (folder / "p.jsonl").write_text('{"prompt": "a", "prompt_2": "b"}')
    (folder / "flux").mkdir()
    (folder / "flux" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()).save_pretrained(folder / "sd15")
    save_encoder(folder / "wide", 64)
    first, config = tiny_sdxl.text_encoder(32).config, tiny_sdxl.text_encoder_2().config
    save_encoder(folder / "second", encoder=CLIPTextModelWithProjection(first))
    save_encoder(folder / "bare_2", encoder=CLIPTextModel(config))
    long = type(config)(**config.to_dict() | {"projection_dim": 32})
    save_encoder(folder / "long_2", encoder=CLIPTextModelWithProjection(long))
    return folder


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[str(changes)[:60] for changes, _ in MISTAKES])
def test_mistakes_are_named_before_anything_is_loaded(base, unfit, changes, message, monkeypatch):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    settings = {"prompt": "cat", "base": base, "output": str(unfit / "a.png"), "device": "cpu"} | changes
    settings = {k: v.replace("{tmp}", str(unfit)) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(UserError, match=message):
        generate(GenerateConfig(**settings))
    assert not (unfit / "a.png").exists()


# ---- files of prompts


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Renders lines into a folder, which is returned; a second call with its name continues there."""
    root = tmp_path_factory.mktemp("many")

    def render(name, lines=LINES, kind="txt", **changes):
        file = root / f"{name}.{kind}"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        settings = {"prompt": None, "prompts": str(file), **TOY}
        return generate(GenerateConfig(**settings | changes, output=str(root / name)))

    return render


@pytest.fixture(scope="module")
def folder(many):
    """Each line alone; not to be changed."""
    return many("folder")


def test_a_folder_of_images(folder, tmp_path):
    slug = "there-is-one-star-and-one-circle-the-obj"
    slugs = [slug if line.startswith(LONG[:99]) else line.replace(" ", "-") for line in LINES]
    names = [f"0000{i}-{i}-{name}.png" for i, name in enumerate(slugs)]
    assert {path.name for path in folder.iterdir()} == {*names, *BESIDE}
    index = lines_of(folder / "index.jsonl")
    assert [(entry["file"], entry["where"], entry["prompt"], entry["seed"]) for entry in index] == [
        (name, f"line {i + 1}", line, i) for i, (name, line) in enumerate(zip(names, LINES, strict=True))
    ]
    expected = [(152, [1, 2]) if len(line) > 9 else (77, [1, 1]) for line in LINES]
    assert [(entry["positions"], entry["chunks"]) for entry in index] == expected
    for i in (1, 2):  # each is the image that its line gives alone
        assert make(tmp_path, LINES[i], seed=i).read_bytes() == (folder / names[i]).read_bytes()


def test_a_stopped_folder_is_continued_to_the_same_bytes(folder, many, monkeypatch):
    whole = many("stopped", batch=3)
    before = {path.name: path.read_bytes() for path in whole.iterdir() if path.name in BESIDE - {"items.jsonl"}}
    rendered = images(whole)
    for name in [*list(rendered)[::2], "contact-sheet.png", "index.jsonl"]:
        (whole / name).unlink()
    many("stopped", batch=3)  # in the batches that they would have been in
    assert images(whole) == rendered and list(rendered) == list(images(folder))
    assert {name: (whole / name).read_bytes() for name in before} == before
    for name in rendered:  # batches begin with the noise of each seed
        assert abs(pixels(whole / name) - pixels(folder / name)).max() <= 1
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    many("stopped", batch=3)  # loads nothing


def test_other_images_are_not_overwritten(folder, many):
    before = images(folder)
    with pytest.raises(UserError, match="other settings .steps: 2 there, 3 here"):
        many("folder", steps=3)
    with pytest.raises(UserError, match=r"1 of the images .* 00000-0-a-star.png .line 1.: prompt was 'a star', now"):
        many("folder", ["a circle", *LINES[1:]])
    assert images(folder) == before


def test_csv_and_json_lines_and_a_bad_line_keeps_its_number(folder, many, capsys):
    rows = ["prompt,seed", *(f'"{line}",' for line in LINES)]
    assert images(many("csv", rows, kind="csv")) == images(folder)
    entries = [{"prompt": line, "seed": i} for i, line in enumerate(LINES)]
    mended = many("jsonl", [*entries[:2], "no json", *entries[2:5]], kind="jsonl", seed=99)
    assert "Left out: line 3: bad JSON: Expecting value" in capsys.readouterr().out
    [left_out] = lines_of(mended / "left-out.jsonl")
    assert left_out["where"] == "line 3" and left_out["reason"].startswith("bad JSON")
    # Mending it moves no other image.
    before = images(mended)
    assert [name[:6] for name in before] == ["00000-", "00001-", "00003-", "00004-", "00005-"]
    assert list(before.values()) == list(images(folder).values())[:5]
    many("jsonl", [*entries[:2], {"prompt": "mended"}, *entries[2:5]], kind="jsonl", seed=99)
    assert images(mended).items() > before.items() and (mended / "00002-101-mended.png").exists()
    assert not (mended / "left-out.jsonl").exists()


def test_entries_with_settings_of_their_own(many):
    entries = [
        {"prompt": " a star", "negative_prompt": LONG, "seed": 7},
        {"prompt": "a star", "negative_prompt": "", "seed": 7},
        {"prompt": "a star", "prompt_2": "a circle", "seed": 7},
        {"prompt": "Ünïcode 猫", "seed": 7},
    ]
    folder = many("own", entries, kind="jsonl", batch=4, negative_prompt="grey")
    index = lines_of(folder / "index.jsonl")
    assert [entry["negative_prompt"] for entry in index] == [LONG.strip(), "", "grey", "grey"]
    assert [entry["positions"] for entry in index] == [152, 77, 77, 77]
    assert index[3]["file"] == "00003-7-unicode.png" and len(set(images(folder).values())) == 4
    pipe = load_pipeline(TOY["base"], TOY["encoder"], CPU)
    for i, prompt_2, negative in ((0, None, LONG), (2, "a circle", "grey")):
        expected = by_pipeline(pipe, "a star", prompt_2, seed=7, negative_prompt=negative)
        got = pixels(folder / index[i]["file"])
        assert abs(np.frombuffer(expected, np.uint8).reshape(got.shape).astype(int) - got).max() <= 1


def test_images_per_prompt(folder, many):
    before = images(many("more", LINES[:2]))
    after = images(many("more", LINES[:2], images_per_prompt=2))  # beside those that are there
    assert before.items() < after.items() and before.items() < images(folder).items()
    assert [name[:8] for name in after] == ["00000-0-", "00000-1-", "00001-1-", "00001-2-"]


# ---- PNGs


def test_viewers_find_the_parameters(base, tmp_path):
    odd = tmp_path / "ba,se: 1"
    odd.symlink_to(base)
    prompt, changes = "a cat:\nNegative prompt: (red:1.2), 猫", {"negative_prompt": "grey,\nSteps: 3", "seed": 5}
    path = make(tmp_path, prompt, encoder=None, steps=1, base=str(odd), width=96, **changes)
    assert (
        Image.open(path)
        .info["parameters"]
        .startswith(
            "a cat: Negative prompt: (red:1.2), 猫\nNegative prompt: grey, Steps: 3\n"
            'Steps: 1, Sampler: Euler, CFG scale: 7.0, Seed: 5, Size: 96x64, Model: "ba,se: 1", Version: '
        )
    )


def test_a_png_is_written_whole_or_not_at_all(tmp_path):
    image, path = Image.new("RGB", (8, 8), "red"), tmp_path / "a.png"
    write_png(image, path, {"settings": '{"seed": 1}'})
    before = path.read_bytes()
    with pytest.raises(OSError):
        write_png(Image.new("HSV", (8, 8)), path, {})  # a mode that PNG has not
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.png"]
    assert read_settings(path) == {"seed": 1}


# ---- models


def test_the_second_encoder_stretched(base, encoder, tmp_path):
    one = partial(make, tmp_path, PROMPT, base=base, encoder=encoder)
    path = one(encoder_2="stretch")
    settings = read_settings(path)
    assert (settings["encoder_2"], settings["encoder_2_sha256"]) == ("stretch", None)
    assert settings["chunks"] == [1, 1] and settings["positions"] == 152
    pipe = load_pipeline(base, encoder, CPU)
    stretched, tokenizer = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
    pipe.register_modules(text_encoder_2=stretched, tokenizer_2=tokenizer)
    expected = by_pipeline(pipe, PROMPT)
    assert content(path) == expected
    # The same from a folder, whose tokenizer pads with another token than SDXL's second one.
    folder = save_encoder(tmp_path / "second", encoder=stretched)
    assert tiny_tokenizer(248).pad_token_id != tokenizer.pad_token_id == 0
    path = one(encoder_2=folder)
    assert content(path) == expected and read_settings(path)["encoder_2_sha256"] == path_digest(folder)


def test_prompts_are_read_as_asked(tmp_path):
    one = partial(make, tmp_path, encoder=None)
    whole, cut = (read_settings(one(reading=reading)) for reading in ("overlap", "cut"))
    assert (cut["positions"], cut["cut_at"]) == (77, 77) and cut["tokens"] == whole["tokens"] > 75
    text, weighted = (content(one("a (red:1.5) star", emphasis=emphasis)) for emphasis in (None, "comfyui"))
    pipe = load_pipeline(TOY["base"], None, CPU).set_long_prompt(emphasis="comfyui")
    assert text != weighted == by_pipeline(pipe, "a (red:1.5) star")
    assert read_settings(one("a ring BREAK a star", emphasis="comfyui"))["chunks"] == [2, 2]
    with pytest.raises(UserError, match="^The prompt cannot be read: the weight of 'star' is inf, but must be"):
        one(f"a (star:{'9' * 400})", emphasis="comfyui")


def test_stable_diffusion_15(unfit, encoder, tmp_path):
    one = partial(make, tmp_path, base=str(unfit / "sd15"))
    path = one(PROMPT, encoder=encoder)
    assert read_settings(path)["chunks"] == [1]
    assert content(path) == by_pipeline(load_pipeline(unfit / "sd15", encoder, CPU), PROMPT)
