"""Image-caption pairs: what is read from disk and how it reaches a training step."""

from .images import ImageFolder, ImageSource
from .shards import ShardImages, read_shards, verify_shards
from .sharegpt4v import BadRecord, Captions, PackedRecords, Record, read_jsonl, read_sharegpt4v
from .source import data_digest, is_shards, open_data

__all__ = [
    "BadRecord",
    "Captions",
    "ImageFolder",
    "ImageSource",
    "PackedRecords",
    "Record",
    "ShardImages",
    "data_digest",
    "is_shards",
    "open_data",
    "read_jsonl",
    "read_shards",
    "read_sharegpt4v",
    "verify_shards",
]
