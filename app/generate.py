"""Pictures from prompts of any length: SDXL or SD 1.5, with a long-prompt text encoder in place of its first one.

One prompt gives one PNG. A file of prompts gives a folder of them, which an interrupted run goes on filling.
"""

import gc
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError, reason
from debias_diffusion.eval.report import digest
from debias_diffusion.files import held, write_text
from debias_diffusion.pipelines import PromptLayout
from debias_diffusion.pipelines.loading import (
    PIPELINES,
    SDXL,
    STRETCH,
    Part,
    check_base,
    default_dtype,
    default_size,
    load_pipeline,
)
from debias_diffusion.tokens import clean
from debias_diffusion.toyworld.shipped import shipped

from .contact_sheet import write_contact_sheets
from .pictures import PARAMETERS_KEY, SETTINGS_KEY, first_difference, parameters, read_settings, write_png
from .prompts import LeftOut, Prompt, check_prompt, check_text, parse_seed, read_prompts

ENCODED_AT_ONCE = 500  # pictures whose embeddings are kept under low_memory: up to 2 MB each at 248 positions
_EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
_NAME = re.compile(r"(\d{5,})-(\d+)(-.*)?\.png")


@dataclass
class GenerateConfig:
    """What to draw, with which models, and where to put it.

    Args:
        prompt: what to draw, in up to 20,000 characters; nothing of it is cut off.
        base: an SDXL or Stable Diffusion 1.5 folder in diffusers' layout, or a hub id.
        encoder: text encoder that takes the place of the base's first one: a folder written by `export`, or any
            transformers CLIPTextModel folder. The base's own reads long prompts too, in windows of 77 tokens.
        encoder_2: text encoder that takes the place of SDXL's second one, likewise, with a projection. "stretch" gives
            its own one 248 positions, untrained, as Long-CLIP does.
        output: PNG to write, picture.png if not given; of several pictures the folder, pictures if not given. Each
            carries the settings that made it.
        prompts: file of prompts, instead of `prompt`: .txt, one a line; .jsonl or .csv with prompt and, if wanted,
            negative_prompt, seed and prompt_2 (for SDXL's second encoder). Start again what was interrupted: pictures
            that are there are not drawn again.
        negative_prompt: what not to draw. Only used with a guidance scale above 1.
        seed: equal seeds start from equal noise, on every device. Entry i of a file of prompts, from 0, has this seed
            + i unless it names its own.
        images_per_prompt: pictures of each prompt, with its seed, the next one, and so on.
        batch: pictures drawn at once, of prompts of equal length; more are faster and need more memory.
        low_memory: encode prompts first, and load UNet and autoencoder only when the text encoders are gone. The
            pictures are the same.
        strict: leave out prompts that a text encoder would have to read in several windows.
        weighting: (word:1.3), ((word)), [word], word++ and BREAK in prompts are weights; otherwise they are text.
        steps: denoising steps; more are slower and finer, up to about 50.
        guidance_scale: how strongly the prompt is followed; 1 is no guidance and half the time. The default is above
            diffusers' 5, for a closer reading of a long prompt's details; past 10 colours burn.
        height: pixels, a multiple of 8; the model's own size if not given (1024 for SDXL).
        width: pixels, a multiple of 8; the model's own size if not given.
        device: cpu, cuda, cuda:1, mps; the fastest there is if not given.
        dtype: precision of the models; float16 on an accelerator and float32 on the CPU if not given.
    """

    prompt: str | None
    base: str
    encoder: str | None = None
    output: str | None = None
    negative_prompt: str | None = None
    seed: int = 0
    steps: int = 30
    guidance_scale: float = 7.0
    height: int | None = None
    width: int | None = None
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    encoder_2: str | None = None
    prompts: str | None = None
    images_per_prompt: int = 1
    batch: int = 1
    low_memory: bool = False
    strict: bool = False
    weighting: bool = False


