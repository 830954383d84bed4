"""Pictures from the command's own function, with tiny models of the real classes and a 248-token encoder."""

import gc
import json
import os
import re
import shutil
from functools import partial
from importlib.metadata import version

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
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

PROMPT = "A red cat sleeps on a blue sofa. " + "A small green bird sits on the table, near the window. " * 8


# For what happens to many pictures: the toy world's models load in a tenth of a second, their vocabulary being small.
TOY = {"base": "toy/sdxl", "encoder": "toy/debias-clip", "steps": 2, "device": "cpu"}
LONG = "There is one star and one circle. " + 8 * "The object in the centre is a large blue star. "
OTHERS = {"index.jsonl", "contact-sheet.png", ".lock", "job.json", "items.jsonl"}  # in a folder of images
LINES = ["a star", LONG.strip(), "a circle", "a heart", LONG + "A ring.", "a square"]


def draw(folder, prompt=LONG, name="a.png", **changes):
    return generate(GenerateConfig(prompt, output=str(folder / name), **TOY | {"overwrite": True} | changes))


def drawn_by(pipe, *prompts, seed=0, **call):
    """The image of the pipeline itself, with the settings of the tests."""
    noise = torch.Generator().manual_seed(seed)
    return pipe(*prompts, num_inference_steps=2, guidance_scale=7.0, generator=noise, **call).images[0]


def save_encoder(folder, width=None, encoder=None):
    encoder = encoder or tiny_sdxl.text_encoder(width, window=248, seed=7)
    encoder.save_pretrained(folder / "text_encoder")
    tiny_tokenizer(encoder.config.max_position_embeddings).save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def base(sdxl_folder):
    return str(sdxl_folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(save_encoder(tmp_path_factory.mktemp("encoder"), 32))


def test_a_picture_and_its_settings(base, encoder, tmp_path, capsys):
    settings = {"prompt": PROMPT, "base": base, "encoder": encoder, "steps": 2, "seed": 3, "device": "cpu"}
    path = generate(GenerateConfig(**settings, output=str(tmp_path / "new" / "a.png")))
    assert path == tmp_path / "new" / "a.png"
    printed = capsys.readouterr().out
    n_tokens = len(tiny_tokenizer(248)(PROMPT, add_special_tokens=False).input_ids)
    assert 75 < n_tokens <= 150
    assert printed == (
        f"Prompt: {n_tokens} tokens, encoded at 152 positions (1 chunk of the first text encoder, 3 chunks of the "
        "second text encoder)\n"
        f"Wrote {path}\n"
    )
    image = Image.open(path)
    assert image.size == (64, 64) and image.format == "PNG"
    text_encoder, tokenizer = load_text_encoder(encoder)
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, text_encoder=text_encoder, tokenizer=tokenizer)
    assert image.tobytes() == drawn_by(pipe, PROMPT, seed=3).tobytes()
    assert json.loads(image.text["settings"]) == {
        "prompt": PROMPT,
        "base": base,
        "encoder": encoder,
        "encoder_sha256": path_digest(encoder),
        "encoder_2": None,
        "encoder_2_sha256": None,
        "negative_prompt": None,
        "prompt_2": None,
        "weighting": False,
        "reading": "overlap",
        "scheduler": "Euler",
        "seed": 3,
        "steps": 2,
        "guidance_scale": 7.0,
        "height": 64,
        "width": 64,
        "device": "cpu",
        "dtype": "float32",
        "tokens": n_tokens,
        "positions": 152,
        "chunks": [1, 3],
        "cut_at": None,
        "layer": "penultimate",
    }


def test_an_image_of_other_settings_is_not_overwritten_unasked(base, tmp_path):
    path = draw(tmp_path, "a star")
    before = path.read_bytes()
    assert draw(tmp_path, "a star", overwrite=False).read_bytes() == before  # the same image is made again
    with pytest.raises(UserError, match="a.png' is another image: prompt was 'a star', now 'a ring'. .* --overwrite"):
        draw(tmp_path, "a ring", overwrite=False)
    assert path.read_bytes() == before and draw(tmp_path, "a ring").read_bytes() != before
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(UserError, match="it holds no settings"):
        draw(tmp_path, "a ring", overwrite=False)


