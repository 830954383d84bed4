"""Settings that this package and other programs write into images: what is read of them, and what is drawn."""

import json
import re
import struct
import zlib

import pytest
from helpers.modules import ROOT
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.app.generate import generate
from debias_diffusion.app.like import take_settings
from debias_diffusion.app.prompt_options import GenerateConfig
from debias_diffusion.errors import UserError
from debias_diffusion.pipelines.rendering.infotext import read_image
from debias_diffusion.pipelines.rendering.png import read_settings

PROMPT = 'a cat, (red:1.2)\nsofa: "a, b" 猫'
FIELDS = (
    "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 1234, Size: 832x1216, "
    'Model hash: 12ab, Model: "sd, xl: 1", Clip skip: 2, Emphasis: No norm, Version: v1.10.1'
)
A1111 = f"{PROMPT}\nNegative prompt: blurry,\nlow quality\n{FIELDS}"
READ = {
    "prompt": PROMPT, "negative_prompt": "blurry,\nlow quality", "steps": 20, "scheduler": "DPM++ 2M", "karras": True,
    "guidance_scale": 6.5, "seed": 1234, "width": 832, "height": 1216, "base": "sd, xl: 1", "clip_skip": 2,
    "reading": "a1111", "emphasis": "no_norm",
}  # fmt: skip
GRAPH = json.loads((ROOT / "examples" / "comfyui" / "long_prompt.json").read_text())


def png(path, **texts):
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)
    return str(path)


def photograph(path, kind, comment):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    Image.new("RGB", (8, 8)).save(path, format=kind, exif=exif)
    return str(path)


def unicode(text, order="be"):
    return b"UNICODE\0" + text.encode(f"utf-16-{order}")


# ---- A1111 and Forge


@pytest.mark.parametrize("place", ["PNG", "JPEG", "JPEG, little-endian"])
def test_an_infotext_in_each_kind_of_file(tmp_path, place):
    kind, _, order = place.partition(", ")
    path = tmp_path / "a.image"
    if kind == "PNG":
        png(path, parameters=A1111)
    else:
        photograph(path, kind, unicode(A1111, "le" if order else "be"))
    assert read_image(path) == ("A1111 or Forge v1.10.1", READ, [])


SHORT = "Steps: 9, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 512x512"
HIRES = ', Hires upscale: 2, ADetailer prompt: "x, Seed: 5"'
INFOTEXTS = [
    (f"a\n\nb\n{SHORT}", {"prompt": "a\n\nb", "negative_prompt": None, "emphasis": "original"}, ""),
    (SHORT, {"prompt": "", "scheduler": "Euler a", "width": 512}, ""),
    (f"a\n{SHORT.replace('Euler a', 'DPM++ 2M SDE Karras')}", {"scheduler": "DPM++ 2M SDE", "karras": True}, ""),
    (f"a\n{SHORT}{HIRES}", {"seed": 1}, "Hires upscale, ADetailer prompt"),
    (f'a <lora:x:1>\n{SHORT}, Lora hashes: "x: 12, y: 3"', {"prompt": "a"}, "<lora:x:1>: give the folder"),
    (f"a # <lora:x:1>\n{SHORT}", {"prompt": "a # <lora:x:1>"}, ""),  # a comment
    (f"a\n{SHORT}, Version: f2.0.1v1.10.1-previous-1", {"reading": "a1111"}, ""),
]


@pytest.mark.parametrize(("text", "settings", "left"), INFOTEXTS)
def test_infotexts(tmp_path, text, settings, left):
    image = read_image(png(tmp_path / "a.png", parameters=text))
    assert image.settings | settings == image.settings and ("karras" in settings) == ("karras" in image.settings)
    assert (left in " ".join(image.left)) if left else image.left == []


# ---- ComfyUI


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def graph(**changes):
    """A workflow with LoRAs, a last layer and a second pass."""
    nodes = {
        "1": node("CheckpointLoaderSimple", ckpt_name="xl.safetensors"),
        "2": node("LoraLoader", model=["1", 0], clip=["1", 1], lora_name="a\\b.safetensors", strength_model=0.8,
                  strength_clip=0.5),
        "3": node("LoraLoaderModelOnly", model=["2", 0], lora_name="c.safetensors", strength_model=1),
        "4": node("CLIPSetLastLayer", clip=["2", 1], stop_at_clip_layer=-2),
        "5": node("CLIPTextEncode", clip=["4", 0], text="a (red:1.2) cat"),
        "6": node("CLIPTextEncode", clip=["4", 0], text="blurry"),
        "7": node("EmptyLatentImage", width=64, height=48, batch_size=1),
        "8": node("KSampler", model=["3", 0], positive=["5", 0], negative=["6", 0], latent_image=["9", 0], seed=3,
                  steps=5, cfg=2, sampler_name="euler", scheduler="normal", denoise=0.5),
        "9": node("KSamplerAdvanced", model=["3", 0], positive=["5", 0], negative=["6", 0], latent_image=["7", 0],
                  noise_seed=2**64 - 1, steps=20, cfg=7.5, sampler_name="dpmpp_2m", scheduler="karras"),
        "10": node("UpscaleModelLoader", model_name="x"),
    }  # fmt: skip
    for name, inputs in changes.items():
        nodes[name.strip("_")]["inputs"] |= inputs
    return nodes