@dataclass(frozen=True)
class Picture:
    """One picture to draw.

    Attributes:
        prompt: what is on it.
        where: its prompt, in words.
        path: its file.
        settings: everything that decides what it looks like, as its file will say.
    """

    prompt: Prompt
    where: str
    path: Path
    settings: dict


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
            loaded. A folder holds pictures of other settings.
    """
    _check_settings(config)
    several = _are_several(config)
    prompts, where, left_out = _read(config)
    output = _check_folder(config.output or "pictures") if several else _check_file(config.output or "picture.png")
    studio = _Studio(config, pick_device(config.device))
    _check_second_prompts(studio.kind, config, prompts)
    try:
        if several:
            with held(output, f"Another run is filling {str(output)!r}. Wait for it, or give another output."):
                _fill(output, studio, prompts, where, left_out)
        else:
            _draw_one(output, studio, prompts[0])
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"The memory of {studio.device} does not suffice ({reason(error)}). What is finished stays. Try "
            f"--low-memory, a smaller --batch than {config.batch}, or a smaller picture."
        ) from error
    return output


# What was asked for


def _are_several(config: GenerateConfig) -> bool:
    return config.prompts is not None or config.images_per_prompt > 1


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
    for name, number in (
        ("number of steps", config.steps),
        ("number of images per prompt", config.images_per_prompt),
        ("batch", config.batch),
    ):
        if number < 1:
            raise UserError(f"The {name} must be at least 1, got {number}.")


def _read(config: GenerateConfig) -> tuple[list[Prompt], dict[int, str], list[LeftOut]]:
    """The prompts, each one's place in words by its number, and what of their file is left out."""
    if config.prompts is None:
        return [Prompt(0, config.prompt)], {0: "the prompt"}, []
    file = read_prompts(config.prompts)
    print(f"Prompts: {len(file.prompts):,} in {config.prompts}")
    if file.unused:
        print(f"Not used of it: {', '.join(file.unused)[:200]}")
    _print_left_out(file.left_out)
    return file.prompts, {number: f"line {line}" for number, line in file.lines.items()}, file.left_out


def _print_left_out(left_out: Sequence[LeftOut]) -> None:
    for entry in left_out[:5]:
        print(f"Left out: {entry}")
    if len(left_out) > 5:
        print(f"Left out: {len(left_out) - 5:,} more; left-out.jsonl names all")


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


def _check_second_prompts(kind: str, config: GenerateConfig, prompts: Sequence[Prompt]) -> None:
    if kind != SDXL and any(prompt.second for prompt in prompts):
        raise UserError(
            f"The prompts have a prompt_2, and the base model {config.base!r} is a {kind}, which has one text encoder. "
            "Leave it out."
        )


# Models


