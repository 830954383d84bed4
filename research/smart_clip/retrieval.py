"""`evaluate masked-retrieval`: recall where captions are compared with images under the captions' masks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.clip.weight_files import weights_digest
from debias_diffusion.data.retrieval import TIE
from debias_diffusion.errors import UserError
from debias_diffusion.eval.image_features import PairSession, Readable
from debias_diffusion.eval.report import Table
from debias_diffusion.eval.retrieval import DIRECTIONS, KS, hits, in_words, retrieve

from ..options import MaskedRetrievalConfig
from .method import MASK_FILE, masked_cosines, read_mask_network


def evaluate_masked_retrieval(config: MaskedRetrievalConfig) -> dict:
    """Writes `masked_retrieval.json` into `config.output` and prints its table.

    Returns:
        The content of the file: by encoder, recalls in percent.

    Raises:
        UserError: the data or an encoder cannot be used, or no encoder has a mask network.
    """
    if not any(Path(spec.model.location, MASK_FILE).is_file() for spec in config.specs):
        raise UserError(
            f"None of the encoders {', '.join(config.labelled)} has a {MASK_FILE}. Give a run of "
            "`python -m research train --recipe smart-clip`."
        )
    session = MaskedSession("masked_retrieval", config)
    ranks = {label: result["ranks"] for label, result in session.by_encoder(partial(retrieve, session)).items()}
    numbers = {
        label: {"recall_percent": {way: {f"R@{k}": float(hits(of[way], k).mean()) for k in KS} for way in DIRECTIONS}}
        for label, of in ranks.items()
    }
    return session.report(_tables, lambda report: {}, numbers)


def _tables(report: dict) -> list[Table]:
    header = ["recall in percent, under masks", *(f"{in_words(way)}, R@{k}" for way in DIRECTIONS for k in KS)]
    rows = [
        [label, *(value for way in DIRECTIONS for value in numbers["recall_percent"][way].values())]
        for label, numbers in report["encoders"].items()
    ]
    return [Table(header, rows)]


class MaskedSession(PairSession):
    """Compares images under the masks of the captions, for encoders that have a mask network."""

    def compare(
        self, readable: Readable, texts: list[str], progress: str | Literal[False]
    ) -> tuple[dict[str, Tensor], Tensor]:
        backbone = readable.backbone
        network = read_mask_network(self.encoders[readable.label].model.location, backbone)
        if network is None:
            return super().compare(readable, texts, progress)
        features, masks = [], []
        with torch.inference_mode():
            starts = range(0, len(texts), self.config.batch_size)
            for start in tqdm(starts, desc=progress or None, disable=not progress):
                tokens = backbone.tokenize(texts[start : start + self.config.batch_size]).to(self.device)
                features.append(backbone.encode_text(tokens).double().cpu())
                masks.append(network(backbone.text.final_states(tokens)).double().cpu())
        return masked_ranks(readable.features.double(), torch.cat(features), torch.cat(masks), readable.image_of)

    def compared_by(self, readable: Readable) -> dict[str, str]:
        network = read_mask_network(self.encoders[readable.label].model.location, readable.backbone)
        return super().compared_by(readable) | ({"masks": weights_digest(network)} if network else {})


def masked_ranks(
    images: Tensor, texts: Tensor, masks: Tensor, image_of: Sequence[int]
) -> tuple[dict[str, Tensor], Tensor]:
    """As `PairSession.compare`, in double precision: images [N, D] under the masks [M, D] of texts [M, D].

    Ties count against the model, as in `recall_ranks`. The similarities [N, M] are in memory.
    """
    similarity, owners = masked_cosines(images, texts, masks), torch.as_tensor(image_of)
    paired = similarity[owners, torch.arange(len(texts))]
    best = paired.new_full((len(images),), -torch.inf).scatter_reduce_(0, owners, paired, "amax")
    strangers = similarity.masked_fill(owners == torch.arange(len(images))[:, None], -torch.inf)
    ranks = {
        "text_to_image": 1 + (strangers >= paired - TIE).sum(dim=0),
        "image_to_text": 1 + (strangers >= best[:, None] - TIE).sum(dim=1),
    }
    return ranks, F.cosine_similarity(images[owners] * masks, texts, dim=1)
