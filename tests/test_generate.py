"""`generate`: one image, folders of images and what lies beside them, with tiny models of the real classes."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from helpers import tiny_sdxl
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from transformers import CLIPTextModel

from debias_diffusion.app.generate import generate
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.encoders.spec import load_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.files import path_digest
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.pipelines.rendering.png import read_settings

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
    return np.asarray(Image.open(path)).astype(int)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def images(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[0-9]*.png"))}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"), 32)


def test_what_is_not_read_stands_in_the_last_lines(base, tmp_path, capsys):
    """Of one image and of a file of prompts; a wildcard where there are some; a LoRA's tag where none is loaded."""
    size = {"base": base, "steps": 1, "height": 64, "width": 64, "device": "cpu", "clip_skip": 1}
    generate(GenerateConfig("a cat AND a dog", output=str(tmp_path / "a.png"), **size))
    *first, wrote, last = capsys.readouterr().out.splitlines()
    assert wrote == f"Wrote {tmp_path / 'a.png'}" and "Not read: " in last and "'AND' does not join" in last
    assert "Clip skip 1: of SDXL the layer before the last is read" in "".join(first)
    (tmp_path / "wildcards").mkdir()
    (tmp_path / "wildcards" / "colour.txt").write_text("red")
    lines = ("a __colour__ cat", "a __nothere__ cat", "a cat <lyco:x:1>", '--prompt "a cat" --seed 7', "dog AND a cat")
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    generate(GenerateConfig(None, prompts=str(tmp_path / "prompts.txt"), output=str(tmp_path / "out"), **size))
    *first, tag, option, joined = capsys.readouterr().out.splitlines()
    assert "Left out: line 2: '__nothere__' is in no" in "".join(first) and "'AND' does" in joined
    assert "'<lyco:x:1>' loads nothing" in tag and "'--prompt' is no option" in option


def test_an_image_and_its_settings(base, encoder, tmp_path, capsys):
    settings = {"prompt": PROMPT, "base": base, "encoder": encoder, "steps": 2, "seed": 3, "device": "cpu"}
    path = generate(GenerateConfig(**settings, output=str(tmp_path / "new" / "a.png")))
    n_tokens = len(tiny_tokenizer(248)(PROMPT, add_special_tokens=False).input_ids)
    assert f"Prompt: {n_tokens} tokens, encoded at 152 positions (1 chunk of" in capsys.readouterr().out
    image = Image.open(path)
    text_encoder, tokenizer = load_text_encoder(encoder)
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, text_encoder=text_encoder, tokenizer=tokenizer)
    assert image.tobytes() == by_pipeline(pipe, PROMPT, seed=3)
    parameters = f"{PROMPT.strip()}\nSteps: 2, Sampler: Euler, CFG scale: 7.0, Seed: 3, Size: 64x64, Model: "
    assert image.text["parameters"].startswith(parameters)  # for viewers
    assert json.loads(image.text["settings"]) == settings | {
        **dict.fromkeys(("encoder_2", "encoder_2_sha256", "negative_prompt", "prompt_2", "cut_at")),
        **{"encoder_sha256": path_digest(encoder), "reading": "overlap", "scheduler": "Euler"},
        **{"guidance_scale": 7.0, "height": 64, "width": 64, "dtype": "float32"},
        **{"tokens": n_tokens, "positions": 152, "chunks": [1, 3]},
    }


def test_an_image_of_other_settings_is_not_overwritten_unasked(tmp_path):
    path = make(tmp_path, "a star")
    before = path.read_bytes()
    with pytest.raises(UserError, match="prompt was 'a star', now 'a ring'. .* --overwrite"):
        make(tmp_path, "a ring", overwrite=False)
    assert make(tmp_path, "a star").read_bytes() == before != make(tmp_path, "a ring").read_bytes()


def test_steps_guidance_and_size_are_the_checkpoint_s_unless_given(base, tmp_path):
    settings = read_settings(make(tmp_path, "a star", steps=None, guidance_scale=None))
    assert [settings[name] for name in ("steps", "guidance_scale", "height", "width")] == [20, 3.0, 48, 48]
    assert read_settings(make(tmp_path, "a star", steps=1, guidance_scale=0.0))["guidance_scale"] == 0
    tiny = {"base": base, "encoder": None, "steps": 1}
    assert Image.open(make(tmp_path, "a cat", **tiny, height=64, width=96)).size == (96, 64)
    for changes, message in (
        ({"width": 1000}, "renders 48 x 48 pixels only, got 48 x 1000"),
        (tiny | {"width": 8 * 10**6}, "pixels are more than"),
    ):
        with pytest.raises(UserError, match=message):
            make(tmp_path, "a star", **changes)