class _Studio:
    """The settings of a run, where it runs, and its models, loaded when they are asked for.

    Raises:
        UserError: there is no such base or device.
    """

    def __init__(self, config: GenerateConfig, device: torch.device):
        self.config = config
        self.device = device
        self.several = _are_several(config)
        self.kind = check_base(config.base, tuple(PIPELINES))
        self.dtype = getattr(torch, config.dtype) if config.dtype else default_dtype(device)
        self.guided = config.guidance_scale > 1

    def load(self, part: Part = "all") -> DiffusionPipeline:
        config = self.config
        pipe = load_pipeline(config.base, config.encoder, self.device, self.dtype, config.encoder_2, part)
        pipe.set_progress_bar_config(disable=self.several)
        if config.strict or config.weighting:
            pipe.set_long_prompt(strict=config.strict, weighting=config.weighting)
        return pipe

    def settings(self) -> dict:
        """What all pictures of the run have in common and what decides how they look; reads no models."""
        config = asdict(self.config)
        names = ("base", "encoder", "encoder_2", "steps", "guidance_scale", "weighting")
        height, width = default_size(self.config.base)
        return {name: config[name] for name in names} | {
            # An encoder that was trained further under the same name is another one.
            "encoder_sha256": _digest(self.config.encoder),
            "encoder_2_sha256": _digest(self.config.encoder_2),
            "height": self.config.height or height,
            "width": self.config.width or width,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def texts(self, prompt: Prompt) -> dict[str, str | None]:
        """A prompt's texts, cleaned as captions were cleaned for training, SDXL's own encoders included."""
        negative = self.config.negative_prompt if prompt.negative is None else prompt.negative
        texts = {"prompt": prompt.text, "negative_prompt": negative}
        if prompt.second is not None:
            texts["prompt_2"] = prompt.second
        return {name: None if text is None else self._clean(text) for name, text in texts.items()}

    def _clean(self, text: str) -> str:
        if not self.config.weighting:
            return clean(text)
        return " BREAK ".join(clean(part) for part in re.split(r"\bBREAK\b", text))  # a word that lower case would hide

    def layout(self, pipe: DiffusionPipeline, prompt: Prompt) -> PromptLayout:
        """How a prompt is read.

        Raises:
            UserError: it needs a second window, under `strict`; or its weights cannot be used.
        """
        texts = self.texts(prompt)
        try:
            layout = pipe.prompt_layout(**texts, do_classifier_free_guidance=self.guided)
            windows = [layout.windows]
            if self.guided and texts["negative_prompt"] is not None:
                turned = {"prompt": texts["negative_prompt"], "negative_prompt": texts["prompt"]}
                turned |= {"negative_prompt_2": texts["prompt_2"]} if "prompt_2" in texts else {}
                windows.append(pipe.prompt_layout(**turned).windows)
        except ValueError as error:
            raise UserError(f"The prompt cannot be read: {reason(error)}.") from error
        if self.config.strict and max(map(max, windows)) > 1:
            raise UserError(
                f"With its {layout.tokens} tokens it takes {_windows(max(windows))}, and --strict allows one window."
            )
        return layout


def _digest(encoder: str | None) -> str | None:
    """sha256 of an encoder's files; None for none, and for a hub id, whose files lie wherever the cache put them."""
    path = encoder and encoder != STRETCH and shipped(encoder)
    return digest(path) if path and os.path.exists(path) else None


def _windows(windows: Sequence[int]) -> str:
    names = ["of the first text encoder", "of the second"] if len(windows) > 1 else ["of the text encoder"]
    counts = [f"{count} window{'s' * (count > 1)}" if not i else str(count) for i, count in enumerate(windows)]
    return ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True))


# One picture, and many


def _draw_one(path: Path, studio: _Studio, prompt: Prompt) -> None:
    picture = Picture(prompt, "the prompt", path, _settings(studio, studio.settings(), prompt, studio.config.seed))
    _draw(studio, [picture], {path}, [])


def _fill(
    folder: Path, studio: _Studio, prompts: Sequence[Prompt], where: dict[int, str], left_out: list[LeftOut]
) -> None:
    """Draws what a folder lacks, and writes its index, its contact sheets and the list of what was left out."""
    pictures = _pictures(folder, studio, prompts, where)
    missing = _missing(folder, pictures)
    print(f"Pictures: {len(pictures) - len(missing):,} are in {folder}, {len(missing):,} to draw")
    if missing:
        _draw(studio, pictures, missing, left_out)
    finished = [(picture, read_settings(picture.path)) for picture in pictures if picture.path.exists()]
    _write_lines(folder / "index.jsonl", [_index_entry(picture, its) for picture, its in finished])
    _write_lines(folder / "left-out.jsonl", [vars(entry) for entry in left_out])
    titled = [(p.path, f"{p.prompt.number:05} · seed {its['seed']}", p.prompt.text) for p, its in finished]
    sheets = write_contact_sheets(folder, titled)
    print(f"All {len(finished):,} at a glance: {', '.join(map(str, sheets))}")


def _pictures(folder: Path, studio: _Studio, prompts: Sequence[Prompt], where: dict[int, str]) -> list[Picture]:
    """All pictures of a run. Place and seed make a file's name its own; the words after them are for people."""
    there = {
        (int(match[1]), int(match[2])): folder / match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match
    }
    common, pictures = studio.settings(), []
    for prompt in prompts:
        first = studio.config.seed + prompt.number if prompt.seed is None else prompt.seed
        for seed in range(first, first + studio.config.images_per_prompt):
            name = "-".join(filter(None, (f"{prompt.number:05}", str(seed), _slug(prompt.text))))
            path = there.get((prompt.number, seed), folder / f"{name}.png")
            pictures.append(Picture(prompt, where[prompt.number], path, _settings(studio, common, prompt, seed)))
    return pictures