def test_a_graph_of_comfyui(tmp_path):
    image = read_image(png(tmp_path / "a.png", prompt=json.dumps(graph())), loras=True)
    assert image.settings == {
        "prompt": "a (red:1.2) cat <lora:b:0.5:0.8> <lora:c:0:1>", "negative_prompt": "blurry", "steps": 20,
        "guidance_scale": 7.5, "scheduler": "DPM++ 2M", "karras": True, "width": 64, "height": 48, "clip_skip": 2,
        "base": "xl.safetensors", "reading": "comfyui", "emphasis": "comfyui",
    }  # fmt: skip
    assert len(image.left) == 3 and "UpscaleModelLoader is not followed" in " ".join(image.left)
    assert "above 2^63" in " ".join(image.left) and "Other samplers" in " ".join(image.left)
    last = read_image(png(tmp_path / "a.png", prompt=json.dumps(graph(_4={"stop_at_clip_layer": -1}))))
    assert last.settings["clip_skip"] == 1 and "CLIP Set Last Layer -1: of SDXL the layer before" in " ".join(last.left)
    ours = read_image(png(tmp_path / "a.png", prompt=json.dumps(GRAPH)))
    assert ours.settings["prompt"] == GRAPH["3"]["inputs"]["text"] and ours.settings["reading"] == "overlap"
    assert ours.settings["seed"] == 0 and ours.left == []


# ---- files that are damaged or hostile


def chunk(kind, content, length=None):
    length, checksum = len(content) if length is None else length, zlib.crc32(kind + content)
    return struct.pack(">I", length) + kind + content + struct.pack(">I", checksum)


def raw_png(*chunks, side=8):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(25 * 8)))
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *chunks, pixels, chunk(b"IEND", b"")])


def infotext(text, to=""):
    """With one of the fields of `SHORT` replaced, or more after them."""
    return {"parameters": f"a\n{SHORT.replace(text, to) if to else SHORT + text}"}


def changed(**nodes):
    return {"prompt": json.dumps(graph(**nodes))}


BOMB = chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a" * 2**22))
HOSTILE = {
    "a length beyond the file": raw_png(chunk(b"tEXt", b"parameters\0a", length=2**31 - 1)),
    "a text that grows": raw_png(BOMB),
    "pixels that grow": raw_png(chunk(b"tEXt", b"parameters\0" + SHORT.encode()), side=60_000),
    "no text": {},
    "too long": {"parameters": "a" * 4_000_001 + f"\n{SHORT}"},
    "deep": {"settings": "[" * 100_000},
    "deep field": infotext(f", Seed: {'[' * 100_000}"),
    "no encoding": b"ASCII\0\0\0\xff\xfe",
    "circle": changed(_3={"model": ["3", 0]}),
    "unhashable": changed(_9={"positive": [["5"], 0]}),
    "no nodes": {"prompt": '{"1": 3}'},
    "seed": infotext("Seed: 1", "Seed: 1e999"),
    "prompt": {"settings": '{"prompt": 7}'},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_and_hostile_files_get_one_clear_error(tmp_path, name):
    content, path = HOSTILE[name], tmp_path / "a.png"
    if isinstance(content, dict):
        png(path, **content)
    elif name == "no encoding":
        photograph(path, "JPEG", content)
    else:
        path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"in the image 'a.png' cannot be read: .*Give a PNG|must be|no prompt that is read"
    ):
        take_settings(GenerateConfig(None, base="toy/sdxl", like=str(path)))


def test_a_long_line_is_read_in_time(tmp_path):
    """Not in the square of its length."""
    line = 'a: "b' * 300_000
    assert read_image(png(tmp_path / "a.png", parameters=f"{line}\n{SHORT}, {line}")).settings["seed"] == 1


# ---- drawn


def test_an_image_of_this_package_is_drawn_again(tmp_path, capsys):
    first = {"negative_prompt": "grey", "seed": 5, "steps": 2, "guidance_scale": 4.0, "sharpen": 1.5, "karras": True}
    first |= {"scheduler": "DPMSolverMultistepScheduler", "clip_skip": 3, "reading": "a1111", "emphasis": "no_norm"}
    where = {"base": "toy/sdxl", "device": "cpu"}
    path = generate(GenerateConfig("a (red:1.3) ring", output=str(tmp_path / "a.png"), **where, **first))
    again = generate(GenerateConfig(None, like=str(path), output=str(tmp_path / "b.png"), **where))
    assert again.read_bytes() == path.read_bytes()
    assert f"From {path}: clip_skip '3'" in capsys.readouterr().out
    given = {"seed": 0, "sharpen": 1.0, "karras": False, "reading": "overlap", "prompt": "a star"}
    config = take_settings(GenerateConfig(like=str(path), **where, **given))
    assert {name: getattr(config, name) for name in given} == given and config.steps == 2
    assert not re.search(rf": ({'|'.join(given)}) ", capsys.readouterr().out)


def test_an_image_of_another_program_is_drawn_as_it_reads(tmp_path, sdxl_folder, capsys):
    text = re.sub("832x1216", "64x48", A1111).replace("Steps: 20", "Steps: 2")
    like = png(tmp_path / "like.png", parameters=f"{text}, Hires upscale: 2")
    where = {"base": str(sdxl_folder), "device": "cpu"}
    drawn = generate(GenerateConfig(None, like=like, output=str(tmp_path / "a.png"), **where))
    out = capsys.readouterr().out
    assert "Not from it: Hires upscale" in out and "Not from it: The base 'sd, xl: 1'" in out
    options = {name: value for name, value in READ.items() if name != "base"} | {"width": 64, "height": 48, "steps": 2}
    options |= {"scheduler": "DPMSolverMultistepScheduler"}
    plain = generate(GenerateConfig(**options, output=str(tmp_path / "b.png"), **where))
    assert drawn.read_bytes() == plain.read_bytes() and read_settings(drawn)["emphasis"] == "no_norm"
