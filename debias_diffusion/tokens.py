"""Captions to ids: the one cleaning, the long window, prefix padding, and where EOT stands."""

import gzip
import html
import os
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ftfy
import regex
import torch
from transformers import CLIPTokenizer

PAD = 0  # the id that pads CLIP's training captions, before the text and after EOT; never EOT itself

# What a tokenizer would read as a special token: transformers' names and open_clip's.
_SPECIAL = regex.compile(r"<(\|startoftext\||\|endoftext\||start_of_text|end_of_text)>", regex.IGNORECASE)


def clean(caption: str) -> str:
    """The one cleaning of a caption before any tokenizer sees it.

    Mends broken Unicode (ftfy), unescapes HTML twice and folds white space, as CLIP's own tokenizer does and
    transformers' does not; lowers case and composes characters once, because libraries differ in both; and sets the
    brackets of a literal special token ("<|endoftext|>") apart, so that it is read as text.

    open_clip's and transformers' tokenizers then agree, except on code points that Unicode has not assigned and on
    U+0345 (combining ypogegrammeni), which their regular expressions class differently.
    """
    caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    caption = unicodedata.normalize("NFC", caption.lower())
    return " ".join(_SPECIAL.sub(r"< \1 >", caption).split())


@lru_cache
def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's vocabulary and merges, from the file inside open_clip: 256 bytes, each also as a word's end, the merges,
    then SOT and EOT under the names that transformers gives them."""
    from open_clip.tokenizer import bytes_to_unicode, default_bpe

    with gzip.open(default_bpe(), "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    symbols = list(bytes_to_unicode().values())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), *("".join(merge) for merge in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return {word: index for index, word in enumerate(words)}, merges


def clip_tokenizer(context_length: int, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """CLIP's own vocabulary as a transformers tokenizer, without a download.

    Args:
        context_length: becomes `model_max_length`.
        pad_token: what `padding=...` adds after EOT: EOT for SDXL's first encoder, "!" (id 0) for its second.
    """
    vocabulary, merges = _clip_vocabulary()
    return CLIPTokenizer(
        vocab=dict(vocabulary), merges=list(merges), pad_token=pad_token, model_max_length=context_length
    )


def load_tokenizer(folder: str | os.PathLike) -> CLIPTokenizer:
    """A CLIPTokenizer saved in `folder`; nothing in it is executed."""
    return CLIPTokenizer.from_pretrained(Path(folder), local_files_only=True)


@dataclass(frozen=True)
class TokenBatch:
    """Captions of a batch without what need not be computed.

    The literal row of caption i is `[SOT, PAD * n_pre_i, text_i, EOT, PAD ...]`. All rows begin alike, so the beginning
    `[SOT, PAD, PAD, ...]` is kept once, as long as the longest needs it; and nothing after EOT is kept.

    Attributes:
        prefix_ids: [longest prefix] SOT, then PADs.
        n_prefix: [batch] how many of the prefix each caption sees: 1 + n_pre. On the CPU.
        ids: [sum of lengths] each caption's text and its EOT, one caption after the other.
        lengths: [batch] how many of `ids` each caption has. On the CPU.
        context_length: the window, in tokens.
    """

    prefix_ids: torch.Tensor
    n_prefix: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    context_length: int

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch with its ids on `device`; the bookkeeping stays on the CPU, where it is read."""
        move = {"device": device, "non_blocking": True}
        return TokenBatch(
            self.prefix_ids.to(**move), self.n_prefix, self.ids.to(**move), self.lengths, self.context_length
        )

    def pin_memory(self) -> "TokenBatch":
        return TokenBatch(
            self.prefix_ids.pin_memory(), self.n_prefix, self.ids.pin_memory(), self.lengths, self.context_length
        )

    def padded(self) -> torch.Tensor:
        """The literal rows, [batch, context_length], as an encoder that knows nothing of prefixes takes them."""
        rows = self.ids.new_full((len(self), self.context_length), PAD)
        texts = self.ids.split(self.lengths.tolist())
        for row, n_prefix, text in zip(rows, self.n_prefix.tolist(), texts, strict=True):
            row[:n_prefix] = self.prefix_ids[:n_prefix]
            row[n_prefix : n_prefix + len(text)] = text
        return rows

    @staticmethod
    def cat(batches: "list[TokenBatch]") -> "TokenBatch":
        """Several batches as one, so that they share one prefix."""
        return TokenBatch(
            max((batch.prefix_ids for batch in batches), key=len),
            torch.cat([batch.n_prefix for batch in batches]),
            torch.cat([batch.ids for batch in batches]),
            torch.cat([batch.lengths for batch in batches]),
            batches[0].context_length,
        )


class CaptionTokenizer:
    """Cleans and tokenizes captions for one window.

    Args:
        tokenizer: any CLIPTokenizer, the one that will be exported.
        context_length: window in tokens, SOT and EOT included.

    Raises:
        ValueError: EOT is not the highest id (open_clip pools there), or the window holds no text.
    """

    def __init__(self, tokenizer: CLIPTokenizer, context_length: int):
        if tokenizer.eos_token_id != len(tokenizer) - 1:
            raise ValueError(
                f"EOT must be the highest id, {len(tokenizer) - 1}, because open_clip pools there; "
                f"this tokenizer's {tokenizer.eos_token!r} is {tokenizer.eos_token_id}"
            )
        if context_length < 3:
            raise ValueError(f"a window of {context_length} tokens holds no text between SOT and EOT")
        self.tokenizer = tokenizer
        self.context_length = context_length

    def text_ids(self, captions: list[str]) -> list[list[int]]:
        """Each caption's ids without SOT and EOT, cut so that both still fit the window."""
        ids = self.tokenizer([clean(caption) for caption in captions], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return [row[: self.context_length - 2] for row in ids]

    def count(self, caption: str) -> int:
        """How many tokens the whole caption has, SOT and EOT included; may exceed the window."""
        return len(self.tokenizer(clean(caption), verbose=False)["input_ids"])

    def n_post(self, text_ids: list[int]) -> int:
        """How many PADs follow EOT in the literal row: the room for a prefix (Algorithm 1, line 9)."""
        return self.context_length - 2 - len(text_ids)

    def batch(self, text_ids: list[list[int]], n_pre: list[int] | None = None) -> TokenBatch:
        """Tokenized captions as a batch, with `n_pre` PADs between SOT and each text.

        Raises:
            ValueError: a caption with its prefix does not fit the window.
        """
        n_pre = [0] * len(text_ids) if n_pre is None else n_pre
        for ids, pads in zip(text_ids, n_pre, strict=True):
            if not 0 <= pads <= self.n_post(ids):
                raise ValueError(f"n_pre must be in [0, {self.n_post(ids)}] for {len(ids)} text tokens, got {pads}")
        sot, eot = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return TokenBatch(
            prefix_ids=torch.tensor([sot] + [PAD] * max(n_pre, default=0)),
            n_prefix=torch.tensor(n_pre, dtype=torch.long) + 1,
            ids=torch.tensor([token for ids in text_ids for token in (*ids, eot)], dtype=torch.long),
            lengths=torch.tensor([len(ids) + 1 for ids in text_ids], dtype=torch.long),
            context_length=self.context_length,
        )

    def __call__(self, captions: list[str]) -> TokenBatch:
        """Captions as they are, without a prefix."""
        return self.batch(self.text_ids(captions))
