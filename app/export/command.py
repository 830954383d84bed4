"""Exports a training run, or any other text encoder, for other programs."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.encoders import EncoderSpec, Kind
from debias_diffusion.errors import UserError, reason
from debias_diffusion.interchange.single_file import VOCABULARY, WRITTEN_BY, write_file, written_metadata
from debias_diffusion.interchange.text_encoders import (
    TextEncoder,
    is_bigg,
    keeps_projection,
    text_config,
    to_transformers,
)
from debias_diffusion.interchange.transformers_folder import write_text_encoder
from debias_diffusion.pipelines.custom_pipeline import write_custom_pipeline

from ..options import ExportConfig
from ..written_folder import MARK, check_replaceable, written_folder
from .model_card import OPEN_CLIP_UNABLATED, Exported, model_card

if TYPE_CHECKING:
    from debias_diffusion.models.backbone import Backbone


def export(config: ExportConfig) -> Path:
    """Writes the folder or file, complete or not at all, and prints how to use it.

    Raises:
        UserError: the model cannot be loaded, the format cannot hold it, the output belongs to something else, or the
            upload failed.
    """
    output = Path(config.output)
    _check(config, output)
    source = _load(config)
    write = {
        "transformers": _transformers,
        "diffusers": _transformers,
        "comfyui": _comfyui,
        "open_clip": _open_clip,
        "clip": _clip,
    }[config.to]
    write(config, source, output)
    if config.push_to_hub:
        print(f"Uploaded to {_push_folder(output, config.push_to_hub)} (a new repository is private).")
    return output


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
    if config.to == "comfyui":
        if config.scores:
            raise UserError("scores go into a model card, and comfyui is a file without one. Leave out --scores.")
        if output.suffix != ".safetensors":
            raise UserError(f"The output {config.output!r} must be a file that ends in .safetensors.")
        if output.exists() and (output.is_dir() or written_metadata(output).get("written_by") != WRITTEN_BY):
            raise UserError(f"The output {config.output!r} exists and is no file of an export. Give a new file.")
        return
    check_replaceable(output, "export")


_BOTH_TOWERS = ("open_clip", "clip")  # formats


@dataclass
class _Source:
    """The model to export: two towers, or a text encoder alone with its tokenizer.

    Attributes:
        backbone: suppressed text heads are ordinary weights, where they can be.
        alone: the text encoder and its tokenizer.
        digest: of the two towers as evaluations read them; None if no scores are wanted.
    """

    backbone: "Backbone | None" = None
    alone: tuple[TextEncoder, CLIPTokenizer] | None = None
    digest: str | None = None

    def text_config(self) -> CLIPTextConfig:
        return text_config(self.backbone) if self.backbone else self.alone[0].config

    def text_encoder(self, projection: bool = False) -> tuple[TextEncoder, CLIPTokenizer]:
        """The text encoder with its tokenizer; bigG always keeps its projection."""
        if self.backbone:
            return to_transformers(self.backbone, projection or keeps_projection(self.backbone))
        if projection and not isinstance(self.alone[0], CLIPTextModelWithProjection):
            raise UserError("This text encoder has no projection to export. Leave out --projection.")
        return self.alone


def _load(config: ExportConfig) -> _Source:
    source = _read(config)
    _check_prompts(config, source)
    if config.positions == "short":
        _read_short(config, source)
    if backbone := source.backbone:
        from debias_diffusion.ablation.heads import fold_text_heads, noted, soft_heads

        source.digest = backbone.digest() if config.scores else None
        text = noted(backbone, "text")
        # Soft heads stay in the configuration, which open_clip's format has.
        if not (config.to == "open_clip" and text and soft_heads(text)):
            fold_text_heads(backbone)
    return source


def _check_prompts(config: ExportConfig, source: _Source) -> None:
    if config.to in _BOTH_TOWERS and source.backbone.prompt_settings is not None:
        raise UserError(
            f"The image tower of {config.model!r} has regional prompts, which no other program knows: {config.to} "
            "would give other features. Export the text encoder (--to transformers or comfyui), load both towers with "
            "debias_diffusion.encoders.load_two_tower, or train with --method.prompts 0."
        )


def _read_short(config: ExportConfig, source: _Source) -> None:
    if source.backbone is None:
        raise UserError(f"{config.model!r} is a text encoder alone. Give the training run, or leave out --positions.")
    source.backbone.read_short()


def _read(config: ExportConfig) -> _Source:
    spec = EncoderSpec.parse(":".join(filter(None, (config.model, config.pretrained))))
    if spec.kind is Kind.OPEN_CLIP:
        from debias_diffusion.models.loading import load_backbone  # open_clip is optional

        return _Source(backbone=load_backbone(spec.place, spec.weights).eval())
    if config.to not in _BOTH_TOWERS and spec.kind is not Kind.ABLATION:
        return _Source(alone=spec.load_text_encoder())
    try:
        return _Source(backbone=spec.load_two_tower())
    except UserError as error:
        raise UserError(f"--to {config.to} needs both towers. {error}") from error


def _transformers(config: ExportConfig, source: _Source, output: Path) -> None:
    encoder, tokenizer = source.text_encoder(config.projection)
    kind, width, length = _sizes(encoder)
    is_first = kind == "CLIPTextModel"  # the class of SDXL's first encoder
    with written_folder(output, "export") as folder:
        write_text_encoder(encoder, tokenizer, folder)
        if is_first:
            write_custom_pipeline(folder / "pipeline.py")
        use = _USE_TRANSFORMERS.format(kind=kind) + (_USE_PIPELINE if is_first else "")
        title = f"A CLIP text encoder that reads {length} tokens"
        _write_card(config, source, folder, title, use, "transformers", "feature-extraction")
    print(f"Wrote {output}: a {kind} of width {width} that reads {length} tokens.")
    _print_unaffected(source)
    option = "encoder-2" if is_bigg(encoder.config) else "encoder"
    print(f"Next: debias-diffusion generate 'a long prompt' --base SDXL_FOLDER --{option} {output}")


def _comfyui(config: ExportConfig, source: _Source, output: Path) -> None:
    sizes = source.text_config()
    if sizes.vocab_size != VOCABULARY:
        raise UserError(
            f"{config.model!r} has a vocabulary of {sizes.vocab_size}, and ComfyUI knows only CLIP's of {VOCABULARY}. "
            "Export it with --to transformers."
        )
    known = _COMFYUI_ENCODERS.get((sizes.hidden_size, sizes.num_hidden_layers))
    if known and known[1] != sizes.hidden_act:
        raise UserError(
            f"ComfyUI runs every {known[0]} with the activation {known[1]}, whatever the file says, and this one was "
            f"trained with {sizes.hidden_act}: ComfyUI would silently produce wrong images. Use it with diffusers, or "
            "train from OpenAI's weights (ViT-L-14-quickgelu)."
        )
    encoder, _ = source.text_encoder()
    _, width, length = _sizes(encoder)
    program = f"debias-diffusion {version('debias-diffusion')}"
    write_file(encoder, output, {"note": _COMFYUI_NOTE, "exported_with": program})
    print(f"Wrote {output}: a text encoder of width {width} that reads {length} tokens, for ComfyUI.")
    _print_unaffected(source)
    if not known:
        print(f"ComfyUI has no text encoder of width {width} and {sizes.num_hidden_layers} blocks to load it into.")
    print(
        "Next: put it into ComfyUI/models/text_encoders, and choose it in DualCLIPLoader together with SDXL's clip_g."
    )
    print(_COMFYUI_NOTE)


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


def _open_clip(config: ExportConfig, source: _Source, output: Path) -> None:
    backbone = source.backbone
    with written_folder(output, "export") as folder:
        backbone.save(folder)
        title = f"A {backbone.family.name} that reads {backbone.context_length} tokens"
        _write_card(config, source, folder, title, _USE_OPEN_CLIP, "open_clip", "zero-shot-image-classification")
    print(f"Wrote {output}: both towers, for open_clip.create_model('local-dir:{output}').")
    if backbone.image_attention or backbone.text_attention:
        print(f"Plain open_clip runs it UNABLATED: {OPEN_CLIP_UNABLATED}")
    if backbone.pooling != "eot":
        print(f"It was trained with {backbone.pooling} pooling, which open_clip lacks: open_clip pools at EOT.")


def _clip(config: ExportConfig, source: _Source, output: Path) -> None:
    from debias_diffusion.interchange.clip_model import export_clip_model

    backbone = source.backbone
    with written_folder(output, "export") as folder:
        export_clip_model(backbone, folder)
        title = f"A CLIP that reads {backbone.context_length} tokens"
        use = _USE_ABLATED_CLIP if backbone.image_attention else _USE_CLIP
        _write_card(config, source, folder, title, use, "transformers", "zero-shot-image-classification")
    if backbone.image_attention:
        print(f"Wrote {output}: both towers, for AutoModel.from_pretrained('{output}', trust_remote_code=True).")
    else:
        print(f"Wrote {output}: both towers, for transformers.CLIPModel.from_pretrained('{output}').")


def _push_folder(folder: Path, name: str) -> str:
    """Uploads a folder as the hub repository `name` and returns its address.

    A new repository is private. An existing one keeps its visibility and its other files.

    Raises:
        UserError: the repository cannot be created or written. The message says that the local folder is complete.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Exported by debias-diffusion", ignore_patterns=MARK
        )
        return str(address)
    except Exception as error:  # no such name, no network, no token, no write access: the library has many types
        raise UserError(
            f"The folder {str(folder)!r} is complete, but could not be uploaded to {name!r}: {reason(error)}. "
            f"Log in with `hf auth login`, check the network, and run `hf upload {name} {folder}`."
        ) from error


