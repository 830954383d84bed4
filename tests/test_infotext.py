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


def infotext(text="", to=""):
    """With one of the fields of `SHORT` replaced, or more after them."""
    return {"parameters": f"a\n{SHORT.replace(text, to) if to else SHORT + text}"}


EASY = {
    "prompt": PROMPT, "negative_prompt": READ["negative_prompt"], "seed": "1234", "guidance_scale": "6.5",
    "use_stable_diffusion_model": "sd, xl: 1", "clip_skip": "False", "use_vae_model": "None", "width": "832",
    "height": "1216", "sampler_name": "euler_a", "num_inference_steps": "20", "tiling": "x", "use_lora_model": "['y']",
}  # fmt: skip
LINES = (
    ', Emphasis: None, Wildcard: "a\n, Seed: 5", Civitai resources: [{"modelName":"x, Steps: 5"}]\n'
    "Template: {b|c}, Seed: 5\nNegative Template: d"
)
INFOTEXTS = [
    ({"parameters": f"a\n\nb\n{SHORT}"}, {"prompt": "a\n\nb", "negative_prompt": None, "emphasis": "original"}, ""),
    ({"parameters": SHORT}, {"prompt": "", "scheduler": "Euler a", "width": 512}, ""),
    (infotext("Euler a", "DPM++ 2M SDE Karras"), {"scheduler": "DPM++ 2M SDE", "karras": True}, ""),
    (infotext(', Hires upscale: 2, ADetailer prompt: "x, Seed: 5"'), {"seed": 1}, "'Hires upscale', 'ADetailer"),
    (infotext(LINES), {"prompt": "a", "seed": 1, "steps": 9, "emphasis": "none"}, "'Template', 'N"),
    (infotext(", CLiP-skip: 2, App: SD.Next, Scheduler: Karras"), {"clip_skip": 2, "karras": True}, ""),
    (infotext("512x512", "1001x8, Emphasis: Odd"), {"width": None, "height": 8, "emphasis": None}, "width is 1001"),
    (infotext("Seed: 1", f"Seed: {'[' * 100_000}"), {"seed": None, "steps": 9}, "seed is '[[["),
    ({"parameters": f"a <lora:x:1>\n{SHORT}"}, {"prompt": "a"}, "<lora:x:1>: give the folder"),
    ({"parameters": f"a # <lora:x:1>\n{SHORT}"}, {"prompt": "a # <lora:x:1>"}, ""),  # a comment
    (infotext(", Version: f2.0.1v1.10.1-previous-1, Clip skip: 0"), {"reading": "a1111", "karras": None}, ""),
    ({"prompt": "a dog"} | infotext(), {"prompt": "a", "reading": "a1111"}, ""),
    ({"prompt": '{"1": {"class_type": "X", "inputs": {}}}'} | infotext(), {"prompt": "a"}, ""),
    (
        EASY,
        READ | {"scheduler": "Euler a", "karras": None, "clip_skip": None, "emphasis": "original"},
        "'tiling', 'use",
    ),
]


# ---- ComfyUI


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def changed(**changes):
    """A workflow with LoRAs, a last layer and a second pass, of which nodes or some of their inputs are others."""
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
    for name, change in changes.items():
        name = name.strip("_")
        nodes[name] = change if "class_type" in change else {**nodes[name], "inputs": nodes[name]["inputs"] | change}
    return {"prompt": json.dumps(nodes)}