def test_one_encoder_under_two_paths_is_the_same_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shipped("toy/clip"), "clip")
    draw(tmp_path, "a star", encoder="clip")
    draw(tmp_path, "a star", encoder="./clip", overwrite=False)
    with pytest.raises(UserError, match="encoder_sha256 was"):
        draw(tmp_path, "a star", overwrite=False)


def test_every_setting_counts(tmp_path, capsys):
    make = partial(draw, tmp_path, seed=3)
    path = make()
    assert make(name="again.png").read_bytes() == path.read_bytes()
    pixels = Image.open(path).tobytes()
    changes = [{"seed": 4}, {"encoder": None}, {"prompt": LONG + "A ring."}, {"negative_prompt": "grey"}, {"steps": 3}]
    for change in [*changes, {"guidance_scale": 1.0}]:
        assert Image.open(make(name="other.png", **change)).tobytes() != pixels, change
    assert Image.open(make(name="wide.png", height=64, width=96)).size == (96, 64)
    # a negative prompt that guidance does not use does not lengthen the prompt
    capsys.readouterr()
    make("a star", negative_prompt=LONG, guidance_scale=1.0)
    assert capsys.readouterr().out.startswith("Prompt: 2 tokens, encoded at 77 positions (1 chunk of")
    assert read_settings(make("a &amp; b <|endoftext|>", precision="bf16"))["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
        ({"device": "toaster"}, "The device 'toaster' is not available"),
        ({"device": "cuda:99"}, "The device 'cuda:99' is not available"),
        ({"base": "{tmp}/nowhere"}, "The SDXL checkpoint '.*nowhere' is not there. Give an SDXL folder"),
        ({"base": "{tmp}"}, "cannot be read: it has no readable model_index.json"),
        (
            {"base": "{tmp}/flux"},
            "is a FluxPipeline, not a StableDiffusionXLPipeline or a StableDiffusionPipeline. Give an SDXL folder",
        ),
        ({"base": "{tmp}/sd15"}, "has no readable unet/config.json.* Give a whole"),
        ({"encoder": "{tmp}/nowhere/else"}, "is not there"),
        (
            {"encoder": "{tmp}/wide"},
            "has width 64; the UNet of .* reads 32 of its first encoder. Give one of width 32",
        ),
    ],
)
def test_errors_name_what_was_given(base, tmp_path, changes, message, monkeypatch):
    (tmp_path / "file").touch()
    for name, kind in (("sd15", "StableDiffusionPipeline"), ("flux", "FluxPipeline")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    (tmp_path / "p.txt").write_text("a cat")
    (tmp_path / "p.jsonl").write_text("a cat")
    if changes.get("encoder") == "{tmp}/wide":
        save_encoder(tmp_path / "wide", 64)
    changes = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in changes.items()}

    def load(*_, **__):
        raise AssertionError("a model was loaded before the settings were checked")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", load)
    settings = {"prompt": "cat", "base": base, "output": str(tmp_path / "a.png"), "device": "cpu"} | changes
    with pytest.raises(UserError, match=message):
        generate(GenerateConfig(**settings))
    assert not (tmp_path / "a.png").exists()


def test_a_tiny_sdxl_that_fits_an_exported_encoder(tmp_path, monkeypatch, capsys):
    folder = save_encoder(tmp_path / "exported", 64)
    monkeypatch.setattr("sys.argv", ["tiny_sdxl.py", str(tmp_path / "base"), "--text-encoder", str(folder)])
    tiny_sdxl.main()
    output = tmp_path / "p.png"
    generate(GenerateConfig("a cat", str(tmp_path / "base"), str(folder), str(output), steps=1, device="cpu"))
    assert Image.open(output).size == (64, 64)


def test_a_tiny_sdxl_is_the_same_every_time(base, tmp_path):
    again = tiny_sdxl.build_tiny_sdxl(tmp_path)
    for name in ("unet", "vae"):
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert (again / file).read_bytes() == (tmp_path.__class__(base) / file).read_bytes()


