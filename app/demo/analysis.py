"""What the encoders read of a prompt: its tokens, the attention to its words, and the effect of its sentences."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import CLIPTextModelWithProjection

from debias_diffusion.errors import UserError
from debias_diffusion.eval.attention import Reader, look_at_tokens
from debias_diffusion.eval.robustness import move4
from debias_diffusion.methods.sampling import join_sentences
from debias_diffusion.pipelines import parse_weights
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import clean

from ..prompts import check_prompt
from .checks import check_is_text, check_labels, check_long_prompts, check_weights, shown, unweighted
from .models import DemoModels, Encoder
from .prompt_reading import PromptReading, encoder_chunks, prompt_reading, tokenize_prompt
from .request import LongPrompts

ReadBy = Literal["all", "some", "none"]
MOST_SENTENCES = 40  # removed in turn: each takes a run of every encoder
_BATCH = 16  # texts encoded at once


@dataclass(frozen=True)
class Token:
    """One token of a prompt.

    Attributes:
        text: its characters and the white space after them; if several tokens are bytes of one character, the last one
            has the character.
        sentence: number of the sentence it begins in, from 1.
        read_by: whether all, some or none of the encoders read it when images are generated.
    """

    text: str
    sentence: int
    read_by: ReadBy


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens, without BOS and EOS.

    Attributes:
        tokens: all, in order. Their joined texts are the cleaned prompt.
        sentences: number of sentences.
        readings: how each encoder reads them, by label.
    """

    tokens: tuple[Token, ...]
    sentences: int
    readings: dict[str, PromptReading]

    @property
    def count(self) -> int:
        return len(self.tokens)


def tokens(
    models: DemoModels,
    prompt: str,
    weighting: bool = False,
    labels: Sequence[str] | None = None,
    long_prompts: LongPrompts = "auto",
) -> PromptTokens:
    """A prompt's tokens, by the first encoder's tokenizer; an empty prompt has none.

    Fast enough for every key stroke, and safe while another thread draws.

    Args:
        models: the demo's models.
        prompt: any text.
        weighting: read weights.
        labels: of the encoders that read the prompt; None for all.
        long_prompts: how they read it, as in a request.

    Raises:
        UserError: the prompt is too long, its weights cannot be used, or there is no such encoder or way to read.
            Unmatched brackets are allowed.
    """
    check_is_text("prompt", prompt)
    check_long_prompts(long_prompts)
    labels = models.labels if labels is None else check_labels(labels, models)
    if weighting:
        check_weights("prompt", prompt, finished=False)
    text = unweighted(prompt, weighting)
    offsets = models.counter.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    starts = [0, *(start for start, _ in offsets[1:])] if offsets else []
    split = tokenize_prompt(prompt, models.counter, weighting)
    readings = {label: prompt_reading(models, label, split, long_prompts) for label in labels}
    ends = [reading.read for reading in readings.values()]
    sentences = _sentence_starts(prompt, text, weighting)
    prompt_tokens = tuple(
        Token(text[start:end], max(1, bisect_right(sentences, start)), _read_by(place, ends))
        for place, (start, end) in enumerate(pairwise([*starts, len(text)]))
    )
    return PromptTokens(prompt_tokens, len(sentences), readings)


def _read_by(place: int, ends: Sequence[int]) -> ReadBy:
    """Who reads a token, by the number of first tokens that each encoder reads."""
    return "all" if place < min(ends) else "some" if place < max(ends) else "none"


def _sentence_starts(prompt: str, text: str, weighting: bool) -> list[int]:
    """Where in the cleaned text each sentence begins.

    Sentences are split in the prompt as written, because cleaning removes the capitals that mark their beginning.
    Cleaning each sentence gives the same text as cleaning the prompt, apart from white space. If not, as when a broken
    character spans two sentences, the cleaned text is split instead.
    """
    whole, sentences = "".join(text.split()), split_sentences(_plain(prompt, weighting))
    for cleaning in (str.lower, clean):  # the first almost always suffices, and is much faster
        cleaned = ["".join(cleaning(sentence).split()) for sentence in sentences]
        if "".join(cleaned) == whole:
            break
    else:
        cleaned = ["".join(sentence.split()) for sentence in split_sentences(text)]
    places = [place for place, character in enumerate(text) if not character.isspace()]
    ends = accumulate(map(len, cleaned))
    return [places[end - len(sentence)] for sentence, end in zip(cleaned, ends, strict=True) if sentence]


