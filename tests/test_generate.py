"""`generate`: one image, folders of images and what lies beside them, with tiny models of the real classes."""

import json
import os
import re
import shutil
from functools import partial
from importlib.metadata import version

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers import tiny_sdxl
from helpers.vocabulary import tiny_tokenizer
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from debias_diffusion.app import cli
from debias_diffusion.app.contact_sheet import CELL, write_contact_sheets
from debias_diffusion.app.generate import generate
from debias_diffusion.app.options import GenerateConfig
from debias_diffusion.encoders import load_text_encoder
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import path_digest
from debias_diffusion.interchange.stretch import stretch_text_encoder
from debias_diffusion.models.shipped import shipped
from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline
from debias_diffusion.pipelines import rendering as renderer
from debias_diffusion.pipelines.checkpoints import Checkpoint, load_pipeline
from debias_diffusion.pipelines.png import first_difference, read_settings, write_png

CPU = torch.device("cpu")
PROMPT = "A red cat sleeps on a blue sofa. " + "A small green bird sits on the table, near the window. " * 8
# For what happens to many images: the toy world's models load in a tenth of a second, their vocabulary being small.
TOY = {"base": "toy/sdxl", "encoder": "toy/debias-clip", "steps": 2, "device": "cpu"}
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
    return folder


def content(path):
    return Image.open(path).tobytes()


def values(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def base(sdxl_folder):
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(save_encoder(tmp_path_factory.mktemp("encoder"), 32))


# ---- one image


def test_an_image_and_its_settings(base, encoder, tmp_path, capsys):
    settings = {"prompt": PROMPT, "base": base, "encoder": encoder, "steps": 2, "seed": 3, "device": "cpu"}
    path = generate(GenerateConfig(**settings, output=str(tmp_path / "new" / "a.png")))
    assert path == tmp_path / "new" / "a.png"
    n_tokens = len(tiny_tokenizer(248)(PROMPT, add_special_tokens=False).input_ids)
    assert 75 < n_tokens <= 150
    assert capsys.readouterr().out == (
        f"Prompt: {n_tokens} tokens, encoded at 152 positions (1 chunk of the first text encoder, 3 chunks of the "
        f"second text encoder)\nWrote {path}\n"
    )
    image = Image.open(path)
    assert image.size == (64, 64) and image.format == "PNG"
    text_encoder, tokenizer = load_text_encoder(encoder)
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, text_encoder=text_encoder, tokenizer=tokenizer)
    assert image.tobytes() == by_pipeline(pipe, PROMPT, seed=3)
    assert json.loads(image.text["settings"]) == settings | {
        **dict.fromkeys(("encoder_2", "encoder_2_sha256", "negative_prompt", "prompt_2", "cut_at")),
        **{"encoder_sha256": path_digest(encoder), "weighting": False, "reading": "overlap", "scheduler": "Euler"},
        **{"guidance_scale": 7.0, "height": 64, "width": 64, "dtype": "float32"},
        **{"tokens": n_tokens, "positions": 152, "chunks": [1, 3]},
    }


def test_an_image_of_other_settings_is_not_overwritten_unasked(base, tmp_path, monkeypatch):
    path = make(tmp_path, "a star")
    before = path.read_bytes()
    assert make(tmp_path, "a star", overwrite=False).read_bytes() == before  # the same image is made again
    with pytest.raises(UserError, match="a.png' is another image: prompt was 'a star', now 'a ring'. .* --overwrite"):
        make(tmp_path, "a ring", overwrite=False)
    assert path.read_bytes() == before and make(tmp_path, "a ring").read_bytes() != before
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(UserError, match="it holds no settings"):
        make(tmp_path, "a ring", overwrite=False)
    monkeypatch.chdir(tmp_path)  # one encoder under two paths is one encoder
    shutil.copytree(shipped("toy/clip"), "clip")
    make(tmp_path, "a star", encoder="clip")
    make(tmp_path, "a star", encoder="./clip", overwrite=False)
    with pytest.raises(UserError, match="encoder_sha256 was"):
        make(tmp_path, "a star", overwrite=False)


