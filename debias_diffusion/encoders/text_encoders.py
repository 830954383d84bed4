"""A text tower as a standard transformers text encoder, in memory and as a folder, and back.

A folder holds `text_encoder/` and `tokenizer/`, as in diffusers' pipelines: plain transformers and diffusers load it.
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PretrainedConfig

from ..clip.weight_files import (
    CONFIG_FILE,
    FG_CLIPS,
    OPENAIS_TEXT,
    State,
    check_finite,
    check_fit,
    save_tensors,
    tensor_shapes,
    to_openai_names,
    to_transformers_names,
)
from ..errors import UserError, explain_failure
from ..files import read_json
from ..text.tokens import count_ids, save_tokenizer
from .hub import find_file, find_tokenizer, from_pretrained, load_pretrained

if TYPE_CHECKING:
    from ..clip.backbone import Backbone

TextEncoder = CLIPTextModel | CLIPTextModelWithProjection

# The model_type in the config.json of a CLIP text encoder.
_CLIPS = ("clip", "ablated_clip", "clip_text_model")
_TABLE = re.compile(r"(text_model\.)?embeddings\.position_embedding(_res)?\.weight")


def is_bigg(config: CLIPTextConfig) -> bool:
    """Whether the encoder is SDXL's second one, which keeps its projection and is padded with "!", id 0."""
    return config.num_hidden_layers == 32  # No other CLIP has as many; ComfyUI recognises it by them, too.


def keeps_projection(backbone: "Backbone") -> bool:
    """Whether the backbone's text tower is loaded and exported with its projection by default."""
    config = text_config(backbone)
    return is_bigg(config) and config.projection_dim is not None and backbone.pooling == "eot"


