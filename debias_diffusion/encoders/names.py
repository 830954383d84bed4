"""CLIP's weights under OpenAI's names, which open_clip and Long-CLIP use, and under transformers'.

Only names and layouts differ: OpenAI packs query, key and value into one matrix and stores projections transposed.
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch

from ..errors import UserError

State = dict[str, torch.Tensor]
# How OpenAI's names of a text tower's weights begin; those of an image tower beside it begin with `visual.`
OPENAIS_TEXT = ("token_embedding.", "positional_embedding", "ln_final.", "transformer.", "text_projection")

# Outside the blocks: OpenAI's name -> transformers', below `text_model.` and `vision_model.`
_OUTSIDE = {
    "text": {
        "token_embedding.weight": "embeddings.token_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_final.weight": "final_layer_norm.weight",
        "ln_final.bias": "final_layer_norm.bias",
    },
    "vision": {
        "class_embedding": "embeddings.class_embedding",
        "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",  # transformers' spelling
        "ln_pre.bias": "pre_layrnorm.bias",
        "ln_post.weight": "post_layernorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    },
}
_PROJECTIONS = {"text": ("text_projection", "text_projection.weight"), "vision": ("proj", "visual_projection.weight")}
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


def to_transformers_names(state: Mapping[str, torch.Tensor], tower: Literal["text", "vision"] = "text") -> State:
    """A tower's weights under transformers' names, with the prefix `text_model.` or `vision_model.`.

    Every version of transformers, and ComfyUI, load that prefix. Tensors share the memory of `state`; a projection
    [width, embed_dim] is a transposed view, `text_projection.weight` or `visual_projection.weight` [embed_dim, width].

    Args:
        state: the tower's weights alone, under OpenAI's names.

    Raises:
        UserError: a weight has no place in transformers' CLIP.
    """
    (matrix, linear), prefix, renamed = _PROJECTIONS[tower], f"{tower}_model.", {}
    for name, tensor in state.items():
        match = _BLOCK.fullmatch(name)
        if name in _OUTSIDE[tower]:
            renamed[prefix + _OUTSIDE[tower][name]] = tensor
        elif name in (matrix, f"{matrix}.weight"):  # the second of a Linear
            renamed[linear] = tensor.T if name == matrix else tensor
        elif match and match[2] in _PARTS:
            renamed[f"{prefix}encoder.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "attn.in_proj" and len(tensor) % 3 == 0:
            for part, chunk in zip(_QKV, tensor.chunk(3), strict=True):
                renamed[f"{prefix}encoder.layers.{match[1]}.self_attn.{part}.{match[3]}"] = chunk
        else:
            raise UserError(f"The weight {name!r} {tuple(tensor.shape)} has no place in transformers' CLIP.")
    return renamed


def to_openai_names(state: Mapping[str, torch.Tensor], tower: Literal["text", "vision"] = "text") -> State:
    """The inverse of `to_transformers_names`; of an image tower without the prefix `visual.`.

    The projection is a matrix [width, embed_dim]. Weights of the other tower are ignored.
    """
    matrix, linear = _PROJECTIONS[tower]
    plain = {name.removeprefix(f"{tower}_model."): tensor for name, tensor in state.items()}
    names = {name: openai for openai, name in _OUTSIDE[tower].items()}
    parts = {part: openai for openai, part in _PARTS.items()}
    renamed = {names[name]: tensor for name, tensor in plain.items() if name in names}
    for name, tensor in plain.items():
        match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if match and match[2] in parts:
            renamed[f"transformer.resblocks.{match[1]}.{parts[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] == "self_attn.q_proj":
            packed = torch.cat([plain[name.replace("q_proj", part)] for part in _QKV])
            renamed[f"transformer.resblocks.{match[1]}.attn.in_proj_{match[3]}"] = packed
    return renamed | ({matrix: plain[linear].T} if linear in plain else {})