def test_every_setting_counts(tmp_path, capsys):
    one = partial(make, tmp_path, seed=3)
    path = one()
    assert one(name="again.png").read_bytes() == path.read_bytes()
    changes = [{"seed": 4}, {"encoder": None}, {"prompt": LONG + "A ring."}, {"negative_prompt": "grey"}, {"steps": 3}]
    for change in [*changes, {"guidance_scale": 1.0}]:
        assert content(one(name="other.png", **change)) != content(path), change
    assert Image.open(one(name="wide.png", height=64, width=96)).size == (96, 64)
    # a negative prompt that guidance does not use does not lengthen the prompt
    capsys.readouterr()
    short = partial(one, "a star", negative_prompt=LONG, guidance_scale=1.0)
    short()
    assert capsys.readouterr().out.startswith("Prompt: 2 tokens, encoded at 77 positions (1 chunk of")
    assert short(name="low.png", low_memory=True).read_bytes() == short().read_bytes()
    assert read_settings(one("a &amp; b <|endoftext|>", precision="bf16"))["dtype"] == "bfloat16"


MISTAKES = [
    ({"prompt": ""}, "The prompt is empty"),
    ({"prompt": "x" * 100_000}, "The prompt has 100,000 characters; at most 20,000 are read"),
    ({"negative_prompt": "x" * 20_001}, "The negative prompt has 20,001 characters; at most 20,000 are read"),
    ({"images_per_prompt": 10**9, "output": "{tmp}/x"}, "make 1,000,000,000; one run renders at most 1,000,000"),
    ({"prompt": None, "prompts": "{tmp}/nowhere.txt"}, "nowhere.txt' cannot be read"),
    ({"prompt": None, "prompts": "{tmp}/p.jsonl"}, "no usable prompt. The first fault: line 1: Not JSON"),
    ({"prompt": None, "prompts": "{tmp}/p.txt"}, r"a.png' is a file, and several images need a folder"),
    ({"images_per_prompt": 2, "output": "{tmp}/file"}, "is a file, and several images need a folder"),
    ({"output": "{tmp}"}, "is a folder. Give a file name"),
    ({"output": "{tmp}/a.jpg"}, "must end in .png"),
    ({"output": "{tmp}/file/sub/a.png"}, r"The output folder '.*file/sub' is not writable \(Not a directory\)"),
    ({"images_per_prompt": 2, "output": "{tmp}/file/sub"}, "The output folder '.*file/sub' cannot be made: Not a dir"),
    ({"images_per_prompt": 3, "output": "{tmp}/x", "seed": 2**63 - 2}, "is too large for 3 images"),
    ({"device": "toaster"}, "The device 'toaster' is not available"),
    ({"device": "cuda:99"}, "The device 'cuda:99' is not available"),
    ({"base": "{tmp}/nowhere"}, "The SDXL checkpoint '.*nowhere' is not there. Give an SDXL folder"),
    ({"base": "{tmp}"}, "cannot be read: it has no readable model_index.json"),
    ({"base": "{tmp}/flux"}, "is a FluxPipeline, not a StableDiffusionXLPipeline or a StableDiffusionPipeline. Give"),
    ({"base": "{tmp}/sd15"}, "has no readable unet/config.json.* Give a whole"),
    ({"encoder": "{tmp}/nowhere/else"}, "is not there"),
    ({"encoder": "{tmp}/wide"}, "has width 64; the UNet of .* reads 32 of its first encoder. Give one of width 32"),
    ({"encoder": "cut:original", "reading": "separate"}, "encoder is 'cut:original' and reading 'separate', but both"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[str(changes)[:60] for changes, _ in MISTAKES])
def test_mistakes_are_named_before_anything_is_loaded(base, tmp_path, changes, message, monkeypatch):
    (tmp_path / "file").touch()
    for name, kind in (("sd15", "StableDiffusionPipeline"), ("flux", "FluxPipeline")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    for name in ("p.txt", "p.jsonl"):
        (tmp_path / name).write_text("a cat")
    if changes.get("encoder") == "{tmp}/wide":
        save_encoder(tmp_path / "wide", 64)
    changes = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in changes.items()}
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    settings = {"prompt": "cat", "base": base, "output": str(tmp_path / "a.png"), "device": "cpu"} | changes
    with pytest.raises(UserError, match=message):
        generate(GenerateConfig(**settings))
    assert not (tmp_path / "a.png").exists()


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


def images(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[0-9]*.png"))}


def test_a_folder_of_images(folder, tmp_path):
    slug = "there-is-one-star-and-one-circle-the-obj"
    slugs = [slug if line.startswith(LONG[:99]) else line.replace(" ", "-") for line in LINES]
    names = [f"0000{i}-{i}-{name}.png" for i, name in enumerate(slugs)]
    assert list(images(folder)) == names
    assert {path.name for path in folder.iterdir()} == {*names, *BESIDE}
    index = lines_of(folder / "index.jsonl")
    assert [(entry["file"], entry["where"], entry["prompt"], entry["seed"]) for entry in index] == [
        (name, f"line {i + 1}", line, i) for i, (name, line) in enumerate(zip(names, LINES, strict=True))
    ]
    expected = [(152, [1, 2]) if len(line) > 9 else (77, [1, 1]) for line in LINES]
    assert [(entry["positions"], entry["chunks"]) for entry in index] == expected
    assert all(0 < entry["tokens"] <= entry["positions"] - 2 and "seconds" not in entry for entry in index)
    for i in (1, 2):  # each is the image that its line gives alone
        assert make(tmp_path, LINES[i], seed=i).read_bytes() == (folder / names[i]).read_bytes()


def test_a_stopped_folder_is_continued_to_the_same_bytes(folder, many, monkeypatch, capsys):
    whole = many("stopped", batch=3)
    before = {path.name: path.read_bytes() for path in whole.iterdir() if path.name in BESIDE - {"items.jsonl"}}
    rendered = images(whole)
    for name in [*list(rendered)[::2], "contact-sheet.png", "index.jsonl"]:
        (whole / name).unlink()
    many("stopped", batch=3)  # in the batches that they would have been in
    assert images(whole) == rendered and list(rendered) == list(images(folder))
    assert {name: (whole / name).read_bytes() for name in before} == before
    for name in rendered:  # batches begin with the noise of each seed
        assert abs(values(whole / name) - values(folder / name)).max() <= 1
    capsys.readouterr()
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    many("stopped", batch=3)
    assert "6 are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (LINES, {"steps": 3}, "other settings .steps: 2 there, 3 here"),
        (LINES, {"encoder": None}, "The encoder is another one, by its contents: .* there, None here"),
        (["a circle", *LINES[1:]], {}, r"1 of the images .* 00000-0-a-star.png .line 1.: prompt was 'a star', now"),
        ([*LINES[:4], LONG + "A cross."], {}, "prompt was '….* A ring.', now '….* A cross.'"),
    ],
)
def test_other_images_are_not_overwritten(folder, many, lines, changes, message):
    before = images(folder)
    with pytest.raises(UserError, match=message):
        many("folder", lines, **changes)
    assert images(folder) == before


