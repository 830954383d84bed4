"""A node for ComfyUI. This folder goes into its `custom_nodes`; docs/comfyui.md says how."""

from .schema import NODE_ID, TITLE, LongPromptEncode, v3_node

WEB_DIRECTORY = "web"  # with the node's page

try:
    from comfy_api.latest import ComfyExtension, io

    _NODE = v3_node(io)
except (ImportError, TypeError):  # not in ComfyUI, or in one without that schema, or with an early form of it
    NODE_CLASS_MAPPINGS = {NODE_ID: LongPromptEncode}
    NODE_DISPLAY_NAME_MAPPINGS = {NODE_ID: TITLE}
else:

    class LongPrompts(ComfyExtension):
        """What ComfyUI asks for the pack's nodes."""

        async def get_node_list(self) -> list[type]:
            return [_NODE]

    async def comfy_entrypoint() -> LongPrompts:
        return LongPrompts()