# Files of prompts


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Draws from lines, into a folder, which is returned; a second call with its name goes on with it."""
    root = tmp_path_factory.mktemp("many")

    def draw(name, lines=LINES, kind="txt", **changes):
        file = root / f"{name}.{kind}"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        settings = {"prompt": None, "prompts": str(file), **TOY}
        return generate(GenerateConfig(**settings | changes, output=str(root / name)))

    return draw


@pytest.fixture(scope="module")
def drawn(many):
    """Each line alone."""
    return many("drawn")


def pictures(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[0-9]*.png"))}


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_of_pictures(drawn, tmp_path):
    slug = "there-is-one-star-and-one-circle-the-obj"
    names = [
        f"0000{i}-{i}-{slug if line.startswith(LONG[:99]) else line.replace(' ', '-')}.png"
        for i, line in enumerate(LINES)
    ]
    assert list(pictures(drawn)) == names
    assert {path.name for path in drawn.iterdir()} == {*names, *OTHERS}
    index = lines_of(drawn / "index.jsonl")
    assert [(entry["file"], entry["where"], entry["prompt"], entry["seed"]) for entry in index] == [
        (name, f"line {i + 1}", line, i) for i, (name, line) in enumerate(zip(names, LINES, strict=True))
    ]
    assert [(entry["positions"], entry["chunks"]) for entry in index] == [
        (152, [1, 2]) if len(line) > 9 else (77, [1, 1]) for line in LINES
    ]
    assert all(0 < entry["tokens"] <= entry["positions"] - 2 for entry in index)
    # Each is the picture that its line gives alone.
    for i in (1, 2):
        assert draw(tmp_path, LINES[i], seed=i).read_bytes() == (drawn / names[i]).read_bytes()


def test_batches_begin_with_the_noise_of_each_seed(drawn, many):
    batched = many("batched", batch=3)
    assert list(pictures(batched)) == list(pictures(drawn))
    for name in pictures(drawn):
        assert abs(pixels(batched / name) - pixels(drawn / name)).max() <= 1
    first, second = list(pictures(drawn))[:2]
    assert abs(pixels(drawn / first) - pixels(drawn / second)).max() > 1


def test_the_same_from_csv_and_json_lines(drawn, many, capsys):
    rows = ["prompt,seed", *(f'"{line}",' for line in LINES)]
    assert pictures(many("csv", rows, kind="csv")) == pictures(drawn)
    capsys.readouterr()
    entries = [{"prompt": line, "seed": i} for i, line in enumerate(LINES)]
    folder = many("jsonl", [*entries[:2], "no json", *entries[2:5]], kind="jsonl", seed=99)
    printed = capsys.readouterr().out
    assert "Prompts: 5 in " in printed and "Left out: line 3: Not JSON: Expecting value" in printed
    [left_out] = lines_of(folder / "left-out.jsonl")
    assert left_out["where"] == "line 3" and left_out["reason"].startswith("Not JSON")
    # A bad line keeps its number, so that mending it moves no other picture.
    of_both = pictures(folder), pictures(drawn)
    assert [name[:6] for name in of_both[0]] == ["00000-", "00001-", "00003-", "00004-", "00005-"]
    assert list(of_both[0].values()) == list(of_both[1].values())[:5]
    many("jsonl", [*entries[:2], {"prompt": "mended"}, *entries[2:5]], kind="jsonl", seed=99)
    assert {name: data for name, data in pictures(folder).items() if name[:6] != "00002-"} == of_both[0]
    assert (folder / "00002-101-mended.png").exists() and not (folder / "left-out.jsonl").exists()


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
    assert index[4]["file"] == "00004-7-unicode.png"
    assert len({pixels(path).tobytes() for path in folder.glob("[0-9]*.png")}) == 5

    pipe = load_pipeline(TOY["base"], TOY["encoder"], torch.device("cpu"))
    for i, (prompt, prompt_2, negative) in enumerate([("a star", None, LONG), ("a star", "a circle", "grey")]):
        expected = drawn_by(pipe, prompt, prompt_2, seed=7, negative_prompt=negative)
        path = folder / index[(0, 3)[i]]["file"]
        assert abs(np.asarray(expected).astype(int) - pixels(path)).max() <= 1


def test_images_per_prompt(tmp_path, drawn, many):
    folder = draw(tmp_path, "a star", "stars", images_per_prompt=2)
    assert list(pictures(folder)) == ["00000-0-a-star.png", "00000-1-a-star.png"]
    assert pictures(folder)["00000-0-a-star.png"] == pictures(drawn)["00000-0-a-star.png"]
    # More of them go beside those that are there.
    before = pictures(many("more", LINES[:2]))
    after = pictures(many("more", LINES[:2], images_per_prompt=2))
    assert before.items() < after.items()
    assert [name[:8] for name in after] == ["00000-0-", "00000-1-", "00001-1-", "00001-2-"]


def test_a_finished_folder_loads_no_model(drawn, many, monkeypatch, capsys):
    times = {path.name: path.stat().st_mtime_ns for path in drawn.glob("[0-9]*.png")}
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    sheet, index = ((drawn / name).read_bytes() for name in ("contact-sheet.png", "index.jsonl"))
    assert many("drawn") == drawn
    assert "6 are in" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in drawn.glob("[0-9]*.png")} == times
    assert (drawn / "contact-sheet.png").read_bytes() == sheet and (drawn / "index.jsonl").read_bytes() == index


def test_what_is_missing_is_drawn_in_the_batches_it_would_have_been_in(many):
    folder = many("holes", batch=3)
    before = pictures(folder)
    for name in list(before)[::2]:
        (folder / name).unlink()
    many("holes", batch=3)
    assert pictures(folder) == before


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (LINES, {"steps": 3}, "other settings .steps: 2 there, 3 here"),
        (LINES, {"reading": "separate"}, "other settings .reading: 'overlap' there, 'separate' here"),
        (LINES, {"encoder": None}, "The encoder is another one, by its contents: .* there, None here"),
        (
            ["a circle", *LINES[1:]],
            {},
            r"1 of the images .* 00000-0-a-star.png .line 1.: prompt was 'a star', now 'a circle'\.",
        ),
        ([*LINES[:4], LONG + "A cross."], {}, "prompt was '….* A ring.', now '….* A cross.'"),
    ],
)
def test_other_pictures_are_not_overwritten(drawn, many, lines, changes, message):
    before = pictures(drawn)
    with pytest.raises(UserError, match=message):
        many("drawn", lines, **changes)
    assert pictures(drawn) == before


def test_a_picture_from_elsewhere_is_not_overwritten(many):
    folder = many("elsewhere", LINES[:1])
    (folder / "00001-1-a-circle.png").write_bytes(b"mine")
    with pytest.raises(UserError, match="1 of the images .* 00001-1-a-circle.png .line 2.: it was not made by"):
        many("elsewhere", [LINES[0], LINES[2]])
    assert (folder / "00001-1-a-circle.png").read_bytes() == b"mine"


def test_of_a_training_run_the_model_counts_and_not_the_log(many, tmp_path):
    shutil.copytree(shipped("toy/clip"), tmp_path / "run" / "last")
    folder = many("run", LINES[:1], encoder=str(tmp_path / "run"))
    (tmp_path / "run" / "log.jsonl").write_text("{}")
    many("run", LINES[:1], encoder=str(tmp_path / "run"))
    (tmp_path / "run" / "last" / "open_clip_config.json").write_text("{}")
    with pytest.raises(UserError, match="The encoder is another one"):
        many("run", LINES[:1], encoder=str(tmp_path / "run"))
    assert len(pictures(folder)) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that opens and cannot be read")
def test_an_encoder_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "model.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"The model '.*/encoder' cannot be read \(.*Input/output error"):
        draw(tmp_path, encoder=str(tmp_path / "encoder"))


def test_seeds_end_where_generators_end(tmp_path, many):
    last = 2**63 - 1
    with pytest.raises(UserError, match=f"The seed {last - 1} is too large for 3 images"):
        draw(tmp_path, "a star", "a", seed=last - 1, images_per_prompt=3)
    with pytest.raises(UserError, match=f"The seed {last + 1} is too large for 1 image:"):
        many("seeds", ["a star", "a ring"], seed=last)
    with pytest.raises(UserError, match="makes? 2,000,000; one run renders at most 1,000,000"):
        many("seeds", ["a star", "a ring"], images_per_prompt=1_000_000)
    assert not (tmp_path / "a").exists()
    folder = many("seeds", ["a star", "a ring"], seed=last - 1)
    assert list(pictures(folder)) == [f"00000-{last - 1}-a-star.png", f"00001-{last}-a-ring.png"]


def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
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


@pytest.mark.parametrize(
    "damaged", [lambda png: png[:-30], lambda png: png[: len(png) // 2], lambda png: png[:-60] + b"?" + png[-59:]]
)
def test_a_damaged_picture_is_drawn_again(drawn, many, damaged, capsys):
    before = pictures(drawn)
    name = list(before)[2]
    for place in ("drawn/contact-sheet.png", "drawn/index.jsonl"):
        (drawn.parent / place).unlink()
    (drawn / name).write_bytes(damaged(before[name]))
    assert read_settings(drawn / name) is not None
    many("drawn")
    assert pictures(drawn) == before and len(lines_of(drawn / "index.jsonl")) == 6
    printed = capsys.readouterr().out
    assert f"Damaged: 1 of the images, rendered again, the first {name}" in printed and "5 are in" in printed


def test_a_picture_that_no_contact_sheet_can_show_is_named(tmp_path):
    write_png(Image.effect_noise((64, 64), 50), tmp_path / "a.png", {})
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:500])
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png", format="JPEG")  # no other reader is offered the file
    for name in ("b.png", "c.png"):
        with pytest.raises(UserError, match=f"The image .*{name}' cannot be read .* Remove it"):
            write_contact_sheets(tmp_path, [(tmp_path / name, "", "")])


def test_the_first_difference():
    assert first_difference({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}) == ""
    assert first_difference({"a": 1}, {"a": 1, "b": None}) == ""
    assert first_difference({"a": 1, "b": 2}, {"b": 3, "a": 0}) == "b was 2, now 3"
    long = "x" * 500
    assert (
        first_difference({"p": long + "cat" + long}, {"p": long})
        == f"p was '…{'x' * 20}cat{'x' * 37}…', now '…{'x' * 20}'"
    )


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
    assert run(*settings, "--output", tmp_path / "a.png")[0] == 0
    assert run(*settings, "a ring", "--output", tmp_path / "b.png")[0] == 0
    assert [read_settings(tmp_path / name)["prompt"] for name in ("a.png", "b.png")] == ["a star", "a ring"]
    code, printed = run("--base=toy/sdxl", "--steps=2", "--prompts", tmp_path / "p.txt", "--output", tmp_path / "all")
    assert code == 0 and printed.endswith(f"Wrote {tmp_path / 'all'}\n") and len(pictures(tmp_path / "all")) == 2
    code, printed = run("--base=toy/sdxl")
    assert code == 2 and printed.startswith("error: Give either a prompt or a file of prompts, not neither")


# Low memory


def alive(*classes):
    return sum(type(thing) in classes for thing in gc.get_objects())


def watched(monkeypatch, cls):
    """Whether text encoders and UNets were there, each time a `cls` ran."""
    encoders, seen, forward = (CLIPTextModel, CLIPTextModelWithProjection), set(), cls.forward
    gc.collect()
    before, unets = alive(*encoders), alive(UNet2DConditionModel)  # of other tests

    def spy(self, *args, **kwargs):
        seen.add((alive(*encoders) > before, alive(UNet2DConditionModel) > unets))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", spy)
    return seen


@pytest.mark.parametrize(
    ("low_memory", "at_unet", "at_encoder"), [(False, (True, True), (True, True)), (True, (False, True), (True, False))]
)
def test_low_memory(drawn, many, monkeypatch, low_memory, at_unet, at_encoder):
    unets, encoders = (watched(monkeypatch, cls) for cls in (UNet2DConditionModel, CLIPTextModel))
    folder = many(f"low-{low_memory}", LINES[:1], low_memory=low_memory)
    assert (unets, encoders) == ({at_unet}, {at_encoder})
    assert pictures(folder).items() <= pictures(drawn).items()


def test_low_memory_in_rounds_of_batches(many, monkeypatch):
    monkeypatch.setattr(renderer, "ENCODED_AT_ONCE", 4)
    settings = {"batch": 2, "negative_prompt": "grey", "encoder_2": "stretch", "images_per_prompt": 2}
    whole, rounds = (many(f"rounds-{low}", LINES[:4], low_memory=low, **settings) for low in (False, True))
    assert len(pictures(whole)) == 8 and pictures(rounds) == pictures(whole)


def test_low_memory_for_one_picture_without_guidance(tmp_path):
    make = partial(draw, tmp_path, guidance_scale=1.0, negative_prompt=LONG)
    assert make(name="low.png", low_memory=True).read_bytes() == make().read_bytes()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "The memory of cpu does not suffice .CUDA out.* Try --low"),
        (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), "does not suffice .*allocate .* Try"),
        (MemoryError("Unable to allocate 7.11 PiB"), "does not suffice .*allocate .* Try --low-memory"),
        (RuntimeError("size mismatch"), "^size mismatch$"),  # another error stays as it is
    ],
)
def test_too_little_memory_is_explained(many, monkeypatch, error, message):
    def forward(*_, **__):
        raise error

    monkeypatch.setattr(UNet2DConditionModel, "forward", forward)
    with pytest.raises(RuntimeError if message[0] == "^" else UserError, match=message):
        many("memory", LINES[:1])


# Values that are no numbers


@pytest.fixture
def broken_encoder(monkeypatch):
    """A letter's embedding is no number once the models are loaded, since files with such weights are refused.

    Prompts without a heart are drawn as ever.
    """
    load = renderer.load_pipeline

    def load_and_break(*arguments):
        pipe = load(*arguments)
        if pipe.text_encoder is not None:
            letter = pipe.tokenizer("heart", add_special_tokens=False).input_ids[0]
            with torch.no_grad():
                pipe.text_encoder.get_input_embeddings().weight[letter, 3] = float("nan")
        return pipe

    monkeypatch.setattr(renderer, "load_pipeline", load_and_break)


@pytest.mark.parametrize("settings", [{"batch": 3}, {"low_memory": True}])
def test_pictures_of_values_that_are_no_numbers_are_named_and_the_rest_is_drawn(
    drawn, many, broken_encoder, settings, monkeypatch, capsys
):
    name = f"broken-{'-'.join(settings)}"
    with pytest.raises(
        FailedError, match="^1 of 6 images in .* not rendered, the first: line 4, seed 3: its .* not finite"
    ) as error:
        many(name, **settings)
    assert error.value.exit_code == 1
    folder = drawn.parent / name
    assert [int(name[:5]) for name in pictures(folder)] == [0, 1, 2, 4, 5]
    for file in pictures(folder):
        assert abs(pixels(folder / file) - pixels(drawn / file)).max() <= ("batch" in settings)
    assert [entry["where"] for entry in lines_of(folder / "left-out.jsonl")] == ["line 4, seed 3"]
    assert len(lines_of(folder / "index.jsonl")) == 5 and "Left out: line 4, seed 3" in capsys.readouterr().out
    monkeypatch.undo()  # mended: only what is missing is drawn
    assert len(pictures(many(name, **settings))) == 6 and not (folder / "left-out.jsonl").exists()


def test_one_picture_of_values_that_are_no_numbers_is_no_file(tmp_path, broken_encoder):
    with pytest.raises(FailedError, match="not rendered, the first: the prompt, seed 0: its embeddings are not finite"):
        draw(tmp_path, "a heart")
    assert not (tmp_path / "a.png").exists()


# What the files say


def as_viewers_read_it(text):
    """What A1111's interface, and viewers that follow it, make of a `parameters` chunk."""
    *lines, last = text.strip().split("\n")
    fields = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    assert len(fields) >= 3  # or the line would be taken for a part of the prompt
    prompt, negative, is_negative = "", "", False
    for line in lines:
        if line.startswith("Negative prompt:"):
            is_negative, line = True, line[len("Negative prompt:") :].strip()
        if is_negative:
            negative += line
        else:
            prompt += line
    return prompt, negative, {name: json.loads(value) if value[0] == '"' else value for name, value in fields}


