"""Texts of any length through one text encoder, in chunks whose hidden states are joined. Needs no pipeline."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import convert_slow_tokenizer

from .chunks import (
    PROGRAMS,
    TRAINED_POSITIONS,
    Breaks,
    Emphasis,
    Part,
    Reading,
    Tokens,
    join_runs,
    positions_of,
    rate_cuts,
    rate_cuts_of_program,
    split_text,
    weigh,
)
from .weighting import check_weight, parse_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes seconds

# From an encoder and ids [rows, positions]: hidden states [rows, positions, width], and pooled [rows, width] or None.
States = Callable[["PreTrainedModel", torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def penultimate_states(
    encoder: "PreTrainedModel", ids: torch.Tensor, clip_skip: int | None = None, eos_token_id: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What SDXL's UNet was trained with: the layer before the last, or `clip_skip` layers before that, and pooled.

    Args:
        eos_token_id: pooled embeddings are of its first place, even if the encoder pools at the highest id.
    """
    output = encoder(ids, output_hidden_states=True)
    pooled = getattr(output, "text_embeds", None)
    if pooled is not None and eos_token_id is not None and _pools_at_highest_id(encoder):
        ends = (ids == eos_token_id).int().argmax(-1)
        if bool((ids.argmax(-1) != ends).any()):
            pooled = encoder.text_projection(output.last_hidden_state[torch.arange(len(ids), device=ends.device), ends])
    return output.hidden_states[-2 - (clip_skip or 0)], pooled


def _pools_at_highest_id(encoder: "PreTrainedModel") -> bool:
    """As transformers does with the `eos_token_id` of SDXL's published files; textual inversions have higher ids."""
    return getattr(encoder.config, "eos_token_id", None) == 2 and hasattr(encoder, "text_projection")


def pooling_eos(tokenizer: PreTrainedTokenizerBase, length: int, reading: Reading) -> int | None:
    """Where pooled embeddings are taken: at EOS, or, where diffusers reads the text alike, wherever it takes them."""
    as_diffusers = length <= TRAINED_POSITIONS and reading not in PROGRAMS
    return None if as_diffusers else tokenizer.eos_token_id


def last_states(
    encoder: "PreTrainedModel",
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
    encoder: "PreTrainedModel",
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str | Tokens],
    length: int,
    *,
    reading: Reading = "overlap",
    emphasis: Emphasis | None = None,
    states: States | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an encoder gives a UNet for texts of any length, with gradients.

    Args:
        texts: each a prompt, in the syntax of `parse_prompt`, or its tokens from `tokenize_text` or `tokenize_parts`.
        length: positions of the result, at least those of the longest text, BOS and EOS.
        reading: how a text longer than the encoder is cut and joined: `chunks.split_text`, `chunks.positions_of`.
        emphasis: what weights such as `(word:1.3)` do, and whether they and BREAK are read: `parse_prompt`,
            `chunks.weigh`. None: as in pipelines, what the program does that is imitated, else "none".
        states: runs the encoder; the ids are on `device`. None: `penultimate_states`, for SDXL; `last_states` is for
            SD 1.5.
        device: of the results; the encoder's if None.

    Returns:
        hidden states [texts, length, width]; pooled embeddings [texts, pooled width] of the first chunks, None for an
        encoder without a projection.

    Raises:
        ValueError: a text does not fit the length, or has weights that cannot be used.
    """
    device, emphasis = device or encoder.device, emphasis or PROGRAMS.get(reading, "none")
    texts = [
        tokenize_parts(parse_prompt(text, reading, emphasis), tokenizer, reading) if isinstance(text, str) else text
        for text in texts
    ]
    if (longest := max(len(text.ids) for text in texts)) + 2 > length:
        raise ValueError(f"a text of {longest} tokens, BOS and EOS do not fit {length} positions: shorten it.")
    context = chunk_length(min(encoder.config.max_position_embeddings, length), reading)
    split = [split_text(text, context - 2, reading) for text in texts]  # [texts][chunks]
    places = [positions_of(chunks, context, length, reading) for chunks in split]
    rows = [(text, chunk) for text, chunks in zip(texts, split, strict=True) for chunk in chunks]
    weights = [[text.weights[at] for at in chunk.read] for text, chunk in rows]
    weighted = emphasis not in ("none", "ignore") and any(weight != 1 for row in weights for weight in row)
    # One empty chunk serves all texts.
    lacking = any(max(place) >= len(chunks) * context for chunks, place in zip(split, places, strict=True))
    ids = [[text.ids[at] for at in chunk.read] for text, chunk in rows] + [[]] * (lacking or weighted)
    eos_token_id = pooling_eos(tokenizer, length, reading)
    as_diffusers = eos_token_id is None and _pools_at_highest_id(encoder)
    if as_diffusers and any(token > tokenizer.eos_token_id for row in ids for token in row):
        warnings.warn(
            "The pooled embedding is that of the textual inversion, as in diffusers, because the text encoder's"
            " configuration has the eos_token_id 2. Prompts of more than 77 positions and the readings of other"
            f" programs take that of EOS; {tokenizer.eos_token_id} in text_encoder_2/config.json takes it everywhere.",
            stacklevel=2,
        )
    states = states or partial(penultimate_states, eos_token_id=eos_token_id)
    row_states, pooled = states(encoder, _chunk_ids(ids, context, tokenizer).to(device))
    chunk_states, empty = row_states[: len(rows)].to(device), row_states[-1].to(device)
    if weighted:
        padded = [[1.0, *row] + [1.0] * (context - 1 - len(row)) for row in weights]
        chunk_states = weigh(chunk_states, torch.tensor(padded), empty, emphasis)
    counts = [len(chunks) for chunks in split]
    joined = [
        torch.cat([*text_states, empty])[place]
        for text_states, place in zip(chunk_states.split(counts), places, strict=True)
    ]
    first_chunks = list(itertools.accumulate([0, *counts[:-1]]))
    return torch.stack(joined), None if pooled is None else pooled[first_chunks]


def chunk_length(context: int, reading: Reading) -> int:
    """Positions that an encoder of this context length reads at once; 77 as the programs do that are imitated."""
    return min(context, TRAINED_POSITIONS) if reading in PROGRAMS else context


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, list[tuple[int, int]]]:
    """The tokens of a text, all of weight 1, and their spans (start and end in `text`, in characters)."""
    return _tokenize_runs([(text, 1.0)], tokenizer, "overlap", split_special_tokens=False)


_FAST = WeakKeyDictionary()  # by tokenizer of transformers 4: the number of its tokens, and its fast twin


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or one of the same tokens that gives spans, where it is one of transformers 4 that does not."""
    if tokenizer.is_fast:
        return tokenizer
    count, fast = _FAST.get(tokenizer, (None, None))
    if count != len(tokenizer):  # textual inversions add tokens
        special = tokenizer.special_tokens_map_extended
        fast = PreTrainedTokenizerFast(tokenizer_object=convert_slow_tokenizer(tokenizer), **special)
        fast.add_tokens([token for _, token in sorted(tokenizer.added_tokens_decoder.items())])
        _FAST[tokenizer] = (len(tokenizer), fast)
    return fast


