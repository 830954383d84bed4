"""Recall of image-caption retrieval, in both directions."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from debias_diffusion.backbones import Backbone, load_backbone
from debias_diffusion.data import BadRecord
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.files import write_json
from debias_diffusion.retrieval import encode_pairs, recall_at_k

from .inputs import check_batch_size, print_left_out, read_pairs
from .report import table, versions, weights_digest


@dataclass
class RetrievalConfig:
    """Settings of a retrieval evaluation.

    Attributes:
        model: Folder of a trained open_clip model, or an open_clip model name such as ViT-B-16.
        data: JSON file in ShareGPT4V's layout, JSONL file, or folder of WebDataset shards.
        output: Folder for the result, `retrieval.json`.
        images: Folder that the data file's image paths start from; not for shards, which hold theirs.
        pretrained: Tag or file of open_clip's pretrained weights, for a model given by name.
        limit: Use only the first so many pairs (1000 are ShareGPT4V's validation split). null uses all.
        batch_size: Images, or captions, encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
    """

    model: str
    data: str
    output: str
    images: str | None = None
    pretrained: str | None = None
    limit: int | None = 1000
    batch_size: int = 64
    device: str | None = None


def load_for_evaluation(model: str, pretrained: str | None, device: torch.device) -> Backbone:
    """The backbone on `device`, in evaluation mode.

    Raises:
        UserError: it cannot be loaded, or would have random weights.
    """
    backbone = load_backbone(model, pretrained)
    if backbone.random_weights:
        raise UserError(
            f"{model!r} is only a name, and without weights its numbers mean nothing. Give --pretrained, an open_clip "
            "tag such as openai or a file, or the folder of a trained model."
        )
    return backbone.to(device).eval()


class Evaluation:
    """What evaluations of a two-tower have in common: what they are given, and the JSON they leave.

    Attributes:
        pairs: what to evaluate on.
        records: its pairs.
        images: what opens their images.
        backbone: the model, in evaluation mode on `device`.

    Raises:
        UserError: a setting cannot be used.
    """

    def __init__(self, config: RetrievalConfig):
        self.started = time.monotonic()
        check_batch_size(config.batch_size)
        self.config = config
        self.pairs = read_pairs(config.data, config.images, config.limit)
        self.records, self.images = self.pairs.records, self.pairs.images
        self.device = pick_device(config.device)
        self.backbone = load_for_evaluation(config.model, config.pretrained, self.device)

    def write(self, name: str, unreadable: list[BadRecord], numbers: dict) -> dict:
        """Writes `name`.json: settings, versions, digests, `numbers`, the pairs left out, seconds. Returns it."""
        report = {
            "settings": asdict(self.config),
            "versions": versions(),
            "digests": {"data": self.pairs.digest, "model": weights_digest(self.backbone)},
            **numbers,
            "left_out": [asdict(record) for record in self.pairs.bad + unreadable],
            "seconds": round(time.monotonic() - self.started, 1),
        }
        write_json(Path(self.config.output) / f"{name}.json", report)
        return report


def evaluate_retrieval(config: RetrievalConfig) -> dict:
    """Retrieval with whole captions; writes `retrieval.json` into `config.output` and prints a table.

    Returns:
        What the file holds: settings, versions, digests, recalls in percent, the pairs left out, seconds.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation(config)
    image_features, text_features, unreadable = encode_pairs(
        own.backbone, own.records, own.images, config.batch_size, own.device
    )
    print_left_out(unreadable)
    recalls = recall_at_k(image_features, text_features)
    report = own.write("retrieval", unreadable, {"pairs": len(image_features), "recall_percent": recalls})
    header = ["", *recalls["text_to_image"]]
    print(table(header, [[direction.replace("_", " "), *values.values()] for direction, values in recalls.items()]))
    return report