def test_viewers_find_the_parameters(base, tmp_path):
    def read(name, **changes):
        settings = {"base": base, "encoder": None, "steps": 1} | changes
        path = draw(tmp_path, "a cat:\nNegative prompt: (red:1.2), 猫", name, **settings)
        return as_viewers_read_it(Image.open(path).info["parameters"])

    prompt, negative, fields = read("a.png", negative_prompt="grey,\nSteps: 3", seed=5, width=96)
    assert (prompt, negative) == ("a cat: Negative prompt: (red:1.2), 猫", "grey, Steps: 3")
    assert fields == {
        "Steps": "1",
        "Sampler": "Euler",
        "CFG scale": "7.0",
        "Seed": "5",
        "Size": "96x64",
        "Model": os.path.basename(base),
        "Version": f"debias-diffusion {version('debias-diffusion')}",
    }
    odd = tmp_path / "ba,se: 1"
    odd.symlink_to(base)
    prompt, negative, fields = read("b.png", base=str(odd) + "/")
    assert negative == "" and fields["Model"] == "ba,se: 1"


def test_contact_sheets(tmp_path):
    colours = ["red", "blue", "lime", "black"]
    entries = []
    for i in range(50):
        size = [(60, 40), (600, 900), (8, 8)][i % 3]
        Image.new("RGBA" if i % 2 else "L", size, colours[i % 4] if i % 2 else 99).save(tmp_path / f"{i}.png")
        text = ["a cat", "x" * 900, "", "猫 " * 400 + "\x1b[31m", "Ärger Синяя عربي 🎨\n\nb"][i % 5]
        entries.append((tmp_path / f"{i}.png", f"{i:05} · seed {i}", text))
    sheets = write_contact_sheets(tmp_path, entries)
    assert [path.name for path in sheets] == ["contact-sheet.png", "contact-sheet-2.png"]
    shown = np.asarray(Image.open(sheets[0]))
    assert all((shown == colour).all(-1).any() for colour in ([0, 0, 255], [0, 0, 0]))
    first = Image.open(sheets[0]).size
    assert max(first) <= 8 * (CELL + 90) and Image.open(sheets[1]).size[1] < first[1]
    again = sheets[0].read_bytes()
    write_contact_sheets(tmp_path, entries[:48])
    assert sheets[0].read_bytes() == again and not sheets[1].exists()


