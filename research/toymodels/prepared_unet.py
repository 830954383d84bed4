"""A UNet that was prepared for what SDXL's has never seen: shifted states of the first encoder, and joined chunks.

It is the plain one, trained further; it shows how much of a result depends on such a preparation, and is not shipped.
"""

import random
from collections.abc import Iterable

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor
from transformers import CLIPTokenizer

from debias_diffusion.text.chunks import Chunk, positions_of
from debias_diffusion.text.sentences import join_sentences
from debias_diffusion.text.tokens import clean
from debias_diffusion.toyworld.grammar import Caption
from debias_diffusion.toyworld.scenes import generator

from .unet import Pairs, encode_pairs, encode_texts

# What fine-tuning does to the first encoder's hidden states, in shares of their spread: research/toy-world-making.md.
_SHIFT, _MIXING = 0.9, 0.5  # at most


def chunks_of(caption: Caption, tokenizer: CLIPTokenizer, rng: random.Random) -> tuple[str, str]:
    """What 77 tokens hold of a caption, without its summary half the time, cut in two between sentences.

    The UNet is to draw from several chunks as well, of which all but one begin with a detail.
    """
    sentences = [sentence.text for sentence in caption.sentences[rng.randint(0, 1) :]]
    while len(tokenizer(clean(join_sentences(sentences))).input_ids) > tokenizer.model_max_length:
        sentences.pop()
    cut = rng.randint(1, len(sentences))
    return clean(join_sentences(sentences[:cut])), clean(join_sentences(sentences[cut:]))


def encode_pairs_in_chunks(pipe: StableDiffusionXLPipeline, count: int, start: int = 0) -> Pairs:
    """As `encode_pairs`, of captions in two chunks, half of them read at once by the first encoder."""

    def encode(captions: list[Caption], indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        rngs = [generator("train", index, "windows") for index in indices]
        chunks = [chunks_of(caption, pipe.tokenizer, rng) for caption, rng in zip(captions, rngs, strict=True)]
        return _encode_chunks(pipe, chunks, [rng.random() < 0.5 for rng in rngs])

    return encode_pairs(pipe, count, start=start, encode=encode)


def _encode_chunks(
    pipe: StableDiffusionXLPipeline, texts: list[tuple[str, str]], whole: list[bool]
) -> tuple[Tensor, Tensor]:
    """The joined states of two chunks.

    Args:
        texts: of the two chunks, within 77 tokens together.
        whole: where the first encoder reads both at once, as one of 248 positions does.

    Returns:
        (hidden_states [texts, 152, D], pooled [texts, P], of the first chunks)
    """
    (first, pooled), (second, _) = (encode_texts(pipe, list(chunk)) for chunk in zip(*texts, strict=True))
    at_once, _ = encode_texts(pipe, [" ".join(chunks).strip() for chunks in texts])
    empty, width = encode_texts(pipe, [""])[0][0], pipe.text_encoder.config.hidden_size

    def join(states: list[Tensor], tokens: list[range]) -> Tensor:
        chunks = [Chunk(part, part) for part in tokens]
        return torch.cat([*states, empty])[positions_of(chunks, len(empty), 2 * len(empty) - 2)]

    joined = []
    for i, pair in enumerate(texts):
        tokens = [range(len(ids)) for ids in pipe.tokenizer(list(pair), add_special_tokens=False).input_ids]
        states = join([first[i], second[i]], tokens)
        if whole[i]:
            states[:, :width] = join([at_once[i]], [range(sum(map(len, tokens)))])[:, :width]
        joined.append(states)
    return torch.stack(joined), pooled


def disturbed(hidden_states: Tensor, rng: torch.Generator, width: int) -> Tensor:
    """The first `width` channels as another encoder of the same origin might give them: shifted and mixed at random.

    Each sample is disturbed in its own way and strength, all its tokens alike.

    Args:
        hidden_states: [batch, tokens, channels]
    """
    first, second = hidden_states.split([width, hidden_states.shape[-1] - width], dim=-1)
    centred = first - first.mean(dim=(0, 1))
    shift = centred.std() * torch.randn(len(first), 1, width, generator=rng)
    mixing = torch.randn(len(first), width, width, generator=rng) / width**0.5
    strength = torch.rand(len(first), 1, 1, generator=rng)
    return torch.cat([first + strength * (_SHIFT * shift + _MIXING * (centred @ mixing)), second], dim=-1)
