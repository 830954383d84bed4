"""How ComfyUI sees the node "CLIP Text Encode (long prompt)": by its V3 schema, and by a class of the older form."""

from typing import Any

from .long_prompt_node import READINGS, encode_prompt

NODE_ID = "DebiasLongPromptEncode"
TITLE = "CLIP Text Encode (long prompt)"
CATEGORY = "model/conditioning"
DESCRIPTION = (
    "Reads a prompt of any length with the text encoders of SDXL, SD 1.5, SD 2 or Stable Cascade. A prompt that is "
    "longer than an encoder is read in chunks that end with a sentence, if possible; both encoders of SDXL stay "
    "aligned token by token. Weights are written as (word:1.2)."
)
SEARCH_ALIASES = ["long prompt", "77 tokens", "token limit", "chunks", "text", "prompt", "encode prompt"]

_TEXT = {"multiline": True, "dynamic_prompts": True, "optional": True}
_TEXT_OF_ONE = _TEXT | {"advanced": True}
_SIZE = {"default": 0, "min": 0, "max": 16384, "optional": True, "advanced": True}
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

# Name: (a type of `comfy_api.latest.io`, arguments of its `Input`).
INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("Clip", {"tooltip": "Text encoders of SDXL, its refiner, SD 1.5, SD 2 or Stable Cascade."}),
    "text": ("String", _TEXT | {"tooltip": "The prompt, with weights such as (word:1.2), and embedding:name."}),
    "reading": (
        "Combo",
        {"options": list(READINGS), "default": "overlap", "optional": True, "tooltip": _READINGS},
    ),
    "multiple_of_77": ("Boolean", {"default": True, "optional": True, "tooltip": _MULTIPLE}),
    "breaks": (
        "Boolean",
        {
            "default": False,
            "optional": True,
            "tooltip": "BREAK, in capitals, begins a new chunk. Off: it is text, as in ComfyUI.",
        },
    ),
    "match": (
        "Conditioning",
        {
            "optional": True,
            "tooltip": "Conditioning used together with this one, such as the positive prompt's: at least its length "
            "results.",
        },
    ),
    "text_g": ("String", _TEXT_OF_ONE | {"tooltip": "What bigG reads in place of the text, unless empty."}),
    "text_l": ("String", _TEXT_OF_ONE | {"tooltip": "What CLIP-L reads in place of the text, unless empty."}),
    "width": ("Int", _SIZE | {"tooltip": "Of the image, for SDXL. 0: of the image that is sampled."}),
    "height": ("Int", _SIZE | {"tooltip": "Of the image, for SDXL. 0: of the image that is sampled."}),
    "crop_w": ("Int", _SIZE | {"tooltip": "Pixels cut off at the left, for SDXL."}),
    "crop_h": ("Int", _SIZE | {"tooltip": "Pixels cut off at the top, for SDXL."}),
    "target_width": ("Int", _SIZE | {"tooltip": "Of the image, for SDXL. 0: the width."}),
    "target_height": ("Int", _SIZE | {"tooltip": "Of the image, for SDXL. 0: the height."}),
}
OUTPUTS = [
    ("Conditioning", "CONDITIONING", "The prompt's conditioning, as long as the prompt needs."),
    ("String", "chunks", "How each text encoder reads the prompt: text and number of tokens of each chunk."),
]


def v3_node(io: Any) -> type:
    """The node by the V3 schema, `comfy_api.latest.io`; raises TypeError for an early form of that, as in 0.3.64."""

    class LongPromptEncodeV3(io.ComfyNode):
        @classmethod
        def define_schema(cls):
            return io.Schema(
                node_id=NODE_ID,
                display_name=TITLE,
                category=CATEGORY,
                description=DESCRIPTION,
                search_aliases=SEARCH_ALIASES,
                inputs=[getattr(io, kind).Input(name, **options) for name, (kind, options) in INPUTS.items()],
                outputs=[getattr(io, kind).Output(display_name=name, tooltip=said) for kind, name, said in OUTPUTS],
            )

        @classmethod
        def execute(cls, **inputs):
            return io.NodeOutput(*encode_prompt(**inputs))

    LongPromptEncodeV3.define_schema()
    return LongPromptEncodeV3


class LongPromptEncode:
    """The node as ComfyUI's without that schema take it."""

    CATEGORY, DESCRIPTION, SEARCH_ALIASES = CATEGORY, DESCRIPTION, SEARCH_ALIASES
    RETURN_TYPES = tuple(kind.upper() for kind, _, _ in OUTPUTS)
    RETURN_NAMES = tuple(name for _, name, _ in OUTPUTS)
    OUTPUT_TOOLTIPS = tuple(tooltip for _, _, tooltip in OUTPUTS)
    FUNCTION = "encode"
    encode = staticmethod(encode_prompt)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        types: dict = {"required": {}, "optional": {}}
        for name, (kind, options) in INPUTS.items():
            widget = options | {"dynamicPrompts": options.get("dynamic_prompts", False)}
            needed = "optional" if options.get("optional") else "required"
            types[needed][name] = (options.get("options", kind.upper()), widget)
        return types
