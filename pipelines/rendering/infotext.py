"""Settings in an image: of this package, A1111 and Forge (infotext), ComfyUI (a graph of nodes), Easy Diffusion.

Only text is read, no pixel, and no file that the text names is opened.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import ExifTags, Image

from debias_diffusion.data.captions import parse_object, text_fault
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import open_regular
from debias_diffusion.limits import Seed

from .loras import lora_tags
from .options import Sampling
from .png import PARAMETERS_KEY, SETTINGS_KEY

OURS = "debias-diffusion"
_MOST = 4_000_000  # characters of a text, far more than the largest graphs have
_ENCODINGS = ("utf-16-be", "utf-16-le", "utf-8")  # of comments; their first 8 bytes do not tell all
_ADVICE = (
    "Give a PNG or JPEG as A1111, Forge, ComfyUI, Easy Diffusion or this package saved it; sites that share images "
    "remove settings. Fooocus, InvokeAI, NovelAI and SwarmUI are not read. Or give the prompt itself, without --like."
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


@dataclass(kw_only=True)
class _Options(Sampling):
    base: str | None = None
    prompt: str | None = None
    seed: Seed | None = None


def read_image(path: str | os.PathLike, loras: bool = False) -> ImageSettings:
    """The settings in a PNG, JPEG or WebP: in the first of its texts that can be read and has a prompt.

    Args:
        loras: whether tags of LoRAs stay in the prompt; else they are left out.

    Raises:
        UserError: the file cannot be read, or holds no settings.
    """
    with explain_failure(f"The settings in the image {os.path.basename(path)!r} cannot be read", _ADVICE):
        fields, images, failures = _read_fields(path), [], []
        for key, (read, failure) in _READERS.items():
            try:
                images += [_check(read(fields[key]))] if key in fields else []
            except ValueError:
                failures.append(f"its text `{key}` {failure}")
        if not images:
            raise ValueError(", and ".join(failures) or "it holds none of a known program")
        image = next((image for image in images if "prompt" in image.settings), images[0])
        prompt = image.settings.get("prompt") or ""
        for tag in [] if loras else lora_tags(prompt, image.settings.get("reading", "overlap")):
            image.left.append(f"{repr(tag)[1:-1][:80]}: give the folder of its file, as loras.")
            image.settings["prompt"] = image.settings["prompt"].replace(tag, "").strip()
        return image


def _read_fields(path: str | os.PathLike) -> dict[str, str]:
    with open_regular(path) as file, Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
        fields = {key: image.info.get(key) for key in _READERS}
        if fields[_EASY]:  # each setting is a text of its own
            fields[_EASY] = json.dumps({key: text for key, text in image.info.items() if isinstance(text, str)})
        if image.format != "PNG":  # of which Pillow would decode the pixels first
            text = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
            texts = [text[8:].decode(each, "replace") for each in _ENCODINGS] if isinstance(text, bytes) else [text]
            fields[PARAMETERS_KEY] = next((text for text in texts if "Steps: " in str(text)), None)
    return {key: text for key, text in fields.items() if isinstance(text, str) and len(text) <= _MOST}


def _check(image: ImageSettings) -> ImageSettings:
    """With `karras` for `schedule`, and without values that their options do not allow: each is left, by itself."""
    _, settings, left = image
    schedule = str(settings.pop("schedule", "")).strip()
    if schedule.lower() == "karras":
        settings["karras"] = True
    elif schedule.lower() not in ("", "automatic", "normal", "uniform"):
        left.append(f"The schedule {schedule[:60]!r}: noise levels are the checkpoint's own.")
    for name in sorted(settings.keys() - {"scheduler", "long_prompt"}):
        try:
            _Options.of({name: settings[name]})
            if "prompt" in name and (fault := text_fault(str(settings[name]))):
                raise UserError(f"{name} {fault}.")
        except UserError as error:
            left.append(str(error))
            del settings[name]
    return image


# ---- A1111, Forge and Easy Diffusion

_STEPS = re.compile(r"^(?:.*, ?)?Steps: ?[\d.]+\s*(?:,|$)", re.MULTILINE)
_FIELD = re.compile(r'(\w[^:,"\n]{0,60}): ?("[^"\\]*(?:\\.[^"\\]*)*"|[^,\n]*)(?:[,\n]\s*|$)')
_SIZE = re.compile(r"(?P<width>\d{1,6}) ?x ?(?P<height>\d{1,6})")
_FIELDS = {"Steps": "steps", "CFG scale": "guidance_scale", "Seed": "seed", "Clip skip": "clip_skip", "Model": "base"}
_FIELDS |= {"CLiP-skip": "clip_skip"}  # SD.Next's
# Fields that are settings in another way, or none.
_OTHERS = re.compile(r"Sampler|Schedule(r| type)|Size|Emphasis|App|Version|Hashes|VAE|RNG|.* hash(es)?|Module \d+")


def _read_infotext(text: str) -> ImageSettings:
    """The settings in lines of a prompt, a negative prompt and, last of its kind, "Steps: 20, Sampler: Euler, ..."."""
    *_, start = (match.start() for match in _STEPS.finditer(text))  # ValueError if there is none
    fields = {}
    for name, value in _FIELD.findall(text[start:]):  # extensions write line ends into fields, and lines below them
        fields.setdefault(name.strip(), _value(value.strip()))
    head = "\n".join(line.strip() for line in text[:start].strip().split("\n"))
    prompt, _, negative = f"\n{head}".partition("\nNegative prompt:")
    return _settings_of(prompt, negative, fields)


def _settings_of(prompt: str, negative: str, fields: dict[str, Any]) -> ImageSettings:
    """The settings of an image whose fields have an infotext's names."""
    left, settings = [], {setting: fields[name] for name, setting in _FIELDS.items() if name in fields}
    settings |= {"prompt": prompt.strip(), "negative_prompt": negative.strip() or None, "reading": "a1111"}
    settings["emphasis"] = str(fields.get("Emphasis", "Original")).lower().replace(" ", "_")
    if size := _SIZE.fullmatch(str(fields.get("Size"))):
        settings |= {side: int(pixels) for side, pixels in size.groupdict().items()}
    if names := [name for name in fields if name not in _FIELDS and not _OTHERS.fullmatch(name)]:
        left.append(f"{str(names)[1:-1][:300]}: this program has no such setting, and draws once, from noise.")
    settings["clip_skip"] = settings.get("clip_skip") or None  # Civitai writes 0 where none was set
    if settings["clip_skip"] not in (None, 1, 2):
        left.append("For SDXL, Forge follows Clip skip, and A1111 does not: clip_skip 2 is what that does.")
    sampler, karras, _ = str(fields.get("Sampler", "")).partition(" Karras")  # before version 1.9
    settings |= {"scheduler": sampler, "schedule": karras or fields.get("Schedule type", fields.get("Scheduler", ""))}
    return ImageSettings(f"{fields.get('App', 'A1111 or Forge')} {fields.get('Version', '')}".strip(), settings, left)


