"""Images from prompts of any length, by SDXL or SD 1.5 with a long-prompt text encoder.

One prompt gives one PNG. A file of prompts gives a folder of PNGs; the same command continues an interrupted run.
"""

import json
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from debias_diffusion.devices import pick_device
from debias_diffusion.encoders import EncoderSpec
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import folder_lock, write_text
from debias_diffusion.pipelines.checkpoints import SDXL
from debias_diffusion.pipelines.rendering import explain_memory
from debias_diffusion.png import png_damage

from ..options import GenerateConfig
from .contact_sheet import write_contact_sheets
from .png_settings import first_difference, read_settings
from .prompts import (
    MAX_PROMPTS,
    LeftOut,
    Prompt,
    check_last_seed,
    check_prompt,
    check_text,
    print_left_out,
    read_prompts,
)
from .rendering import ImageTask, Studio, render_missing

_NAME = re.compile(r"(\d{5,})-(\d+)(-.*)?\.png")


def generate(config: GenerateConfig) -> Path:
    """Renders one image, or one for each entry of a file of prompts, as PNGs.

    A PNG's text chunk "settings" holds its settings as JSON, and "parameters" the same in the format of A1111's
    interface. Equal settings on one machine give equal files, byte for byte. Prints how prompts are read.

    In a folder of several images, finished ones with equal settings are kept. At the end `index.jsonl` lists all images
    and `contact-sheet.png` shows them. Invalid entries are skipped and reported, the first on the console and all in
    `left-out.jsonl`.

    Returns:
        path of the image, or of the folder

    Raises:
        UserError: a setting or all prompts cannot be used (whatever can be checked early is checked before a model is
            loaded); the folder holds images of other settings, or the file is one without `overwrite`; memory does not
            suffice.
        FailedError: some images have values that are not finite. These are not written, all others are.
    """
    if config.prompt is not None:
        check_prompt(config.prompt)
    check_text("negative prompt", config.negative_prompt or "")
    if config.encoder and not config.encoder_2 and (second := EncoderSpec.parse(config.encoder).fitted_second):
        config = replace(config, encoder_2=second)
        print(f"Second encoder: {second}, fitted with the first")
    prompts, where, left_out = _read(config)
    _check_count(config, prompts)
    output = (
        _check_folder(config.output or "pictures") if config.several else _check_file(config.output or "picture.png")
    )
    studio = Studio(config, pick_device(config.device))
    _check_second_prompts(studio.kind, config, prompts)
    advice = f"Try --low-memory, a smaller --batch than {config.batch}, or a smaller image."
    with explain_memory(studio.device, advice):
        if config.several:
            with folder_lock(output, f"Another run is filling {str(output)!r}. Wait for it, or give another output."):
                _fill(output, studio, prompts, where, left_out)
        else:
            _render_one(output, studio, prompts[0])
    print(f"Wrote {output}")
    return output


# Settings


def _read(config: GenerateConfig) -> tuple[list[Prompt], dict[int, str], list[LeftOut]]:
    """The prompts, the place of each in words by its number, and the entries that are left out."""
    if config.prompts is None:
        return [Prompt(0, config.prompt)], {0: "the prompt"}, []
    file = read_prompts(config.prompts)
    print(f"Prompts: {len(file.prompts):,} in {config.prompts}")
    if file.unused:
        print(f"Unused columns: {', '.join(file.unused)[:200]}")
    if file.over_lines:
        first, last = max(file.over_lines, key=lambda lines: lines[1] - lines[0])
        print(
            f"Rows of several lines: {len(file.over_lines):,}, the longest from line {first} to line {last}. If that "
            "is not intended, a quotation mark is missing there."
        )
    print_left_out(file.left_out)
    return file.prompts, {number: f"line {line}" for number, line in file.lines.items()}, file.left_out