def test_the_same_from_csv_and_json_lines(folder, many, capsys):
    rows = ["prompt,seed", *(f'"{line}",' for line in LINES)]
    assert images(many("csv", rows, kind="csv")) == images(folder)
    capsys.readouterr()
    entries = [{"prompt": line, "seed": i} for i, line in enumerate(LINES)]
    mended = many("jsonl", [*entries[:2], "no json", *entries[2:5]], kind="jsonl", seed=99)
    printed = capsys.readouterr().out
    assert "Prompts: 5 in " in printed and "Left out: line 3: Not JSON: Expecting value" in printed
    [left_out] = lines_of(mended / "left-out.jsonl")
    assert left_out["where"] == "line 3" and left_out["reason"].startswith("Not JSON")
    # A bad line keeps its number, so that mending it moves no other image.
    before = images(mended)
    assert [name[:6] for name in before] == ["00000-", "00001-", "00003-", "00004-", "00005-"]
    assert list(before.values()) == list(images(folder).values())[:5]
    many("jsonl", [*entries[:2], {"prompt": "mended"}, *entries[2:5]], kind="jsonl", seed=99)
    assert images(mended).items() > before.items() and (mended / "00002-101-mended.png").exists()
    assert not (mended / "left-out.jsonl").exists()


def test_entries_with_settings_of_their_own(many):
    entries = [
        {"prompt": " a star", "negative_prompt": LONG, "seed": 7},
        {"prompt": "a star", "seed": 7},
        {"prompt": "a star", "negative_prompt": "", "seed": 7},
        {"prompt": "a star", "prompt_2": "a circle", "seed": 7},
        {"prompt": "Ünïcode 猫", "seed": 7},
    ]
    folder = many("own", entries, kind="jsonl", batch=4, negative_prompt="grey")
    index = lines_of(folder / "index.jsonl")
    assert [entry["negative_prompt"] for entry in index] == [LONG.strip(), "grey", "", "grey", "grey"]
    assert [entry["positions"] for entry in index] == [152, 77, 77, 77, 77]
    assert index[4]["file"] == "00004-7-unicode.png" and len(set(images(folder).values())) == 5
    pipe = load_pipeline(TOY["base"], TOY["encoder"], CPU)
    for i, prompt, prompt_2, negative in ((0, "a star", None, LONG), (3, "a star", "a circle", "grey")):
        expected = by_pipeline(pipe, prompt, prompt_2, seed=7, negative_prompt=negative)
        got = values(folder / index[i]["file"])
        assert abs(np.frombuffer(expected, np.uint8).reshape(got.shape).astype(int) - got).max() <= 1


