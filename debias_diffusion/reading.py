"""Texts of any length through one text encoder, in chunks whose hidden states are joined. Needs no pipeline."""

import itertools
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chunks import Cut, Tokens, join_chunks, lacks_pads, split_text, tokenize_text, weigh

# From an encoder and ids [rows, positions]: hidden states [rows, positions, width], and pooled [rows, width] or None.
States = Callable[[PreTrainedModel, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def penultimate_states(
    encoder: PreTrainedModel, ids: torch.Tensor, clip_skip: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What SDXL's UNet was trained with: the layer before the last, or `clip_skip` layers before that, and pooled."""
    output = encoder(ids, output_hidden_states=True)
    return output.hidden_states[-2 - (clip_skip or 0)], getattr(output, "text_embeds", None)


def last_states(
    encoder: PreTrainedModel,
    ids: torch.Tensor,
    clip_skip: int | None = None,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """What SD 1.5's UNet was trained with: the last layer, or `clip_skip` layers before it, through the final norm."""
    output = encoder(ids, attention_mask=attention_mask, output_hidden_states=bool(clip_skip))
    if not clip_skip:
        return output[0], None
    norm = getattr(encoder, "text_model", encoder).final_layer_norm  # transformers 5 has no such part
    states, device = output.hidden_states[-1 - clip_skip], norm.weight.device  # "meta": the norm fetches its weights
    return norm(states if device.type == "meta" else states.to(device)), None


def encode_texts(
    encoder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str | Tokens],
    length: int,
    *,
    overlap: bool = True,
    states: States = penultimate_states,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an encoder gives a UNet for texts of any length, with gradients.

    Args:
        texts: each as it is, or its tokens from `chunks.tokenize_text` or `tokenize_parts`.
        length: positions of the result, at least those of the longest text, BOS and EOS.
        overlap: read each chunk but the first together with the end of the text before it.
        states: runs the encoder; the ids are on `device`. `penultimate_states` for SDXL, `last_states` for SD 1.5.
        device: of the results; the encoder's if None.

    Returns:
        hidden states [texts, length, width]; pooled embeddings [texts, pooled width] of the first chunks, None for an
        encoder without a projection.

    Raises:
        ValueError: a text does not fit the length.
    """
    device = device or encoder.device
    texts = [tokenize_text(text, tokenizer)[0] if isinstance(text, str) else text for text in texts]
    if (longest := max(len(text.ids) for text in texts)) + 2 > length:
        raise ValueError(f"a text of {longest} tokens, BOS and EOS do not fit {length} positions: shorten it.")
    context = context_length(encoder, length)
    split = [split_text(text, context - 2, overlap) for text in texts]  # [texts][chunks]
    chunks = [(text, chunk) for text, parts in zip(texts, split, strict=True) for chunk in parts]
    rows = [[text.ids[at] for at in chunk.read] for text, chunk in chunks]
    weights = [[text.weights[at] for at in chunk.read] for text, chunk in chunks]
    weighted = any(weight != 1 for row in weights for weight in row)
    # The pads of one empty chunk serve all texts whose last chunk has too few.
    lacking = any(lacks_pads(parts, context, length) for parts in split)
    ids = _chunk_ids(rows + [[]] * (lacking or weighted), context, tokenizer)
    row_states, pooled = states(encoder, ids.to(device))
    chunk_states, empty = row_states[: len(rows)].to(device), row_states[-1].to(device) if lacking or weighted else None
    if weighted:
        padded = [[1.0, *row] + [1.0] * (context - 1 - len(row)) for row in weights]
        chunk_states = weigh(chunk_states, torch.tensor(padded), empty)
    counts = [len(parts) for parts in split]
    joined = [
        join_chunks(text_states, parts, empty, length)
        for text_states, parts in zip(chunk_states.split(counts), split, strict=True)
    ]
    first_chunks = list(itertools.accumulate([0, *counts[:-1]]))
    return torch.stack(joined), None if pooled is None else pooled[first_chunks]


def context_length(encoder: PreTrainedModel, positions: int | None = None) -> int:
    """The encoder's context length, at most `positions`."""
    length = encoder.config.max_position_embeddings
    return length if positions is None else min(length, positions)


def tokenize_parts(parts: Sequence[Sequence[tuple[str, float]]], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of a text in parts that begin new chunks, each of runs of text with weights (`parse_weights`)."""
    tokens = [_part_tokens(part, tokenizer) for part in parts]
    tokens = [part for part in tokens if part.ids] or tokens[:1]
    for part in tokens[:-1]:
        part.cuts[-1] = Cut.BREAK
    return Tokens(*(list(itertools.chain(*column)) for column in zip(*tokens, strict=True)))


def _part_tokens(runs: Sequence[tuple[str, float]], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of weighted runs of text, tokenized as one text."""
    tokens, spans = tokenize_text("".join(run for run, _ in runs), tokenizer)
    character_weights = [weight for run, weight in runs for _ in run]
    return tokens._replace(weights=[character_weights[start] for start, _ in spans])


def _chunk_ids(rows: list[list[int]], length: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """[rows, length] ids `[BOS, row, EOS, pads]`, with the tokenizer's pad token."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return torch.tensor([[bos, *row, eos] + [pad] * (length - 2 - len(row)) for row in rows])
