"""Texts of any length through one text encoder, in chunks whose hidden states are joined. Needs no pipeline."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from .chunks import PROGRAMS, TRAINED_POSITIONS, Breaks, Emphasis, Reading, weigh
from .options import LongPromptOptions
from .prompt import TextPlan, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes seconds

# From an encoder and ids [rows, positions]: hidden states [rows, positions, width], and pooled [rows, width] or None.
States = Callable[["PreTrainedModel", torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
ROWS_AT_ONCE = 256  # of chunks in one forward, whose states of all layers are in memory together


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
    texts: str | Sequence[str],
    length: int | None = None,
    *,
    reading: Reading = "overlap",
    emphasis: Emphasis | None = None,
    breaks: Breaks = "concatenate",
    split_special_tokens: bool = False,
    states: States | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an encoder gives a UNet for prompts of any length: what pipelines' `encode_prompt` gives, with gradients.

    Args:
        texts: a prompt, or several.
        length: positions of the result, as `LongPromptOptions.positions`. None: what the longest text needs. For two
            encoders of different context lengths, give the length of the longer one's.
        reading: see `LongPromptOptions`, as for the next three.
        emphasis: what weights do.
        breaks: what BREAK does.
        split_special_tokens: whether "!" is text.
        states: runs the encoder; the ids are on `device`. None: `penultimate_states`, for SDXL; `last_states` is for
            SD 1.5.
        device: of the results; the encoder's if None.

    Returns:
        hidden states [texts, length, width]; pooled embeddings [texts, pooled width] of the first chunks, None for an
        encoder without a projection.

    Raises:
        ValueError: an option that is not allowed; no text, or one that does not fit the length, has weights that cannot
            be used, or changes from step to step.
    """
    how: Any = {"emphasis": emphasis, "breaks": breaks, "split_special_tokens": split_special_tokens}
    options = LongPromptOptions(reading=reading, positions=length, **how)
    plan = read([texts], None, [(tokenizer, encoder.config.max_position_embeddings)], options)
    plan.refuse_schedules()
    plan.warn()
    given = states and (lambda encoder, ids, eos_token_id: states(encoder, ids))
    return encode(plan.prompts.encoders[0], encoder, given or penultimate_states, device)


def encode(
    plan: TextPlan,
    encoder: "PreTrainedModel",
    states: Callable = penultimate_states,
    device: torch.device | None = None,
    inputs: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs an encoder on the texts of a plan. Results are those of `encode_texts`.

    `states` is called with the encoder, ids on `inputs` (by default `device`) and `eos_token_id`.
    """
    device, context, tokenizer = device or encoder.device, plan.context_length, plan.tokenizer
    rows = [(part, at, chunk) for part in plan.parts for at, chunk in enumerate(part.chunks)]
    weights = [[part.tokens.weights[at] for at in chunk.read] for part, _, chunk in rows]
    weighted = plan.emphasis not in ("none", "ignore") and any(weight != 1 for row in weights for weight in row)
    # One empty chunk serves all texts.
    lacking = any(max(part.places) >= len(part.chunks) * context for part in plan.parts)
    ids = [[part.tokens.ids[at] for at in chunk.read] for part, _, chunk in rows] + [[]] * (lacking or weighted)
    # Pooled embeddings are of EOS; where diffusers reads a text alike, of wherever it takes them.
    as_diffusers, eos = plan.positions <= TRAINED_POSITIONS and plan.reading not in PROGRAMS, tokenizer.eos_token_id
    if as_diffusers and _pools_at_highest_id(encoder) and any(token > eos for row in ids for token in row):
        warnings.warn(
            "The pooled embedding is that of the textual inversion, as in diffusers, because the text encoder's"
            " configuration has the eos_token_id 2. Prompts of more than 77 positions and the readings of other"
            f" programs take that of EOS; {eos} in text_encoder_2/config.json takes it everywhere.",
            stacklevel=2,
        )
    padded = [[tokenizer.bos_token_id, *row, eos] + [tokenizer.pad_token_id] * (context - 2 - len(row)) for row in ids]
    batches = torch.tensor(padded).to(inputs or device).split(ROWS_AT_ONCE)
    outputs = [states(encoder, batch, eos_token_id=None if as_diffusers else eos) for batch in batches]
    row_states, pooled = (None if parts[0] is None else torch.cat(parts) for parts in zip(*outputs, strict=True))
    chunk_states, empty = row_states[: len(rows)].to(device), row_states[-1].to(device)
    if weighted:
        padded = [[1.0, *row] + [1.0] * (context - 1 - len(row)) for row in weights]
        groups = list(dict.fromkeys((part.owner, at) for part, at, _ in rows))
        together = torch.tensor([groups.index((part.owner, at)) for part, at, _ in rows], device=device)
        entries = torch.tensor([part.entries for part, *_ in rows], device=device)
        chunk_states = weigh(chunk_states, torch.tensor(padded), empty, plan.emphasis, together, entries)
    counts = [len(part.chunks) for part in plan.parts]
    columns = zip(chunk_states.split(counts), plan.parts, strict=True)
    joined = torch.stack([torch.cat([*of_part, empty])[part.places] for of_part, part in columns])
    first_chunks = list(itertools.accumulate([0, *counts[:-1]]))
    return _means(joined, plan), None if pooled is None else _means(pooled[first_chunks], plan)


def _means(encoded: torch.Tensor, plan: TextPlan) -> torch.Tensor:
    """The mean of each text's parts by their strengths, [parts of all texts, ...] -> [texts, ...]."""
    means = []
    for _, group in itertools.groupby(enumerate(plan.parts), lambda numbered: numbered[1].text):
        numbers, parts = zip(*group, strict=True)
        states, strengths = encoded[list(numbers)], [strength for part in parts for strength in part.tokens.strengths]
        if len(parts) > 1:
            shares = states.new_tensor(strengths).view(-1, *[1] * (states.ndim - 1)) / sum(strengths)
            states = (states * shares).sum(0, keepdim=True)
        means.append(states[0])
    return torch.stack(means)
