"""Images from prompts of any length, by SDXL or SD 1.5 with a long-prompt text encoder.

One prompt gives one PNG. A file of prompts gives a folder of PNGs; the same command continues an interrupted run.
"""

import json
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from debias_diffusion.devices import DTYPES, pick_device
from debias_diffusion.encoders import ORIGINAL, EncoderSpec
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import write_text
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines import PromptLayout
from debias_diffusion.pipelines.checkpoints import PIPELINES, SDXL
from debias_diffusion.pipelines.png import first_difference, read_settings, sampler, settings_text, write_png
from debias_diffusion.pipelines.rendering import (
    ImagePrompt,
    ImageTask,
    Renderer,
    Sampling,
    explain_failures,
    explain_memory,
    render_into,
)

from .contact_sheet import write_contact_sheets
from .options import GenerateConfig
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

_NAME = re.compile(r"((\d{5,})-(\d+)(-.*)?)\.png")


def generate(config: GenerateConfig) -> Path:
    """Renders one image, or one for each entry of a file of prompts, as PNGs.

    A PNG's text chunk "settings" holds its settings as JSON, and "parameters" the same in the format of A1111's
    interface. Equal settings on one machine give equal files, byte for byte. Prints how prompts are read.

    A folder of several images is a job: finished ones are kept. At the end `index.jsonl` lists all images and
    `contact-sheet.png` shows them. Invalid entries are skipped and reported, the first on the console and all in
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
    encoder = EncoderSpec.parse(config.encoder or ORIGINAL, config.reading)
    if encoder.fitted_second and config.encoder_2:
        encoder = replace(encoder, name=encoder.place)  # without the second encoder
    elif encoder.fitted_second:
        print(f"Second encoder: {encoder.fitted_second}, fitted with the first")
    prompts, where, left_out = _read(config)
    _check_count(config, prompts)
    output = Path(config.output or ("pictures" if config.several else "picture.png"))
    _check_output(output, config.several)
    renderer = Renderer(
        config.base,
        Sampling(config.steps, config.guidance_scale, config.height, config.width),
        pick_device(config.device),
        DTYPES.get(config.precision),
        encoder_2=config.encoder_2,
        weighting=config.weighting,
        batch=config.batch,
        low_memory=config.low_memory,
        show_steps=not config.several,
    )
    kind = renderer.checkpoint.check_kind(PIPELINES)
    if kind != SDXL and any(prompt.second for prompt in prompts):
        raise UserError(
            f"The prompts have a prompt_2, and the SDXL checkpoint {config.base!r} is a {kind}, which has one text "
            "encoder. Leave it out."
        )
    advice = f"Try --low-memory, a smaller --batch than {config.batch}, or a smaller image."
    with explain_memory(renderer.device, advice):
        if config.several:
            with Job.open(output, "generate", renderer.settings(encoder), renderer.inputs(encoder)) as job:
                _fill(job, renderer, encoder, _tasks(config, prompts, where, job), left_out)
        else:
            _render_one(output, config, renderer, encoder, _tasks(config, prompts, where)[0])
    print(f"Wrote {output}")
    return output


def _read(config: GenerateConfig) -> tuple[list[Prompt], dict[int, str], list[LeftOut]]:
    """The prompts, the place of each in words by its number, and the entries that are left out."""
    if config.prompts is None:
        return [Prompt(0, config.prompt)], {0: "the prompt"}, []
    file = read_prompts(config.prompts)
    print(f"Prompts: {len(file.prompts):,} in {config.prompts}")
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


def _check_output(path: Path, several: bool) -> None:
    """Raises UserError unless images can be written there."""
    output, is_png = str(path), path.suffix.lower() == ".png"
    if several and (is_png or path.is_file()):
        raise UserError(f"The output {output!r} is a file, and several images need a folder. Give a folder.")
    if not several and path.is_dir():
        raise UserError(f"The output {output!r} is a folder. Give a file name, such as {str(path / 'picture.png')!r}.")
    if not several and not is_png:
        raise UserError(f"The output {output!r} must end in .png, because PNG is the format.")
    folder = path if several else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The output folder {str(folder)!r} cannot be created ({error.strerror}). Give another one."
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"The output folder {str(folder)!r} is not readable and writable. Give another one.")


def _tasks(
    config: GenerateConfig, prompts: Sequence[Prompt], where: dict[int, str], job: Job | None = None
) -> list[ImageTask]:
    """All images of a run. Number and seed identify a file; the words after them are for people."""
    finished = map(_NAME.fullmatch, job.names() if job else ())
    names = {(int(match[2]), int(match[3])): match[1] for match in finished if match}
    tasks = []
    for prompt in prompts:
        first = _first_seed(config, prompt)
        negative = config.negative_prompt if prompt.negative is None else prompt.negative
        for seed in range(first, first + config.images_per_prompt):
            name = "-".join(filter(None, (f"{prompt.number:05}", str(seed), _slug(prompt.text))))
            image = ImagePrompt(prompt.text, seed, negative, prompt.second)
            tasks.append(ImageTask(names.get((prompt.number, seed), name), image, where[prompt.number]))
    return tasks


def _slug(text: str) -> str:
    """The beginning of a text in letters and digits that every file system takes; may be empty."""
    ascii_only = unicodedata.normalize("NFKD", text[:200]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].rstrip("-")


# One image, and a folder of images


def _render_one(path: Path, config: GenerateConfig, renderer: Renderer, encoder: EncoderSpec, task: ImageTask) -> None:
    settings = renderer.png_settings(encoder, task.prompt)
    if path.exists() and not config.overwrite and (difference := _difference(path, settings)):
        raise UserError(f"{str(path)!r} is another image: {difference}. Give another --output, or --overwrite.")
    pipe = renderer.pipeline(encoder)
    layout = renderer.layout(pipe, task.prompt)
    print(f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions ({_chunks(layout)})")
    scheduler = type(pipe.scheduler).__name__
    [[image]] = renderer.render(pipe, encoder, [[task.prompt]])
    if isinstance(image, str):
        failed = [(f"{task.where}, seed {task.prompt.seed}", image)]
        raise FailedError(explain_failures(failed, "1 image", renderer.dtype))
    settings |= layout._asdict() | {"scheduler": sampler(scheduler)}
    write_png(image, path, settings_text(settings, scheduler))


def _difference(path: Path, settings: dict) -> str:
    """How an existing file's settings differ; "" if they do not."""
    before = read_settings(path)
    # one encoder may have several paths
    named = {name for name in ("encoder", "encoder_2") if settings[f"{name}_sha256"]}
    wanted = {name: value for name, value in settings.items() if name not in named}
    return "it holds no settings" if before is None else first_difference(before, wanted)


