"""A node for ComfyUI. This folder goes into its `custom_nodes`; docs/comfyui.md says how."""

from .long_prompt_node import LongPromptEncode

NODE_CLASS_MAPPINGS = {"DebiasLongPromptEncode": LongPromptEncode}
NODE_DISPLAY_NAME_MAPPINGS = {"DebiasLongPromptEncode": "CLIP Text Encode (long prompt)"}
