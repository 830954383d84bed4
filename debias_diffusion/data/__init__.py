"""Image-caption pairs: what is read from disk and how it reaches a training step."""

from .bad_records import BadRecord
from .captions import Captions
from .images import ImageFolder, ImageSource
from .json_files import read_jsonl, read_sharegpt4v
from .records import PackedRecords, Record
from .shards import ShardImages, read_shards, verify_shards
from .sources import data_digest, is_shards, open_data, read_captions
from .toy_scenes import ToyScenes, is_toy_scenes, toy_scene

__all__ = [
    "BadRecord",
    "Captions",
    "ImageFolder",
    "ImageSource",
    "PackedRecords",
    "Record",
    "ShardImages",
    "ToyScenes",
    "data_digest",
    "is_shards",
    "is_toy_scenes",
    "open_data",
    "read_captions",
    "read_jsonl",
    "read_shards",
    "read_sharegpt4v",
    "toy_scene",
    "verify_shards",
]
