"""Import and export of encoders in the formats that people load."""

from ..lazy import lazy_names
from .load import load_text_encoder
from .places import model_of_run
from .single_file import write_file
from .stretch import stretch_text_encoder
from .text_encoders import import_text_encoder, to_transformers
from .transformers_folder import export_text_encoder, write_text_encoder

__all__ = [
    "export_clip_model",
    "export_text_encoder",
    "import_text_encoder",
    "load_text_encoder",
    "load_two_tower",
    "model_of_run",
    "stretch_text_encoder",
    "to_transformers",
    "write_file",
    "write_text_encoder",
]

# open_clip is optional.
__getattr__ = lazy_names(__name__, {"export_clip_model": ".clip_model", "load_two_tower": ".two_tower"})
