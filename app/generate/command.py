"""Pictures from prompts of any length: SDXL or SD 1.5, with a long-prompt text encoder in place of its first one.

One prompt gives one PNG. A file of prompts gives a folder of them, which an interrupted run goes on filling.
"""

import json
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from debias_diffusion.devices import pick_device
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import held, write_text
from debias_diffusion.limits import check_guidance, check_pixels, check_steps
from debias_diffusion.pipelines.loading import SDXL
from debias_diffusion.pipelines.memory import explain_memory
from debias_diffusion.png import png_damage

from .config import GenerateConfig
from .contact_sheet import write_contact_sheets
from .drawing import Picture, Studio, draw
from .png_settings import first_difference, read_settings
from .prompts import (
    MAX_PROMPTS,
    LeftOut,
    Prompt,
    check_last_seed,
    check_prompt,
    check_text,
    parse_seed,
    print_left_out,
    read_prompts,
)

_NAME = re.compile(r"(\d{5,})-(\d+)(-.*)?\.png")


def generate(config: GenerateConfig) -> Path:
    """Draws one picture, or all of a file of prompts, as PNGs.

    A PNG's text chunk "settings" holds what made it as JSON, and "parameters" the same as A1111's interface writes it.
    The same settings on the same machine give the same file, byte for byte. Prints how prompts are read.

    A folder of several pictures is filled as far as it is not: a picture whose settings are those it would have now
    stays. When all are there, `index.jsonl` lists them, and `contact-sheet.png` shows them. Entries that cannot be
    drawn are left out, counted and named, the first on the console and all in `left-out.jsonl`.

    Returns:
        the picture's path, or the folder's

    Raises:
        UserError: a setting is not usable, or no prompt is. Everything that can be checked is checked before a model is
            loaded. A folder holds pictures of other settings. Memory cannot suffice, or does not.
        FailedError: values of some pictures are no finite numbers. These are not written, and all others are.
    """
    _check_settings(config)
    prompts, where, left_out = _read(config)
    _check_count(config, prompts)
    output = (
        _check_folder(config.output or "pictures") if config.several else _check_file(config.output or "picture.png")
    )
    studio = Studio(config, pick_device(config.device))
    _check_second_prompts(studio.kind, config, prompts)
    studio.check_memory(1)
    advice = f"Try --low-memory, a smaller --batch than {config.batch}, or a smaller picture."
    with explain_memory(studio.device, advice):
        if config.several:
            with held(output, f"Another run is filling {str(output)!r}. Wait for it, or give another output."):
                _fill(output, studio, prompts, where, left_out)
        else:
            _draw_one(output, studio, prompts[0])
    print(f"Wrote {output}")
    return output


# What was asked for


def _check_settings(config: GenerateConfig) -> None:
    if (config.prompt is None) == (config.prompts is None):
        given = "neither" if config.prompt is None else "both"
        raise UserError(
            f'Give either a prompt or a file of prompts, not {given}: `generate "a red cat"`, or `generate --prompts '
            "prompts.txt`."
        )
    if config.prompt is not None:
        check_prompt(config.prompt)
    check_text("negative prompt", config.negative_prompt or "")
    parse_seed(config.seed)
    for name, size in (("height", config.height), ("width", config.width)):
        if size is not None and (size <= 0 or size % 8):
            nearest = max(8, round(size / 8) * 8)
            raise UserError(f"The {name} must be a positive multiple of 8 pixels, got {size}. Take {nearest}.")
    if config.height and config.width:
        check_pixels(config.height, config.width)
    check_guidance(config.guidance_scale)
    for name, number in (
        ("number of steps", config.steps),
        ("number of images per prompt", config.images_per_prompt),
        ("batch", config.batch),
    ):
        if number < 1:
            raise UserError(f"The {name} must be at least 1, got {number}.")
    check_steps(config.steps)