def test_images_per_prompt(folder, many):
    before = images(many("more", LINES[:2]))
    after = images(many("more", LINES[:2], images_per_prompt=2))  # beside those that are there
    assert before.items() < after.items() and before.items() < images(folder).items()
    assert [name[:8] for name in after] == ["00000-0-", "00000-1-", "00001-1-", "00001-2-"]
    last = 2**63 - 1
    with pytest.raises(UserError, match=f"The seed {last + 1} is too large for 1 image:"):
        many("seeds", ["a star", "a ring"], seed=last)
    assert list(images(many("seeds", ["a star"], seed=last))) == [f"00000-{last}-a-star.png"]


def test_of_a_training_run_the_model_counts_and_not_the_log(many, tmp_path):
    shutil.copytree(shipped("toy/clip"), tmp_path / "run" / "last")
    run = partial(many, "run", LINES[:1], encoder=str(tmp_path / "run"))
    run()
    (tmp_path / "run" / "log.jsonl").write_text("{}")
    run()
    (tmp_path / "run" / "last" / "open_clip_config.json").write_text("{}")
    with pytest.raises(UserError, match="The encoder is another one"):
        run()


def test_the_command_line(tmp_path, capsys):
    def run(*arguments):
        try:
            cli.main(["generate", *map(str, arguments)])
        except SystemExit as exit:
            return exit.code, capsys.readouterr().err
        return 0, capsys.readouterr().out

    (tmp_path / "c.yaml").write_text("prompt: a star\nbase: toy/sdxl\nsteps: 2\ndevice: cpu\n")
    (tmp_path / "p.txt").write_text("a star\na ring")
    settings = ["--config", tmp_path / "c.yaml", "--low-memory"]
    assert run(*settings, "a ring", "--output", tmp_path / "b.png")[0] == 0
    assert read_settings(tmp_path / "b.png")["prompt"] == "a ring"
    code, printed = run("--base=toy/sdxl", "--steps=2", "--prompts", tmp_path / "p.txt", "--output", tmp_path / "all")
    assert code == 0 and printed.endswith(f"Wrote {tmp_path / 'all'}\n") and len(images(tmp_path / "all")) == 2
    code, printed = run("--base=toy/sdxl")
    assert code == 2 and printed.startswith("error: Give either a prompt or a file of prompts, not neither")


