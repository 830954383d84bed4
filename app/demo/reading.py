"""What the encoders read of a prompt: its tokens, the attention to its words, and the effect of its sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from debias_diffusion.chunks import Chunk, Tokens, split_text
from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import look_at_tokens
from debias_diffusion.eval.robustness import move4
from debias_diffusion.methods.sampling import join_sentences
from debias_diffusion.pipelines import SDXLLongPromptMixin
from debias_diffusion.pipelines.rendering import cleaned
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import clean

from ..prompts import check_prompt
from .models import DemoModels, Encoder
from .request import Request
from .settings import check_text_settings, without_weights

ReadBy = Literal["all", "some", "none"]
MOST_SENTENCES = 40  # removed in turn: each takes a run of every encoder
_BATCH = 16  # texts encoded at once


@dataclass(frozen=True)
class PromptReading:
    """How one encoder reads a prompt when images are generated from it.

    Attributes:
        tokens: number of the prompt's tokens, BOS and EOS not counted.
        chunks: what it reads at once, by token numbers from 0, in order; at least one.
    """

    tokens: int
    chunks: tuple[Chunk, ...]

    @property
    def read(self) -> int:
        """Number of first tokens that the encoder reads."""
        return self.chunks[-1].kept.stop

    def in_words(self) -> str:
        """Such as "reads all 93 tokens in 2 overlapping chunks: 1 to 75, 44 to 93"."""
        if self.read < self.tokens:
            return f"reads the first {self.read:,} of {self.tokens:,} tokens"
        if len(self.chunks) < 2:
            return f"reads all {self.tokens:,} tokens at once"
        kind = "overlapping" if any(chunk.again for chunk in self.chunks) else "separate"
        places = ", ".join(f"{chunk.read.start + 1:,} to {chunk.read.stop:,}" for chunk in self.chunks)
        return f"reads all {self.tokens:,} tokens in {len(self.chunks):,} {kind} chunks: {places}"


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens, without BOS and EOS.

    Attributes:
        tokens: of each its characters and the white space after them (if several tokens are bytes of one character, the
            last one has the character), and whether all, some or none of the encoders read it. The joined texts are the
            cleaned prompt.
        sentences: number of sentences.
        readings: how each encoder reads them, by label.
    """

    tokens: list[tuple[str, ReadBy]]
    sentences: int
    readings: dict[str, PromptReading]


def tokenize_prompt(prompt: str, tokenizer: CLIPTokenizer, weighting: bool) -> Tokens:
    """A prompt's tokens as the pipelines read them, with the best places to end a chunk."""
    reader = SDXLLongPromptMixin().set_long_prompt(weighting=weighting)
    return reader._tokens([cleaned(prompt, weighting)], tokenizer)[0]


def read_prompt(models: DemoModels, label: str, request: Request, tokens: Tokens) -> PromptReading:
    """How an encoder reads the tokens of a prompt; `tokens` by a tokenizer of its vocabulary."""
    reading, context_length = models.reading(label, request), models.encoders[label].context_length
    read = tokens.first(min(context_length, models.stock_context) - 2) if reading == "cut" else tokens
    return PromptReading(len(tokens.ids), tuple(split_text(read, context_length - 2, overlap=reading != "separate")))


def count_tokens(models: DemoModels, request: Request) -> PromptTokens:
    """A request's tokens, by the first encoder's tokenizer; an empty prompt has none.

    Fast enough for every key stroke, and safe while another thread generates.

    Raises:
        UserError: the prompt is too long, a weight is infinite, or there is no such encoder or reading.
    """
    check_text_settings(request, models)
    text = cleaned(without_weights(request.prompt, request.weighting), weighting=False)
    offsets = models.counter.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    starts = [0, *(start for start, _ in offsets[1:])] if offsets else []
    split = tokenize_prompt(request.prompt, models.counter, request.weighting)
    readings = {label: read_prompt(models, label, request, split) for label in request.encoders}
    ends = [reading.read for reading in readings.values()]
    tokens = [
        (text[start:end], "all" if place < min(ends) else "some" if place < max(ends) else "none")
        for place, (start, end) in enumerate(pairwise([*starts, len(text)]))
    ]
    return PromptTokens(tokens, len(_sentences(request)), readings)


def _sentences(request: Request) -> list[str]:
    text = without_weights(request.prompt, request.weighting)
    return [sentence for sentence in split_sentences(text) if clean(sentence)]


