"""Image-caption pairs: what is read from disk and how it reaches a training step."""

from .images import ImageFolder
from .sharegpt4v import BadRecord, Captions, PackedRecords, Record, read_sharegpt4v

__all__ = ["BadRecord", "Captions", "ImageFolder", "PackedRecords", "Record", "read_sharegpt4v"]