# ---- values that are not finite


def test_images_that_are_not_finite_are_named_and_the_rest_is_rendered(folder, many, tmp_path, monkeypatch, capsys):
    """A letter's embedding is broken once the models are loaded, since files with such weights are refused."""
    load = renderer.load_pipeline

    def load_and_break(*arguments):
        pipe = load(*arguments)
        letter = pipe.tokenizer("heart", add_special_tokens=False).input_ids[0]
        with torch.no_grad():
            pipe.text_encoder.get_input_embeddings().weight[letter, 3] = float("nan")
        return pipe

    monkeypatch.setattr(renderer, "load_pipeline", load_and_break)
    message = "^1 of 6 images in .* not rendered, the first: line 4, seed 3: its .* not finite"
    with pytest.raises(FailedError, match=message) as error:
        many("broken", batch=3)
    broken = folder.parent / "broken"
    assert error.value.exit_code == 1 and [int(name[:5]) for name in images(broken)] == [0, 1, 2, 4, 5]
    for file in images(broken):
        assert abs(values(broken / file) - values(folder / file)).max() <= 1
    assert [entry["where"] for entry in lines_of(broken / "left-out.jsonl")] == ["line 4, seed 3"]
    assert len(lines_of(broken / "index.jsonl")) == 5 and "Left out: line 4, seed 3" in capsys.readouterr().out
    with pytest.raises(FailedError, match="not rendered, the first: the prompt, seed 0: its embeddings are not finite"):
        make(tmp_path, "a heart")
    assert not (tmp_path / "a.png").exists()
    monkeypatch.undo()  # mended: only what is missing is rendered
    assert len(images(many("broken", batch=3))) == 6 and not (broken / "left-out.jsonl").exists()


# ---- PNGs and contact sheets


def as_viewers_read_it(text):
    """What A1111's interface, and viewers that follow it, make of a `parameters` chunk."""
    *lines, last = text.strip().split("\n")
    fields = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    assert len(fields) >= 3  # or the line would be taken for a part of the prompt
    start = next((i for i, line in enumerate(lines) if line.startswith("Negative prompt:")), len(lines))
    negative = "".join(lines[start:]).removeprefix("Negative prompt:").strip()
    fields = {name: json.loads(value) if value[0] == '"' else value for name, value in fields}
    return "".join(lines[:start]), negative, fields


def test_viewers_find_the_parameters(base, tmp_path):
    def read(name, **changes):
        path = make(tmp_path, "a cat:\nNegative prompt: (red:1.2), 猫", name, encoder=None, steps=1, **changes)
        return as_viewers_read_it(Image.open(path).info["parameters"])

    prompt, negative, fields = read("a.png", base=base, negative_prompt="grey,\nSteps: 3", seed=5, width=96)
    assert (prompt, negative) == ("a cat: Negative prompt: (red:1.2), 猫", "grey, Steps: 3")
    expected = {"Steps": "1", "Sampler": "Euler", "CFG scale": "7.0", "Seed": "5", "Size": "96x64"}
    program = f"debias-diffusion {version('debias-diffusion')}"
    assert fields == expected | {"Model": os.path.basename(base), "Version": program}
    odd = tmp_path / "ba,se: 1"
    odd.symlink_to(base)
    prompt, negative, fields = read("b.png", base=str(odd) + "/")
    assert negative == "" and fields["Model"] == "ba,se: 1"


