"""Captions to ids: cleaning, context length, prefix padding, and the place of EOT."""

import copy
import gzip
import html
import json
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ftfy
import torch
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..devices import to_device

PAD = 0  # the id that pads CLIP's training captions, before the text and after EOT; never EOT itself

# What a tokenizer would read as a special token: transformers' names and open_clip's.
_SPECIAL = re.compile(r"<(\|startoftext\||\|endoftext\||start_of_text|end_of_text)>", re.IGNORECASE)
_MERGES = Path(__file__).parent / "clip_merges.txt.gz"


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


def byte_symbols() -> list[str]:
    """The characters that stand for the 256 bytes in CLIP's and GPT-2's vocabularies, in the order of their ids.

    Bytes that print as Latin-1 stand for themselves; the others for the characters from 256 on.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(code) for code in (*printed, *range(256, 512 - len(printed)))]


@lru_cache
def _clip_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's vocabulary and merges: 256 bytes, each also as a word's end, the merges, then SOT and EOT under the names
    that transformers gives them."""
    with gzip.open(_MERGES, "rt", encoding="utf-8") as file:
        merges = [tuple(line.split()) for line in file.read().splitlines()[1:]]
    symbols = byte_symbols()
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
    return make_clip_tokenizer(vocabulary, merges, pad_token=pad_token, model_max_length=context_length)


