"""Recall of image-caption retrieval, in both directions."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from debias_diffusion.backbones import Backbone, load_backbone
from debias_diffusion.data import BadRecord, Record
from debias_diffusion.devices import pick_device
from debias_diffusion.errors import UserError
from debias_diffusion.files import write_json
from debias_diffusion.retrieval import encode_images, encode_texts, recall_at_k

from .inputs import Pairs, check_batch_size, check_max_bad, check_share, print_left_out, read_benchmark, read_pairs
from .report import table, versions, weights_digest


@dataclass
class RetrievalConfig:
    """Settings of a retrieval evaluation.

    What is evaluated is either `data` (with `images`), pairs of one's own, or `dataset` with `root`, a benchmark.

    Attributes:
        model: Folder of a trained open_clip model, or an open_clip model name such as ViT-B-16.
        data: JSON file in ShareGPT4V's layout, JSONL file, or folder of WebDataset shards.
        output: Folder for the result, `retrieval.json` and `retrieval.png`.
        images: Folder that the data file's image paths start from; not for shards, which hold theirs.
        pretrained: Tag or file of open_clip's pretrained weights, for a model given by name.
        limit: Use only the first so many images. null uses all; auto is 1000 of the data, as ShareGPT4V's validation
            split has, and all of a benchmark.
        batch_size: Images, or captions, encoded at once.
        device: Device to run on. The default is cuda where there is one, else cpu.
        dataset: A retrieval benchmark in place of data. One of urban1k, dci, long-dci, docci, iiw, sharegpt4v-1k, coco,
            flickr30k, flickr30k-test.
        root: Folder that the benchmark lies in, as its authors publish it.
        max_bad: Largest share of images or records that may be unreadable before the evaluation stops, from 0 to 1.
    """

    model: str
    data: str | None = None
    output: str = ""
    images: str | None = None
    pretrained: str | None = None
    limit: int | Literal["auto"] | None = "auto"
    batch_size: int = 64
    device: str | None = None
    dataset: str | None = None
    root: str | None = None
    max_bad: float = 0.01


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
        pairs: what to evaluate on, each image once.
        records: its pairs. An image of a benchmark with several captions stands here with its first.
        images: what opens their images.
        captions: all captions, [M].
        image_of: the position in `records` of each caption's image, [M].
        backbone: the model, in evaluation mode on `device`.

    Raises:
        UserError: a setting cannot be used.
    """

    def __init__(self, config: RetrievalConfig):
        self.started = time.monotonic()
        check_batch_size(config.batch_size)
        check_max_bad(config.max_bad)
        if not config.output:
            raise UserError("There is no output. Give --output, a folder for the result.")
        self.config = config
        self.pairs, self.captions, self.image_of = _given(config)
        self.records, self.images = self.pairs.records, self.pairs.images
        self.device = pick_device(config.device)
        self.backbone = load_for_evaluation(config.model, config.pretrained, self.device)

    def encode_images(self) -> tuple[Tensor, list[str], list[int], list[BadRecord]]:
        """The features of the readable images [N, D], their captions [M], each one's image of the N, and the rest.

        Raises:
            UserError: more images or records than the share `max_bad` are unreadable.
        """
        features, good, unreadable = encode_images(
            self.backbone, self.records, self.images, self.config.batch_size, self.device
        )
        print_left_out(unreadable)
        # a data file is read beyond `limit`, so its own faults are not a share of what is evaluated
        bad = unreadable if self.config.dataset is None else self.pairs.bad + unreadable
        check_share(bad, len(self.records), self.config.max_bad)
        place = {position: row for row, position in enumerate(good)}
        kept = [
            (caption, place[image])
            for caption, image in zip(self.captions, self.image_of, strict=True)
            if image in place
        ]
        return features, [caption for caption, _ in kept], [row for _, row in kept], unreadable

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


def _given(config: RetrievalConfig) -> tuple[Pairs, list[str], list[int]]:
    """The pairs, each image once, all captions, and each one's image. Raises UserError for unusable settings."""
    own, benchmark = (config.data, config.images), (config.dataset, config.root)
    if (config.data is None) == (config.dataset is None) or (any(own) and any(benchmark)):
        raise UserError(
            f"data is {config.data!r} with images {config.images!r}, dataset is {config.dataset!r} with root "
            f"{config.root!r}. Give either --data, with --images unless it is shards, or --dataset with --root."
        )
    if config.dataset is None:
        pairs = read_pairs(config.data, config.images, 1000 if config.limit == "auto" else config.limit)
        return pairs, [record.caption for record in pairs.records], list(range(len(pairs.records)))
    if config.root is None:
        raise UserError(f"dataset is {config.dataset!r}, but root is not given. Give the folder that it lies in.")
    found = read_benchmark(config.dataset, config.root, None if config.limit == "auto" else config.limit)
    firsts = dict(zip(reversed(found.image_of), reversed(found.captions), strict=True))  # the earliest is set last
    records = [Record(image, image, firsts[position]) for position, image in enumerate(found.images)]
    return Pairs(records, found.source, found.bad, found.digest()), found.captions, found.image_of


def plot(recalls: dict[str, dict[str, float]]) -> Figure:
    """Bars of recall by k, one panel a direction. A Figure of its own draws with Agg and leaves pyplot alone."""
    figure = Figure(figsize=(8, 3.5), layout="constrained", dpi=150)
    for axes, (direction, values) in zip(figure.subplots(1, 2, sharey=True), recalls.items(), strict=True):
        axes.bar_label(axes.bar(list(values), list(values.values())), fmt="%.1f")
        axes.set(title=direction.replace("_", " "), ylim=(0, 110))
    figure.axes[0].set_ylabel("recall (%)")
    return figure


def evaluate_retrieval(config: RetrievalConfig) -> dict:
    """Retrieval with whole captions; writes `retrieval.json` and `.png` into `config.output` and prints a table.

    Captions over the model's window are cut, and counted. `recall_at_k` says how several captions an image, ties and
    duplicates count.

    Returns:
        What the file holds: settings, versions, digests, recalls in percent, how many images, captions and captions
        over the window, what was left out, seconds.

    Raises:
        UserError: a setting cannot be used.
    """
    own = Evaluation(config)
    image_features, captions, image_of, unreadable = own.encode_images()
    text_features = encode_texts(own.backbone, captions, config.batch_size, own.device)
    recalls = recall_at_k(image_features, text_features, image_of=image_of)
    tokenizer = own.backbone.tokenizer
    numbers = {
        "pairs": len(captions),
        "images": len(image_features),
        "captions_over_window": sum(tokenizer.count(caption) > tokenizer.context_length for caption in captions),
        "recall_percent": recalls,
    }
    report = own.write("retrieval", unreadable, numbers)
    plot(recalls).savefig(Path(config.output) / "retrieval.png")
    header = ["", *recalls["text_to_image"]]
    print(table(header, [[direction.replace("_", " "), *values.values()] for direction, values in recalls.items()]))
    return report