def test_a_png_is_written_whole_or_not_at_all(tmp_path):
    image, path = Image.new("RGB", (8, 8), "red"), tmp_path / "a.png"
    write_png(image, path, {"settings": '{"seed": 1}'})
    before = path.read_bytes()
    with pytest.raises(OSError):
        write_png(Image.new("HSV", (8, 8)), path, {})  # a mode that PNG has not
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.png"]
    assert read_settings(path) == {"seed": 1}
    for content in (b"", before[:40]):
        path.write_bytes(content)
        assert read_settings(path) is None
    for text in ("3", "[" * 100_000):
        write_png(image, path, {"settings": text})
        assert read_settings(path) is None


def test_the_first_difference():
    assert first_difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}) == ""
    assert first_difference({"a": 1}, {"a": 1, "b": None}) == ""
    assert first_difference({"a": 1, "b": 2}, {"b": 3, "a": 0}) == "b was 2, now 3"
    long = "x" * 500
    expected = f"p was '…{'x' * 20}cat{'x' * 37}…', now '…{'x' * 20}'"
    assert first_difference({"p": long + "cat" + long}, {"p": long}) == expected


def test_contact_sheets(tmp_path):
    colours, texts = (
        ["red", "blue", "lime", "black"],
        ["a cat", "x" * 900, "", "猫 " * 400 + "\x1b[31m", "Ä عربي 🎨\nb"],
    )
    entries = []
    for i in range(50):
        size = [(60, 40), (600, 900), (8, 8)][i % 3]
        Image.new("RGBA" if i % 2 else "L", size, colours[i % 4] if i % 2 else 99).save(tmp_path / f"{i}.png")
        entries.append((tmp_path / f"{i}.png", f"{i:05} · seed {i}", texts[i % 5]))
    sheets = write_contact_sheets(tmp_path, entries)
    assert [path.name for path in sheets] == ["contact-sheet.png", "contact-sheet-2.png"]
    shown = np.asarray(Image.open(sheets[0]))
    assert all((shown == colour).all(-1).any() for colour in ([0, 0, 255], [0, 0, 0]))
    first = Image.open(sheets[0]).size
    assert max(first) <= 8 * (CELL + 90) and Image.open(sheets[1]).size[1] < first[1]
    again = sheets[0].read_bytes()
    write_contact_sheets(tmp_path, entries[:48])
    assert sheets[0].read_bytes() == again and not sheets[1].exists()
    (tmp_path / "cut.png").write_bytes(again[:500])
    Image.new("RGB", (8, 8)).save(tmp_path / "jpeg.png", format="JPEG")  # no other reader is offered the file
    for name in ("cut.png", "jpeg.png"):
        with pytest.raises(UserError, match=f"The image .*{name}' cannot be read .* Remove it"):
            write_contact_sheets(tmp_path, [(tmp_path / name, "", "")])


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
    path = one(encoder_2=str(folder))
    assert content(path) == expected and read_settings(path)["encoder_2_sha256"] == path_digest(folder)
    assert content(one()) != expected


def test_a_second_encoder_that_does_not_fit(base, tmp_path, monkeypatch):
    config = tiny_sdxl.text_encoder_2().config
    changed = [{"hidden_size": 50}, {"projection_dim": 32}]
    wide, long = (CLIPTextModelWithProjection(type(config)(**config.to_dict() | change)) for change in changed)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    for i, (message, encoder) in enumerate(
        {
            "has width 50; the UNet of .* reads 40 of its second encoder": wide,
            "has a projection to 32; the UNet of .* reads a projection to 24 of its second encoder": long,
            "has no projection; the UNet of .*export`, with --projection": CLIPTextModel(config),
        }.items()
    ):
        folder = save_encoder(tmp_path / str(i), encoder=encoder)
        with pytest.raises(UserError, match=f"The encoder '.*' {message}"):
            load_pipeline(base, None, CPU, encoder_2=folder)