def text_config(backbone: "Backbone") -> CLIPTextConfig:
    """The configuration of the backbone's text tower in transformers, whose CLIP has only causal ones."""
    tower, tokenizer = backbone.text.tower, backbone.tokenizer.tokenizer
    if not backbone.family.causal:
        raise UserError(
            f"The text tower of a {backbone.family.name} has no causal mask, and a transformers CLIPTextModel has one: "
            "it cannot replace SDXL's text encoders. Export a CLIP, for example ViT-L-14."
        )
    block, projection = tower.transformer.resblocks[0], tower.text_projection
    if projection is not None:  # of a Linear [embed_dim, width], else [width, embed_dim]
        projection = projection.out_features if isinstance(projection, nn.Linear) else projection.shape[1]
    return CLIPTextConfig(
        vocab_size=tower.token_embedding.num_embeddings,
        hidden_size=tower.token_embedding.embedding_dim,
        intermediate_size=block.mlp.c_fc.out_features,
        projection_dim=projection,
        num_hidden_layers=len(tower.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        max_position_embeddings=backbone.context_length,
        hidden_act=activation(block),
        layer_norm_eps=tower.ln_final.eps,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def check_plain_text(backbone: "Backbone") -> None:
    """Raises UserError if the attention in the text tower was replaced: weights alone would lose it."""
    if backbone.text_attention is not None:
        raise UserError(
            "The attention in the text tower was replaced, and a transformers CLIP has the plain one. If it suppresses "
            "heads with beta 0, `debias_diffusion.ablation.heads.fold_text_heads` writes them into the weights."
        )


def activation(block: nn.Module) -> str:
    """transformers' name of the activation of open_clip's block."""
    from open_clip.transformer import QuickGELU  # optional

    return "quick_gelu" if isinstance(block.mlp.gelu, QuickGELU) else "gelu"


def text_state(tower: nn.Module) -> State:
    """The text tower's weights under transformers' names, without those of an image tower beside it."""
    return to_transformers_names({name: t for name, t in tower.state_dict().items() if name.startswith(OPENAIS_TEXT)})


def make_encoder(config: CLIPTextConfig, state: State, projection: bool, label: str = "the encoder") -> TextEncoder:
    """A text encoder with copies of these tensors, in their dtype and eval mode.

    Args:
        config: the sizes of the tensors.
        state: transformers' names with the `text_model.` prefix.
        projection: True for a CLIPTextModelWithProjection; False ignores a projection in `state`.
        label: the encoder in words, for errors.
    """
    if not projection:
        state = {name: tensor for name, tensor in state.items() if name != "text_projection.weight"}
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    with torch.device("meta"):  # no time for random weights
        encoder = cls(config)
    # In memory a CLIPTextModel of transformers 5 has no prefix; older versions have.
    names = dict(zip(prefixed_state(encoder), encoder.state_dict(), strict=True))
    dtype = next(iter(state.values())).dtype
    state = {names.get(name, name): tensor for name, tensor in state.items()}
    missing, unknown = encoder.to(dtype).to_empty(device="cpu").load_state_dict(state, strict=False)
    wrong = [f"{name} has no place in it" for name in unknown]
    wrong += [f"{name} is of {part.dtype}" for name, part in state.items() if not part.is_floating_point()]
    check_fit(missing, wrong, label)
    for module in encoder.modules():
        if "position_ids" in module._buffers:  # in no state dict
            module.position_ids = torch.arange(config.max_position_embeddings).expand(1, -1)
    return encoder.eval()


def prefixed_state(encoder: TextEncoder) -> State:
    """The encoder's weights with the `text_model.` prefix, which transformers 5 leaves out in memory."""
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": tensor
        for name, tensor in encoder.state_dict().items()
        if not name.endswith("position_ids")
    }


def save_weights(state: State, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes weights as float32 safetensors. Raises UserError if they are not finite."""
    tensors = {name: tensor.detach().cpu().float() for name, tensor in state.items()}
    check_finite(tensors.items(), "The encoder to be written")
    save_tensors(tensors, file, metadata)


def to_transformers(backbone: "Backbone", projection: bool = False) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text tower as a transformers model with copies of its weights.

    Args:
        projection: False gives a CLIPTextModel, to replace SDXL's first encoder; True a CLIPTextModelWithProjection,
            whose `text_embeds` are the trained features, to replace its second.

    Raises:
        UserError: transformers has no such encoder.
    """
    check_plain_text(backbone)
    config = text_config(backbone)
    if projection and config.projection_dim is None:
        raise UserError("This text tower has no projection to export.")
    if projection and backbone.pooling != "eot":
        raise UserError(
            f"This text tower was trained with {backbone.pooling} pooling, and a CLIPTextModelWithProjection pools "
            "at EOT. Export it without the projection; its hidden states are the same."
        )
    tokenizer: Any = backbone.tokenizer.tokenizer  # CLIP's, as the family is
    return make_encoder(config, text_state(backbone.text.tower), projection), tokenizer


def import_text_encoder(backbone: "Backbone", text_encoder: TextEncoder, projection: bool = True) -> None:
    """Copies a transformers text encoder's weights into a backbone of the same sizes, in place.

    Args:
        projection: whether to copy the encoder's projection, too, if it has one.

    Raises:
        UserError: the sizes or the activation differ.
    """
    config = text_config(backbone)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    for key in (*keys, "vocab_size", "hidden_act"):
        size, wanted = getattr(text_encoder.config, key), getattr(config, key)
        if size != wanted:
            raise UserError(f"The encoder's {key} is {size}, the backbone's is {wanted}; they must be equal.")
    parameters = dict(backbone.text.tower.named_parameters())
    with torch.no_grad():
        for name, tensor in to_openai_names(prefixed_state(text_encoder)).items():
            if name == "text_projection" and not projection:
                continue
            if name in parameters:
                parameters[name].copy_(tensor)
            elif f"{name}.weight" in parameters:  # a projection that is a Linear, whose weight is transposed
                parameters[f"{name}.weight"].copy_(tensor.T)


def export_text_encoder(backbone: "Backbone", folder: str | os.PathLike, projection: bool = False) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`; see `to_transformers`. Returns the folder."""
    return write_text_encoder(*to_transformers(backbone, projection), folder)


def write_text_encoder(encoder: TextEncoder, tokenizer: CLIPTokenizer, folder: str | os.PathLike) -> Path:
    """Writes `text_encoder/` and `tokenizer/` below `folder`, in float32. Returns the folder."""
    folder = Path(folder)
    write_weights(prefixed_state(encoder), encoder.config, type(encoder).__name__, folder / "text_encoder")
    write_tokenizer(tokenizer, folder / "tokenizer")
    return folder


def write_weights(state: dict, config: PretrainedConfig, architecture: str, folder: Path) -> None:
    """Writes config.json and model.safetensors, with float32 weights and that dtype in the configuration.

    Not by save_pretrained: that of transformers 5 leaves out the prefix `text_model.`, which other loaders need.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(state, folder / "model.safetensors")
    content = json.loads(config.to_json_string(use_diff=False))
    content |= {"architectures": [architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    save_tokenizer(tokenizer, folder)
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.model.save(os.fspath(folder))  # vocab.json, merges.txt: for older loaders


def read_text_encoder(location: str, width: int | None = None) -> tuple[TextEncoder, CLIPTokenizer]:
    """The text encoder and tokenizer of a folder or of a repository of the hub.

    Of its `text_encoder/` and `tokenizer/`, as in a pipeline; else it is a CLIPTextModel or CLIPModel itself.

    Args:
        width: of the encoder, where a pipeline has two; None is the first.
    """
    names = ("text_encoder", "text_encoder_2") if width else ("text_encoder",)
    names = [name for name in names if find_file(location, "config.json", name)]
    fitting = [name for name in names if width == read_model_config(location, name).get("hidden_size")]
    subfolder = next(iter(fitting or names), "")
    encoder = read_encoder(location, subfolder)
    if not os.path.isdir(location):
        return encoder, read_tokenizer(
            location, encoder.config, subfolder=subfolder.replace("text_encoder", "tokenizer")
        )
    folder = Path(location)
    inside = folder / subfolder
    # In SDXL's folder text_encoder_2 belongs to tokenizer_2.
    beside = inside.with_name(inside.name.replace("text_encoder", "tokenizer"))
    tokenizer = find_tokenizer(folder, beside, inside.parent / "tokenizer", inside, inside / "tokenizer")
    return encoder, read_tokenizer(str(tokenizer), encoder.config)


def read_encoder(location: str, subfolder: str = "") -> TextEncoder:
    """The text encoder of a folder or a hub repository, of the class in its configuration, in eval mode."""
    label = repr(os.path.join(location, subfolder) if subfolder else location)
    content = read_model_config(location, subfolder)
    kind = content.get("model_type", "clip_text_model")
    if kind not in _CLIPS:
        raise UserError(
            f"{label} holds a model of type {kind!r}; a CLIP text encoder is of type {' or '.join(_CLIPS)}."
        )
    projection = "CLIPTextModelWithProjection" in (content.get("architectures") or [])
    content_of_text = content if kind == "clip_text_model" else content.get("text_config", {})
    config = CLIPTextConfig.from_dict(content_of_text)
    take_context_length(config, content_of_text, location, subfolder)
    options = {"config": config, "dtype": content.get("dtype") or content.get("torch_dtype") or "auto"}
    if transformers.__version__.startswith("4."):  # which does not read the names that transformers 5 writes
        options["key_mapping"] = {r"^(embeddings|encoder|final_layer_norm)\.": r"text_model.\1."}
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    return load_pretrained(cls, location, label, subfolder=subfolder, **options)


def take_context_length(config: CLIPTextConfig, content: dict, location: str, subfolder: str = "") -> None:
    """Sets the context length by the weights, where config.json does not say it, and where FG-CLIP has a second table.

    Args:
        content: of config.json, that `config` was made of. Older snapshots of zer0int's Long-CLIPs lack the length.
    """
    file = find_file(location, "model.safetensors", subfolder)
    shapes = tensor_shapes(file) if file else {}
    tables = {name: shape for name, shape in shapes.items() if _TABLE.match(name)}
    second = [shape for name, shape in tables.items() if name.endswith(FG_CLIPS)]
    if second or (tables and "max_position_embeddings" not in content):
        config.max_position_embeddings = (second or [*tables.values()])[0][0]


def read_model_config(location: str, subfolder: str = "") -> dict:
    """The config.json of a folder or a hub repository."""
    file = find_file(location, "config.json", subfolder)
    if file is None:
        raise UserError(
            f"{location!r} holds no model: neither config.json nor text_encoder/config.json nor "
            f"{CONFIG_FILE}, in it or in the last/ of a training run."
        )
    return read_json(file)


def read_tokenizer(location: str, config: CLIPTextConfig, **where) -> CLIPTokenizer:
    """The tokenizer of a text encoder of this configuration, with its context length."""
    with explain_failure(f"The tokenizer {location!r} could not be loaded"):
        tokenizer = from_pretrained(CLIPTokenizer, location, **where)
    ids = count_ids(tokenizer)
    if ids > config.vocab_size:
        raise UserError(
            f"The tokenizer {location!r} has {ids} ids, but its text encoder only "
            f"{config.vocab_size}. They do not belong together."
        )
    # Published Long-CLIPs have the tokenizer of CLIP, with a length of 77.
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer
