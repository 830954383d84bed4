"""Import and export of encoders in the formats that people load."""

from .clip_model import export_clip_model
from .load import load_text_encoder
from .places import model_of_run
from .single_file import write_file
from .stretch import stretch_text_encoder
from .text_encoders import import_text_encoder, to_transformers
from .transformers_folder import export_text_encoder, write_text_encoder
from .two_tower import load_two_tower

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
