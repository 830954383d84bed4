"""Embeddings of a training set's captions, read whole, in the files that a trainer of SDXL takes.

Each file holds a digest of what decides its embeddings, and a checksum of its content. So a run that was stopped
continues, and a file that no longer fits, or is damaged, is made again.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from safetensors.torch import save
from tqdm import tqdm

from debias_diffusion.clip.weight_files import model_digest
from debias_diffusion.data.bad_records import BadRecord, leave_out, printable, report_all
from debias_diffusion.data.captions import usable_captions
from debias_diffusion.data.image_folder import IMAGES, SAME_NAME, ending, read_pair_folder
from debias_diffusion.data.images import ImageSource, is_there
from debias_diffusion.data.records import Record
from debias_diffusion.devices import DTYPES, explain_memory, pick_device
from debias_diffusion.encoders.spec import Kind
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.files import (
    atomic_file,
    bytes_digest,
    folder_lock,
    json_digest,
    read_file,
    visible_files,
    write_text,
)
from debias_diffusion.pipelines.rendering.checkpoints import DENOISER, Checkpoint
from debias_diffusion.pipelines.rendering.loading import load_pipeline
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.prompt import Encoders, read

from .prompt_options import EncodeConfig
from .tokens import load_tokenizers

INDEX, KOHYA = "index.jsonl", "_te_outputs.npz"
# In each file: the digest of what decides it, and the sha256 of the file with zeros in the place of that sha256.
_MARK = re.compile(rb"debias_diffusion ([0-9a-f]{64}) ([0-9a-f]{64})")
_OUR_INDEX = re.compile(rb'{"image": .*, "file": "[0-9a-f]{32}\.safetensors"}\n')
LONGEST = 302  # positions, unless more are asked for


def encode_captions(config: EncodeConfig) -> Path:
    """Encodes the captions of a folder, all at one length, and returns the output folder.

    `kohya`: `NAME_te_outputs.npz` as `SdxlTextEncoderOutputsCachingStrategy` of kohya-ss/sd-scripts (48d368f) writes
    it: hidden_state1 [positions, 768], hidden_state2 [positions, 1280], pool2 [1280]. `diffusers`: a safetensors file
    for each caption, of prompt_embeds [positions, 2048] and pooled_prompt_embeds [1280], and `index.jsonl`.

    Raises:
        UserError: the captions, the checkpoint or the options cannot be used; two images or captions would have one
            file; captions are longer than the length; a file is there that this command did not make; another process
            works in the output folder.
    """
    folder, images = read_pair_folder(config.captions)
    output, spec, checkpoint = Path(config.output or images.root), config.spec, Checkpoint.parse(config.base)
    checkpoint.check_kind()
    with explain_failure("The captions cannot be read"):
        options = LongPromptOptions(reading=spec.reading, positions=config.positions)
    if spec.reading != "kohya":  # which cuts there
        options = replace(options, positions=None)
    encoders, bad = load_tokenizers(checkpoint, spec), list(folder.bad)
    captions = [*_read_captions(folder.records, images, encoders, options, bad)]
    records = [caption.record for caption in captions]
    usable_captions("The folder", records, bad, "Give a folder of images and captions.")
    positions = _common_length(captions, encoders, options, config.positions)
    names = [_file(config.to, record.image, record.caption) for record in records]
    files = dict(zip(names, records, strict=True))
    if config.to == "kohya":
        pairs = ((record, files[name]) for name, record in zip(names, records, strict=True))
        twice = [record.detail for record in bad if record.kind == SAME_NAME]
        if twice := twice + [f"{record.image} and {last.image}" for record, last in pairs if record != last]:
            raise UserError(
                f"kohya has one file, of one caption, for images of one name: {_named(twice)}. Rename all but one."
            )
    report_all(bad, len(records) + len(bad), config.max_bad, output, "Mend them, or raise --max-bad.")

    output.mkdir(parents=True, exist_ok=True)
    with folder_lock(output):
        there = _look_up(config, images.root, output, files)
        print(f"{len(files):,} files of {positions} positions in {output}")
        device = pick_device(config.device)
        with explain_memory(device, "Give --device cpu."):
            _encode(config, device, files, positions, there, output)
        if config.to == "diffusers":
            pairs = zip(names, records, strict=True)
            rows = ({"image": record.image, "caption": record.caption, "file": name} for name, record in pairs)
            write_text(output / INDEX, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"Wrote {output}. {_NEXT[config.to]}")
    if positions > 77:
        print(
            f"The captions are read as {spec.reading} reads them. Encode as your users will draw: with this package "
            "in the same reading, with --reading a1111 for A1111 and Forge, with --reading comfyui for ComfyUI."
        )
    return output


_NEXT = {
    "kohya": "Next: train with sd-scripts' --cache_text_encoder_outputs_to_disk --network_train_unet_only.",
    "diffusers": f"Next: give your loop prompt_embeds and pooled_prompt_embeds of the files that {INDEX} lists.",
}


def _look_up(config: EncodeConfig, images: Path, output: Path, files: dict[str, Record]) -> dict[str, str | None]:
    """The digests of files that are there, by name; None of one that may be replaced.

    Removes embeddings that this command made of captions that are now left out: sd-scripts would train on them.

    Raises:
        UserError: another program's file lies in the place of one.
    """
    names = visible_files(images) if config.to == "kohya" else ()
    left_out = {_file("kohya", name) for name in names if ending(name) in IMAGES} - files.keys()
    written = [*files, *([INDEX] if config.to == "diffusers" else sorted(left_out))]
    written = [name for name in written if os.path.lexists(output / name)]
    bar = tqdm(written, "checking files", unit=" files", disable=len(written) < 1000)
    there = {name: _digest_in(output / name) for name in bar}
    if foreign := [name for name in written if there[name] is None and (name in left_out or not config.overwrite)]:
        raise UserError(
            f"{len(foreign):,} files in {str(output)!r} are not of this command: {_named(foreign)}. Move them away, or "
            "give another --output. --overwrite replaces those whose captions are encoded."
        )
    if stale := [name for name in written if name in left_out]:
        for name in stale:
            (output / name).unlink()
        print(f"Removed, because their captions are left out: {_named(stale)}")
    return there


def _encode(
    config: EncodeConfig, device: torch.device, files: dict[str, Record], positions: int, there: dict, output: Path
) -> None:
    """Writes the files whose digests are not those of files that are `there`."""
    spec, dtype = config.spec, DTYPES[config.dtype]
    first = None if spec.kind is Kind.ORIGINAL else spec.name
    pipe = load_pipeline(config.base, first, device, torch.float32, spec.fitted_second, without=DENOISER)
    pipe.set_long_prompt(reading=spec.reading, positions=positions)
    encoders = [model_digest(encoder, encoder.config, tokenizer) for tokenizer, encoder in pipe._text_encoders()]
    settings = {"reading": spec.reading, "positions": positions, "encoders": encoders, "dtype": config.dtype}
    settings["version"] = version("debias-diffusion")  # of the reading's code, too
    digests = {name: json_digest(settings | {"caption": record.caption}) for name, record in files.items()}
    missing = [name for name, digest in digests.items() if there.get(name) != digest]
    print(f"{len(missing):,} to encode; {len(files) - len(missing):,} are there")
    for name in tqdm(missing, "encoding captions", unit=" captions"):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other programs' syntax, for each caption
            embeds, _, pooled, _ = pipe.encode_prompt(files[name].caption, do_classifier_free_guidance=False)
        tensors = [tensor[0].to("cpu", dtype) for tensor in (embeds, pooled)]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise UserError(f"The embeddings of {files[name].image!r} are not finite. Give --dtype fp32.")
        mark = f"debias_diffusion {digests[name]} {'0' * 64}"
        if config.to == "diffusers":
            tensors = dict(zip(("prompt_embeds", "pooled_prompt_embeds"), tensors, strict=True))
            content = save(tensors, {"debias_diffusion": mark})  # safetensors has no order of several
        else:
            width, buffer = pipe.text_encoder.config.hidden_size, BytesIO()
            states = {"hidden_state1": tensors[0][:, :width].numpy(), "hidden_state2": tensors[0][:, width:].numpy()}
            np.savez(buffer, **states, pool2=tensors[1].numpy())
            with ZipFile(buffer, "a") as archive:
                archive.comment = mark.encode()
            content = buffer.getvalue()
        with atomic_file(output / name) as temporary:
            sealed = mark[:-64] + bytes_digest([content])
            temporary.write_bytes(content.replace(mark.encode(), sealed.encode()))


class _Caption(NamedTuple):
    """A caption that can be encoded, as it is read: see `Plan`."""

    record: Record
    needed: int
    positions: int
    cut_at: int | None  # None, too, for a caption that fits
    unread: dict[str, str]


def _read_captions(
    records: Sequence[Record], images: ImageSource, encoders: Encoders, options: LongPromptOptions, bad: list[BadRecord]
) -> Iterator[_Caption]:
    """The captions that can be encoded, at any length. Adds the others to `bad`."""
    for record in tqdm(records, "reading captions", disable=len(records) < 10_000):
        with leave_out(record.image, bad):
            if _leads_out(record.image) or not is_there(images, record.image):
                raise ValueError(f"no such image: {record.image} in the folder")
            plan = read([record.caption], None, encoders, options)
            plan.refuse_schedules()
            is_cut = any(part.rest for each in plan.prompts.encoders for part in each.parts)
            yield _Caption(record, plan.needed, plan.positions, plan.cut_at if is_cut else None, plan.unread)


def _common_length(
    captions: Sequence[_Caption], encoders: Encoders, options: LongPromptOptions, asked: int | None
) -> int:
    """The one length for all captions, at most `LONGEST` or what was asked for. Prints what of them is not read."""
    too_long = [each for each in captions if (each.needed > asked if asked else each.positions > LONGEST)]
    lengths = {each.positions: each.record.caption for each in captions}
    shared = read([list(lengths.values())], None, encoders, options).positions
    if too_long or (shared > LONGEST and not asked):
        raise UserError(
            f"{len(too_long):,} of {len(captions):,} captions do not fit {asked or LONGEST} positions: "
            f"{_named([each.record.image for each in too_long])}. Give --positions {shared}, which holds "
            "all, shorten them, or cut them with --reading cut or kohya."
        )
    for kind in dict.fromkeys(kind for each in captions for kind in each.unread):
        of_kind = [each for each in captions if kind in each.unread]
        print(f"In {len(of_kind):,} of the captions, such as {of_kind[0].record.image}: {of_kind[0].unread[kind]}")
    if cut := [each for each in captions if each.cut_at]:
        images = _named([each.record.image for each in cut])
        print(f"Cut at {cut[0].cut_at} positions, as the reading says: {len(cut):,} captions: {images}")
    return asked or shared


def _file(form: str, image: str, caption: str = "") -> str:
    """Where a caption's embeddings lie in the output: kohya's after the image, the others' after the caption."""
    digest = bytes_digest([caption.encode()])[:32]
    return f"{os.path.splitext(image)[0]}{KOHYA}" if form == "kohya" else f"{digest}.safetensors"


def _leads_out(path: str) -> bool:
    return bool({"..", "/"} & {*PurePosixPath(path).parts})


def _digest_in(path: Path) -> str | None:
    """The digest in a file of this command; "" of its index, or of a damaged file; None of a file without a mark."""
    try:
        content = read_file(path)
    except OSError:  # such as a FIFO
        return None
    if path.name == INDEX:
        return "" if _OUR_INDEX.match(content) else None
    if (mark := _MARK.search(content)) is None:
        return None
    found = bytes_digest([content[: mark.start(2)], b"0" * 64, content[mark.end(2) :]])
    return mark[1].decode() if found == mark[2].decode() else ""


def _named(names: Sequence[str]) -> str:
    """The first five names."""
    return ", ".join(map(printable, names[:5])) + ", ..." * (len(names) > 5)