WHOLE = {
    "prompt": "a (red:1.2) cat", "negative_prompt": "blurry", "steps": 20, "guidance_scale": 7.5, "karras": True,
    "scheduler": "DPM++ 2M", "width": 64, "height": 48, "clip_skip": 2, "base": "xl.safetensors", "seed": None,
    "reading": "comfyui", "emphasis": "comfyui",
}  # fmt: skip
LINKED = changed(
    _2={"strength_model": ["b", 0]}, _5={"text": ["f", 0]}, _6={"text": ["g", 0]},
    _7={"width": ["a", 0], "height": ["a", 1]}, a=node("SDXLResolution", resolution="896x1152 (0.78)"),
    _9={"noise_seed": ["c", 0], "steps": ["d", 0], "cfg": ["b", 0], "sampler_name": ["e", 0], "scheduler": ["e", 1]},
    b=node("Float", Number=0.5), c=node("Seed (rgthree)", seed=77), d=node("PrimitiveInt", value=30, control="fixed"),
    e=node("Selector", sampler_name="ddim", scheduler="x"), f=node("Text", STRING="a dog", flag=True),
    g=node("PrimitiveStringMultiline", value=""),
)  # fmt: skip
SIZES = {"width": 896, "height": 1152}
VALUES = SIZES | {"prompt": "a dog", "negative_prompt": "", "seed": 77, "steps": 30, "guidance_scale": 0.5,
                  "scheduler": "DDIM", "karras": None, "clip_skip": 2}  # fmt: skip
UNCLEAR = changed(
    _5={"text": ["b", 0]}, _7={"width": ["a", 0]}, _9={"steps": ["c", 0], "cfg": 1001},
    a=node("Ratio", width=8, ratio="16x32"), b=node("Replace", text="a", to="b"), c=node("Math", value="a*2", a=5),
)  # fmt: skip
PASSED_ON = changed(
    _5=node("CLIPTextEncodeSDXL", text_g="b", text_l="a", clip=["4", 0]), _2={"strength_clip": ["no", 0]},
    _9={"latent_image": ["a", 0], "model": ["b", 0], "positive": ["c", 0]},
    a=node("Reroute", **{"": ["7", 0]}), b=node("Reroute", **{"": ["3", 0]}), c=node("Reroute", **{"": ["d", 0]}),
    d=node("ControlNetApplyAdvanced", positive=["5", 0], negative=["6", 0]),
)  # fmt: skip
LOADER = node("Efficient Loader", positive="a", negative="b", empty_latent_width=896, empty_latent_height=1152)
EFFICIENT = node("KSampler (Efficient)", model=["a", 0], positive=["a", 1], negative=["a", 2], latent_image=["a", 3],
                 seed=5, steps=2, sampler_name="euler")  # fmt: skip
COMBINED = changed(_9={"positive": ["a", 0]}, a=node("ConditioningCombine", conditioning_1=["5", 0]))
GRAPHS = [
    ({"prompt": json.dumps(GRAPH)}, {"prompt": GRAPH["3"]["inputs"]["text"], "reading": "overlap", "seed": 0}, ""),
    (changed(), WHOLE, "<lora:b:0.5:0.8>: | <lora:c:0:1>: | 2^63 - 1 | Other samplers | taken: 'UpscaleModelLoader'"),
    (LINKED, VALUES, "The schedule 'x'"),
    (UNCLEAR, dict.fromkeys(("prompt", "width", "steps", "guidance_scale")) | {"height": 48},
     "steps is 'a*2' | The width: it comes from the node 'Ratio' | taken: 'LoraLoader', 'LoraLoaderModelOnly', 'R"),
    (PASSED_ON, {"prompt": "a", "base": "xl.safetensors", "width": 64}, "The prompt of SDXL's second text | The "
     "weight of the LoRA 'b': it comes from the node '(mis | taken: 'CLIPTextEncodeSDXL', 'ControlNetApplyAdvanced'"),
    (changed(_9=EFFICIENT, a=LOADER), SIZES | {"prompt": "a", "negative_prompt": "b"}, "'Efficient Loader', 'Upscale"),
    (COMBINED, {"prompt": None, "steps": 20}, "The prompt: it comes from the node 'Conditioning"),
    (COMBINED | infotext(), {"prompt": "a", "seed": 1}, ""),
    (changed(_7=node("Empty Latent", dimensions=" 896 x 1152 ", batch_size=1)), SIZES, "Other samplers"),
    (changed(_7=node("VAEEncode", pixels=["x", 0]), _8=node("X")), {"width": None, "steps": 20}, "node 'VAEEncode'"),
    (changed(_4={"stop_at_clip_layer": -1}), {"clip_skip": 1}, "CLIP Set Last Layer -1: of SDXL the layer before"),
    (changed(_3={"model": ["3", 0]}), {"steps": 20}, "Other samplers"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "settings", "left"), INFOTEXTS + GRAPHS)
