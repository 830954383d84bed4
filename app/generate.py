"""Images from prompts of any length, by SDXL or SD 1.5 with a long-prompt text encoder.

One prompt gives one PNG. A file of prompts gives a folder of PNGs; the same command continues an interrupted run.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from debias_diffusion.data.bad_records import print_left_out
from debias_diffusion.devices import DTYPES, explain_memory, pick_device
from debias_diffusion.encoders.spec import EncoderSpec
from debias_diffusion.errors import FailedError, UserError
from debias_diffusion.files import write_text
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines.rendering.checkpoints import KINDS, SDXL
from debias_diffusion.pipelines.rendering.folder import explain_failures, render_into
from debias_diffusion.pipelines.rendering.images import read_layout
from debias_diffusion.pipelines.rendering.loras import LoraFolder
from debias_diffusion.pipelines.rendering.options import USUAL, Sampling
from debias_diffusion.pipelines.rendering.png import first_difference, read_settings, write_png
from debias_diffusion.pipelines.rendering.prompts import ImagePrompt, ImageTask
from debias_diffusion.pipelines.rendering.renderer import Renderer

from .contact_sheet import write_contact_sheets
from .like import take_settings
from .prompt_options import GenerateConfig
from .prompts import check_prompt, check_text, parse_seed, read_prompts

LEFT_OUT = "left-out.jsonl"
MOST_UNREAD = 10  # sentences on what is not read of prompts


def generate(config: GenerateConfig) -> Path:
    """Renders one image, or one for each entry of a file of prompts, as PNGs; returns the image or the folder.

    A PNG's text chunk "settings" holds its settings as JSON, and "parameters" the same in the format of A1111's
    interface. Equal settings on one machine give equal files, byte for byte. Prints how prompts are read.

    A folder of several images is a job: finished ones are kept. At the end `index.jsonl` lists all images and
    `contact-sheet.png` shows them. Invalid entries are skipped and reported, the first on the console and all in
    `left-out.jsonl`.

    Raises:
        UserError: a setting or all prompts cannot be used (whatever can be checked early is checked before a model is
            loaded); the folder holds images of other settings, or the file is one without `overwrite`; memory does not
            suffice.
        FailedError: some images have values that are not finite. These are not written, all others are.
    """
    config = take_settings(config) if config.like else config
    if config.prompt is not None:
        check_prompt(config.prompt)
    check_text("negative prompt", config.negative_prompt or "")
    encoder = config.spec
    if encoder.fitted_second and config.encoder_2:
        encoder = replace(encoder, name=encoder.model.location)  # without the second encoder
    elif encoder.fitted_second:
        print(f"Second encoder: {encoder.fitted_second}, fitted with the first")
    parse_seed(config.seed + config.images_per_prompt - 1)  # of the last image
    seeds = range(config.seed, config.seed + config.images_per_prompt)
    prompts = [ImagePrompt(config.prompt or "", seed, config.negative_prompt) for seed in seeds]
    images, left_out = [ImageTask("00000", prompt, "the prompt") for prompt in prompts], {}
    if config.prompts is not None:
        images, left_out = read_prompts(config.prompts, config.seed, config.negative_prompt, config.images_per_prompt)
        print(f"Prompts: {len(images) // config.images_per_prompt:,} in {config.prompts}")
        _print_left_out(left_out)
    unread: list[str] = []
    output = Path(config.output or ("pictures" if config.several else "picture.png"))
    is_png = output.suffix.lower() == ".png"
    if is_png == config.several or (is_png and output.is_dir()):
        kind = "a folder for several images: leave out .png" if config.several else "a file that ends in .png"
        raise UserError(f"The output {str(output)!r} must be {kind}.")
    if not config.several:  # a job checks its folder
        output.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output.parent).close()  # an OSError now, not after the image is made
    renderer = Renderer(
        config.base,
        Sampling.of(vars(config)),
        pick_device(config.device),
        DTYPES.get(config.precision),
        encoder_2=config.encoder_2,
        batch=config.batch,
        low_memory=config.low_memory,
        show_steps=not config.several,
        loras=config.loras and LoraFolder(config.loras),
        refiner=config.refiner,
    )
    kind = renderer.checkpoint.check_kind(KINDS)
    if scheduling := renderer.checkpoint.scheduling:
        print("The checkpoint says:", ", ".join(f"{name} {value}" for name, value in scheduling.items()))
    if kind == SDXL and config.clip_skip == 1:
        print("Clip skip 1: of SDXL the layer before the last is read, as in A1111 and Forge. ComfyUI reads the last.")
    if kind != SDXL and any(image.prompt.prompt_2 for image in images):
        raise UserError(
            f"The prompts have a prompt_2, and the SDXL checkpoint {config.base!r} is a {kind}, which has one text "
            "encoder. Leave it out."
        )
    advice = f"Try --low-memory, a smaller --batch than {config.batch}, or a smaller image."
    with explain_memory(renderer.device, advice):
        if config.several:
            with Job.open(output, "generate", renderer.settings(encoder), renderer.inputs(encoder)) as job:
                _fill(job, renderer, encoder, _named(images, job), left_out, unread)
        else:
            _render_one(output, config, renderer, encoder, images[0], unread)
    print(f"Wrote {output}")
    more = f", and {len(unread) - MOST_UNREAD:,} more" if len(unread) > MOST_UNREAD else ""
    for number, sentence in enumerate(unread[:MOST_UNREAD], 1):
        print(f"Not read: {sentence}{more * (number == MOST_UNREAD)}")
    return output


def _named(images: Sequence[ImageTask], job: Job) -> list[ImageTask]:
    """The images of a run with their names. Number and seed identify a file; the words after them are for people."""
    finished = [Path(name).stem for name in job.names()]
    names, tasks = {tuple(name.split("-")[:2]): name for name in finished}, []
    for image in images:
        place = image.name, str(image.prompt.seed)
        # letters and digits that every file system takes; there may be none
        words = unicodedata.normalize("NFKD", image.prompt.prompt[:200]).encode("ascii", "ignore").decode().lower()
        words = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:40].rstrip("-")
        tasks.append(replace(image, name=names.get(place, "-".join(filter(None, (*place, words))))))
    return tasks


def _render_one(
    path: Path,
    config: GenerateConfig,
    renderer: Renderer,
    encoder: EncoderSpec,
    task: ImageTask,
    unread: list[str],
) -> None:
    prompt, settings = renderer.cleaned(encoder, task.prompt), renderer.png_settings(encoder, task.prompt)
    if path.exists() and not config.overwrite:
        # one encoder may have several paths; positions are known when the prompt is read
        skipped = {name for name in ("encoder", "encoder_2", "refiner") if settings[f"{name}_sha256"]} | {"positions"}
        wanted = {name: value for name, value in settings.items() if name not in skipped}
        before = read_settings(path)
        difference = "it holds no settings" if before is None else first_difference(USUAL | before, wanted)
        if difference:
            raise UserError(f"{str(path)!r} is another image: {difference}. Give another --output, or --overwrite.")
    pipe = renderer.pipeline(encoder)
    layout = read_layout(pipe, prompt, renderer.sampling)
    unread += layout.warnings
    names = ("first ", "second ") if len(layout.chunks) > 1 else ("",)
    chunks = zip(layout.chunks, names, strict=True)
    counts = [f"{count} chunk{'s' * (count > 1)} of the {name}text encoder" for count, name in chunks]
    print(f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions ({', '.join(counts)})")
    if layout.schedules:
        print(f"Changing from step to step: {', '.join(layout.schedules)}; these counts are of the first step")
    [[image]] = renderer.render_batches(pipe, encoder, [[prompt]])
    if isinstance(image, str):
        failed = {f"{task.where}, seed {task.prompt.seed}": image}
        raise FailedError(explain_failures(failed, "1 image", renderer.dtype))
    write_png(image, path, renderer.png_text(pipe, encoder, task.prompt, layout))


def _fill(
    job: Job,
    renderer: Renderer,
    encoder: EncoderSpec,
    tasks: Sequence[ImageTask],
    left_out: dict[str, str],
    unread: list[str],
) -> None:
    """Renders the missing images of a folder, and writes its index, contact sheets and list of skipped entries."""
    not_rendered: dict[str, str] = {}
    error = None
    try:
        render_into(job, renderer, encoder, tasks, not_rendered, unread=unread)
    except FailedError as not_finite:
        error = not_finite
    _print_left_out(not_rendered)
    finished = [task for task in tasks if task.file in job]
    index = [{"file": task.file, "where": task.where} | job.notes(task.file) for task in finished]
    for entry in index:
        del entry["seconds"]
    _write_lines(job.folder / "index.jsonl", index)
    left_out = left_out | not_rendered
    _write_lines(job.folder / LEFT_OUT, [{"where": where, "reason": why} for where, why in left_out.items()])
    if finished:
        titles = [f"{task.name.partition('-')[0]} · seed {task.prompt.seed}" for task in finished]
        cells = zip(finished, titles, strict=True)
        cells = [(job.folder / task.file, title, task.prompt.prompt) for task, title in cells]
        sheets = write_contact_sheets(job.folder, cells)
        more = f" and {len(sheets) - 1} more page{'s' * (len(sheets) > 2)}" if len(sheets) > 1 else ""
        print(f"Contact sheet of all {len(finished):,}: {sheets[0]}{more}")
    if error:
        raise error


def _print_left_out(left_out: dict[str, str]) -> None:
    print_left_out([f"{where}: {why}" for where, why in left_out.items()], LEFT_OUT)


def _write_lines(path: Path, entries: Sequence[dict]) -> None:
    """Writes one JSON object a line, or removes the file if there are none."""
    if entries:
        write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    else:
        path.unlink(missing_ok=True)