# Models


def test_the_second_encoder_stretched(base, encoder, tmp_path):
    make = partial(draw, tmp_path, PROMPT, base=base, encoder=encoder)
    path = make(encoder_2="stretch")
    settings = read_settings(path)
    assert (settings["encoder_2"], settings["encoder_2_sha256"]) == ("stretch", None)
    assert settings["chunks"] == [1, 1] and settings["positions"] == 152

    pipe = load_pipeline(base, encoder, torch.device("cpu"))
    stretched, tokenizer = stretch_text_encoder(pipe.text_encoder_2, pipe.tokenizer_2)
    pipe.register_modules(text_encoder_2=stretched, tokenizer_2=tokenizer)
    expected = drawn_by(pipe, PROMPT)
    assert Image.open(path).tobytes() == expected.tobytes()
    # The same from a folder, whose tokenizer pads with another token than SDXL's second one.
    folder = save_encoder(tmp_path / "second", encoder=stretched)
    assert tiny_tokenizer(248).pad_token_id != tokenizer.pad_token_id == 0
    path = make(encoder_2=str(folder))
    assert Image.open(path).tobytes() == expected.tobytes()
    assert read_settings(path)["encoder_2_sha256"] == path_digest(folder)
    assert Image.open(make()).tobytes() != expected.tobytes()