def _chunks(layout: PromptLayout) -> str:
    names = ["of the first text encoder", "of the second"] if len(layout.chunks) > 1 else ["of the text encoder"]
    counts = [f"{count} chunk{'s' * (count > 1)}" if not i else str(count) for i, count in enumerate(layout.chunks)]
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))


def _fill(
    job: Job, renderer: Renderer, encoder: EncoderSpec, tasks: Sequence[ImageTask], left_out: list[LeftOut]
) -> None:
    """Renders the missing images of a folder, and writes its index, contact sheets and list of skipped entries."""
    not_rendered: dict[str, str] = {}
    try:
        render_into(job, renderer, encoder, tasks, not_rendered)
    except FailedError:
        _describe(job, tasks, left_out, not_rendered)
        raise
    _describe(job, tasks, left_out, not_rendered)


def _describe(job: Job, tasks: Sequence[ImageTask], left_out: list[LeftOut], not_rendered: dict[str, str]) -> None:
    failed = [LeftOut(*entry) for entry in not_rendered.items()]
    print_left_out(failed)
    finished = {f"{task.name}.png": task for task in tasks if f"{task.name}.png" in job}
    index = [{"file": name, "where": task.where} | _entry(job.notes(name)) for name, task in finished.items()]
    _write_lines(job.folder / "index.jsonl", index)
    _write_lines(job.folder / "left-out.jsonl", [asdict(entry) for entry in [*left_out, *failed]])
    if finished:
        titles = [f"{name.partition('-')[0]} · seed {task.prompt.seed}" for name, task in finished.items()]
        texts = [task.prompt.prompt for task in finished.values()]
        files = [job.folder / name for name in finished]
        sheets = write_contact_sheets(job.folder, list(zip(files, titles, texts, strict=True)))
        more = f" and {len(sheets) - 1} more page{'s' * (len(sheets) > 2)}" if len(sheets) > 1 else ""
        print(f"Contact sheet of all {len(finished):,}: {sheets[0]}{more}")


def _entry(notes: dict) -> dict:
    names = ("prompt", "negative_prompt", "prompt_2", "seed", "tokens", "positions", "chunks")
    return {name: notes[name] for name in names}


def _write_lines(path: Path, entries: Sequence[dict]) -> None:
    """Writes one JSON object a line, or removes the file if there are none."""
    if entries:
        write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    else:
        path.unlink(missing_ok=True)
