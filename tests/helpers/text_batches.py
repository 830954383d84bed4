"""Batches of captions for the text tower."""

from functools import cache

import torch
from helpers.tiny_clip import tiny_clip
from helpers.vocabulary import BOS, EOS

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.text.tokens import CaptionTokenizer, Markers


@cache
def text_tower() -> Backbone:
    """In double precision, with 149 positions. Tests put back what they set."""
    backbone = tiny_clip().double()
    backbone.stretch(keep=5, factor=2)
    return backbone


# How rows begin.
BEGINNINGS = ["SOT, pads, text", "pads, SOT, text", "pads, text"]


def batch_of(captions, beginning, seed):
    """Captions of random ids, given as (text tokens, share of the room that pads in front take)."""
    tokenizer = text_tower().tokenizer
    if beginning == "pads, text":
        tokenizer = CaptionTokenizer(tokenizer.tokenizer, 149, Markers(sot=None, eot=EOS, pad=7))
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, BOS, (length,), generator=generator).tolist() for length, _ in captions]
    n_pre = [int(share * tokenizer.n_post(row)) for row, (_, share) in zip(ids, captions, strict=True)]
    return tokenizer.batch(ids, n_pre, pads_before_sot=beginning == "pads, SOT, text")


# More captions than groups, so that captions of unlike length and with unlike pads attend together.
MANY = [(7 * index % 40, (index % 6) / 5) for index in range(24)]
