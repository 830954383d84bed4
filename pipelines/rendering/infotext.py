"""Settings in an image: of this package, of A1111 and Forge (infotext), and of ComfyUI (the graph of its nodes).

Only text is read, no pixel, and no file that the text names is opened.
"""

import json
import os
import re
from typing import Any, NamedTuple

from PIL import Image

from debias_diffusion.errors import explain_failure
from debias_diffusion.files import open_regular

from .loras import lora_tags
from .png import PARAMETERS_KEY, SETTINGS_KEY

OURS, COMFYUI = "debias-diffusion", "ComfyUI"
_MOST = 4_000_000  # characters of a field, far more than the largest graphs have
_KINDS = ("PNG", "JPEG", "WEBP")
_EXIF, _USER_COMMENT = 0x8769, 0x9286
_ADVICE = (
    "Give a PNG or JPEG as this package, A1111, Forge or ComfyUI saved it; sites that share images remove settings."
)


class ImageSettings(NamedTuple):
    """What an image says of how it was made.

    Attributes:
        program: that wrote it.
        settings: by the names that this package's PNGs have, with A1111's names of samplers ("Euler a").
        left: what is not in them, in sentences.
    """

    program: str
    settings: dict[str, Any]
    left: list[str]


def read_image(path: str | os.PathLike, loras: bool = False) -> ImageSettings:
    """The settings in a PNG, JPEG or WebP.

    Args:
        loras: whether tags of LoRAs stay in the prompt; else they are left out.

    Raises:
        OSError: the file cannot be read.
        UserError: it holds no settings, or damaged ones.
    """
    with explain_failure(f"The settings in the image {os.path.basename(path)!r} cannot be read", _ADVICE):
        fields = _read_fields(path)
        if SETTINGS_KEY in fields:
            image = ImageSettings(OURS, {**json.loads(fields[SETTINGS_KEY])}, [])
        elif "prompt" in fields:
            image = _read_graph({**json.loads(fields["prompt"])})
        elif (image := _read_infotext(fields.get(PARAMETERS_KEY, ""))) is None:
            raise ValueError("it holds none of a known program")
        prompt = image.settings.get("prompt")
        for tag in lora_tags(prompt, image.settings.get("reading")) if isinstance(prompt, str) and not loras else ():
            image.left.append(f"{tag[:80]}: give the folder of its file, as loras.")
            image.settings["prompt"] = image.settings["prompt"].replace(tag, "").strip()
        return image


def _read_fields(path: str | os.PathLike) -> dict[str, str]:
    with open_regular(path) as file, Image.open(file, formats=_KINDS) as image:
        fields = {key: image.info.get(key) for key in (SETTINGS_KEY, "prompt", PARAMETERS_KEY)}
        if image.format != "PNG":  # of which Pillow would decode the pixels first
            fields[PARAMETERS_KEY] = _decode(image.getexif().get_ifd(_EXIF).get(_USER_COMMENT))
    fields = {key: text for key, text in fields.items() if isinstance(text, str)}
    if any(len(text) > _MOST for text in fields.values()):
        raise ValueError(f"a text in it has more than {_MOST:,} characters")
    return fields


def _decode(comment: Any) -> str | None:
    """An EXIF comment: 8 bytes name the encoding. Programs differ in the order of UTF-16's bytes."""
    if not isinstance(comment, bytes) or not comment.startswith(b"UNICODE"):
        return comment[8:].decode() if isinstance(comment, bytes) else comment
    texts = [comment[8:].decode(encoding, errors="replace") for encoding in ("utf-16-be", "utf-16-le")]
    return next((text for text in texts if "Steps: " in text), None)


def _name_sampler(settings: dict, left: list[str], name: str, schedule: str, usual: tuple[str, ...]) -> None:
    settings["scheduler"] = name
    if schedule.lower() == "karras":
        settings["karras"] = True
    elif schedule not in usual:
        left.append(f"The schedule {schedule[:60]!r}: noise levels are the checkpoint's own.")


# ---- A1111 and Forge

_FIELD = re.compile(r'(\w[^:,"]{0,60}): ?("(?:[^"\\]|\\.)*"|[^,]*)(?:,\s*|$)')
_NEGATIVE = "Negative prompt:"
_FIELDS = {"Steps": "steps", "CFG scale": "guidance_scale", "Seed": "seed", "Clip skip": "clip_skip", "Model": "base"}
# Fields that are settings in another way, or none.
_OTHERS = re.compile(
    r"Sampler|Schedule type|Size|Emphasis|Version|Hashes|VAE|RNG|(Model|VAE|Lora|TI) hash(es)?|Module \d+"
)