def test_long_prompts_are_read_as_asked(tmp_path):
    readings = ("overlap", "separate", "cut")
    paths = [make(tmp_path, encoder=None, reading=name, name=f"{name}.png") for name in readings]
    pipe = load_pipeline(TOY["base"], None, CPU)
    assert by_pipeline(pipe, LONG) == content(paths[0]) and len({content(path) for path in paths}) == 3
    assert [read_settings(path)["reading"] for path in paths] == list(readings)
    cut = read_settings(paths[2])
    assert (cut["positions"], cut["cut_at"]) == (77, 77) and cut["tokens"] == read_settings(paths[0])["tokens"] > 75
    assert by_pipeline(StableDiffusionXLPipeline(**pipe.components), LONG) == content(paths[2])
    assert make(tmp_path, encoder="cut:original", name="cut.png", overwrite=False) == paths[2]  # the same settings
    several = make(tmp_path, name="several", encoder=None, images_per_prompt=2, reading="separate")
    assert paths[1].read_bytes() in images(several).values()
    assert len({content(make(tmp_path, "a star", encoder=None, reading=name)) for name in readings}) == 1


def test_weighting(tmp_path):
    def one(prompt, **changes):
        path = make(tmp_path, prompt, **changes)
        return content(path), read_settings(path)["chunks"]

    plain, as_text = one("a red star"), one("a (red:1.5) star")
    weighted = one("a (red:1.5) star", weighting=True)
    assert len({plain[0], as_text[0], weighted[0]}) == 3
    assert one("a (RED:1.0) star", weighting=True) == plain
    cut = one("a (red:1.5) star", weighting=True, reading="cut", encoder=None)
    assert cut[0] == one("a (red:1.5) star", weighting=True, encoder=None)[0]
    # BREAK is a word in capitals only, and lower case is what encoders are given.
    assert one("a ring BREAK a star", weighting=True)[1] == [2, 2]
    assert one("a ring break a star", weighting=True)[1] == [1, 1]
    pipe = load_pipeline(TOY["base"], TOY["encoder"], CPU).set_long_prompt(weighting=True)
    assert by_pipeline(pipe, "a (red:1.5) star") == weighted[0]
    with pytest.raises(UserError, match="^The prompt cannot be read: the weight of 'star' is inf, but must be"):
        one(f"a (star:{'9' * 400})", weighting=True)


def test_stable_diffusion_15(tmp_path, monkeypatch):
    base = tmp_path / "sd15"
    tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()).save_pretrained(base)
    encoder = save_encoder(tmp_path / "encoder", 32)
    one = partial(make, tmp_path, base=str(base))
    path = one(PROMPT, encoder=str(encoder))
    assert read_settings(path)["chunks"] == [1]
    pipe = load_pipeline(base, encoder, CPU)
    assert content(path) == by_pipeline(pipe, PROMPT)
    assert one(PROMPT, "low.png", encoder=str(encoder), low_memory=True).read_bytes() == path.read_bytes()
    assert content(one(PROMPT, "own.png", encoder=None)) != content(path)

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    wide = save_encoder(tmp_path / "wide", 64)
    projected = save_encoder(tmp_path / "projected", encoder=CLIPTextModelWithProjection(pipe.text_encoder.config))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "prompt_2": "b"}')
    for changes, message in [
        ({"encoder": str(wide)}, "has width 64; the UNet of .* reads 32 of its first encoder. Give one of width 32"),
        ({"encoder": str(projected)}, "has a projection to .* reads no projection of its first encoder"),
        ({"encoder_2": "stretch"}, "is a StableDiffusionPipeline, which has no second encoder. Leave encoder_2 out"),
        ({"prompt": None, "prompts": str(tmp_path / "p.jsonl"), "name": "x"}, "have a prompt_2, and the SDXL"),
    ]:
        with pytest.raises(UserError, match=message):
            one(**changes)
    with pytest.raises(UserError, match="is a StableDiffusionPipeline, not a StableDiffusionXLPipeline"):
        Checkpoint.parse(base).check_kind()
