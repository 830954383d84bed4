"""A node for ComfyUI. This folder goes into its `custom_nodes`; docs/comfyui.md says how."""

from .schema import LongPromptEncode

WEB_DIRECTORY = "web"  # with the node's page
NODE_CLASS_MAPPINGS = {"DebiasLongPromptEncode": LongPromptEncode}
NODE_DISPLAY_NAME_MAPPINGS = {"DebiasLongPromptEncode": "CLIP Text Encode (long prompt)"}
