"""What encoders read of a prompt: its tokens, where they look, and what moves them."""

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
from .models import Encoder, Models
from .requests import check_is_text, check_labels, check_weights, unweighted

Window = Literal["original", "long", "further"]
MOST_SENTENCES = 40  # that are removed in turn, because each takes a run of every encoder
_AT_ONCE = 16  # texts encoded


@dataclass(frozen=True)
class Token:
    """One token of a prompt.

    Attributes:
        text: its characters and the white space behind them; of tokens that are bytes of one character, only the last
            has it.
        sentence: number of the sentence that it begins in, from 1.
        window: who reads it.
    """

    text: str
    sentence: int
    window: Window


@dataclass(frozen=True)
class Tokens:
    """A prompt's tokens, without those around the text.

    Attributes:
        tokens: all, in order. Their texts joined are the cleaned prompt.
        original: so many of the first are read by every encoder ("original"), also where prompts are cut.
        long: so many of the first are read by the longest encoder in one piece ("long"); any more are in its further
            windows ("further").
        sentences: how many there are.
    """

    tokens: tuple[Token, ...]
    original: int
    long: int
    sentences: int

    @property
    def count(self) -> int:
        return len(self.tokens)


def tokens(models: Models, prompt: str, weighting: bool = False) -> Tokens:
    """A prompt's tokens, counted by the first encoder's own tokenizer; an empty prompt has none.

    Fast enough to run at every key, and safe while something else is drawn.

    Raises:
        UserError: the prompt is too long, or its weights cannot be used; brackets that do not match yet may.
    """
    check_is_text("prompt", prompt)
    if weighting:
        check_weights("prompt", prompt, finished=False)
    text = unweighted(prompt, weighting)
    found = models.counter.encode(text, add_special_tokens=False)
    starts = [0, *(start for start, _ in found.offsets[1:])] if found.offsets else []
    limits = models.short_window - 2, models.long_window - 2
    sentences = _sentence_starts(prompt, text, weighting)
    its = tuple(
        Token(text[start:end], max(1, bisect_right(sentences, start)), _window(place, *limits))
        for place, (start, end) in enumerate(pairwise([*starts, len(text)]))
    )
    return Tokens(its, *limits, len(sentences))


def _window(place: int, original: int, long: int) -> Window:
    return "original" if place < original else "long" if place < long else "further"


def _sentence_starts(prompt: str, text: str, weighting: bool) -> list[int]:
    """Where in the cleaned text each sentence begins.

    Sentences are those of the prompt as it was written, because cleaning takes the capitals that tell where they
    begin. Cleaning a sentence or all of them comes to the same text, but for white space; where it does not, as when a
    broken character lies across two sentences, the sentences are those of the cleaned text.
    """
    if weighting:
        prompt = " ".join("".join(run for run, _ in part) for part in parse_weights(prompt))
    whole, sentences = "".join(text.split()), split_sentences(prompt)
    for cleaning in (str.lower, clean):  # nearly always the first does, and it is much faster
        own = ["".join(cleaning(sentence).split()) for sentence in sentences]
        if "".join(own) == whole:
            break
    else:
        own = ["".join(sentence.split()) for sentence in split_sentences(text)]
    places = [place for place, character in enumerate(text) if not character.isspace()]
    ends = accumulate(map(len, own))
    return [places[end - len(its)] for its, end in zip(own, ends, strict=True) if its]


def attention(models: Models, prompt: str, labels: Sequence[str]) -> dict[str, dict]:
    """How much EOT attends to each word of a prompt in the last layer, by label; see `eval.attention.look_at_prompt`.

    Each encoder reads the prompt as a caption: what exceeds its window is cut, and weights are text.

    Raises:
        UserError: the prompt is empty or too long, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    return {its.label: look_at_prompt(its.reader(), prompt) for its in _chosen(models, labels)}


@dataclass(frozen=True)
class Moved:
    """What an edit of a prompt does to each encoder's embedding.

    Attributes:
        edit: in words, such as "sentence 3 removed".
        text: the sentence that is removed; "" where sentences are swapped.
        distance: by label, 1 - cosine of the embeddings before and after, from 0 to 2; exactly 0 where the encoder
            reads the same tokens before and after.
    """

    edit: str
    text: str
    distance: dict[str, float]


def movement(models: Models, prompt: str, labels: Sequence[str]) -> list[Moved]:
    """How far each encoder's embedding of a prompt moves when a sentence is removed, and when 1 and 4 are swapped.

    The embedding is the hidden state at EOT after the final norm (transformers' pooler_output), or, of an encoder with
    a projection, its projected feature (text_embeds). Each encoder reads the prompt as a caption, cut at its window.
    Sentences past the 40th stay where they are. Of fewer than four sentences, the first and the last are swapped.

    Returns:
        first the swap, then each sentence removed, in order

    Raises:
        UserError: the prompt is empty, too long, or a single sentence, or there is no such encoder.
    """
    check_is_text("prompt", prompt)
    check_prompt(prompt)
    sentences = [sentence for sentence in split_sentences(prompt) if clean(sentence)]
    if len(sentences) < 2:
        raise UserError("The prompt is one sentence, so that none can be removed or swapped. Give at least two.")
    removed = range(min(len(sentences), MOST_SENTENCES))
    edits = [(f"sentences 1 and {min(4, len(sentences))} swapped", "")]
    edits += [(f"sentence {place + 1} removed", sentences[place]) for place in removed]
    texts = [move4(sentences), *([*sentences[:place], *sentences[place + 1 :]] for place in removed)]
    joined = [join_sentences(its) for its in (sentences, *texts)]
    found = {its.label: _distances(its, joined) for its in _chosen(models, labels)}
    return [Moved(*edit, {label: its[place] for label, its in found.items()}) for place, edit in enumerate(edits)]


def _chosen(models: Models, labels: Sequence[str]) -> list[Encoder]:
    return [models.encoders[label] for label in check_labels(labels, models)]


@torch.no_grad()
def _distances(encoder: Encoder, texts: Sequence[str]) -> list[float]:
    """1 - cosine of each further text's embedding and the first one's."""
    reader = encoder.reader()
    ids = reader.tokenizer.text_ids(list(texts))
    features = torch.cat(
        [
            _embedding(encoder, reader.tokenizer.batch(ids[start : start + _AT_ONCE]).padded())
            for start in range(0, len(ids), _AT_ONCE)
        ]
    )
    cosines = F.cosine_similarity(features[:1], features[1:])
    return [
        0.0 if own == ids[0] else max(0.0, 1.0 - cosine) for own, cosine in zip(ids[1:], cosines.tolist(), strict=True)
    ]


def _embedding(encoder: Encoder, rows: torch.Tensor) -> torch.Tensor:
    """Ids [texts, window] -> [texts, width], in double precision on the CPU."""
    output = encoder.model(rows.to(encoder.model.device))
    projected = isinstance(encoder.model, CLIPTextModelWithProjection)
    return (output.text_embeds if projected else output.pooler_output).cpu().double()
