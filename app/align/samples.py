"""What one pair gives a step: a latent, noise, a time, and texts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from debias_diffusion.chunks import TRAINED_POSITIONS, Tokens, split_text, tokenize_text
from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.data.dataset import RecordDataset
from debias_diffusion.methods.base import Key
from debias_diffusion.methods.sampling import draw_generator
from debias_diffusion.sentences import join_sentences, split_sentences
from debias_diffusion.tokens import clean

Text = tuple[Tokens, ...]  # one text, for each of SDXL's encoders

PART = 1 / 2  # of the samples, the share of which some sentences are read too


@dataclass(frozen=True)
class Sample:
    """One pair of a step.

    Attributes:
        latents: [channels, height, width], scaled.
        noise: of the same shape.
        share: in [0, 1), of the noise schedule; more of the samples are at high noise, where it is decided what stands
            where, and where the text is needed.
        text: the whole caption. Cut at one chunk, as in the UNet's training, it would teach the encoder to ask for more
            than it says.
        part: some of its sentences, in any order, that one chunk holds; None for half of the samples.
    """

    sample_id: str
    latents: Tensor
    noise: Tensor
    share: float
    text: Text
    part: Text | None
    bad: list[BadRecord]


@dataclass(frozen=True)
class AlignBatch:
    """The samples of one step on one process: `Sample`'s attributes, stacked or listed."""

    sample_ids: list[str]
    latents: Tensor
    noise: Tensor
    shares: Tensor
    texts: list[Text]
    parts: list[Text | None]
    bad: list[BadRecord]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def chunks(self, size: int) -> "list[AlignBatch]":
        """The batch in chunks of `size` samples; the last may be smaller. `bad` stays with the whole batch."""
        per_sample = [field.name for field in fields(self) if field.name != "bad"]
        return [
            replace(self, bad=[], **{name: getattr(self, name)[start : start + size] for name in per_sample})
            for start in range(0, len(self), size)
        ]

    def to(self, device: torch.device) -> "AlignBatch":
        tensors = {name: getattr(self, name).to(device) for name in ("latents", "noise", "shares")}
        return replace(self, **tensors)


def collate(samples: Sequence[Sample]) -> AlignBatch:
    """Samples to a batch."""
    return AlignBatch(
        sample_ids=[sample.sample_id for sample in samples],
        latents=torch.stack([sample.latents for sample in samples]),
        noise=torch.stack([sample.noise for sample in samples]),
        shares=torch.tensor([sample.share for sample in samples]),
        texts=[sample.text for sample in samples],
        parts=[sample.part for sample in samples],
        bad=[record for sample in samples for record in sample.bad],
    )


class AlignDataset(RecordDataset):
    """Pairs whose images are latents, as `collate` takes them.

    Args:
        tokenizers: of SDXL's encoders.
        shape: of an image's latent.
    """

    def __init__(
        self,
        records,
        latents,
        seed: int,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        shape: tuple[int, ...],
        stand_ins: Callable[[int], Sequence[int]] | None = None,
    ):
        super().__init__(records, latents, lambda latent: latent.view(shape), seed, stand_ins)
        self.tokenizers = tokenizers

    def __getitem__(self, key: Key) -> Sample:
        record, latents, bad = self.read(key)
        rng = draw_generator(self.seed, key[0], f"{record.sample_id}/align")
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(rng.getrandbits(62)))
        share, sentences = 1 - rng.random() ** 2, split_sentences(record.caption)
        part = self._one_chunk(_some(sentences, rng)) if sentences and rng.random() < PART else None
        return Sample(record.sample_id, latents, noise, share, self._tokenize(record.caption), part, bad)

    def _tokenize(self, text: str) -> Text:
        cleaned = clean(text)
        return tuple(tokenize_text(cleaned, tokenizer)[0] for tokenizer in self.tokenizers)

    def _one_chunk(self, text: str) -> Text:
        """The first chunk of a text."""
        texts = self._tokenize(text)
        ends = [split_text(tokens, TRAINED_POSITIONS - 2, overlap=False)[0].kept.stop for tokens in texts]
        return tuple(tokens.first(end) for tokens, end in zip(texts, ends, strict=True))


def _some(sentences: Sequence[str], rng: random.Random) -> str:
    return join_sentences(rng.sample(sentences, rng.randint(1, len(sentences))))
