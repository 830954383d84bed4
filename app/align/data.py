"""What one pair gives a step: a latent, computed once and cached on disk, noise, a time, and texts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from torch import Tensor
from torchvision.transforms.v2 import CenterCrop, Compose, InterpolationMode, PILToTensor, Resize
from transformers import PreTrainedTokenizerBase

from debias_diffusion.clip.weight_files import model_digest
from debias_diffusion.data.bad_records import BadRecord
from debias_diffusion.data.batch import Key, draw_generator
from debias_diffusion.text.chunks import TRAINED_POSITIONS, Tokens, split_text
from debias_diffusion.text.prompt_tokens import tokenize_text
from debias_diffusion.text.sentences import join_sentences, split_sentences
from debias_diffusion.text.tokens import clean
from debias_diffusion.training.batches import RecordDataset
from debias_diffusion.training.feature_cache import FrozenEncoder

Text = tuple[Tokens, ...]  # one text, for each of SDXL's encoders

PART = 1 / 2  # of the samples, the share of which some sentences are read too


def latent_shape(vae: AutoencoderKL, pixels: int) -> tuple[int, int, int]:
    """Channels, height and width of the latents of square images."""
    side = pixels // 2 ** (len(vae.config.block_out_channels) - 1)
    return vae.config.latent_channels, side, side


def frozen_vae(vae: AutoencoderKL, pixels: int, accelerator: Accelerator) -> FrozenEncoder:
    """SDXL's autoencoder, which turns images into latents, scaled as the UNet reads them.

    In float32 whatever the run's precision is: SDXL's autoencoder overflows in float16. The mean of the distribution is
    taken, so that an image has one latent.

    Args:
        vae: the autoencoder; moved to the accelerator's device.
        pixels: side of the square that images are scaled and cropped to.
    """
    vae, config = vae.to(accelerator.device).float().eval(), vae.config

    def encode(images: Tensor) -> Tensor:
        latents = vae.encode(images.float() / 127.5 - 1).latent_dist.mean
        if getattr(config, "latents_mean", None) is not None:
            mean, std = (
                torch.tensor(values, device=latents.device).view(1, -1, 1, 1)
                for values in (config.latents_mean, config.latents_std)
            )
            latents = (latents - mean) / std
        return latents.flatten(1) * config.scaling_factor

    read_pixels = Compose([Resize(pixels, InterpolationMode.LANCZOS), CenterCrop(pixels), PILToTensor()])
    # With its scaling factor, means and standard deviations; names with a line before them say where it lies.
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    return FrozenEncoder(accelerator, read_pixels, encode, {"vae": model_digest(vae, settings), "pixels": pixels})


@dataclass(frozen=True)
class AlignBatch:
    """The samples of one step on one process.

    Attributes:
        latents: [samples, channels, height, width], scaled.
        noise: of the same shape.
        shares: [samples] in [0, 1), of the noise schedule; more of the samples are at high noise, where it is decided
            what stands where, and where the text is needed.
        texts: the whole captions. Cut at one chunk, as in the UNet's training, they would teach the encoder to ask for
            more than they say.
        parts: some of a caption's sentences, in any order, that one chunk holds; None for half of the samples.
        bad: records that could not be read.
    """

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
        columns = [getattr(self, field.name) for field in fields(self)[:-1]]
        starts = range(0, len(self), size)
        return [AlignBatch(*(column[start : start + size] for column in columns), bad=[]) for start in starts]

    def to(self, device: torch.device) -> "AlignBatch":
        tensors = {name: getattr(self, name).to(device) for name in ("latents", "noise", "shares")}
        return replace(self, **tensors)


def collate(samples: Sequence[AlignBatch]) -> AlignBatch:
    """Samples, which are batches of one, to a batch."""
    columns = ([getattr(sample, field.name) for sample in samples] for field in fields(AlignBatch))
    return AlignBatch(*(torch.cat(part) if torch.is_tensor(part[0]) else list(chain(*part)) for part in columns))


@dataclass(eq=False, repr=False)
class AlignDataset(RecordDataset):
    """Pairs whose images are latents, as `collate` takes them.

    Args:
        tokenizers: of SDXL's encoders.
    """

    tokenizers: Sequence[PreTrainedTokenizerBase]

    def __getitem__(self, key: Key) -> AlignBatch:
        record, latents, bad = self.read(key)
        rng = draw_generator(self.seed, key[0], f"{record.sample_id}/align")
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(rng.getrandbits(62)))
        share, sentences, part = 1 - rng.random() ** 2, split_sentences(record.caption), None
        if sentences and rng.random() < PART:
            some = self._tokenize(join_sentences(rng.sample(sentences, rng.randint(1, len(sentences)))))
            part = tuple(text.first(split_text(text, TRAINED_POSITIONS - 2, "separate")[0].kept.stop) for text in some)
        text, shares = self._tokenize(record.caption), torch.tensor([share])
        return AlignBatch([record.sample_id], latents[None], noise[None], shares, [text], [part], bad)

    def _tokenize(self, text: str) -> Text:
        cleaned = clean(text)
        return tuple(tokenize_text(cleaned, tokenizer) for tokenizer in self.tokenizers)
