"""A text tower as an ordinary transformers text encoder, in memory, and back."""

from collections.abc import Mapping

import torch
from open_clip.transformer import QuickGELU
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..errors import UserError
from ..models.backbone import Backbone
from ..models.model_files import build_empty
from .names import State, text_from_transformers, text_to_transformers

TextEncoder = CLIPTextModel | CLIPTextModelWithProjection

# SDXL's second encoder: the one text tower whose projected feature a pipeline reads. No other CLIP has as many blocks;
# ComfyUI, too, knows it by them.
_BIGG_LAYERS = 32


def is_bigg(config: CLIPTextConfig) -> bool:
    """Whether this is SDXL's second kind of encoder, which keeps its projection and is padded with "!", id 0."""
    return config.num_hidden_layers == _BIGG_LAYERS


def keeps_projection(backbone: Backbone) -> bool:
    """Whether the backbone's text tower is loaded and exported with its projection unless told otherwise."""
    config = text_config(backbone)
    return is_bigg(config) and config.projection_dim is not None and backbone.pooling == "eot"


def text_config(backbone: Backbone) -> CLIPTextConfig:
    """The configuration of the backbone's text tower in transformers.

    Raises:
        UserError: transformers' CLIP has no such tower.
    """
    tower, tokenizer = backbone.text.tower, backbone.tokenizer.tokenizer
    block = tower.transformer.resblocks[0]
    if not backbone.family.causal:
        raise UserError(
            f"The text tower of a {backbone.family.name} has no causal mask, and a transformers CLIPTextModel has one: "
            "it cannot take the place of SDXL's text encoders. Export a CLIP, for example ViT-L-14."
        )
    if not isinstance(block.ls_1, nn.Identity):
        raise UserError("A text tower with layer scale has no place for it in a transformers CLIPTextModel.")
    projection = text_to_transformers(text_state(tower)).get("text_projection.weight")
    return CLIPTextConfig(
        vocab_size=tower.token_embedding.num_embeddings,
        hidden_size=tower.token_embedding.embedding_dim,
        intermediate_size=block.mlp.c_fc.out_features,
        projection_dim=None if projection is None else len(projection),
        num_hidden_layers=len(tower.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        max_position_embeddings=backbone.context_length,
        hidden_act=activation(block),
        layer_norm_eps=tower.ln_final.eps,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def activation(block: nn.Module) -> str:
    """transformers' name of the activation in open_clip's block."""
    return "quick_gelu" if isinstance(block.mlp.gelu, QuickGELU) else "gelu"


def text_state(tower: nn.Module) -> State:
    """The text tower's weights under OpenAI's names, without those of an image tower beside it."""
    prefixes = ("token_embedding.", "positional_embedding", "ln_final.", "transformer.", "text_projection")
    return {name: tensor for name, tensor in tower.state_dict().items() if name.startswith(prefixes)}


def expected_state(config: CLIPTextConfig, projection: bool, state: State, named: str) -> State:
    """The weights that a configuration describes, on the meta device, with the `text_model.` prefix.

    Raises:
        UserError: they are many times as large as `state`.
    """
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    return prefixed_state(build_empty(lambda: cls(config), sum(tensor.numel() for tensor in state.values()), named))


def make_encoder(config: CLIPTextConfig, state: Mapping[str, torch.Tensor], projection: bool) -> TextEncoder:
    """A text encoder made of these very tensors, in eval mode.

    Args:
        config: its sizes, which the tensors must have.
        state: transformers' names with the `text_model.` prefix; a projection that is not wanted is left aside.
    """
    cls = CLIPTextModelWithProjection if projection else CLIPTextModel
    with torch.device("meta"):  # neither time nor memory for random weights
        encoder = cls(config)
    # In memory transformers 5 has no prefix before a CLIPTextModel's own parts; older versions have.
    prefixed = any(name.startswith("text_model.") for name in encoder.state_dict())
    named = {
        name if prefixed else name.removeprefix("text_model."): tensor
        for name, tensor in state.items()
        if projection or name != "text_projection.weight"
    }
    encoder.load_state_dict(named, assign=True)
    for module in encoder.modules():
        if "position_ids" in module._buffers:  # in no state dict
            module.position_ids = torch.arange(config.max_position_embeddings).expand(1, -1)
    return encoder.eval()


def prefixed_state(encoder: TextEncoder) -> State:
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
            CLIPTextModelWithProjection, whose `text_embeds` are the features that were trained, for its second.

    Raises:
        UserError: transformers has no such encoder.
    """
    config = text_config(backbone)
    if projection and config.projection_dim is None:
        raise UserError("This text tower has no projection to export.")
    if projection and backbone.pooling != "eot":
        raise UserError(
            f"This text tower was trained with {backbone.pooling} pooling, and a CLIPTextModelWithProjection pools "
            "at EOT. Export it without the projection; its hidden states are the same."
        )
    state = text_to_transformers(text_state(backbone.text.tower))
    # contiguous, and then copied, because a transposed tensor would be cloned as one
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    return make_encoder(config, own, projection), backbone.tokenizer.tokenizer


def import_text_encoder(backbone: Backbone, text_encoder: TextEncoder) -> None:
    """Copies a transformers text encoder's weights into a backbone of the same sizes, in place.

    The backbone keeps its projection where the encoder has none.

    Raises:
        UserError: the sizes or the activation differ.
    """
    ours, theirs = text_config(backbone), text_encoder.config
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    for key in (*keys, "vocab_size", "hidden_act"):
        if getattr(ours, key) != getattr(theirs, key):
            raise UserError(
                f"The encoder's {key} is {getattr(theirs, key)}, the backbone's is {getattr(ours, key)}; they must be "
                "equal."
            )
    parameters = dict(backbone.text.tower.named_parameters())
    with torch.no_grad():
        for name, tensor in text_from_transformers(prefixed_state(text_encoder)).items():
            if name in parameters:
                parameters[name].copy_(tensor)
            elif f"{name}.weight" in parameters:  # a projection that is a Linear, whose weight is transposed
                parameters[f"{name}.weight"].copy_(tensor.T)