def _slug(text: str) -> str:
    """The beginning of a text in letters that every file system takes; nothing, if it has none."""
    ascii_only = unicodedata.normalize("NFKD", text[:200]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_only).strip("-")[:40].rstrip("-")


def _settings(studio: _Studio, common: dict, prompt: Prompt, seed: int) -> dict:
    """Everything that decides what a picture looks like."""
    negative = studio.config.negative_prompt if prompt.negative is None else prompt.negative
    return {"prompt": prompt.text, "negative_prompt": negative, "prompt_2": prompt.second, "seed": seed} | common


def _missing(folder: Path, pictures: Sequence[Picture]) -> set[Path]:
    """The files that are not there.

    Raises:
        UserError: one is there and is another picture.
    """
    missing, others = set(), []
    for picture in pictures:
        if not picture.path.exists():
            missing.add(picture.path)
            continue
        before = read_settings(picture.path)
        difference = "it holds no settings" if before is None else first_difference(before, picture.settings)
        if difference:
            others.append(f"{picture.path.name} ({picture.where}): {difference}")
    if others:
        raise UserError(
            f"{len(others):,} of the pictures in {str(folder)!r} were made with other settings, the first {others[0]}. "
            "Give another output, go back to those settings, or remove what is to be drawn anew."
        )
    return missing


def _index_entry(picture: Picture, settings: dict) -> dict:
    names = ("prompt", "negative_prompt", "prompt_2", "seed", "tokens", "positions", "windows")
    return {"file": picture.path.name, "where": picture.where} | {name: settings[name] for name in names}


def _write_lines(path: Path, entries: Sequence[dict]) -> None:
    """One JSON object a line; no file if there are none."""
    if entries:
        write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    else:
        path.unlink(missing_ok=True)


# Drawing

Embeddings = dict[str, torch.Tensor]  # by the name of the pipeline's argument, on the CPU


def _draw(studio: _Studio, pictures: Sequence[Picture], missing: set[Path], left_out: list[LeftOut]) -> None:
    """Draws the pictures whose files are missing, and adds to `left_out` the prompts that cannot be read.

    Raises:
        UserError: none can.
    """
    low_memory = studio.config.low_memory
    pipe = studio.load("encoders" if low_memory else "all")
    layouts = _layouts(studio, pipe, pictures, left_out)
    _print_layouts(studio, layouts)
    batches = _batches(studio, pictures, layouts, missing)
    sampler = type(pipe.scheduler).__name__
    drawn = _encode_then_draw(studio, pipe, batches) if low_memory else _encode_and_draw(studio, pipe, batches)
    with tqdm(total=len(missing), desc="draw", unit="picture", disable=not studio.several) as bar:
        for batch, images in drawn:
            for picture, image in zip(batch, images, strict=True):
                if picture.path in missing:
                    settings = picture.settings | layouts[picture.prompt.number]._asdict()
                    text = {SETTINGS_KEY: json.dumps(settings), PARAMETERS_KEY: parameters(settings, sampler)}
                    write_png(image, picture.path, text)
                    bar.update()


def _layouts(
    studio: _Studio, pipe: DiffusionPipeline, pictures: Sequence[Picture], left_out: list[LeftOut]
) -> dict[int, PromptLayout]:
    """How each prompt is read, by its number."""
    layouts, unreadable = {}, []
    for picture in {picture.prompt.number: picture for picture in pictures}.values():
        try:
            layouts[picture.prompt.number] = studio.layout(pipe, picture.prompt)
        except UserError as error:
            unreadable.append(LeftOut(picture.where, str(error)))
    if not layouts:
        raise UserError(f"No prompt can be drawn. {unreadable[0].where.capitalize()}: {unreadable[0].reason}")
    _print_left_out(unreadable)
    left_out += unreadable
    return layouts


def _print_layouts(studio: _Studio, layouts: dict[int, PromptLayout]) -> None:
    if not studio.several:
        layout = layouts[0]
        windows = _windows(layout.windows)
        print(f"Prompt: {layout.tokens} tokens, encoded at {layout.positions} positions ({windows})")
        return
    counts = sorted(Counter(layout.positions for layout in layouts.values()).items())
    print(
        "Positions: " + ", ".join(f"{positions} for {count:,} prompt{'s' * (count > 1)}" for positions, count in counts)
    )


