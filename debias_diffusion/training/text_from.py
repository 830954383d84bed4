"""`--text-from`: a training that begins with the text encoder of a checkpoint, in the place of the base model's."""

import json
from pathlib import Path

from ..clip.backbone import Backbone
from ..clip.weight_files import tensor_shapes
from ..encoders.hub import find_file
from ..encoders.resolve import Kind
from ..encoders.spec import EncoderSpec
from ..encoders.text_encoders import import_text_encoder
from ..errors import UserError, explain_failure
from ..files import read_file


def take_text_tower(backbone: Backbone, checkpoint: EncoderSpec, keeps_states: bool) -> None:
    """Gives a base model the checkpoint's text encoder of the same width, in place; its projection stays.

    An encoder of 248 positions gives these to the base model, which is then not stretched again.

    Args:
        keeps_states: whether the training keeps the penultimate states, which only SDXL's UNet reads.

    Raises:
        UserError: the encoder has other sizes, another activation or vocabulary, or is Stable Diffusion 1.5's.
    """
    if keeps_states and _is_sd15(checkpoint):
        raise UserError(
            f"{checkpoint.name!r} is a Stable Diffusion 1.5 checkpoint, whose UNet reads the last states, and this "
            "recipe keeps the penultimate ones. Give --keep-states 0, or an SDXL checkpoint."
        )
    encoder, _ = checkpoint.load_text_encoder(backbone.text.tower.token_embedding.embedding_dim)
    if encoder.config.max_position_embeddings != backbone.context_length:
        backbone.stretch()
    import_text_encoder(backbone, encoder, projection=False)


def _is_sd15(checkpoint: EncoderSpec) -> bool:
    location = checkpoint.model.location
    with explain_failure(f"The checkpoint {checkpoint.name!r} cannot be read"):
        if checkpoint.kind is Kind.FILE:
            is_safetensors = location.endswith(".safetensors")
            return is_safetensors and any(
                name.startswith("cond_stage_model.") for name in tensor_shapes(Path(location))
            )
        index = None if checkpoint.kind is Kind.OPEN_CLIP else find_file(location, "model_index.json")
        return index is not None and json.loads(read_file(index))["_class_name"] == "StableDiffusionPipeline"
