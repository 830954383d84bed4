"""A text tower as an ordinary transformers CLIPTextModel, in memory and as a folder, and back.

The folder holds `text_encoder/` and `tokenizer/`, the names that diffusers' pipelines use. Nothing of ours is needed to
load it.
"""

import json
import os
from pathlib import Path

import torch
from open_clip.transformer import QuickGELU
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..backbones import CONFIG_FILE, Backbone, load_backbone
from ..errors import UserError
from ..toyworld.shipped import shipped

TextEncoder = CLIPTextModel | CLIPTextModelWithProjection

# open_clip's name of a block's part -> transformers'
_PARTS = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_QKV = ("q_proj", "k_proj", "v_proj")


def _text_config(backbone: Backbone) -> CLIPTextConfig:
    tower, tokenizer = backbone.text.tower, backbone.tokenizer.tokenizer
    block = tower.transformer.resblocks[0]
    if not backbone.family.causal:
        raise UserError(
            f"The text tower of a {backbone.family.name} has no causal mask, and a transformers CLIPTextModel has one: "
            "it cannot take the place of SDXL's text encoders. Export a CLIP, for example ViT-L-14."
        )
    if not isinstance(block.ls_1, nn.Identity):
        raise UserError("A text tower with layer scale has no place for it in a transformers CLIPTextModel.")
    return CLIPTextConfig(
        vocab_size=tower.token_embedding.num_embeddings,
        hidden_size=tower.token_embedding.embedding_dim,
        intermediate_size=block.mlp.c_fc.out_features,
        projection_dim=_projection(tower).shape[0] if tower.text_projection is not None else None,
        num_hidden_layers=len(tower.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        max_position_embeddings=backbone.context_length,
        hidden_act="quick_gelu" if isinstance(block.mlp.gelu, QuickGELU) else "gelu",
        layer_norm_eps=tower.ln_final.eps,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _projection(tower: nn.Module) -> torch.Tensor:
    """[embed_dim, width], as a Linear's weight."""
    projection = tower.text_projection
    if isinstance(projection, nn.Linear):
        if projection.bias is not None:
            raise UserError("A text projection with a bias has no place for it in transformers' CLIP.")
        return projection.weight
    return projection.T


def _to_transformers_state(tower: nn.Module) -> dict[str, torch.Tensor]:
    """The tower's weights under transformers' names with the `text_model.` prefix, which every version loads."""
    state = {
        "embeddings.token_embedding.weight": tower.token_embedding.weight,
        "embeddings.position_embedding.weight": tower.positional_embedding,
        "final_layer_norm.weight": tower.ln_final.weight,
        "final_layer_norm.bias": tower.ln_final.bias,
    }
    for index, block in enumerate(tower.transformer.resblocks):
        layer = f"encoder.layers.{index}"
        for theirs, ours in _PARTS.items():
            for name, parameter in block.get_submodule(theirs).named_parameters():
                state[f"{layer}.{ours}.{name}"] = parameter
        for kind, packed in (("weight", block.attn.in_proj_weight), ("bias", block.attn.in_proj_bias)):
            for name, part in zip(_QKV, packed.chunk(3), strict=True):
                state[f"{layer}.self_attn.{name}.{kind}"] = part
    return {f"text_model.{name}": tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _load_state(tower: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The opposite of `_to_transformers_state`: copies transformers' weights into the tower."""

    def read(name: str) -> torch.Tensor:
        return state[f"text_model.{name}"]

    with torch.no_grad():
        tower.token_embedding.weight.copy_(read("embeddings.token_embedding.weight"))
        tower.positional_embedding.copy_(read("embeddings.position_embedding.weight"))
        tower.ln_final.weight.copy_(read("final_layer_norm.weight"))
        tower.ln_final.bias.copy_(read("final_layer_norm.bias"))
        for index, block in enumerate(tower.transformer.resblocks):
            layer = f"encoder.layers.{index}"
            for theirs, ours in _PARTS.items():
                for name, parameter in block.get_submodule(theirs).named_parameters():
                    parameter.copy_(read(f"{layer}.{ours}.{name}"))
            for kind, packed in (("weight", block.attn.in_proj_weight), ("bias", block.attn.in_proj_bias)):
                packed.copy_(torch.cat([read(f"{layer}.self_attn.{name}.{kind}") for name in _QKV]))
        if "text_projection.weight" in state:
            _projection(tower).copy_(state["text_projection.weight"])


def _prefixed_state(encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """The encoder's weights with the `text_model.` prefix, which in memory transformers 5 leaves out."""
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": tensor
        for name, tensor in encoder.state_dict().items()
        if not name.endswith("position_ids")
    }


def to_transformers(backbone: Backbone, projection: bool = False) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text tower as a transformers model with weights of its own.

    Args:
        projection: False gives a CLIPTextModel, which takes the place of SDXL's first encoder; True a
            CLIPTextModelWithProjection, whose `text_embeds` are the features that were trained.
    """
    tower = backbone.text.tower
    config = _text_config(backbone)
    state = _to_transformers_state(tower)
    if projection:
        if tower.text_projection is None:
            raise UserError("This text tower has no projection to export.")
        if backbone.pooling != "eot":
            raise UserError(
                f"This text tower was trained with {backbone.pooling} pooling, and a CLIPTextModelWithProjection pools "
                "at EOT. Export it without the projection; its hidden states are the same."
            )
        state["text_projection.weight"] = _projection(tower).detach().clone().contiguous()
        encoder = CLIPTextModelWithProjection(config)
    else:
        encoder = CLIPTextModel(config)
    # In memory transformers 5 has no prefix before a CLIPTextModel's own parts; older versions have.
    if not any(name.startswith("text_model.") for name in encoder.state_dict()):
        state = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    encoder.load_state_dict(state)
    return encoder.eval(), backbone.tokenizer.tokenizer


def export_text_encoder(backbone: Backbone, folder: str | os.PathLike, projection: bool = False) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`; see `to_transformers`. Returns the folder."""
    folder = Path(folder)
    encoder, tokenizer = to_transformers(backbone, projection)
    (folder / "text_encoder").mkdir(parents=True, exist_ok=True)
    # Written by hand: save_pretrained of transformers 5 leaves out the prefix that other loaders need.
    state = {name: tensor.contiguous() for name, tensor in _prefixed_state(encoder).items()}
    save_file(state, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(encoder.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(encoder).__name__], "dtype": "float32"}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder / "tokenizer")
    tokenizer.backend_tokenizer.model.save(os.fspath(folder / "tokenizer"))  # vocab.json, merges.txt: for older loaders
    return folder


def load_text_encoder(path: str | os.PathLike) -> tuple[TextEncoder, CLIPTokenizer]:
    """Loads a text encoder and its tokenizer, ready for a diffusers pipeline.

    Args:
        path: a folder written by `export_text_encoder`, any transformers folder of a CLIPTextModel (its tokenizer
            beside or in it), an open_clip folder such as training leaves, a hub id of the
            first two, or "toy/debias-clip" and the like.

    Returns:
        (text_encoder, tokenizer): a CLIPTextModel, or a CLIPTextModelWithProjection where the folder says so; in eval
        mode, in the dtype its configuration names.

    Raises:
        UserError: nothing of the kind is there.
    """
    path = shipped(path)
    folder = Path(path)
    if (folder / CONFIG_FILE).is_file():
        return to_transformers(load_backbone(os.fspath(path)))
    if folder.exists():
        encoder_folder = folder / "text_encoder" if (folder / "text_encoder").is_dir() else folder
        if not (encoder_folder / "config.json").is_file():
            raise UserError(
                f"{os.fspath(path)!r} holds no text encoder: neither text_encoder/config.json nor config.json nor "
                f"{CONFIG_FILE}. Give a folder written by `debias-diffusion export`."
            )
        beside = [folder / "tokenizer", folder.parent / "tokenizer", encoder_folder]
        tokenizer_folder = next((f for f in beside if (f / "tokenizer_config.json").is_file()), None)
        if tokenizer_folder is None:
            raise UserError(f"{os.fspath(path)!r} holds no tokenizer (tokenizer/tokenizer_config.json).")
        return _from_pretrained(encoder_folder), CLIPTokenizer.from_pretrained(tokenizer_folder)
    if os.fspath(path).count("/") != 1:
        raise UserError(
            f"{os.fspath(path)!r} is not there. Give a folder with a text encoder, or a hub id (owner/name)."
        )
    return (
        _from_pretrained(os.fspath(path), subfolder="text_encoder"),
        CLIPTokenizer.from_pretrained(os.fspath(path), subfolder="tokenizer"),
    )


def _from_pretrained(source: str | Path, **where) -> TextEncoder:
    try:
        config = CLIPTextConfig.from_pretrained(source, **where)
        projected = "CLIPTextModelWithProjection" in (config.architectures or [])
        cls = CLIPTextModelWithProjection if projected else CLIPTextModel
        return cls.from_pretrained(source, **where).eval()
    except Exception as error:  # whatever a wrong or hostile file makes the libraries raise
        reason = str(error).splitlines()[0][:300]
        raise UserError(f"The text encoder {os.fspath(source)!r} could not be loaded: {reason}") from error


def import_text_encoder(backbone: Backbone, text_encoder: TextEncoder) -> None:
    """Copies a transformers text encoder's weights into a backbone of the same sizes, in place.

    The backbone keeps its projection where the encoder has none.

    Raises:
        UserError: the sizes or the activation differ.
    """
    ours, theirs = _text_config(backbone), text_encoder.config
    for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size", "hidden_act"):
        if getattr(ours, key) != getattr(theirs, key):
            raise UserError(
                f"The encoder's {key} is {getattr(theirs, key)}, the backbone's is {getattr(ours, key)}; they must be "
                "equal."
            )
    _load_state(backbone.text.tower, _prefixed_state(text_encoder))