def _read(config: GenerateConfig) -> tuple[list[Prompt], dict[int, str], list[LeftOut]]:
    """The prompts, each one's place in words by its number, and what of their file is left out."""
    if config.prompts is None:
        return [Prompt(0, config.prompt)], {0: "the prompt"}, []
    file = read_prompts(config.prompts)
    print(f"Prompts: {len(file.prompts):,} in {config.prompts}")
    if file.unused:
        print(f"Not used of it: {', '.join(file.unused)[:200]}")
    if file.over_lines:
        first, last = max(file.over_lines, key=lambda lines: lines[1] - lines[0])
        print(
            f"Rows of several lines: {len(file.over_lines):,}, the longest from line {first} to line {last}. If that "
            "is not meant, a quotation mark is missing there."
        )
    print_left_out(file.left_out)
    return file.prompts, {number: f"line {line}" for number, line in file.lines.items()}, file.left_out


def _check_count(config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for more images than one run keeps in mind, and where the seeds of some would be too large."""
    count = len(prompts) * config.images_per_prompt
    if count > MAX_PROMPTS:
        raise UserError(
            f"{len(prompts):,} prompts with {config.images_per_prompt:,} images each make {count:,}; one run draws at "
            f"most {MAX_PROMPTS:,}. Lower --images-per-prompt, or split the prompts."
        )
    for prompt in prompts:
        check_last_seed(_first_seed(config, prompt), config.images_per_prompt)


def _first_seed(config: GenerateConfig, prompt: Prompt) -> int:
    return config.seed + prompt.number if prompt.seed is None else prompt.seed


def _check_file(output: str) -> Path:
    path = Path(output)
    if path.is_dir():
        raise UserError(f"The output {output!r} is a folder. Give a file name, such as {str(path / 'picture.png')!r}.")
    if path.suffix.lower() != ".png":
        raise UserError(f"The output {output!r} must end in .png, because a PNG is what is written.")
    _make_folder(path.parent)
    return path


def _check_folder(output: str) -> Path:
    path = Path(output)
    if path.suffix.lower() == ".png" or path.is_file():
        raise UserError(f"The output {output!r} is a file, and several pictures need a folder. Give a folder.")
    _make_folder(path)
    return path


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The output folder {str(path)!r} cannot be made ({error.strerror}). Give another one."
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"The output folder {str(path)!r} may not be read and written to. Give another one.")


def _check_second_prompts(kind: str, config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    if kind != SDXL and any(prompt.second for prompt in prompts):
        raise UserError(
            f"The prompts have a prompt_2, and the base model {config.base!r} is a {kind}, which has one text encoder. "
            "Leave it out."
        )


# One picture, and many


def _draw_one(path: Path, studio: Studio, prompt: Prompt) -> None:
    picture = Picture(prompt, "the prompt", path, _settings(studio, studio.settings(), prompt, studio.config.seed))
    _raise_if_any(draw(studio, [picture], {path}, []), studio)


def _fill(
    folder: Path, studio: Studio, prompts: Sequence[Prompt], where: dict[int, str], left_out: list[LeftOut]
) -> None:
    """Draws what a folder lacks, and writes its index, its contact sheets and the list of what was left out."""
    _check_free(folder)
    pictures = _pictures(folder, studio, prompts, where)
    missing = _missing(folder, pictures)
    print(f"Pictures: {len(pictures) - len(missing):,} are in {folder}, {len(missing):,} to draw")
    failed = draw(studio, pictures, missing, left_out) if missing else []
    print_left_out(failed)
    finished = [(picture, read_settings(picture.path)) for picture in pictures if picture.path.exists()]
    _write_lines(folder / "index.jsonl", [_index_entry(picture, its) for picture, its in finished])
    _write_lines(folder / "left-out.jsonl", [vars(entry) for entry in [*left_out, *failed]])
    if finished:
        _write_contact_sheets(folder, finished)
    _raise_if_any(failed, studio)


def _write_contact_sheets(folder: Path, finished: Sequence[tuple[Picture, dict]]) -> None:
    titled = [(p.path, f"{p.prompt.number:05} · seed {its['seed']}", p.prompt.text) for p, its in finished]
    sheets = write_contact_sheets(folder, titled)
    more = f" and {len(sheets) - 1} more page{'s' * (len(sheets) > 2)}" if len(sheets) > 1 else ""
    print(f"All {len(finished):,} at a glance: {sheets[0]}{more}")


def _raise_if_any(failed: Sequence[LeftOut], studio: Studio) -> None:
    """Raises FailedError where there is a picture of which nothing came."""
    if failed:
        raise FailedError(
            f"{len(failed):,} picture{'s were' if len(failed) > 1 else ' was'} not drawn, the first: {failed[0]}. "
            "Where values are not finite, weights of an encoder or of the base model are damaged, or too large for "
            f"{str(studio.dtype).removeprefix('torch.')}. Try another encoder, or --dtype float32."
        )


def _pictures(folder: Path, studio: Studio, prompts: Sequence[Prompt], where: dict[int, str]) -> list[Picture]:
    """All pictures of a run. Place and seed make a file's name its own; the words after them are for people."""
    there = {
        (int(match[1]), int(match[2])): folder / match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match
    }
    common, pictures = studio.settings(), []
    for prompt in prompts:
        first = _first_seed(studio.config, prompt)
        for seed in range(first, first + studio.config.images_per_prompt):
            name = "-".join(filter(None, (f"{prompt.number:05}", str(seed), _slug(prompt.text))))
            path = there.get((prompt.number, seed), folder / f"{name}.png")
            pictures.append(Picture(prompt, where[prompt.number], path, _settings(studio, common, prompt, seed)))
    return pictures


def _slug(text: str) -> str:
    """The beginning of a text in letters that every file system takes; nothing, if it has none."""
    ascii_only = unicodedata.normalize("NFKD", text[:200]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].rstrip("-")


def _settings(studio: Studio, common: dict, prompt: Prompt, seed: int) -> dict:
    """Everything that decides what a picture looks like."""
    negative = studio.config.negative_prompt if prompt.negative is None else prompt.negative
    return {"prompt": prompt.text, "negative_prompt": negative, "prompt_2": prompt.second, "seed": seed} | common


def _check_free(folder: Path) -> None:
    """Raises UserError where a folder has the name of a file that is written when hours of drawing are done."""
    for path in (folder / "index.jsonl", folder / "left-out.jsonl", *folder.glob("contact-sheet*.png")):
        if path.is_dir() and not path.is_symlink():
            raise UserError(f"{str(path)!r} is a folder, and a file is written there. Move it, or give another output.")


def _missing(folder: Path, pictures: Sequence[Picture]) -> set[Path]:
    """The files that are not there, or are damaged.

    Raises:
        UserError: one is there and is another picture.
    """
    missing, others, damaged = set(), [], []
    for picture in pictures:
        if not picture.path.exists():
            missing.add(picture.path)
            continue
        before = read_settings(picture.path)
        difference = "it holds no settings" if before is None else first_difference(before, picture.settings)
        if difference:
            others.append(f"{picture.path.name} ({picture.where}): {difference}")
        elif problem := png_damage(picture.path):
            missing.add(picture.path)
            damaged.append(f"{picture.path.name} ({problem})")
    if others:
        raise UserError(
            f"{len(others):,} of the pictures in {str(folder)!r} were made with other settings, the first {others[0]}. "
            "Give another output, go back to those settings, or remove what is to be drawn anew."
        )
    if damaged:
        print(f"Damaged: {len(damaged):,} of the pictures, drawn again, the first {damaged[0]}")
    return missing


def _index_entry(picture: Picture, settings: dict) -> dict:
    names = ("prompt", "negative_prompt", "prompt_2", "seed", "tokens", "positions", "windows")
    return {"file": picture.path.name, "where": picture.where} | {name: settings.get(name) for name in names}


def _write_lines(path: Path, entries: Sequence[dict]) -> None:
    """One JSON object a line; no file if there are none."""
    if entries:
        write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    else:
        path.unlink(missing_ok=True)