def test_a_second_encoder_that_does_not_fit(base, tmp_path, monkeypatch):
    config = tiny_sdxl.text_encoder_2().config
    wide = CLIPTextModelWithProjection(type(config)(**config.to_dict() | {"hidden_size": 50}))
    long = CLIPTextModelWithProjection(type(config)(**config.to_dict() | {"projection_dim": 32}))
    folders = {
        "has width 50; the UNet of .* reads 40 of its second encoder": wide,
        "has a projection to 32; the UNet of .* reads a projection to 24 of its second encoder": long,
        "has no projection; the UNet of .*export`, with --projection": CLIPTextModel(config),
    }
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    for i, (message, encoder) in enumerate(folders.items()):
        folder = save_encoder(tmp_path / str(i), encoder=encoder)
        with pytest.raises(UserError, match=f"The encoder '.*' {message}"):
            load_pipeline(base, None, torch.device("cpu"), encoder_2=folder)


def test_long_prompts_are_read_as_asked(tmp_path):
    readings = ("overlap", "separate", "cut")
    overlap, plain, cut = (draw(tmp_path, encoder=None, reading=name, name=f"{name}.png") for name in readings)
    pipe = load_pipeline(TOY["base"], None, torch.device("cpu"))
    assert np.asarray(drawn_by(pipe, LONG)).tobytes() == np.asarray(Image.open(overlap)).tobytes()
    assert len({Image.open(path).tobytes() for path in (overlap, plain, cut)}) == 3
    assert [read_settings(path)["reading"] for path in (plain, overlap, cut)] == ["separate", "overlap", "cut"]
    stock = StableDiffusionXLPipeline(**pipe.components)
    assert np.asarray(drawn_by(stock, LONG)).tobytes() == np.asarray(Image.open(cut)).tobytes()
    with pytest.raises(UserError, match="encoder is 'cut:original' and reading 'separate', but both say how prompts"):
        draw(tmp_path, encoder="cut:original", reading="separate")
    assert draw(tmp_path, encoder="cut:original", name="cut.png") == cut  # the same settings
    several = draw(tmp_path, name="several", encoder=None, images_per_prompt=2, reading="separate")
    assert plain.read_bytes() in pictures(several).values()
    short = {Image.open(draw(tmp_path, "a star", encoder=None, reading=name)).tobytes() for name in readings}
    assert len(short) == 1