def _value(text: str) -> Any:
    """A number, or text without its quotation marks. What is no setting is refused where it is used."""
    with suppress(ValueError):
        return json.loads(text, strict=False) if text[:1] in '"-0123456789' else text
    return text


_EASY = "use_stable_diffusion_model"
_EASY_FIELDS = {"num_inference_steps": "Steps", "guidance_scale": "CFG scale", "seed": "Seed", "clip_skip": "Clip skip"}
_EASY_FIELDS |= {"sampler_name": "Sampler", _EASY: "Model"}


def _read_easy(text: str) -> ImageSettings:
    """The settings of Easy Diffusion by their names, in the reading of A1111."""
    values = {name: text for name, text in parse_object(text).items() if text not in ("None", "False")}
    prompts = [values.pop(name, "") for name in ("prompt", "negative_prompt")]
    fields = {_EASY_FIELDS.get(name, name): _value(_SAMPLERS.get(value, value)) for name, value in values.items()}
    fields |= {"App": "Easy Diffusion", "Size": "x".join(str(fields.pop(side, "")) for side in ("width", "height"))}
    if not isinstance(fields.get("Steps"), int | float):
        raise ValueError("no steps")
    return _settings_of(*prompts, fields)


# ---- ComfyUI

_INPUTS = {"steps": "steps", "cfg": "guidance_scale", "seed": "seed", "noise_seed": "seed"}
_INPUTS |= {"sampler_name": "scheduler", "scheduler": "schedule"}
_SAMPLERS = {"euler": "Euler", "euler_ancestral": "Euler a", "dpmpp_2m": "DPM++ 2M", "ddim": "DDIM"}
_SAMPLERS |= dict.fromkeys(("uni_pc", "uni_pc_bh2", "unipc"), "UniPC") | {"euler_a": "Euler a", "plms": "PLMS"}
_OUR_NODE = "DebiasLongPromptEncode"
_LORAS = ("LoraLoader", "LoraLoaderModelOnly")
_KNOWN = {"KSampler", "KSamplerAdvanced", "KSampler (Efficient)", "EmptyLatentImage", _OUR_NODE, "CLIPSetLastLayer"}
_KNOWN |= {"CheckpointLoaderSimple", "CLIPTextEncode", "VAEDecode", "VAELoader", "SaveImage", "PreviewImage", "Reroute"}