def make_clip_tokenizer(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **settings) -> CLIPTokenizer:
    """A CLIPTokenizer of a vocabulary, {symbol: id}, and its merges; `settings` as transformers names them."""
    if issubclass(CLIPTokenizer, PreTrainedTokenizerFast):  # transformers 5
        return CLIPTokenizer(vocab=dict(vocabulary), merges=list(merges), **settings)
    with TemporaryDirectory() as folder:
        files = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        files[0].write_text(json.dumps(vocabulary), encoding="utf-8")
        lines = ["#version: 0.2", *map(" ".join, merges)]
        files[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
        return CLIPTokenizer(*map(str, files), **settings)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Writes a tokenizer: the same files whatever it was last called with."""
    if tokenizer.is_fast:  # each call sets these two anew, and leaves them
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows a table of embeddings needs for all ids of a tokenizer, which need not be without gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict:
    """Everything that decides a tokenizer's ids and pads, as JSON values, whatever it was last called with."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # These two are left from the last call, and no row here depends on them.
    return rules | {"truncation": None, "padding": tokenizer.padding_side, "special": special}


@dataclass(frozen=True)
class TokenBatch:
    """A batch of captions, reduced to the tokens that must be computed.

    The literal row of caption i is `[SOT, PAD * n_pre_i, text_i, EOT, PAD ...]`. All rows begin alike, so the
    beginning `[SOT, PAD, PAD, ...]` is kept once, as long as the longest needs it; and nothing after EOT is kept. Where
    pads stand before SOT, or a model has no SOT, the shared beginning is `[PAD, PAD, ...]`, and the rest is their own.

    Attributes:
        prefix_ids: [longest prefix] the shared beginning.
        n_prefix: [batch] how many of the prefix each caption sees. On the CPU.
        ids: [sum of lengths] each caption's own tokens up to its EOT, one caption after the other.
        lengths: [batch] how many of `ids` each caption has. On the CPU.
        context_length: positions that the encoder reads at once.
        pad: the id that fills a literal row after EOT.
        shared_sot: whether the prefix begins with SOT.
        is_short: [batch] bool, True for captions that are read with the text tower's table for short ones; None: none.
            On the CPU.
        layout: what a text tower computes of these for its packed rows, where that was done beforehand; see
            `clip.packing.Layout`.
    """

    prefix_ids: torch.Tensor
    n_prefix: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    context_length: int
    pad: int
    shared_sot: bool
    is_short: torch.Tensor | None = None
    layout: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch with its ids on `device`; the bookkeeping stays on the CPU, where it is read."""
        return self._map(partial(to_device, device=torch.device(device)))

    def pin_memory(self) -> "TokenBatch":
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "TokenBatch":
        layout = self.layout and self.layout.map(change)
        return replace(self, prefix_ids=change(self.prefix_ids), ids=change(self.ids), layout=layout)

    def select(self, captions: Sequence[int]) -> "TokenBatch":
        """Some of the captions, in the order given, with no more of the prefix than they need."""
        texts, n_prefix = self.ids.split(self.lengths.tolist()), self.n_prefix[list(captions)]
        return replace(
            self,
            prefix_ids=self.prefix_ids[: int(n_prefix.max())],
            n_prefix=n_prefix,
            ids=torch.cat([texts[caption] for caption in captions]),
            lengths=self.lengths[list(captions)],
            is_short=None if self.is_short is None else self.is_short[list(captions)],
            layout=None,
        )

    def padded(self) -> torch.Tensor:
        """Padded id rows, [batch, context_length], for encoders without prefix sharing."""
        slots, n_prefix = torch.arange(self.context_length), self.n_prefix[:, None]
        is_text = (n_prefix <= slots) & (slots < n_prefix + self.lengths[:, None])
        rows = self.ids.new_full((len(self), self.context_length), self.pad)
        rows[:, : len(self.prefix_ids)] = self.prefix_ids
        rows[(slots >= n_prefix).to(rows.device)] = self.pad
        rows[is_text.to(rows.device)] = self.ids
        return rows


@dataclass(frozen=True)
class Markers:
    """The ids around a text: `[sot, text, eot, pad ...]`; `sot` is None where a model has none."""

    sot: int | None
    eot: int
    pad: int


@dataclass(eq=False, repr=False)
class CaptionTokenizer:
    """Cleans and tokenizes captions for one context length.

    Args:
        tokenizer: the transformers tokenizer that will be exported.
        context_length: in tokens, SOT and EOT included.
        markers: the ids around a text; None: those of CLIP, from the tokenizer, with id 0 as PAD.
        cleaning: what a caption goes through before the tokenizer.

    Raises:
        ValueError: CLIP's EOT is not the highest id (open_clip pools there).
    """

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    markers: Markers | None = None
    cleaning: Callable[[str], str] = clean

    def __post_init__(self):
        tokenizer = self.tokenizer
        if self.markers is None:
            if tokenizer.eos_token_id != len(tokenizer) - 1:
                raise ValueError(
                    f"EOT must be the highest id, {len(tokenizer) - 1}, because open_clip pools there; "
                    f"this tokenizer's {tokenizer.eos_token!r} is {tokenizer.eos_token_id}"
                )
            self.markers = Markers(tokenizer.bos_token_id, tokenizer.eos_token_id, PAD)
        self.n_special = 1 if self.markers.sot is None else 2  # tokens of a row that are neither text nor PAD

    def with_context_length(self, context_length: int) -> "CaptionTokenizer":
        """A copy of the tokenizer for another context length."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.model_max_length = context_length
        return replace(self, tokenizer=tokenizer, context_length=context_length)

    def _uncut_ids(self, captions: list[str]) -> list[list[int]]:
        cleaned = [self.cleaning(caption) for caption in captions]
        return self.tokenizer(cleaned, add_special_tokens=False, verbose=False)["input_ids"]

    def text_ids(self, captions: list[str]) -> list[list[int]]:
        """Each caption's ids without SOT and EOT, cut so that both still fit the context length."""
        return [row[: self.context_length - self.n_special] for row in self._uncut_ids(captions)]

    def count(self, caption: str) -> int:
        """How many tokens the whole caption has, SOT and EOT included; may exceed the context length."""
        return len(self._uncut_ids([caption])[0]) + self.n_special

    def n_post(self, text_ids: list[int]) -> int:
        """How many PADs follow EOT in the literal row: the room for a prefix (Algorithm 1, line 9)."""
        return self.context_length - self.n_special - len(text_ids)

    def batch(
        self,
        text_ids: list[list[int]],
        n_pre: list[int] | None = None,
        pads_before_sot: bool = False,
        is_short: list[bool] | None = None,
    ) -> TokenBatch:
        """Tokenized captions as a batch, with `n_pre` PADs between SOT and each text, or before SOT.

        `is_short` says which are read with the table for short ones, see `TokenBatch`. Raises ValueError for a caption
        that does not fit the context length with its prefix.
        """
        n_pre = [0] * len(text_ids) if n_pre is None else n_pre
        for ids, pads in zip(text_ids, n_pre, strict=True):
            if not 0 <= pads <= self.n_post(ids):
                raise ValueError(f"n_pre must be in [0, {self.n_post(ids)}] for {len(ids)} text tokens, got {pads}")
        pad, sot = self.markers.pad, [] if self.markers.sot is None else [self.markers.sot]
        shared, start = ([], sot) if pads_before_sot else (sot, [])
        rows = [[*start, *ids, self.markers.eot] for ids in text_ids]
        return TokenBatch(
            prefix_ids=torch.tensor(shared + [pad] * max(n_pre, default=0), dtype=torch.long),
            n_prefix=torch.tensor(n_pre, dtype=torch.long) + len(shared),
            ids=torch.tensor([token for row in rows for token in row], dtype=torch.long),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            context_length=self.context_length,
            pad=pad,
            shared_sot=bool(shared),
            is_short=torch.tensor(is_short) if is_short and any(is_short) else None,
        )

    def __call__(self, captions: list[str]) -> TokenBatch:
        """Captions as they are, without a prefix."""
        return self.batch(self.text_ids(captions))
