"""How a first encoder reads a prompt when images are generated from it: how many of its tokens, and in which chunks."""

from dataclasses import dataclass

from transformers import CLIPTokenizer

from debias_diffusion.chunks import Chunk, Tokens, split_text
from debias_diffusion.pipelines import SDXLLongPromptMixin
from debias_diffusion.pipelines.rendering import cleaned

from .models import DemoModels, first_tokens
from .request import LongPrompts


@dataclass(frozen=True)
class PromptChunk:
    """A part of a prompt that an encoder reads at once, by token numbers from 0, BOS and EOS not counted.

    Attributes:
        first: where it begins.
        new: where its hidden states are used from; the tokens before it were read with the chunk before.
        end: behind its last token.
    """

    first: int
    new: int
    end: int


@dataclass(frozen=True)
class PromptReading:
    """How one encoder reads a prompt.

    Attributes:
        tokens: number of the prompt's tokens.
        read: number of first tokens that the encoder reads.
        chunks: what it reads at once, in order; one if the prompt fits.
    """

    tokens: int
    read: int
    chunks: tuple[PromptChunk, ...]

    def in_words(self) -> str:
        """Such as "reads all 93 tokens in 2 overlapping chunks"."""
        if self.read < self.tokens:
            return f"reads the first {self.read:,} of {self.tokens:,} tokens"
        if len(self.chunks) < 2:
            return f"reads all {self.tokens:,} tokens at once"
        overlapping = "overlapping " if any(chunk.first < chunk.new for chunk in self.chunks) else ""
        return f"reads all {self.tokens:,} tokens in {len(self.chunks):,} {overlapping}chunks"


def tokenize_prompt(prompt: str, tokenizer: CLIPTokenizer, weighting: bool) -> Tokens:
    """A prompt's tokens as the pipelines read them, with the best places to end a chunk."""
    reader = SDXLLongPromptMixin().set_long_prompt(weighting=weighting)
    return reader._tokens([cleaned(prompt, weighting)], tokenizer)[0]


def encoder_chunks(models: DemoModels, label: str, tokens: Tokens, long_prompts: LongPrompts) -> list[Chunk]:
    """The chunks in which an encoder reads a prompt, at least one; the first tokens only where it cuts prompts."""
    how_read, context_length = models.how_read(label, long_prompts), models.encoders[label].context_length
    if how_read == "cut":
        tokens = first_tokens(tokens, min(context_length, models.stock_context))
    return split_text(tokens, context_length - 2, overlap=how_read != "separate")


def prompt_reading(models: DemoModels, label: str, tokens: Tokens, long_prompts: LongPrompts) -> PromptReading:
    """How an encoder reads a prompt.

    Args:
        models: the demo's models.
        label: the encoder.
        tokens: of the prompt, by a tokenizer of the encoder's vocabulary.
        long_prompts: of the request.
    """
    chunks = encoder_chunks(models, label, tokens, long_prompts)
    parts = tuple(PromptChunk(chunk.read.start, chunk.kept.start, chunk.kept.stop) for chunk in chunks)
    return PromptReading(len(tokens.ids), parts[-1].end, parts)