def test_weighting(tmp_path):
    def make(prompt, **changes):
        path = draw(tmp_path, prompt, **changes)
        return pixels(path).tobytes(), read_settings(path)["chunks"]

    plain, as_text = make("a red star"), make("a (red:1.5) star")
    weighted = make("a (red:1.5) star", weighting=True)
    assert len({plain[0], as_text[0], weighted[0]}) == 3
    assert make("a (RED:1.0) star", weighting=True) == plain
    # BREAK is a word in capitals only, and lower case is what encoders are given.
    assert make("a ring BREAK a star", weighting=True)[1] == [2, 2]
    assert make("a ring break a star", weighting=True)[1] == [1, 1]
    pipe = load_pipeline(TOY["base"], TOY["encoder"], torch.device("cpu")).set_long_prompt(weighting=True)
    assert np.asarray(drawn_by(pipe, "a (red:1.5) star")).astype(int).tobytes() == weighted[0]
    with pytest.raises(UserError, match="^The prompt cannot be read: the weight of"):
        make(f"a (star:{'9' * 400})", weighting=True)


def test_stable_diffusion_15(tmp_path, monkeypatch):
    base = tmp_path / "sd15"
    tiny_sdxl.assemble(StableDiffusionPipeline, tiny_sdxl.sd15_parts()).save_pretrained(base)
    encoder = save_encoder(tmp_path / "encoder", 32)
    make = partial(draw, tmp_path, base=str(base))
    path = make(PROMPT, encoder=str(encoder))
    assert read_settings(path)["chunks"] == [1]
    pipe = load_pipeline(base, encoder, torch.device("cpu"))
    expected = drawn_by(pipe, PROMPT)
    assert Image.open(path).tobytes() == expected.tobytes()
    assert make(PROMPT, "low.png", encoder=str(encoder), low_memory=True).read_bytes() == path.read_bytes()
    assert Image.open(make(PROMPT, encoder=None)).tobytes() != expected.tobytes()

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
            make(**changes)
    with pytest.raises(UserError, match="is a StableDiffusionPipeline, not a StableDiffusionXLPipeline"):
        Checkpoint.parse(base).check_kind()