def tokenize_parts(
    parts: Sequence[Part],
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading = "overlap",
    split_special_tokens: bool = False,
    breaks: Breaks = "concatenate",
) -> Tokens:
    """The tokens of a text in parts that begin new chunks, or are averaged, as `reading` finds and cuts them.

    Empty parts are left out; in the programs that are imitated they are empty chunks, but for one at the end.

    Raises:
        ValueError: the strengths of averaged parts have no mean; a weight, by its part's strength, is out of range.
    """
    tokens = [_tokenize_runs(part.runs, tokenizer, reading, split_special_tokens)[0] for part in parts]
    last = max((number for number, part in enumerate(tokens) if part.ids), default=0)
    kept = [at for at, part in enumerate(tokens[: last + 1]) if part.ids or reading in PROGRAMS] or [0]
    joined = Tokens.joined([tokens[at] for at in kept], [parts[at].strength for at in kept])
    text, average = "".join(run for part in parts for run, _ in part.runs), breaks == "average"
    if not (total := sum(joined.strengths) if average else 1.0):
        raise ValueError(f"the strengths of the parts of {text[:80]!r} add up to 0, so they have no mean")
    shares = [strength / total for strength in joined.strengths]
    weights = [weight * share for part, share in zip(joined.alone, shares, strict=True) for weight in part.weights]
    check_weight(text, max([*weights, *shares], key=abs))  # of the parts that are kept
    return joined if average else joined._replace(weights=weights)


def _tokenize_runs(
    runs: Sequence[tuple[str, float]], tokenizer: PreTrainedTokenizerBase, reading: Reading, split_special_tokens: bool
) -> tuple[Tokens, list[tuple[int, int]]]:
    """The tokens of weighted runs of text, each tokenized by itself, and their spans in the joined text."""
    tokenizer = fast_tokenizer(tokenizer)
    text, starts = join_runs([run for run, _ in runs])
    ids, spans, weights, numbers = [], [], [], []
    for number, ((run, weight), begin) in enumerate(zip(runs, starts, strict=True)):
        # verbose=False: transformers' warning about texts beyond the context length does not apply
        batch = tokenizer(
            run,
            add_special_tokens=False,
            verbose=False,
            split_special_tokens=split_special_tokens or reading in PROGRAMS,
            return_offsets_mapping=True,
        )
        ids += batch["input_ids"]
        spans += [(begin + start, begin + end) for start, end in batch["offset_mapping"]]
        weights += [weight] * (len(ids) - len(weights))
        numbers += [number] * (len(ids) - len(numbers))
    joined = _same_inversion(ids, tokenizer)
    if reading not in PROGRAMS:
        return Tokens(ids, rate_cuts(text, spans, joined), weights), spans
    comma = tokenizer.convert_tokens_to_ids(",</w>")
    cuts = rate_cuts_of_program(reading, joined, [token == comma for token in ids], numbers)
    return Tokens(ids, cuts, weights), spans


def _same_inversion(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """For each token but the last, whether the next is of the same textual inversion: "<x>", "<x>_1", "<x>_2", ..."""
    added, joined, stem, vector = tokenizer.added_tokens_encoder, [], None, 0
    names = [name if name in added else None for name in tokenizer.convert_ids_to_tokens(ids)]
    for name, following in itertools.pairwise(names):
        if not (joined and joined[-1]):
            stem, vector = name, 0
        vector += 1
        joined.append(stem is not None and following == f"{stem}_{vector}")
    return joined


def _chunk_ids(rows: list[list[int]], length: int, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """[rows, length] ids `[BOS, row, EOS, pads]`, with the tokenizer's pad token."""
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return torch.tensor([[bos, *row, eos] + [pad] * (length - 2 - len(row)) for row in rows])