class _Graph:
    """Nodes by their numbers, kinds of nodes of which nothing is lost, and what is left."""

    def __init__(self, text: str):
        self.nodes, self.known, self.left = {}, {*_KNOWN}, []
        for number, node in parse_object(text).items():
            if isinstance(node, dict) and isinstance(node.get("inputs"), dict):
                self.nodes[number] = {**node, "class_type": str(node.get("class_type"))}

    def follow(self, node: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
        """The node that an input comes from, the one that its input of this name comes from, ..., without Reroutes."""
        for _ in range(1000):  # they may form a circle
            link = node["inputs"].get(name, node["inputs"].get(""))  # the input of a Reroute has no name
            if not (isinstance(link, list) and link and isinstance(link[0], str) and link[0] in self.nodes):
                return
            node = self.nodes[link[0]]
            if "" not in node["inputs"]:
                yield node

    def take(self, node: dict[str, Any], name: str, setting: str) -> Any:
        """The value of an input; of a link, the only such value of its node, if that has no links; else None."""
        value = node["inputs"].get(name)
        if not isinstance(value, list):
            return value if isinstance(value, str | int | float) else None
        source: dict[str, Any] = next(self.follow(node, name), {"class_type": "(missing)", "inputs": {}})
        values = {} if any(isinstance(each, list | dict) for each in source["inputs"].values()) else source["inputs"]
        texts = {value for value in values.values() if isinstance(value, str)}
        named = [values[key] for key in (name, setting, "value") if key in values][:1]
        sizes = [int(size[setting]) for size in map(_SIZE.search, texts) if size and setting in ("width", "height")]
        found = (texts - {""} or texts) if "prompt" in setting else {*sizes, *named} or {*values.values()}
        if len(found) == 1:
            self.known.add(source["class_type"])
            return found.pop()
        self.left.append(f"The {setting}: it comes from the node {source['class_type'][:60]!r}, which is not followed.")
        return None


def _read_graph(text: str) -> ImageSettings:
    """The settings of the first sampler that starts from an empty latent image; else of the first."""
    graph = _Graph(text)
    samplers = [node for node in graph.nodes.values() if {"steps", "sampler_name", "latent_image"} <= {*node["inputs"]}]
    latents = [next(graph.follow(node, "latent_image"), node) for node in samplers]
    starts = [any("empty" in name.lower() for name in (node["class_type"], *node["inputs"])) for node in latents]
    sampler, latent = max(zip(starts, samplers, latents, strict=True), key=lambda each: each[0])[1:]
    inputs, left = sampler["inputs"], graph.left
    if starts != [True] or inputs.get("denoise", 1) != 1 or inputs.get("start_at_step", 0):
        left.append("Other samplers, a start image, skipped steps: here one sampler draws all its steps, from noise.")
    settings = {setting: graph.take(sampler, name, setting) for name, setting in _INPUTS.items() if name in inputs}
    settings["scheduler"] = _SAMPLERS.get(settings["scheduler"], settings["scheduler"])
    for side in ("width", "height"):
        name = next((name for name in (side, f"empty_latent_{side}") if name in latent["inputs"]), None)
        settings[side] = graph.take(latent, name, side) if name else graph.take(sampler, "latent_image", side)
    for setting, role in (("negative_prompt", "negative"), ("prompt", "positive")):
        names = ("text_l", "text", "text_g", role)  # SDXL's first encoder reads the first of them, the second the last
        encoder = next((node for node in [*graph.follow(sampler, role)][::-1] if {*names} & {*node["inputs"]}), sampler)
        texts = [text for name in names if isinstance(text := graph.take(encoder, name, setting), str)]
        settings[setting], *others = [text for text in texts if text] or texts[:1] or [None]
        if {*others} - {settings[setting]}:
            left.append(f"The {setting} of SDXL's second text encoder: here both encoders read that of the first.")
    reading = encoder["inputs"].get("reading", "overlap") if encoder["class_type"] == _OUR_NODE else "comfyui"
    settings |= {"reading": reading, "emphasis": "comfyui"}
    clip, model = [*graph.follow(encoder, "clip")], [*graph.follow(sampler, "model")]
    layers = [graph.take(node, "stop_at_clip_layer", "clip_skip") for node in clip]
    settings["clip_skip"] = next((-layer for layer in layers if isinstance(layer, int | float)), None)
    if settings["clip_skip"] == 1:
        left.append("CLIP Set Last Layer -1: of SDXL the layer before the last is read here, ComfyUI reads the last.")
    loras = _LORAS if settings["prompt"] is not None else ()  # their tags go into the prompt
    for node in reversed([node for node in model if node["class_type"] in loras]):
        name = re.split(r"[\\/]", str(graph.take(node, "lora_name", "LoRA")))[-1].removesuffix(".safetensors")
        parts = ("clip", "model") if any(node is other for other in clip) else ("model",)
        weights = [graph.take(node, f"strength_{part}", f"weight of the LoRA {name[:60]!r}") for part in parts]
        if name != "None" and None not in weights:  # "None" is also what loaders call no LoRA
            settings["prompt"] += f" <lora:{name}:{':'.join(map(str, [0, *weights][-2:]))}>"
    settings["base"] = graph.take([sampler, *model][-1], "ckpt_name", "base")
    if kinds := {node["class_type"] for node in graph.nodes.values()} - graph.known - {*loras}:
        left.append(f"Of these nodes nothing more is taken: {str(sorted(kinds))[1:-1][:300]}.")
    return ImageSettings("ComfyUI", {name: value for name, value in settings.items() if value is not None}, left)


_READERS = {
    SETTINGS_KEY: (lambda text: ImageSettings(OURS, parse_object(text), []), "is not this package's"),
    "prompt": (_read_graph, "has no graph with a sampler, as ComfyUI writes"),
    _EASY: (_read_easy, "has no steps beside it, as Easy Diffusion writes"),
    PARAMETERS_KEY: (_read_infotext, "has no line with Steps, as A1111 writes"),
}
