"""Settings of `export`."""

from dataclasses import dataclass
from typing import Literal

from debias_diffusion.models.shipped import shipped


@dataclass
class ExportConfig:
    """Export a text encoder, or both towers, for other programs.

    Attributes:
        model: Folder of a training run (its model after the last step is exported) or of `ablate`, an open_clip
            folder, or an open_clip model name.
            For transformers and comfyui also any other text encoder: a transformers folder, a weights file such as
            longclip-L.pt or clip_l.safetensors, or a hub id.
        output: Folder to write; for comfyui a file that ends in .safetensors. Files of other programs are never
            overwritten.
        to: transformers writes a folder with text_encoder/, tokenizer/, README.md and pipeline.py, which diffusers
            loads too, and diffusers is another name for it; comfyui writes one file for ComfyUI; open_clip and clip
            write folders with both towers, for open_clip and for transformers' CLIPModel. Suppressed text heads become
            ordinary weights; plain open_clip ignores suppressed image heads, and transformers runs them by code in the
            folder.
        pretrained: Tag or file of the weights, for a model given by name.
        positions: long reads up to 248 tokens; short writes the encoder of 77 tokens with the rows of positions that
            Fix-CLIP's short captions were trained with (train --recipe fix-clip).
        projection: Export a CLIPTextModelWithProjection, whose text_embeds are the trained features. SDXL's first
            encoder must not have it; its second, bigG, always has.
        scores: Folder with results of `evaluate` for this model, for the model card (README.md).
        push_to_hub: owner/name of the Hugging Face repository to upload the folder to. A new repository is private.
            null uploads nothing.
    """

    model: str
    output: str
    to: Literal["transformers", "diffusers", "comfyui", "open_clip", "clip"] = "transformers"
    pretrained: str | None = None
    positions: Literal["long", "short"] = "long"
    projection: bool = False
    scores: str | None = None
    push_to_hub: str | None = None

    def __post_init__(self):
        shipped(self.model)  # raises UserError for a misspelt toy model
        if self.to == "diffusers":
            self.to = "transformers"
