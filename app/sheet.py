"""Long prompts drawn in four ways by an SDXL checkpoint, side by side on a contact sheet."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from debias_diffusion.devices import machine_name, pick_device
from debias_diffusion.eval.report import versions
from debias_diffusion.files import read_file, sha256, write_text
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint

from .contact_sheet import write_contact_sheets
from .generate import generate
from .prompt_options import CheckConfig, GenerateConfig

CUT, WHOLE, SHARPENED = "cut", "whole", "whole and sharpened"
WAYS = {CUT: "cut", "as A1111 reads": "a1111", WHOLE: "overlap", SHARPENED: "overlap"}  # readings; cut is stock SDXL's

Images = dict[str, list[tuple[Path, str]]]  # by way, in the order of the prompts: file and sha256


def draw_ways(config: CheckConfig, prompts: Sequence[str]) -> Images:
    """Draws the missing images of each way, in a folder each. Raises UserError or FailedError as `generate`."""
    images, output = {}, Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": prompt, "seed": config.seed + number} for number, prompt in enumerate(prompts)]
    write_text(output / "prompts.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    own = {field.name for field in fields(GenerateConfig)} - {"prompt", "prompts", "output", "seed"}
    shared = {name: value for name, value in asdict(config).items() if name in own}  # every option of an image
    shared["prompts"] = str(output / "prompts.jsonl")
    for way, reading in WAYS.items():
        print(f"\n{way}:")
        folder = output / way.replace(" ", "-").lower()
        plain = {} if way == SHARPENED else {"sharpen": 1.0}
        generate(GenerateConfig(None, output=str(folder), reading=reading, **shared | plain))
        index = map(json.loads, read_file(folder / "index.jsonl").splitlines())
        images[way] = [(file, sha256(file)) for file in (folder / entry["file"] for entry in index)]
    return images


def write_sheet(config: CheckConfig, prompts: Sequence[str], images: Images, numbers: Sequence[int]) -> None:
    """`contact-sheet.png` of the prompts of these numbers, in all ways side by side."""
    cells = [(pairs[number][0], way, prompts[number]) for number in numbers for way, pairs in images.items()]
    write_contact_sheets(Path(config.output), cells)


def provenance(config: CheckConfig) -> dict:
    """What a result must say of itself: machine, versions, settings, and the digest of the weights."""
    machine, base = machine_name(pick_device(config.device)), Checkpoint.parse(config.base).digest
    return {"machine": machine, "versions": versions(), "settings": asdict(config), "base": base}
