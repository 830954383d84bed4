"""An evaluation on images, which are encoded and cached in pieces, or on image-caption pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.data.bad_records import BadRecord, check_share, print_left_out, read_or_bad
from debias_diffusion.data.images import ImageSource
from debias_diffusion.data.records import Record
from debias_diffusion.data.retrieval import embed_texts, encode_images, none_readable, recall_ranks
from debias_diffusion.data.toy_scenes import family
from debias_diffusion.errors import UserError
from debias_diffusion.files import bytes_digest, json_digest

from .session import Session, read_source

PIECE = 2048  # images whose features are in one file of the cache


class ImageSession(Session):
    """One evaluation of several two-towers on the same images.

    Args:
        name, config: as in `Session`.
        data: `Pairs` or the like: its `records` are the images, at least one, which `images` opens; with its `bad`
            records and its `digest`.

    Attributes:
        image_digest: of the images' names and order, and of what shows that their files have changed.
    """

    def __init__(self, name: str, config: Any, data: Any):
        super().__init__(name, config, data)
        self.records, self.images = data.records, data.images
        self.image_digest = stamps_digest(self.records, self.images)
        self._readable: list[int] | None = None

    def encode(self, label: str, backbone: Backbone) -> tuple[Tensor, list[int]]:
        """The features [M, D] of the M readable images, on the CPU, and their positions among all, ascending.

        Finished pieces come from the cache; unreadable images are named once.

        Raises:
            UserError: no image is readable, more are bad than the share `max_bad`, or not the same images are readable
                as for an earlier encoder.
        """
        digest, starts = backbone.image_digest(), range(0, len(self.records), PIECE)
        pieces = [self._piece(label, backbone, digest, start) for start in starts]
        good = torch.cat([piece["good"] for piece in pieces]).tolist()
        if self._readable is None:
            bad = [self._explain(self.records[index]) for index in sorted(set(range(len(self.records))) - set(good))]
            if not good:
                raise none_readable(self.records, self.images, bad)
            self._readable = good
            print_left_out(bad)
            self.left_out += bad
            check_share(bad, len(self.records), self.config.max_bad)
        if good != self._readable:
            name = self.records[min(set(good) ^ set(self._readable))].image
            raise UserError(
                f"{name!r} and perhaps other images could be read for one encoder and not for another, so that their "
                f"numbers would be of other images. Delete {str(self.cache.folder)!r} and start again."
            )
        return torch.cat([piece["features"] for piece in pieces if len(piece["good"])]), good

    def _piece(self, label: str, backbone: Backbone, digest: str, start: int) -> dict[str, Tensor]:
        """The n readable images of one piece: "features" [n, D], and "good", their positions among all, [n]."""
        records = self.records[start : start + PIECE]

        def compute() -> dict[str, Tensor]:
            settings = (self.config.batch_size, self.device, f"images, {label}")
            features, good, _ = encode_images(backbone, records, self.images, *settings)
            return {"features": features, "good": start + torch.tensor(good, dtype=torch.long)}

        depends = {"pixels": self.image_digest, "start": start, "count": len(records)}
        return self.cache.tensors("images", depends | {"image tower": digest}, compute)

    def _explain(self, record: Record) -> BadRecord:
        """Why an image is missing from the features of its piece, which may come from an earlier run."""
        image = read_or_bad(record, self.images.open)
        if isinstance(image, BadRecord):
            return image
        return BadRecord(record.image, "unreadable image", f"{record.image}: it could not be read when it was encoded")


@dataclass(frozen=True)
class Readable:
    """The readable images of the data, encoded by one encoder, and their captions.

    Attributes:
        label, backbone: the encoder.
        features: of the readable images, [N, D].
        good: their positions among all images, [N].
        captions: of these images, [M].
        image_of: the row of `features` of each caption's image, [M].
        groups: by direction, the name of the group of each query, [M] and [N], see `toy_scenes.family`.
    """

    label: str
    backbone: Backbone
    features: Tensor
    good: list[int]
    captions: list[str]
    image_of: list[int]
    groups: dict[str, list[str]]


class PairSession(ImageSession):
    """What the evaluations of two-towers on image-caption pairs share.

    Raises:
        UserError: the data cannot be used.
    """

    def __init__(self, name: str, config: Any):
        super().__init__(name, config, read_source(config, config.labelled, config.held_out))

    def read(self, label: str, backbone: Backbone) -> Readable:
        """The features of the images, and the captions of those that can be read.

        Raises:
            UserError: more images or records than the share `max_bad` are unreadable, or all.
        """
        features, good = self.encode(label, backbone)
        row_of = {position: row for row, position in enumerate(good)}
        pairs = zip(self.data.captions, self.data.image_of, strict=True)
        kept = [(caption, row_of[image]) for caption, image in pairs if image in row_of]
        captions, image_of = map(list, zip(*kept, strict=True))
        families = [family(self.records[position].image) for position in good]
        groups = {"text_to_image": [families[row] for row in image_of], "image_to_text": families}
        return Readable(label, backbone, features, good, captions, image_of, groups)

    def embed_texts(self, readable: Readable, texts: list[str], progress: str | Literal[False] = False) -> Tensor:
        """The features of these texts, [M, D]; see `retrieval.embed_texts`."""
        return embed_texts(readable.backbone, texts, self.config.batch_size, self.device, progress)

    def compare(
        self, readable: Readable, texts: list[str], progress: str | Literal[False]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The ranks by direction, see `recall_ranks`, and the cosine of each text with its image, [M]."""
        features = self.embed_texts(readable, texts, progress)
        ranks = recall_ranks(readable.features, features, image_of=readable.image_of)
        images = readable.features[readable.image_of]
        return ranks, F.cosine_similarity(images.double(), features.double(), dim=1)

    def compared_by(self, readable: Readable) -> dict[str, str]:
        """What `compare` depends on beside images and texts: digests, as JSON values."""
        return {"encoder": self.digests["encoders"][readable.label]}

    def rank(self, readable: Readable, texts: list[str], progress: str | Literal[False] = False) -> dict:
        """How the encoder ranks these texts in place of the captions, in JSON values, from the cache if it is there.

        Args:
            progress: title of the progress bar; False shows none.

        Returns:
            `ranks` by direction, see `recall_ranks`; `similarities`, the cosine of each text with its image, [M]; and
            `longer_than_context`, how many texts exceed the context length.
        """
        tokenizer = readable.backbone.tokenizer

        def compute() -> dict:
            ranks, similarities = self.compare(readable, texts, progress)
            return {
                "longer_than_context": sum(tokenizer.count(text) > tokenizer.context_length for text in texts),
                "ranks": {direction: values.tolist() for direction, values in ranks.items()},
                "similarities": similarities.tolist(),
            }

        of_texts = json_digest({"all": [readable.good, texts, readable.image_of]})
        depends = self.compared_by(readable) | {"pixels": self.image_digest, "texts": of_texts}
        return self.cache.result("ranks", depends, compute)


def stamps_digest(records: Sequence[Record], images: ImageSource) -> str:
    """sha256 of the images' names and order, and of what shows that their files have changed."""

    def stamp(record: Record) -> bytes:
        try:
            return images.stamp(record.image)
        except (OSError, ValueError):
            return f"no {record.image}\n".encode("utf-8", "surrogatepass")

    return bytes_digest(map(stamp, records))