def test_settings_that_are_read_and_those_that_are_left(tmp_path, texts, settings, left):
    image = read_image(png(tmp_path / "a.png", **texts))
    assert {name: image.settings.get(name) for name in settings} == settings
    assert all(words in " ".join(image.left) for words in left.split(" | ")) and bool(left) == bool(image.left)


# ---- files that are damaged or hostile


def chunk(kind, content, length=None):
    length, checksum = len(content) if length is None else length, zlib.crc32(kind + content)
    return struct.pack(">I", length) + kind + content + struct.pack(">I", checksum)


def raw_png(*chunks, side=8):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(25 * 8)))
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *chunks, pixels, chunk(b"IEND", b"")])


BOMB = chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a" * 2**22))
HOSTILE = {
    "a length beyond the file": raw_png(chunk(b"tEXt", b"parameters\0a", length=2**31 - 1)),
    "a text that grows": raw_png(BOMB),
    "pixels that grow": raw_png(chunk(b"tEXt", b"parameters\0" + SHORT.encode()), side=60_000),
    "no text": {},
    "too long": {"parameters": "a" * 4_000_001 + f"\n{SHORT}"},
    "too long a prompt": {"parameters": "a" * 20_001 + f"\n{SHORT}"},
    "deep": {"settings": "[" * 100_000},
    "deep graph": {"prompt": "[" * 100_000},
    "no encoding": b"ASCII\0\0\0\xff\xfe",
    "Fooocus": {"parameters": '{"prompt": "a", "steps": 30}'},
    "unhashable": changed(_9={"positive": [["5"], 0]}),
    "no nodes": {"prompt": '{"1": 3}'},
    "Easy Diffusion": {"prompt": "a cat", "use_stable_diffusion_model": "x"},
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
    with pytest.raises(UserError, match=r"image '[^']*a.png' (cannot be read: .*Easy.*--like|has no prompt)"):
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


def test_the_line_for_other_programs_says_what_was_drawn(tmp_path, sdxl_folder):
    """Of a checkpoint whose name looks like fields, and of an image that is no square."""
    (base := tmp_path / 'x, Seed: 9, "Size: 8x8').symlink_to(sdxl_folder)
    drawn = {
        "negative_prompt": "grey, Seed: 1",
        "seed": 5,
        "steps": 1,
        "guidance_scale": 4.0,
        "width": 96,
        "height": 64,
    }
    path = generate(GenerateConfig("a ring", base=str(base), output=str(tmp_path / "a.png"), device="cpu", **drawn))
    with Image.open(path) as image:
        line = image.text["parameters"]
    assert read_image(png(tmp_path / "line.png", parameters=line)).settings.items() >= drawn.items()


def test_an_image_of_another_program_is_drawn_as_it_reads(tmp_path, sdxl_folder, capsys):
    text = re.sub("832x1216", "64x48", A1111).replace("Steps: 20", "Steps: 2")
    like = png(tmp_path / "like.png", parameters=f"{text}, Hires upscale: 2")
    where = {"base": str(sdxl_folder), "device": "cpu"}
    drawn = generate(GenerateConfig(None, like=like, output=str(tmp_path / "a.png"), **where))
    out = capsys.readouterr().out
    assert "Not from it: 'Hires upscale'" in out and "Not from it: The base 'sd, xl: 1'" in out
    options = {name: value for name, value in READ.items() if name != "base"} | {"width": 64, "height": 48, "steps": 2}
    options |= {"scheduler": "DPMSolverMultistepScheduler"}
    plain = generate(GenerateConfig(**options, output=str(tmp_path / "b.png"), **where))
    assert drawn.read_bytes() == plain.read_bytes() and read_settings(drawn)["emphasis"] == "no_norm"