def attention(models: DemoModels, request: Request) -> dict[str, dict]:
    """How much EOT attends to each word of a prompt in the last layer, by label, as images are generated from it.

    An encoder that reads the prompt in several chunks has an EOT in each. Weights do not change the attention.

    Returns:
        for each encoder `reading` in words, and `chunks`: for each `first` and `end` (token numbers from 0), and `sot`,
        `eot` and `words` of `look_at_tokens`, with positions in the prompt.

    Raises:
        UserError: the prompt is empty or too long, or there is no such encoder.
    """
    check_text_settings(request, models)
    check_prompt(request.prompt)
    return {label: _attention(models, models.encoders[label], request) for label in request.encoders}


def _attention(models: DemoModels, encoder: Encoder, request: Request) -> dict:
    reader, split = encoder.reader(), tokenize_prompt(request.prompt, encoder.tokenizer, request.weighting)
    if not split.ids:
        raise UserError(f"The prompt {request.prompt[:80]!r} holds no words. Give some text.")
    reading = read_prompt(models, encoder.label, request, split)
    chunks = [
        {"first": chunk.read.start, "end": chunk.read.stop}
        | look_at_tokens(reader, [split.ids[at] for at in chunk.read], 1 + chunk.read.start)
        for chunk in reading.chunks
        if chunk.read
    ]
    return {"reading": reading.in_words(), "chunks": chunks}


def movement(models: DemoModels, request: Request) -> list[dict]:
    """How far each encoder's embedding moves when a sentence is removed, and when sentences 1 and 4 are swapped.

    The embedding is the hidden state at EOT after the final norm (transformers' pooler_output), or the projected
    feature (text_embeds) of an encoder with a projection; of a prompt in several chunks, the mean of the chunks', each
    divided by its norm. Each encoder reads the prompt as when images are generated from it, without weights and BREAK.
    Only the first 40 sentences are removed. With fewer than four sentences, the first and the last are swapped.

    Returns:
        first the swap, then each sentence removed, in order: `edit`, in words; `text`, the removed sentence, "" where
        sentences are swapped; `distance`, by label, 1 - cosine of the embeddings before and after, from 0 to 2, exactly
        0 if the encoder reads the same tokens before and after. Empty for a prompt of one sentence.

    Raises:
        UserError: the prompt is empty or too long, or there is no such encoder.
    """
    check_text_settings(request, models)
    check_prompt(request.prompt)
    sentences = _sentences(request)
    if len(sentences) < 2:
        return []
    removed = range(min(len(sentences), MOST_SENTENCES))
    edits = [(f"sentences 1 and {min(4, len(sentences))} swapped", "")]
    edits += [(f"sentence {place + 1} removed", sentences[place]) for place in removed]
    texts = [sentences, move4(sentences), *([*sentences[:place], *sentences[place + 1 :]] for place in removed)]
    joined = [join_sentences(parts) for parts in texts]
    distances = {label: _distances(models, models.encoders[label], joined, request) for label in request.encoders}
    return [
        {"edit": edit, "text": text, "distance": {label: values[place] for label, values in distances.items()}}
        for place, (edit, text) in enumerate(edits)
    ]


@torch.no_grad()
def _distances(models: DemoModels, encoder: Encoder, texts: Sequence[str], request: Request) -> list[float]:
    """1 - cosine of the first text's embedding and each further one's."""

    def chunk_ids(text: str) -> list[list[int]]:
        split = tokenize_prompt(text, encoder.tokenizer, weighting=False)
        return [
            [split.ids[at] for at in chunk.read] for chunk in read_prompt(models, encoder.label, request, split).chunks
        ]

    rows = list(map(chunk_ids, texts))
    # [chunks of all texts, width]
    features = _embeddings(encoder, [ids for chunks in rows for ids in chunks])
    means = [F.normalize(part, dim=-1).mean(dim=0) for part in features.split([len(chunks) for chunks in rows])]
    cosines = F.cosine_similarity(means[0][None], torch.stack(means[1:]))
    return [
        0.0 if chunks == rows[0] else max(0.0, 1.0 - cosine)
        for chunks, cosine in zip(rows[1:], cosines.tolist(), strict=True)
    ]


def _embeddings(encoder: Encoder, rows: list[list[int]]) -> torch.Tensor:
    """Token ids, each within the context length -> [rows, width], in double precision on the CPU."""
    tokenizer, projected = encoder.reader().tokenizer, isinstance(encoder.model, CLIPTextModelWithProjection)
    parts = []
    for at in range(0, len(rows), _BATCH):
        output = encoder.model(tokenizer.batch(rows[at : at + _BATCH]).padded().to(encoder.model.device))
        parts.append((output.text_embeds if projected else output.pooler_output).cpu().double())
    return torch.cat(parts)