def _batches(
    studio: _Studio, pictures: Sequence[Picture], layouts: dict[int, PromptLayout], missing: set[Path]
) -> list[list[Picture]]:
    """The pictures in batches of one length, so that none is padded further than it would be alone.

    What is there already counts too, so that a run that goes on draws in the same batches: others would change the
    last bits of a picture. Only batches that lack a picture are drawn.
    """
    groups: dict[tuple, list[Picture]] = {}
    for picture in pictures:
        if picture.prompt.number in layouts:
            # In a batch either all or none have a negative prompt.
            key = layouts[picture.prompt.number].positions, picture.settings["negative_prompt"] is None
            groups.setdefault(key, []).append(picture)
    size = studio.config.batch
    batches = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    batches = [batch for batch in batches if any(picture.path in missing for picture in batch)]
    return sorted(batches, key=lambda batch: batch[0].prompt.number)


def _encode_and_draw(
    studio: _Studio, pipe: DiffusionPipeline, batches: Sequence[list[Picture]]
) -> Iterator[tuple[list[Picture], list[Image.Image]]]:
    for batch in batches:
        yield batch, _images(studio, pipe, batch, _encode(studio, pipe, batch))


def _encode_then_draw(
    studio: _Studio, encoders: DiffusionPipeline, batches: Sequence[list[Picture]]
) -> Iterator[tuple[list[Picture], list[Image.Image]]]:
    """Like `_encode_and_draw`, with either the text encoders or the UNet in memory, never both.

    In rounds, because the embeddings of thousands of prompts take more room than the encoders.
    """
    at_once = max(1, ENCODED_AT_ONCE // studio.config.batch)
    for start in range(0, len(batches), at_once):
        encoders = encoders or studio.load("encoders")
        now = batches[start : start + at_once]
        encoded = [
            _encode(studio, encoders, batch)
            for batch in tqdm(now, desc="encode", disable=not studio.several, leave=False)
        ]
        # Whoever else holds the pipeline holds no encoders.
        encoders.register_modules(text_encoder=None, **({"text_encoder_2": None} if studio.kind == SDXL else {}))
        encoders = None
        _free_memory()
        denoiser = studio.load("denoiser")
        for batch, embeddings in zip(now, encoded, strict=True):
            yield batch, _images(studio, denoiser, batch, embeddings)
        del denoiser
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


@torch.no_grad()
def _encode(studio: _Studio, pipe: DiffusionPipeline, batch: Sequence[Picture]) -> Embeddings:
    texts = [studio.texts(picture.prompt) for picture in batch]
    arguments = {"prompt": [text["prompt"] for text in texts]}
    if texts[0]["negative_prompt"] is not None:
        arguments["negative_prompt"] = [text["negative_prompt"] for text in texts]
    if any("prompt_2" in text for text in texts):
        arguments["prompt_2"] = [text.get("prompt_2", text["prompt"]) for text in texts]
    embeddings = pipe.encode_prompt(
        **arguments, device=studio.device, num_images_per_prompt=1, do_classifier_free_guidance=studio.guided
    )
    # Two from Stable Diffusion 1.5, four from SDXL; None where guidance does not ask for it.
    named = zip(_EMBEDDINGS, embeddings, strict=False)
    return {name: embedding.cpu() for name, embedding in named if embedding is not None}


def _images(
    studio: _Studio, pipe: DiffusionPipeline, batch: Sequence[Picture], embeddings: Embeddings
) -> list[Image.Image]:
    config, first = studio.config, batch[0].settings
    return pipe(
        **{name: embedding.to(studio.device) for name, embedding in embeddings.items()},
        height=first["height"],
        width=first["width"],
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale,
        # One an image, so that it does not matter what it is drawn with; on the CPU, because every device's own
        # generator draws other numbers from the same seed.
        generator=[torch.Generator("cpu").manual_seed(picture.settings["seed"]) for picture in batch],
    ).images