def test_every_setting_counts(tmp_path):
    one = partial(make, tmp_path, seed=3)
    path = one()
    for change in ({"seed": 4}, {"encoder": None}, {"negative_prompt": "grey"}, {"sharpen": 1.5}):
        assert content(one(name="other.png", **change)) != content(path), change
    whole, low = (one(name=f"{low}.png", sharpen=1.5, low_memory=low) for low in (False, True))
    assert low.read_bytes() == whole.read_bytes() and read_settings(low)["sharpen"] == 1.5
    assert read_settings(one("a &amp; b <|endoftext|>", precision="bf16"))["dtype"] == "bfloat16"


MISTAKES = [
    ({"output": "{tmp}/a.jpg"}, "must be a file that ends in .png"),
    ({"images_per_prompt": 2}, "a.png' must be a folder for several images"),
    ({"prompt": None, "prompts": "{tmp}/missing.txt"}, "There is no file '.*missing.txt'. Give a file of prompts"),
    ({"device": "cuda:99"}, "'cuda:99' is not available"),
    ({"base": "{tmp}/nowhere"}, "nowhere' is not there"),
    ({"encoder": "{tmp}/wide"}, "has width 64; the UNet of .* reads 32 of its first encoder"),
    ({"encoder_2": "{tmp}/bare_2"}, "has no projection; .* Export it with a projection"),
    ({"base": "{tmp}/sd15", "prompt": None, "prompts": "{tmp}/p.jsonl", "output": "{tmp}/x"}, "have a prompt_2"),
]


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unfit")
    (folder / "p.jsonl").write_text('{"prompt": "a", "prompt_2": "b"}')
    tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()).save_pretrained(folder / "sd15")
    save_encoder(folder / "wide", 64)
    save_encoder(folder / "bare_2", encoder=CLIPTextModel(tiny_sdxl.text_encoder_2().config))
    return folder


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[str(changes)[:60] for changes, _ in MISTAKES])
def test_mistakes_are_named_before_anything_is_loaded(base, unfit, changes, message, monkeypatch):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    settings = {"prompt": "cat", "base": base, "output": str(unfit / "a.png"), "device": "cpu"} | changes
    settings = {k: v.replace("{tmp}", str(unfit)) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(UserError, match=message):
        generate(GenerateConfig(**settings))
    assert not (unfit / "a.png").exists()


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
    for i in (1, 2):  # each is the image that its line gives alone
        assert make(tmp_path, LINES[i], seed=i).read_bytes() == (folder / names[i]).read_bytes()


def test_entries_with_settings_of_their_own_and_a_bad_line_keeps_its_number(many, tmp_path):
    entries = [
        {"prompt": " a star", "negative_prompt": LONG, "seed": 7},
        {"prompt": "a star", "negative_prompt": "", "seed": 7},
        "no json",
        {"prompt": "a star", "prompt_2": "a circle", "seed": 7},
        {"prompt": "Ünïcode 猫"},
    ]
    folder = many("own", entries, kind="jsonl", batch=4, negative_prompt="grey")
    index = lines_of(folder / "index.jsonl")
    assert [entry["negative_prompt"] for entry in index] == [LONG.strip(), "", "grey", "grey"]
    assert [entry["positions"] for entry in index] == [152, 77, 77, 77]
    assert index[3]["file"] == "00004-4-unicode.png"
    assert [line["where"] for line in lines_of(folder / "left-out.jsonl")] == ["line 3"]
    assert len(set(images(folder).values())) == 4
    for number in (0, 1, 3):  # each as if it were alone in its batch
        given = {"negative_prompt": "grey"} | entries[number + (number > 1)] | {"seed": index[number]["seed"]}
        alone, together = make(tmp_path, **given), folder / index[number]["file"]
        assert abs(pixels(alone) - pixels(together)).max() < 3, number
    before = images(folder)
    entries[2] = {"prompt": "mended"}
    many("own", entries, kind="jsonl", batch=4, negative_prompt="grey")
    assert images(folder).items() > before.items() and not (folder / "left-out.jsonl").exists()


def test_images_per_prompt(folder, many):
    before = images(many("more", LINES[:2]))
    after = images(many("more", LINES[:2], images_per_prompt=2))  # beside those that are there
    assert before.items() < after.items() and before.items() < images(folder).items()
    assert [name[:8] for name in after] == ["00000-0-", "00000-1-", "00001-1-", "00001-2-"]


def test_stable_diffusion_15(unfit, encoder, tmp_path):
    path = make(tmp_path, PROMPT, base=str(unfit / "sd15"), encoder=encoder)
    assert content(path) == by_pipeline(load_pipeline(unfit / "sd15", encoder, CPU), PROMPT)