def _print_unaffected(source: _Source) -> None:
    if source.backbone and source.backbone.image_attention:
        print("The suppressed heads are the image tower's. This text encoder is that of the base model.")


def _sizes(encoder: TextEncoder) -> tuple[str, int, int]:
    """(class, width, context length)"""
    return type(encoder).__name__, encoder.config.hidden_size, encoder.config.max_position_embeddings


def _write_card(
    config: ExportConfig, source: _Source, folder: Path, title: str, use: str, library: str, task: str
) -> None:
    use = use.replace("FOLDER", config.push_to_hub or "this folder")
    exported = Exported(title, use, library, task, config.model, config.pretrained, source.backbone, source.digest)
    (folder / "README.md").write_text(model_card(exported, config.scores), encoding="utf-8")


_USE_TRANSFORMERS = """\
```python
from transformers import {kind}, CLIPTokenizer

text_encoder = {kind}.from_pretrained("FOLDER", subfolder="text_encoder")
tokenizer = CLIPTokenizer.from_pretrained("FOLDER", subfolder="tokenizer")
```"""

_USE_PIPELINE = """

In SDXL, whose first text encoder has width 768, as this one must; `pipeline.py` reads prompts of any length:

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained(
    "stabilityai/stable-diffusion-xl-base-1.0", text_encoder=text_encoder, tokenizer=tokenizer,
    custom_pipeline="FOLDER", trust_remote_code=True,
)
```"""

_USE_OPEN_CLIP = """\
```python
import open_clip

name = "local-dir:FOLDER"  # or "hf-hub:owner/name"
model, _, preprocess = open_clip.create_model_and_transforms(name)
tokenizer = open_clip.get_tokenizer(name)
```"""

_USE_CLIP = """\
```python
from transformers import CLIPModel, CLIPProcessor

model, processor = CLIPModel.from_pretrained("FOLDER"), CLIPProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a long caption"], images=[image], padding=True, truncation=True, return_tensors="pt")
similarity = model(**inputs).logits_per_image
```"""

_USE_ABLATED_CLIP = """\
```python
from transformers import AutoModel, CLIPProcessor

model = AutoModel.from_pretrained("FOLDER", trust_remote_code=True)  # modeling_ablated_clip.py
processor = CLIPProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a long caption"], images=[image], padding=True, truncation=True, return_tensors="pt")
similarity = model(**inputs).logits_per_image
```"""