def _read_infotext(text: str) -> ImageSettings | None:
    """The settings in lines of a prompt, a negative prompt and "Steps: 20, Sampler: Euler, ..."; None without Steps."""
    *lines, last = [line.strip() for line in text.strip().split("\n")]
    fields = {name.strip(): _value(value.strip()) for name, value in _FIELD.findall(last)}
    if "Steps" not in fields:
        return None
    at = next((at for at, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    negative = "\n".join(lines[at:]).removeprefix(_NEGATIVE).strip()
    settings = {setting: fields[name] for name, setting in _FIELDS.items() if name in fields}
    settings |= {"prompt": "\n".join(lines[:at]), "negative_prompt": negative or None, "reading": "a1111"}
    settings["emphasis"] = str(fields.get("Emphasis", "Original")).lower().replace(" ", "_")
    if "Size" in fields:
        settings["width"], settings["height"] = map(_value, str(fields["Size"]).split("x"))
    names, left = [name for name in fields if name not in _FIELDS and not _OTHERS.fullmatch(name)], []
    if names:  # such as hires fix, ADetailer, ControlNet, a refiner
        left.append(f"{', '.join(names)[:300]}: this program has no such setting, and draws once, from noise.")
    if settings.get("clip_skip", 1) not in (1, 2):
        left.append("For SDXL, Forge follows Clip skip, and A1111 does not: clip_skip 2 is what that does.")
    sampler, schedule = str(fields.get("Sampler", "")), str(fields.get("Schedule type", "Automatic"))
    if sampler.endswith(" Karras"):  # before version 1.9
        sampler, schedule = sampler.removesuffix(" Karras"), "Karras"
    _name_sampler(settings, left, sampler, schedule, usual=("Automatic", "Normal", "Uniform"))
    return ImageSettings(f"A1111 or Forge {fields.get('Version', '')}".strip(), settings, left)


def _value(text: str) -> Any:
    """A number, or text without its quotation marks. What is no setting is refused where it is used."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- ComfyUI

_INPUTS = {"steps": "steps", "cfg": "guidance_scale", "seed": "seed", "noise_seed": "seed"}
_SAMPLERS = {"euler": "Euler", "euler_ancestral": "Euler a", "dpmpp_2m": "DPM++ 2M", "ddim": "DDIM"}
_SAMPLERS |= dict.fromkeys(("uni_pc", "uni_pc_bh2"), "UniPC")
_OUR_NODE = "DebiasLongPromptEncode"
_LORAS = ("LoraLoader", "LoraLoaderModelOnly")
_KNOWN = {*_LORAS, "KSampler", "KSamplerAdvanced", "CLIPTextEncode", _OUR_NODE, "CLIPSetLastLayer", "EmptyLatentImage"}
_KNOWN |= {"CheckpointLoaderSimple", "VAEDecode", "VAELoader", "SaveImage", "PreviewImage"}


def _read_graph(nodes: dict[str, dict]) -> ImageSettings:
    """The settings of the first sampler that starts from an empty latent image, in nodes `{"class_type", "inputs"}`."""
    settings: dict[str, Any] = {"reading": "comfyui", "emphasis": "comfyui"}
    left = [
        f"The node {str(kind)[:60]} is not followed."
        for kind in {node["class_type"] for node in nodes.values()} - _KNOWN
    ]
    samplers = [node for node in nodes.values() if node["class_type"] in ("KSampler", "KSamplerAdvanced")]
    starts = [_before(nodes, node, "latent_image")[0] for node in samplers]
    at = next((at for at, node in enumerate(starts) if node["class_type"] == "EmptyLatentImage"), None)
    if at is None:
        raise ValueError("in ComfyUI's nodes no KSampler starts from an EmptyLatentImage")
    sampler, inputs, size = samplers[at], samplers[at]["inputs"], starts[at]["inputs"]
    if len(samplers) > 1 or inputs.get("denoise", 1) != 1 or inputs.get("start_at_step", 0):
        left.append("Other samplers, and steps left out: all steps of the first sampler are drawn, from noise.")
    settings |= {setting: inputs[name] for name, setting in _INPUTS.items() if name in inputs}
    settings |= {"width": size["width"], "height": size["height"]}
    if isinstance(settings["seed"], int) and settings["seed"] >= 2**63:
        left.append(f"The seed {settings.pop('seed')}: above 2^63 - 1.")
    name = inputs["sampler_name"]
    _name_sampler(settings, left, _SAMPLERS.get(name, name), inputs["scheduler"], usual=("normal",))
    for setting, role in (("negative_prompt", "negative"), ("prompt", "positive")):
        text = _before(nodes, sampler, role)[0]
        if text["class_type"] in ("CLIPTextEncode", _OUR_NODE) and isinstance(text["inputs"]["text"], str):
            settings[setting] = text["inputs"]["text"]
        else:
            left.append(f"The {role} prompt: it comes from a node {str(text['class_type'])[:60]}.")
    if text["class_type"] == _OUR_NODE:
        settings["reading"] = text["inputs"].get("reading", "overlap")
    clip, model = _before(nodes, text, "clip"), _before(nodes, sampler, "model")
    for node in reversed([node for node in clip if node["class_type"] == "CLIPSetLastLayer"]):
        settings["clip_skip"] = -node["inputs"]["stop_at_clip_layer"]
        if settings["clip_skip"] == 1:
            left.append(
                "CLIP Set Last Layer -1: of SDXL the layer before the last is read here, ComfyUI reads the last."
            )
    for node in reversed([node for node in model if node["class_type"] in _LORAS and "prompt" in settings]):
        name = re.split(r"[\\/]", node["inputs"]["lora_name"])[-1].removesuffix(".safetensors")
        text_weight = node["inputs"]["strength_clip"] if any(node is other for other in clip) else 0
        settings["prompt"] += f" <lora:{name}:{text_weight}:{node['inputs']['strength_model']}>"
    settings["base"] = model[-1]["inputs"].get("ckpt_name")
    return ImageSettings(COMFYUI, settings, sorted(left))


def _before(nodes: dict[str, dict], node: dict, name: str) -> list[dict]:
    """The node that an input comes from, the one that its input of this name comes from, and so on."""
    chain, ids = [], set()
    while isinstance(link := node["inputs"].get(name), list):
        if link[0] in ids:
            raise ValueError("ComfyUI's nodes form a circle")
        ids.add(link[0])
        chain.append(node := nodes[link[0]])
    return chain or [{"class_type": "that is not there", "inputs": {}}]
