"""Exports a training run, or any other text encoder, for other programs."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.clip.weight_files import written_metadata
from debias_diffusion.data.seen import SEEN, Seen, read_seen, write_seen
from debias_diffusion.encoders.single_file import VOCABULARY, WRITTEN_BY, write_file
from debias_diffusion.encoders.spec import EncoderSpec, Kind
from debias_diffusion.encoders.text_encoders import (
    TextEncoder,
    keeps_projection,
    to_transformers,
    write_text_encoder,
)
from debias_diffusion.errors import UserError, explain_failure
from debias_diffusion.pipelines.custom_pipeline import write_block, write_custom_pipeline

from .model_card import BLOCK_CARD, OPEN_CLIP_UNABLATED, model_card
from .options import ExportConfig
from .written_folder import MARK, check_replaceable, written_folder

if TYPE_CHECKING:
    from debias_diffusion.clip.backbone import Backbone

_BOTH_TOWERS = ("open_clip", "clip")  # formats
# Which checkpoint reads a text encoder of this width and so many blocks, and the option of `generate` that takes it.
SLOTS = {
    (768, 12): ("SDXL_FOLDER", "encoder"),
    (1280, 32): ("SDXL_FOLDER", "encoder-2"),
    (128, 3): ("toy/sdxl", "encoder"),
}
# Text encoders that ComfyUI knows: (width, blocks) -> (ComfyUI's name, the activation it runs).
_COMFYUI_ENCODERS = {
    (768, 12): ("clip_l", "quick_gelu"),
    (1024, 24): ("clip_h", "gelu"),
    (1280, 32): ("clip_g", "gelu"),
}
_COMFYUI_NOTE = (
    "ComfyUI's own CLIP Text Encode does not align a CLIP-L of 248 positions with clip_g past 75 tokens. The node that "
    "`debias-diffusion comfyui` writes does, and gives the conditioning of debias-diffusion's pipelines."
)


def export(config: ExportConfig) -> Path:
    """Writes the folder or file, complete or not at all, prints how to use it, and uploads it if that is wanted."""
    output = Path(config.output)
    _check(config, output)
    if config.to == "modular":
        with written_folder(output, "export") as folder:
            write_block(folder)
            (folder / "README.md").write_text(BLOCK_CARD.format(place=config.push_to_hub or output), encoding="utf-8")
        lines = ["long prompts of any length for SDXL in diffusers' modular pipelines; README.md says how to load it."]
    else:
        lines = _export_model(config, output)
    print(f"Wrote {output}: {lines[0]}", *lines[1:], sep="\n")
    if config.push_to_hub:
        print(f"Uploaded to {_push_folder(output, config.push_to_hub)} (a new repository is private).")
    return output


def _export_model(config: ExportConfig, output: Path) -> list[str]:
    """Writes it, and returns the lines to print, the first after the output."""
    spec = EncoderSpec.parse(":".join(filter(None, (config.model, config.pretrained))))
    seen, (backbone, digest) = read_seen(spec), _load_two_tower(config, spec)
    if config.to in _BOTH_TOWERS:
        source = backbone
    elif backbone:  # bigG always keeps its projection
        source = to_transformers(backbone, config.projection or keeps_projection(backbone))
    else:
        source = spec.load_text_encoder()
        if config.projection and not isinstance(source[0], CLIPTextModelWithProjection):
            raise UserError("This text encoder has no projection to export. Leave out --projection.")
    if config.to == "comfyui":
        lines = _write_comfyui(config, source[0], output, seen)
    else:
        write = {"transformers": _write_transformers, "open_clip": _write_open_clip, "clip": _write_clip}[config.to]
        with written_folder(output, "export") as folder:
            title, encoder, lines = write(config, source, folder)
            sizes = source[0].config if encoder else None
            fits_sdxl = sizes is not None and (sizes.hidden_size, sizes.num_hidden_layers) in SLOTS
            card = model_card(config, title, encoder, backbone, digest, fits_sdxl)
            (folder / "README.md").write_text(card, encoding="utf-8")
            write_seen(folder, seen)
    if backbone and backbone.image_attention and config.to not in _BOTH_TOWERS:
        lines.insert(1, "The suppressed heads are the image tower's. This text encoder is that of the base model.")
    return lines


def _check(config: ExportConfig, output: Path) -> None:
    """Raises UserError for options and outputs that cannot work, before anything is loaded."""
    if config.push_to_hub is not None:
        if config.to == "comfyui":
            raise UserError(
                f"push_to_hub uploads folders, and comfyui is a file. Run `hf upload {config.push_to_hub} "
                f"{config.output}` after the export."
            )
        if "/" not in config.push_to_hub:
            raise UserError(f"{config.push_to_hub!r} lacks the owner. Give owner/name.")
    if config.projection and config.to != "transformers":
        raise UserError(f"projection is an option of transformers only; {config.to} keeps the model as it is.")
    if config.to != "comfyui":
        return check_replaceable(output, "export")
    if config.scores:
        raise UserError("scores go into a model card, and comfyui is a file without one. Leave out --scores.")
    if output.suffix != ".safetensors":
        raise UserError(f"The output {config.output!r} must be a file that ends in .safetensors.")
    if output.exists() and (output.is_dir() or written_metadata(output).get("written_by") != WRITTEN_BY):
        raise UserError(f"The output {config.output!r} exists and is no file of an export. Give a new file.")


def _load_two_tower(config: ExportConfig, spec: EncoderSpec) -> tuple["Backbone | None", str | None]:
    """The two-tower, suppressed text heads as ordinary weights where they can be; its digest as evaluations read it, if
    scores are wanted. None of a text encoder alone."""
    if config.to not in _BOTH_TOWERS and spec.kind not in (Kind.OPEN_CLIP, Kind.ABLATION):
        if config.positions == "short":
            raise UserError(
                f"{config.model!r} is a text encoder alone. Give the training run, or leave out --positions."
            )
        return None, None
    from debias_diffusion.ablation.heads import fold_text_heads, suppressed_heads  # with open_clip, which is optional

    backbone = spec.load_two_tower(random_weights=True)
    if config.to in _BOTH_TOWERS and backbone.prompt_settings is not None:
        raise UserError(
            f"The image tower of {config.model!r} has regional prompts, which no other program knows: {config.to} "
            "would give other features. Export the text encoder (--to transformers or comfyui), load both towers with "
            "debias_diffusion.encoders.spec.load_two_tower, or train with --prompts 0."
        )
    if config.positions == "short":
        backbone.read_short()
    digest, text = backbone.digest() if config.scores else None, suppressed_heads(backbone, "text")
    # Soft heads stay in the configuration, which open_clip's format has.
    if not (config.to == "open_clip" and text and text.soft_names):
        fold_text_heads(backbone)
    return backbone, digest


# Each writes a format: (title of the card, class of the text encoder alone, lines to print, the first after the output)
_Written = tuple[str, str | None, list[str]]


def _write_transformers(config: ExportConfig, source: tuple[TextEncoder, CLIPTokenizer], folder: Path) -> _Written:
    encoder, tokenizer = source
    write_text_encoder(encoder, tokenizer, folder)
    if type(encoder) is CLIPTextModel:  # the class of SDXL's first encoder
        write_custom_pipeline(folder / "pipeline.py")
        write_block(folder)
    sizes, name = encoder.config, type(encoder).__name__
    lines = [f"a {name} of width {sizes.hidden_size} that reads {sizes.max_position_embeddings} tokens."]
    if slot := SLOTS.get((sizes.hidden_size, sizes.num_hidden_layers)):
        base, option = slot
        lines.append(f"Next: debias-diffusion generate 'a long prompt' --base {base} --{option} {config.output}")
    else:
        lines.append(
            f"No SDXL checkpoint reads an encoder of this width and {sizes.num_hidden_layers} blocks. Next: "
            f"debias-diffusion evaluate all --encoders {config.model}, or export both towers with --to clip."
        )
    return f"A CLIP text encoder that reads {sizes.max_position_embeddings} tokens", name, lines


def _write_open_clip(config: ExportConfig, backbone: "Backbone", folder: Path) -> _Written:
    backbone.save(folder)
    lines = [f"both towers, for open_clip.create_model('local-dir:{config.output}')."]
    if backbone.image_attention or backbone.text_attention:
        lines.append(f"Plain open_clip runs it UNABLATED: {OPEN_CLIP_UNABLATED}")
    if backbone.pooling != "eot":
        lines.append(f"It was trained with {backbone.pooling} pooling, which open_clip lacks: open_clip pools at EOT.")
    return f"A {backbone.family.name} that reads {backbone.context_length} tokens", None, lines


def _write_clip(config: ExportConfig, backbone: "Backbone", folder: Path) -> _Written:
    from debias_diffusion.encoders.clip_model import export_clip_model

    export_clip_model(backbone, folder)
    load = f"transformers.CLIPModel.from_pretrained('{config.output}')"
    if backbone.image_attention:
        load = f"AutoModel.from_pretrained('{config.output}', trust_remote_code=True)"
    return f"A CLIP that reads {backbone.context_length} tokens", None, [f"both towers, for {load}."]


def _write_comfyui(config: ExportConfig, encoder: TextEncoder, output: Path, seen: Seen) -> list[str]:
    sizes = encoder.config
    width, blocks = sizes.hidden_size, sizes.num_hidden_layers
    if sizes.vocab_size != VOCABULARY:
        raise UserError(
            f"{config.model!r} has a vocabulary of {sizes.vocab_size}, and ComfyUI knows only CLIP's of {VOCABULARY}. "
            "Export it with --to transformers."
        )
    known = _COMFYUI_ENCODERS.get((width, blocks))
    if known is None:
        there = ", ".join(f"{name} ({size[0]}, {size[1]})" for size, (name, _) in _COMFYUI_ENCODERS.items())
        raise UserError(
            f"{config.model!r} has width {width} and {blocks} blocks, and ComfyUI has no such text encoder, only "
            f"{there}. Export it with --to transformers."
        )
    if known[1] != sizes.hidden_act:
        raise UserError(
            f"ComfyUI runs every {known[0]} with the activation {known[1]}, whatever the file says, and this one was "
            f"trained with {sizes.hidden_act}: ComfyUI would silently produce wrong images. Use it with diffusers, or "
            "train from OpenAI's weights (ViT-L-14-quickgelu)."
        )
    program = f"debias-diffusion {version('debias-diffusion')}"
    record = {SEEN: json.dumps(seen)} if seen else {}
    write_file(encoder, output, {"note": _COMFYUI_NOTE, "exported_with": program} | record)
    line = f"a text encoder of width {width} that reads {sizes.max_position_embeddings} tokens, for ComfyUI."
    put = "put it into ComfyUI/models/text_encoders, and choose it in DualCLIPLoader together with SDXL's clip_g."
    return [line, f"Next: {put}", _COMFYUI_NOTE]


def _push_folder(folder: Path, name: str) -> str:
    """Uploads a folder as the hub repository `name`, which keeps its other files, and returns its address."""
    from huggingface_hub import HfApi

    failure = f"The folder {str(folder)!r} is complete, but could not be uploaded to {name!r}"
    advice = f"Log in with `hf auth login`, check the network, and run `hf upload {name} {folder}`."
    with explain_failure(failure, advice):
        hub, message = HfApi(), "Exported by debias-diffusion"
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=MARK)
        return str(address)
