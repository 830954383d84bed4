"""The encoder in and out of the formats that people load."""

from .stretch import stretch_text_encoder
from .transformers_folder import (
    export_text_encoder,
    import_text_encoder,
    load_text_encoder,
    to_transformers,
)

__all__ = ["export_text_encoder", "import_text_encoder", "load_text_encoder", "stretch_text_encoder", "to_transformers"]
