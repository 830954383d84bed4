"""The package's names, which `__init__.py` imports when they are first used."""

from .clip.positions import stretch_positions
from .encoders.spec import load_text_encoder, load_two_tower
from .encoders.stretch import stretch_text_encoder
from .text.encoding import encode_texts, last_states
from .text.sentences import split_sentences
from .text.weighting import parse_prompt
from .toyworld.shipped import shipped

__all__ = [
    "encode_texts",
    "last_states",
    "load_text_encoder",
    "load_two_tower",
    "parse_prompt",
    "shipped",
    "split_sentences",
    "stretch_positions",
    "stretch_text_encoder",
]