def _check_count(config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for more images than one run can hold, and for seeds that would become too large."""
    count = len(prompts) * config.images_per_prompt
    if count > MAX_PROMPTS:
        raise UserError(
            f"{len(prompts):,} prompts with {config.images_per_prompt:,} images each make {count:,}; one run renders "
            f"at most {MAX_PROMPTS:,}. Lower --images-per-prompt, or split the prompts."
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
        raise UserError(f"The output {output!r} must end in .png, because PNG is the format.")
    _make_folder(path.parent)
    return path


def _check_folder(output: str) -> Path:
    path = Path(output)
    if path.suffix.lower() == ".png" or path.is_file():
        raise UserError(f"The output {output!r} is a file, and several images need a folder. Give a folder.")
    _make_folder(path)
    return path


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The output folder {str(path)!r} cannot be created ({error.strerror}). Give another one."
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"The output folder {str(path)!r} is not readable and writable. Give another one.")


def _check_second_prompts(kind: str, config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    if kind != SDXL and any(prompt.second for prompt in prompts):
        raise UserError(
            f"The prompts have a prompt_2, and the SDXL checkpoint {config.base!r} is a {kind}, which has one text "
            "encoder. Leave it out."
        )


# One image, and a folder of images


def _render_one(path: Path, studio: Studio, prompt: Prompt) -> None:
    task = ImageTask(prompt, "the prompt", path, _settings(studio, studio.settings(), prompt, studio.config.seed))
    if path.exists() and not studio.config.overwrite and (difference := _difference(task)):
        raise UserError(f"{str(path)!r} is another image: {difference}. Give another --output, or --overwrite.")
    _raise_if_failed(render_missing(studio, [task], {path}, []), studio)


def _fill(
    folder: Path, studio: Studio, prompts: Sequence[Prompt], where: dict[int, str], left_out: list[LeftOut]
) -> None:
    """Renders the missing images of a folder, and writes its index, contact sheets and list of skipped entries."""
    _check_free(folder)
    tasks = _image_tasks(folder, studio, prompts, where)
    missing = _missing(folder, tasks)
    print(f"Images: {len(tasks) - len(missing):,} are in {folder}, {len(missing):,} to render")
    failed = render_missing(studio, tasks, missing, left_out) if missing else []
    print_left_out(failed)
    finished = [(task, read_settings(task.path)) for task in tasks if task.path.exists()]
    _write_lines(folder / "index.jsonl", [_index_entry(task, settings) for task, settings in finished])
    _write_lines(folder / "left-out.jsonl", [vars(entry) for entry in [*left_out, *failed]])
    if finished:
        _write_contact_sheets(folder, finished)
    _raise_if_failed(failed, studio)


def _write_contact_sheets(folder: Path, finished: Sequence[tuple[ImageTask, dict]]) -> None:
    titled = [(t.path, f"{t.prompt.number:05} · seed {settings['seed']}", t.prompt.text) for t, settings in finished]
    sheets = write_contact_sheets(folder, titled)
    more = f" and {len(sheets) - 1} more page{'s' * (len(sheets) > 2)}" if len(sheets) > 1 else ""
    print(f"Contact sheet of all {len(finished):,}: {sheets[0]}{more}")


def _raise_if_failed(failed: Sequence[LeftOut], studio: Studio) -> None:
    """Raises FailedError if images could not be rendered."""
    if failed:
        raise FailedError(
            f"{len(failed):,} image{'s were' if len(failed) > 1 else ' was'} not rendered, the first: {failed[0]}. "
            "Where values are not finite, weights of an encoder or of the SDXL checkpoint are damaged, or too large "
            f"for {str(studio.dtype).removeprefix('torch.')}. Try another encoder, or --precision fp32."
        )


def _image_tasks(folder: Path, studio: Studio, prompts: Sequence[Prompt], where: dict[int, str]) -> list[ImageTask]:
    """All images of a run. Number and seed identify a file; the words after them are for people."""
    existing = {
        (int(match[1]), int(match[2])): folder / match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match
    }
    common, tasks = studio.settings(), []
    for prompt in prompts:
        first = _first_seed(studio.config, prompt)
        for seed in range(first, first + studio.config.images_per_prompt):
            name = "-".join(filter(None, (f"{prompt.number:05}", str(seed), _slug(prompt.text))))
            path = existing.get((prompt.number, seed), folder / f"{name}.png")
            tasks.append(ImageTask(prompt, where[prompt.number], path, _settings(studio, common, prompt, seed)))
    return tasks


def _slug(text: str) -> str:
    """The beginning of a text in letters and digits that every file system takes; may be empty."""
    ascii_only = unicodedata.normalize("NFKD", text[:200]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].rstrip("-")


def _settings(studio: Studio, common: dict, prompt: Prompt, seed: int) -> dict:
    """Every setting that affects an image."""
    negative = studio.config.negative_prompt if prompt.negative is None else prompt.negative
    return {"prompt": prompt.text, "negative_prompt": negative, "prompt_2": prompt.second, "seed": seed} | common


def _check_free(folder: Path) -> None:
    """Raises UserError for a folder with the name of a file that is written at the end."""
    for path in (folder / "index.jsonl", folder / "left-out.jsonl", *folder.glob("contact-sheet*.png")):
        if path.is_dir() and not path.is_symlink():
            raise UserError(f"{str(path)!r} is a folder, and a file is written there. Move it, or give another output.")


def _missing(folder: Path, tasks: Sequence[ImageTask]) -> set[Path]:
    """The files that do not exist or are damaged.

    Raises:
        UserError: a file has other settings.
    """
    missing, different, damaged = set(), [], []
    for task in tasks:
        if not task.path.exists():
            missing.add(task.path)
            continue
        if difference := _difference(task):
            different.append(f"{task.path.name} ({task.where}): {difference}")
        elif problem := png_damage(task.path):
            missing.add(task.path)
            damaged.append(f"{task.path.name} ({problem})")
    if different:
        raise UserError(
            f"{len(different):,} of the images in {str(folder)!r} were made with other settings, the first "
            f"{different[0]}. Give another output, return to those settings, or remove the images to replace."
        )
    if damaged:
        print(f"Damaged: {len(damaged):,} of the images, rendered again, the first {damaged[0]}")
    return missing


def _difference(task: ImageTask) -> str:
    """How an existing file's settings differ from those of its task; "" if they do not."""
    before = read_settings(task.path)
    return "it holds no settings" if before is None else first_difference(before, task.settings)


def _index_entry(task: ImageTask, settings: dict) -> dict:
    names = ("prompt", "negative_prompt", "prompt_2", "seed", "tokens", "positions", "chunks")
    return {"file": task.path.name, "where": task.where} | {name: settings.get(name) for name in names}


def _write_lines(path: Path, entries: Sequence[dict]) -> None:
    """Writes one JSON object a line, or removes the file if there are none."""
    if entries:
        write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    else:
        path.unlink(missing_ok=True)
