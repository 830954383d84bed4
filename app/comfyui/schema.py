"""How ComfyUI sees the node "CLIP Text Encode (long prompt)". It loads this form of a node in all its versions."""

from typing import Any

from .long_prompt_node import READINGS, encode_prompt

_TEXT = {"multiline": True, "dynamicPrompts": True}
_SIZE = {"default": 0, "min": 0, "max": 16384, "advanced": True}
_READINGS = (
    "How a prompt longer than an encoder is read. overlap: each chunk but the first together with the end of "
    "the text before it, so that words such as 'it' are understood; at most twice the chunks. separate: each "
    "chunk by itself. a1111, kohya, comfyui: cut and joined as these programs do; ComfyUI's weights count. "
    "kohya's conditioning always has 227 positions, and what follows 225 tokens is not read."
)
_MULTIPLE = (
    "Add pads up to a multiple of 77 positions, which is sampled in one batch with conditioning of ComfyUI's "
    "own nodes, up to 308. Off: the length of this package's diffusers pipelines, such as 152."
)
_BREAKS = "BREAK, in capitals, begins a new chunk. Off: it is text, as in ComfyUI."
_MATCH = "Conditioning used together with this one, such as the positive prompt's: at least its length results."

# Name: (type or choices, looks of its widget).
OPTIONAL: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    "text": ("STRING", _TEXT | {"tooltip": "The prompt, with weights such as (word:1.2), and embedding:name."}),
    "reading": (list(READINGS), {"default": "overlap", "tooltip": _READINGS}),
    "multiple_of_77": ("BOOLEAN", {"default": True, "tooltip": _MULTIPLE}),
    "breaks": ("BOOLEAN", {"default": False, "tooltip": _BREAKS}),
    "match": ("CONDITIONING", {"tooltip": _MATCH}),
} | {
    name: ("STRING", _TEXT | {"advanced": True, "tooltip": f"What {encoder} reads in place of the text, unless empty."})
    for name, encoder in {"text_g": "bigG", "text_l": "CLIP-L"}.items()
}
OPTIONAL |= {
    name: ("INT", _SIZE | {"tooltip": tooltip})
    for name, tooltip in {
        "width": "Of the image, for SDXL. 0: of the image that is sampled.",
        "height": "Of the image, for SDXL. 0: of the image that is sampled.",
        "crop_w": "Pixels cut off at the left, for SDXL.",
        "crop_h": "Pixels cut off at the top, for SDXL.",
        "target_width": "Of the image, for SDXL. 0: the width.",
        "target_height": "Of the image, for SDXL. 0: the height.",
    }.items()
}


class LongPromptEncode:
    """The node."""

    CATEGORY = "model/conditioning"
    DESCRIPTION = (
        "Reads a prompt of any length with the text encoders of SDXL, SD 1.5, SD 2 or Stable Cascade. A prompt that is "
        "longer than an encoder is read in chunks that end with a sentence, if possible; both encoders of SDXL stay "
        "aligned token by token. Weights are written as (word:1.2)."
    )
    SEARCH_ALIASES = ("long prompt", "77 tokens", "token limit", "chunks", "text", "prompt", "encode prompt")
    RETURN_TYPES = ("CONDITIONING", "STRING")
    RETURN_NAMES = ("CONDITIONING", "chunks")
    OUTPUT_TOOLTIPS = (
        "The prompt's conditioning, as long as the prompt needs.",
        "How each text encoder reads the prompt: text and number of tokens of each chunk.",
    )
    FUNCTION = "encode"
    encode = staticmethod(encode_prompt)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        clip = ("CLIP", {"tooltip": "Text encoders of SDXL, its refiner, SD 1.5, SD 2 or Stable Cascade."})
        return {"required": {"clip": clip}, "optional": OPTIONAL}
