"""What the encoders read of a prompt: its tokens, the attention to its words, and the effect of its sentences."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import CLIPTextModelWithProjection

from debias_diffusion.errors import UserError
from debias_diffusion.eval.text_image.attention import look_at_prompt
from debias_diffusion.eval.text_image.robustness import move4
from debias_diffusion.methods.sampling import join_sentences
from debias_diffusion.pipelines import parse_weights
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import clean

from ..generate.prompts import check_prompt
from .checks import check_is_text, check_labels, check_weights, unweighted
from .models import DemoModels, Encoder

Reader = Literal["original", "long", "further"]
MOST_SENTENCES = 40  # removed in turn: each takes a run of every encoder
_BATCH = 16  # texts encoded at once


@dataclass(frozen=True)
class Token:
    """One token of a prompt.

    Attributes:
        text: its characters and the white space after them; if several tokens are bytes of one character, the last one
            has the character.
        sentence: number of the sentence it begins in, from 1.
        window: "original": every encoder reads it; "long": encoders of the longest context length; "further": it lies
            beyond the longest context length.
    """

    text: str
    sentence: int
    window: Reader


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's tokens, without BOS and EOS.

    Attributes:
        tokens: all, in order. Their joined texts are the cleaned prompt.
        original: number of first tokens that every encoder reads, even where prompts are cut.
        long: number of first tokens within the longest context length; the longest encoder reads further ones in
            further chunks.
        sentences: number of sentences.
    """

    tokens: tuple[Token, ...]
    original: int
    long: int
    sentences: int

    @property
    def count(self) -> int:
        return len(self.tokens)


def tokens(models: DemoModels, prompt: str, weighting: bool = False) -> PromptTokens:
    """A prompt's tokens, by the first encoder's tokenizer; an empty prompt has none.

    Fast enough for every key stroke, and safe while another thread draws.

    Raises:
        UserError: the prompt is too long, or its weights cannot be used. Unmatched brackets are allowed.
    """
    check_is_text("prompt", prompt)
    if weighting:
        check_weights("prompt", prompt, finished=False)
    text = unweighted(prompt, weighting)
    offsets = models.counter.encode(text, add_special_tokens=False).offsets
    starts = [0, *(start for start, _ in offsets[1:])] if offsets else []
    limits = models.stock_context - 2, models.longest_context - 2
    sentences = _sentence_starts(prompt, text, weighting)
    prompt_tokens = tuple(
        Token(text[start:end], max(1, bisect_right(sentences, start)), _reader(place, *limits))
        for place, (start, end) in enumerate(pairwise([*starts, len(text)]))
    )
    return PromptTokens(prompt_tokens, *limits, len(sentences))


def _reader(place: int, original: int, long: int) -> Reader:
    return "original" if place < original else "long" if place < long else "further"


def _sentence_starts(prompt: str, text: str, weighting: bool) -> list[int]:
    """Where in the cleaned text each sentence begins.

    Sentences are split in the prompt as written, because cleaning removes the capitals that mark their beginning.
    Cleaning each sentence gives the same text as cleaning the prompt, apart from white space. If not, as when a broken
    character spans two sentences, the cleaned text is split instead.
    """
    if weighting:
        prompt = " ".join("".join(run for run, _ in part) for part in parse_weights(prompt))
    whole, sentences = "".join(text.split()), split_sentences(prompt)
    for cleaning in (str.lower, clean):  # the first almost always suffices, and is much faster
        cleaned = ["".join(cleaning(sentence).split()) for sentence in sentences]
        if "".join(cleaned) == whole:
            break
    else:
        cleaned = ["".join(sentence.split()) for sentence in split_sentences(text)]
    places = [place for place, character in enumerate(text) if not character.isspace()]
    ends = accumulate(map(len, cleaned))
    return [places[end - len(sentence)] for sentence, end in zip(cleaned, ends, strict=True) if sentence]


def attention(models: DemoModels, prompt: str, labels: Sequence[str]) -> dict[str, dict]:
    """How much EOT attends to each word of a prompt in the last layer, by label; see `look_at_prompt`.

    Each encoder reads the prompt as a caption: cut at its context length, with weights as text.

    Raises:
        UserError: the prompt is empty or too long, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    return {encoder.label: look_at_prompt(encoder.reader(), prompt) for encoder in _chosen(models, labels)}


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


def movement(models: DemoModels, prompt: str, labels: Sequence[str]) -> list[Movement]:
    """How far each encoder's embedding moves when a sentence is removed, and when sentences 1 and 4 are swapped.

    The embedding is the hidden state at EOT after the final norm (transformers' pooler_output), or the projected
    feature (text_embeds) of an encoder with a projection. Each encoder reads the prompt as a caption, cut at its
    context length. Only the first 40 sentences are removed. With fewer than four sentences, the first and the last are
    swapped.

    Returns:
        first the swap, then each sentence removed, in order

    Raises:
        UserError: the prompt is empty, too long, or a single sentence, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    sentences = [sentence for sentence in split_sentences(prompt) if clean(sentence)]
    if len(sentences) < 2:
        raise UserError("The prompt has one sentence, so none can be removed or swapped. Give at least two.")
    removed = range(min(len(sentences), MOST_SENTENCES))
    edits = [(f"sentences 1 and {min(4, len(sentences))} swapped", "")]
    edits += [(f"sentence {place + 1} removed", sentences[place]) for place in removed]
    texts = [move4(sentences), *([*sentences[:place], *sentences[place + 1 :]] for place in removed)]
    joined = [join_sentences(parts) for parts in (sentences, *texts)]
    distances = {encoder.label: _distances(encoder, joined) for encoder in _chosen(models, labels)}
    return [
        Movement(*edit, {label: values[place] for label, values in distances.items()})
        for place, edit in enumerate(edits)
    ]


def _chosen(models: DemoModels, labels: Sequence[str]) -> list[Encoder]:
    return [models.encoders[label] for label in check_labels(labels, models)]


@torch.no_grad()
def _distances(encoder: Encoder, texts: Sequence[str]) -> list[float]:
    """1 - cosine of the first text's embedding and each further one's."""
    reader = encoder.reader()
    ids = reader.tokenizer.text_ids(list(texts))
    features = torch.cat(
        [
            _embedding(encoder, reader.tokenizer.batch(ids[start : start + _BATCH]).padded())
            for start in range(0, len(ids), _BATCH)
        ]
    )
    cosines = F.cosine_similarity(features[:1], features[1:])
    return [
        0.0 if row == ids[0] else max(0.0, 1.0 - cosine) for row, cosine in zip(ids[1:], cosines.tolist(), strict=True)
    ]


def _embedding(encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    """Ids [texts, context_length] -> [texts, width], in double precision on the CPU."""
    output = encoder.model(rows.to(encoder.model.device))
    projected = isinstance(encoder.model, CLIPTextModelWithProjection)
    return (output.text_embeds if projected else output.pooler_output).cpu().double()
