"""CLIP's weights under OpenAI's names, which open_clip and Long-CLIP use, and under transformers'.

Only names and layouts differ: OpenAI packs query, key and value into one matrix and stores projections transposed.
"""

import re
from collections.abc import Mapping

import torch

from ..errors import UserError

State = dict[str, torch.Tensor]

# Outside the blocks: OpenAI's name -> transformers', below `text_model.` and `vision_model.`
_TEXT = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_VISION = {
    "class_embedding": "embeddings.class_embedding",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre.weight": "pre_layrnorm.weight",  # transformers' spelling
    "ln_pre.bias": "pre_layrnorm.bias",
    "ln_post.weight": "post_layernorm.weight",
    "ln_post.bias": "post_layernorm.bias",
}
# In a block.
_PARTS = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_QKV = ("q_proj", "k_proj", "v_proj")
_BLOCK = re.compile(r"transformer\.resblocks\.(\d{1,4})\.(.+?)[._](weight|bias)")


def text_to_transformers(state: Mapping[str, torch.Tensor]) -> State:
    """A text tower's weights under transformers' names, with the `text_model.` prefix.

    Every version of transformers, and ComfyUI, load that prefix. Tensors share the memory of `state`; a projection
    [width, embed_dim] is a transposed view, `text_projection.weight` [embed_dim, width].

    Args:
        state: the text tower's weights alone, under OpenAI's names.

    Raises:
        UserError: a weight has no place in transformers' CLIP.
    """
    state = dict(state)
    projection = _projection(state, "text_projection")
    renamed = {f"text_model.{name}": tensor for name, tensor in _renamed(state, _TEXT).items()}
    return renamed | ({} if projection is None else {"text_projection.weight": projection})


def vision_to_transformers(state: Mapping[str, torch.Tensor]) -> State:
    """The same for the image tower: `vision_model.…` and `visual_projection.weight`."""
    state = dict(state)
    projection = _projection(state, "proj")
    renamed = {f"vision_model.{name}": tensor for name, tensor in _renamed(state, _VISION).items()}
    return renamed | ({} if projection is None else {"visual_projection.weight": projection})


def text_from_transformers(state: Mapping[str, torch.Tensor]) -> State:
    """The inverse of `text_to_transformers`: OpenAI's names, `text_projection` as [width, embed_dim].

    Weights of an image tower are ignored, and those of a text tower by `vision_from_transformers`.
    """
    return _to_openai(state, "text_model.", _TEXT, "text_projection", "text_projection")


def vision_from_transformers(state: Mapping[str, torch.Tensor]) -> State:
    """The inverse of `vision_to_transformers`: OpenAI's names, without the prefix `visual.`."""
    return _to_openai(state, "vision_model.", _VISION, "visual_projection", "proj")


def _to_openai(
    state: Mapping[str, torch.Tensor], prefix: str, outside: dict[str, str], projection: str, openai_projection: str
) -> State:
    plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    names = {name: openai for openai, name in outside.items()}
    parts = {part: openai for openai, part in _PARTS.items()}
    renamed = {names[name]: tensor for name, tensor in plain.items() if name in names}
    for name, tensor in plain.items():
        match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in parts:
            renamed[f"transformer.resblocks.{match[1]}.{parts[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "self_attn.q_proj":
            packed = torch.cat([plain[name.replace("q_proj", part)] for part in _QKV])
            renamed[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}"] = packed
    if f"{projection}.weight" in plain:
        renamed[openai_projection] = plain[f"{projection}.weight"].T
    return renamed


def _projection(state: State, name: str) -> torch.Tensor | None:
    """Removes the projection from `state`: a Linear's weight [embed_dim, width], or None if there is none."""
    if f"{name}.bias" in state:
        raise UserError(f"A projection with a bias ({name}.bias) has no place in transformers' CLIP.")
    linear, matrix = state.pop(f"{name}.weight", None), state.pop(name, None)
    return linear if matrix is None else matrix.T


def _renamed(state: State, outside: dict[str, str]) -> State:
    renamed = {}
    for name, tensor in state.items():
        match = _BLOCK.fullmatch(name)
        if name in outside:
            renamed[outside[name]] = tensor
        elif match and match[2] in _PARTS:
            renamed[f"encoder.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "attn.in_proj" and len(tensor) % 3 == 0:
            for part, chunk in zip(_QKV, tensor.chunk(3), strict=True):
                renamed[f"encoder.layers.{match[1]}.self_attn.{part}.{match[3]}"] = chunk
        else:
            raise UserError(f"The weight {name!r} {tuple(tensor.shape)} has no place in transformers' CLIP.")
    return renamed
