"""A picture from the command's own function, with a tiny SDXL and a 248-token encoder."""

import json

import pytest
import tiny_sdxl
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from debias_diffusion.app.generate import GenerateConfig, generate
from debias_diffusion.errors import UserError
from debias_diffusion.tokens import clip_tokenizer

PROMPT = "A red cat sleeps on a blue sofa. " + "A small green bird sits on the table, near the window. " * 9


def save_encoder(folder, width):
    tiny_sdxl.text_encoder(width, window=248, seed=7).save_pretrained(folder / "text_encoder")
    clip_tokenizer(248).save_pretrained(folder / "tokenizer")
    return folder


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_sdxl.build_tiny_sdxl(tmp_path_factory.mktemp("sdxl")))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(save_encoder(tmp_path_factory.mktemp("encoder"), 32))


def test_a_picture_and_its_settings(base, encoder, tmp_path, capsys):
    def make(name, **changes):
        settings = {"prompt": PROMPT, "base": base, "encoder": encoder, "steps": 2, "seed": 3, "device": "cpu"}
        return generate(GenerateConfig(**settings | changes, output=str(tmp_path / "new" / name)))

    path = make("a.png")
    assert path == tmp_path / "new" / "a.png"
    printed = capsys.readouterr().out
    n_tokens = len(clip_tokenizer(248)(PROMPT, add_special_tokens=False).input_ids)
    assert 75 < n_tokens <= 150
    assert printed == (
        f"Prompt: {n_tokens} tokens, encoded at 152 positions (1 window of the first text encoder, 2 of the second)\n"
    )
    image = Image.open(path)
    assert image.size == (64, 64) and image.format == "PNG"
    assert json.loads(image.text["settings"]) == {
        "prompt": PROMPT,
        "base": base,
        "encoder": encoder,
        "negative_prompt": None,
        "seed": 3,
        "steps": 2,
        "guidance_scale": 7.0,
        "height": 64,
        "width": 64,
        "device": "cpu",
        "dtype": "float32",
        "tokens": n_tokens,
        "positions": 152,
    }

    assert make("again.png").read_bytes() == path.read_bytes()
    pixels = image.tobytes()
    changes = [{"seed": 4}, {"encoder": None}, {"prompt": PROMPT + "A dragon."}, {"negative_prompt": "grey"}]
    for change in [*changes, {"guidance_scale": 1.0}]:
        assert Image.open(make("other.png", **change)).tobytes() != pixels, change
    assert Image.open(make("wide.png", height=64, width=96)).size == (96, 64)
    # a negative prompt that guidance does not use does not lengthen the prompt
    capsys.readouterr()
    make("short.png", prompt="a cat", negative_prompt=PROMPT, guidance_scale=1.0)
    assert capsys.readouterr().out.startswith("Prompt: 2 tokens, encoded at 77 positions (1 window of")
    make("short.png", prompt="a &amp; b <|endoftext|>", dtype="bfloat16")
    assert json.loads(Image.open(tmp_path / "new" / "short.png").text["settings"])["dtype"] == "bfloat16"


def test_the_picture_is_the_pipelines(base, encoder, tmp_path):
    from debias_diffusion.interchange import load_text_encoder
    from debias_diffusion.pipelines import StableDiffusionXLLongPromptPipeline

    text_encoder, tokenizer = load_text_encoder(encoder)
    pipe = StableDiffusionXLLongPromptPipeline.from_pretrained(base, text_encoder=text_encoder, tokenizer=tokenizer)
    settings = {"num_inference_steps": 2, "guidance_scale": 7.0, "generator": torch.Generator().manual_seed(0)}
    expected = pipe("a red cat", **settings).images[0]
    path = generate(GenerateConfig("a red cat", base, encoder, str(tmp_path / "p.png"), steps=2, device="cpu"))
    assert Image.open(path).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": " \n\t "}, "The prompt is empty"),
        ({"prompt": "x" * 100_000}, "The prompt has 100,000 characters; at most 20,000 are read"),
        ({"negative_prompt": "x" * 20_001}, "The negative prompt has 20,001 characters; at most 20,000 are read"),
        ({"height": 100}, "The height must be a positive multiple of 8 pixels, got 100. Take 96."),
        ({"width": -8}, "The width must be a positive multiple of 8 pixels, got -8. Take 8."),
        ({"steps": 0}, "The number of steps must be at least 1, got 0"),
        ({"output": "{tmp}"}, "is a folder. Give a file name"),
        ({"output": "{tmp}/a.jpg"}, "must end in .png"),
        ({"output": "{tmp}/file/sub/a.png"}, r"The output folder '.*file/sub' cannot be made \(Not a directory\)"),
        ({"device": "toaster"}, "The device 'toaster' is not available"),
        ({"device": "cuda:99"}, "The device 'cuda:99' is not available"),
        ({"base": "{tmp}/nowhere"}, "The base model '.*nowhere' is not there. Give an SDXL folder"),
        ({"base": "{tmp}"}, "cannot be read: it has no readable model_index.json"),
        ({"base": "{tmp}/sd15"}, "is a StableDiffusionPipeline, not a StableDiffusionXLPipeline"),
        ({"encoder": "{tmp}/nowhere/else"}, "is not there"),
        (
            {"encoder": "{tmp}/wide"},
            "has width 64 and the base's second encoder 40, together 104; its UNet reads 72. An encoder of width 32"
            " fits.*ViT-L-14",
        ),
    ],
)
def test_errors_name_what_was_given(base, tmp_path, changes, message, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "sd15").mkdir()
    (tmp_path / "sd15" / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
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
