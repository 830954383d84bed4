"""What the encoders read of a prompt: its tokens, the attention to its words, and the effect of its sentences."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from debias_diffusion.errors import UserError
from debias_diffusion.eval.caption_edits import swap_first
from debias_diffusion.methods.sampling import join_sentences
from debias_diffusion.pipelines.rendering.prompts import cleaned
from debias_diffusion.text.chunks import Chunk
from debias_diffusion.text.options import LongPromptOptions
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import CaptionTokenizer, clean

from ..prompts import check_prompt
from .models import DemoModels
from .request import Request, check_texts, read_texts

MOST_SENTENCES = 40  # removed in turn: each takes a run of every encoder


@dataclass(frozen=True)
class PromptReading:
    """How one encoder reads a prompt when images are generated from it."""

    ids: list[int]  # of the prompt's tokens, without BOS and EOS
    chunks: list[Chunk]  # what it reads at once, by token numbers from 0, in order; at least one
    text: str  # the prompt as it is tokenized
    warnings: tuple[str, ...]  # what the prompt holds that is not read, in sentences

    @property
    def read(self) -> int:
        """Number of first tokens that the encoder reads."""
        return self.chunks[-1].kept.stop

    def in_words(self) -> str:
        """Such as "reads all 93 tokens in 2 overlapping chunks: 1 to 75, 44 to 93"."""
        count, chunks = f"{len(self.ids):,}", self.chunks
        if self.read < len(self.ids):
            return f"reads the first {self.read:,} of {count} tokens"
        if len(chunks) < 2:
            return f"reads all {count} tokens at once"
        kind = "overlapping" if any(chunk.reread for chunk in chunks) else "separate"
        places = ", ".join(f"{chunk.read.start + 1:,} to {chunk.read.stop:,}" for chunk in chunks)
        return f"reads all {count} tokens in {len(chunks):,} {kind} chunks: {places}"


def read_prompt(models: DemoModels, label: str, prompt: str, options: LongPromptOptions) -> PromptReading:
    plan = read_texts(models, label, options, cleaned(prompt, options))
    part = plan.prompts.encoders[0].parts[0]
    return PromptReading(part.tokens.ids + part.rest, part.chunks, plan.text, tuple(plan.unread.values()))


def count_tokens(
    models: DemoModels, request: Request
) -> tuple[list[tuple[str, Literal["all", "some", "none"]]], int, dict[str, PromptReading]]:
    """A request's tokens, by the first encoder's tokenizer; an empty prompt has none.

    Fast enough for every key stroke, and safe while another thread generates.

    Returns:
        of each token its characters and the white space after them (if several tokens are bytes of one character, the
        last one has the character), and whether all, some or none of the encoders read it, the joined texts being the
        prompt as it is tokenized; the number of sentences; how each encoder reads the tokens, by label

    Raises UserError as `check_texts`, and for a weight that is infinite.
    """
    options = check_texts(request, models)
    readings = {label: read_prompt(models, label, request.prompt, chosen) for label, chosen in options.items()}
    text = next(iter(readings.values())).text
    offsets = models.counter.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    starts = [0, *(start for start, _ in offsets[1:])] if offsets else []
    ends = [reading.read for reading in readings.values()]
    tokens = [
        (text[start:end], "all" if place < min(ends) else "some" if place < max(ends) else "none")
        for place, (start, end) in enumerate(pairwise([*starts, len(text)]))
    ]
    return tokens, len(_sentences(models, request, options)), readings


def _sentences(models: DemoModels, request: Request, options: dict[str, LongPromptOptions]) -> list[str]:
    """Of the prompt as it is written, without signs of weights."""
    text = read_texts(models, *next(iter(options.items())), request.prompt).text
    return [sentence for sentence in split_sentences(text) if clean(sentence)]


def attention(models: DemoModels, request: Request) -> dict[str, dict]:
    """How much EOT attends to each word of a prompt in the last layer, by label, as images are generated from it.

    An encoder that reads the prompt in several chunks has an EOT in each. Weights do not change the attention.

    Returns:
        for each encoder `reading` in words, and `chunks`: for each `first` and `end` (token numbers from 0), and `sot`,
        `eot` and `words` of `look_at_tokens`, with positions in the prompt.

    Raises UserError for an empty prompt, and as `check_texts`.
    """
    from debias_diffusion.eval.attention import CaptionReader, look_at_tokens  # matplotlib takes a while to import

    check_prompt(request.prompt)
    shares = {}
    for label, options in check_texts(request, models).items():
        pipe, reading = models.encoders[label], read_prompt(models, label, request.prompt, options)
        if not reading.ids:
            raise UserError(f"The prompt {request.prompt[:80]!r} holds no words. Give some text.")
        captions = CaptionTokenizer(pipe.tokenizer, pipe.text_encoder.config.max_position_embeddings)
        reader = CaptionReader(pipe.text_encoder, captions, models.renderer.device)
        chunks = [
            {"first": chunk.read.start, "end": chunk.read.stop}
            | look_at_tokens(reader, [reading.ids[at] for at in chunk.read], 1 + chunk.read.start)
            for chunk in reading.chunks
            if chunk.read
        ]
        shares[label] = {"reading": reading.in_words(), "chunks": chunks}
    return shares


@torch.no_grad()
def movement(models: DemoModels, request: Request) -> dict[str, dict[str, float]]:
    """How far each encoder's embedding moves when a sentence is removed, and when sentences 1 and 4 are swapped.

    The embedding is the hidden state at EOT after the final norm (transformers' pooler_output), or the projected
    feature (text_embeds) of an encoder with a projection; of a prompt in several chunks, the mean of the chunks', each
    divided by its norm. Each encoder reads the prompt as when images are generated from it, without weights and BREAK.
    Only the first 40 sentences are removed. With fewer than four sentences, the first and the last are swapped.

    Returns:
        by the edit in words, first the swap, then each sentence removed, in order: by label, 1 - cosine of the
        embeddings before and after, from 0 to 2, exactly 0 if the encoder reads the same tokens before and after. Empty
        for a prompt of one sentence.

    Raises UserError for an empty prompt, and as `check_texts`.
    """
    check_prompt(request.prompt)
    options = check_texts(request, models)
    sentences = _sentences(models, request, options)
    if len(sentences) < 2:
        return {}
    edits = {f"sentences 1 and {min(4, len(sentences))} swapped": swap_first(4, sentences)}
    for place, sentence in enumerate(sentences[:MOST_SENTENCES]):
        edits[f"sentence {place + 1} removed: {sentence}"] = [*sentences[:place], *sentences[place + 1 :]]

    def embedding(label: str, parts: list[str]) -> tuple[list[list[int]], torch.Tensor]:
        """The ids that an encoder reads in each chunk, and the mean of their embeddings."""
        encoder, tokenizer = models.encoders[label].text_encoder, models.encoders[label].tokenizer
        reading = read_prompt(models, label, join_sentences(parts), replace(options[label], emphasis="none"))
        rows, features = [[reading.ids[at] for at in chunk.read] for chunk in reading.chunks], []
        for ids in rows:
            row = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
            output = encoder(torch.tensor([row], device=models.renderer.device))
            features.append(getattr(output, "text_embeds", getattr(output, "pooler_output", None))[0].cpu().double())
        return rows, torch.stack([feature / feature.norm() for feature in features]).mean(dim=0)

    moved: dict[str, dict[str, float]] = {edit: {} for edit in edits}
    for label in request.encoders:
        ids, before = embedding(label, sentences)
        for edit, parts in edits.items():
            edited_ids, after = embedding(label, parts)
            distance = max(0.0, 1.0 - torch.cosine_similarity(before, after, dim=0).item())
            moved[edit][label] = 0.0 if edited_ids == ids else distance
    return moved