def attention(
    models: DemoModels,
    prompt: str,
    labels: Sequence[str],
    weighting: bool = False,
    long_prompts: LongPrompts = "auto",
) -> dict[str, dict]:
    """How much EOT attends to each word of a prompt in the last layer, by label, as images are generated from it.

    An encoder that reads the prompt in several chunks has an EOT in each. Weights do not change the attention.

    Returns:
        for each encoder `tokens`, the number of the prompt's, `read`, how many of them it reads, and `chunks`: for each
        chunk `first`, `new` and `end` (see `PromptChunk`), and `sot`, `eot` and `words` of `look_at_tokens`, with
        positions in the prompt.

    Raises:
        UserError: the prompt is empty or too long, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    check_long_prompts(long_prompts)
    return {
        encoder.label: _attention(models, encoder, prompt, weighting, long_prompts)
        for encoder in _chosen(models, labels)
    }


def _attention(models: DemoModels, encoder: Encoder, prompt: str, weighting: bool, long_prompts: LongPrompts) -> dict:
    reader, split = encoder.reader(), tokenize_prompt(prompt, encoder.tokenizer, weighting)
    if not split.ids:
        raise UserError(f"The prompt {shown(prompt)} holds no words. Give some text.")
    reading = prompt_reading(models, encoder.label, split, long_prompts)
    chunks = [
        asdict(chunk) | look_at_tokens(reader, split.ids[chunk.first : chunk.end], 1 + chunk.first)
        for chunk in reading.chunks
        if chunk.first < chunk.end
    ]
    return {"tokens": reading.tokens, "read": reading.read, "chunks": chunks}


@dataclass(frozen=True)
class Movement:
    """How far an edit of a prompt moves each encoder's embedding.

    Attributes:
        edit: a description, such as "sentence 3 removed".
        text: the removed sentence; "" where sentences are swapped.
        distance: by label, 1 - cosine of the embeddings before and after, from 0 to 2; exactly 0 if the encoder
            reads the same tokens before and after.
    """

    edit: str
    text: str
    distance: dict[str, float]


def movement(
    models: DemoModels,
    prompt: str,
    labels: Sequence[str],
    weighting: bool = False,
    long_prompts: LongPrompts = "auto",
) -> list[Movement]:
    """How far each encoder's embedding moves when a sentence is removed, and when sentences 1 and 4 are swapped.

    The embedding is the hidden state at EOT after the final norm (transformers' pooler_output), or the projected
    feature (text_embeds) of an encoder with a projection; of a prompt in several chunks, the mean of the chunks', each
    divided by its norm. Each encoder reads the prompt as when images are generated from it, without weights and BREAK.
    Only the first 40 sentences are removed. With fewer than four sentences, the first and the last are swapped.

    Returns:
        first the swap, then each sentence removed, in order

    Raises:
        UserError: the prompt is empty, too long, or a single sentence, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    check_long_prompts(long_prompts)
    sentences = [sentence for sentence in split_sentences(_plain(prompt, weighting)) if clean(sentence)]
    if len(sentences) < 2:
        raise UserError("The prompt has one sentence, so none can be removed or swapped. Give at least two.")
    removed = range(min(len(sentences), MOST_SENTENCES))
    edits = [(f"sentences 1 and {min(4, len(sentences))} swapped", "")]
    edits += [(f"sentence {place + 1} removed", sentences[place]) for place in removed]
    texts = [move4(sentences), *([*sentences[:place], *sentences[place + 1 :]] for place in removed)]
    joined = [join_sentences(parts) for parts in (sentences, *texts)]
    distances = {
        encoder.label: _distances(models, encoder, joined, long_prompts) for encoder in _chosen(models, labels)
    }
    return [
        Movement(*edit, {label: values[place] for label, values in distances.items()})
        for place, edit in enumerate(edits)
    ]


def _plain(prompt: str, weighting: bool) -> str:
    """A prompt as written, without the syntax of weights."""
    return " ".join("".join(run for run, _ in part) for part in parse_weights(prompt)) if weighting else prompt


def _chosen(models: DemoModels, labels: Sequence[str]) -> list[Encoder]:
    return [models.encoders[label] for label in check_labels(labels, models)]


@torch.no_grad()
def _distances(models: DemoModels, encoder: Encoder, texts: Sequence[str], long_prompts: LongPrompts) -> list[float]:
    """1 - cosine of the first text's embedding and each further one's."""

    def chunk_ids(text: str) -> list[list[int]]:
        split = tokenize_prompt(text, encoder.tokenizer, weighting=False)
        chunks = encoder_chunks(models, encoder.label, split, long_prompts)
        return [split.ids[chunk.read.start : chunk.read.stop] for chunk in chunks]

    reader, rows = encoder.reader(), list(map(chunk_ids, texts))
    # [chunks of all texts, width]
    features = _embeddings(encoder, reader, [ids for chunks in rows for ids in chunks])
    means = [F.normalize(part, dim=-1).mean(dim=0) for part in features.split([len(chunks) for chunks in rows])]
    cosines = F.cosine_similarity(means[0][None], torch.stack(means[1:]))
    return [
        0.0 if chunks == rows[0] else max(0.0, 1.0 - cosine)
        for chunks, cosine in zip(rows[1:], cosines.tolist(), strict=True)
    ]


def _embeddings(encoder: Encoder, reader: Reader, rows: Sequence[list[int]]) -> torch.Tensor:
    """Token ids, each within the context length -> [rows, width], in double precision on the CPU."""
    batches = [reader.tokenizer.batch(list(rows[at : at + _BATCH])).padded() for at in range(0, len(rows), _BATCH)]
    return torch.cat([_embedding(encoder, batch) for batch in batches])


def _embedding(encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    """Ids [texts, context_length] -> [texts, width], in double precision on the CPU."""
    output = encoder.model(rows.to(encoder.model.device))
    projected = isinstance(encoder.model, CLIPTextModelWithProjection)
    return (output.text_embeds if projected else output.pooler_output).cpu().double()
