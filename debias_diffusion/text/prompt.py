"""`read` says once what follows from prompts, tokenizers and options: a plan, which `encoding.encode` carries out.

Every door goes through it: pipelines, `encode_texts`, modular blocks, commands and the demo. No model is needed.
"""

import itertools
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from .chunks import (
    KOHYA_POSITIONS,
    TRAINED_POSITIONS,
    WHOLE_ROWS,
    Chunk,
    Emphasis,
    Reading,
    Tokens,
    chunk_length,
    join_runs,
    positions_for,
    positions_of,
    split_text,
)
from .options import LongPromptOptions, PromptLayout
from .prompt_tokens import tokenize_prompts
from .schedules import MANY_STEPS, find_schedules, last_steps, text_at
from .weighting import find_unread, parse_parts, take_out

Texts = str | Sequence[str] | None  # of a batch, for one text encoder; None: the first encoder's
Encoders = Sequence[tuple[PreTrainedTokenizerBase, int]]  # tokenizers and context lengths, BOS and EOS included
DEFAULTS = LongPromptOptions()
_WARNED: set[str] = set()  # kinds of warnings that this process has given


class PartPlan(NamedTuple):
    """What one text encoder reads of a text, or of one of its parts that are averaged."""

    text: int
    owner: Hashable  # the prompt, and the number of the part; texts of a prompt that changes by steps have one owner
    entries: int  # in how many of the prompt's changes the text stands, see `weigh`
    tokens: Tokens  # that are read
    rest: list[int]  # ids that are cut off
    chunks: Sequence[Chunk] = ()
    places: Sequence[int] = ()  # [positions] which states are given to the UNet, see `positions_of`


class TextPlan(NamedTuple):
    """What one text encoder reads of some texts, and which of its states become the result."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int  # positions that it reads at once, `[BOS, text, EOS, pads]`
    positions: int  # of the result
    reading: Reading
    emphasis: Emphasis  # what weights do
    parts: list[PartPlan]  # of all texts, in their order

    def split(self) -> "TextPlan":
        """With the chunks of each part. As in A1111, texts of one prompt have equally many; empty ones follow."""
        chunks = [split_text(part.tokens, self.context_length - 2, self.reading) for part in self.parts]
        most = Counter()
        for part, of_part in zip(self.parts, chunks, strict=True):
            most[part.owner] = max(most[part.owner], len(of_part))
        for part, of_part in zip(self.parts, chunks, strict=True):
            end = len(part.tokens.ids)
            of_part += [Chunk(range(end, end), range(end, end))] * (most[part.owner] - len(of_part))
        parts = [part._replace(chunks=of_part) for part, of_part in zip(self.parts, chunks, strict=True)]
        return self._replace(parts=parts)


class Batch(NamedTuple):
    """The prompts of a call, or its negative prompts."""

    encoders: list[TextPlan]  # of the same texts
    numbers: list[tuple[int, ...]]  # [steps][prompts] which text is read

    @property
    def words(self) -> torch.Tensor:
        """[texts, positions] bool: where the state of any encoder is of the text, in any part; BOS, EOS and pads, those
        inside chunks too, are not."""
        words = torch.zeros(1 + self.encoders[0].parts[-1].text, self.encoders[0].positions, dtype=torch.bool)
        for plan, part in [(each, part) for each in self.encoders for part in each.parts]:
            ends = torch.tensor([len(chunk.read) for chunk in part.chunks] + [0])  # the last of an empty chunk
            places = torch.tensor(part.places)
            chunks, places = places // plan.context_length, places % plan.context_length
            words[part.text] |= (places > 0) & (places <= ends[chunks])
        return words


class Plan(NamedTuple):
    """How the prompts and the negative prompts of a call are read."""

    options: LongPromptOptions
    prompts: Batch | None  # None where none are encoded
    negatives: Batch | None
    steps: list[int]  # the last step, from 1, of each of `Batch.numbers`
    needed: int  # positions of the longest text
    positions: int  # of all embeddings
    cut_at: int | None  # see `PromptLayout`
    text: str  # the first prompt, at the first step, without signs of weights
    taken_out: tuple[str, ...]
    schedules: tuple[str, ...]  # of all prompts
    unread: dict[str, str]  # what is not read, in sentences, by what there is to do

    @property
    def words(self) -> tuple[tuple[bool, ...], ...]:
        """See `PromptLayout`."""
        batches = [batch for batch in (self.prompts, self.negatives) if batch]
        return tuple(tuple(row) for batch in batches for row in batch.words[[*batch.numbers[0]]].tolist())

    def layout(self, batch: Batch | None = None) -> PromptLayout:
        """What a person wants to know of the prompts, or of another batch of the plan."""
        counts, shown, cut_off, lengths = [], [], [], []
        for plan in (batch or self.prompts).encoders:
            decode, first = plan.tokenizer.decode, [part for part in plan.parts if part.text == 0]
            counts.append(max(len(part.chunks) for part in plan.parts))
            kept = [part.tokens.ids[chunk.kept.start : chunk.kept.stop] for part in first for chunk in part.chunks]
            shown.append(tuple((decode(ids), len(ids)) for ids in kept))
            rest = [token for part in first for token in part.rest]
            cut_off.append((decode(rest), len(rest)))
            of_texts = Counter()
            for part in plan.parts:
                of_texts[part.text] += len(part.tokens.ids) + len(part.rest)
            lengths += of_texts.values()
        columns = max(lengths), self.positions, tuple(counts), self.cut_at, tuple(cut_off), tuple(shown), self.taken_out
        return PromptLayout(*columns, self.schedules, self.words, tuple(self.unread.values()))

    def refuse_schedules(self) -> None:
        """Raises ValueError for a prompt that changes from step to step."""
        if self.schedules:
            raise ValueError(
                f"{', '.join(self.schedules)} changes from step to step, which needs a call of a pipeline whose"
                r" `callback_on_step_end` can change embeddings. Write one of the texts, or \[ for a bracket of text."
            )

    def warn(self) -> None:
        """Warns of what is not read, of each kind once a process."""
        for kind in self.unread.keys() - _WARNED:
            _WARNED.add(kind)
            warnings.warn(self.unread[kind], stacklevel=2)


def read(
    prompts: Sequence[Texts] | None,
    negatives: Sequence[Texts] | None,
    encoders: Encoders,
    options: LongPromptOptions = DEFAULTS,
    *,
    steps: int = MANY_STEPS,
    batch_size: int | None = None,
    positions: int | None = None,
) -> Plan:
    """How texts are read.

    Args:
        prompts: for each text encoder the texts of the batch. One text serves the whole batch. None: there are none.
        negatives: the negative prompts, likewise.
        steps: that shares such as [cat:dog:0.5] are of.
        batch_size: None: that of the prompts.
        positions: of embeddings that were encoded before. None: as the options say, else as many as are needed.

    Raises:
        ValueError: batches of different sizes, or an empty one; a text that is none, has weights that cannot be used,
            or does not fit the positions.
    """
    reading, weights = options.reading, options.weights
    first = _rows(prompts, len(encoders), batch_size)
    rows = [first, _rows(negatives, len(encoders), batch_size or len(first) or None)]
    keys = [*dict.fromkeys((text, side) for side in (0, 1) for row in rows[side] for text in row)]
    read_of = {(text, side): take_out(text, reading, bool(side)) for text, side in keys}
    changing = [text for text, _ in read_of.values() if "[" in text] if reading == "a1111" else []

    # [sides][prompts] the last steps of the texts for the encoders, and these
    ends, texts = [], []
    for row, side in [*zip(rows[0], itertools.repeat(0)), *zip(rows[1], itertools.repeat(1))]:
        whole = [read_of[text, side][0] for text in row]
        ends.append(last_steps(steps, *whole) if changing else [steps])
        texts.append(
            [tuple(text_at(text, end, steps) for text in whole) if changing else tuple(whole) for end in ends[-1]]
        )
    distinct = {text for entries in texts for entry in entries for text in entry}
    parts = {text: parse_parts(text, reading, weights) for text in distinct}
    entries = Counter((prompt, entry) for prompt, entries in enumerate(texts) for entry in entries)
    how = reading, options.split_special_tokens, options.breaks
    tokens = [
        tokenize_prompts([parts[entry[at]] for _, entry in entries], tokenizer, *how)
        for at, (tokenizer, _) in enumerate(encoders)
    ]
    owners = [(prompt, count) for (prompt, _), count in entries.items()]
    plans, needed = plan_tokens(tokens, encoders, options, positions, owners)
    all_ends, numbers = sorted({*itertools.chain(*ends)}), {entry: number for number, entry in enumerate(entries)}
    n_prompts, split = len(first), sum(prompt < len(first) for prompt, _ in entries)
    batches = []
    for of_side, start, end in ((range(n_prompts), 0, split), (range(n_prompts, len(texts)), split, len(entries))):
        own = [
            plan._replace(
                parts=[part._replace(text=part.text - start) for part in plan.parts if start <= part.text < end]
            )
            for plan in plans
        ]
        at_steps = [
            tuple(numbers[prompt, texts[prompt][bisect_left(ends[prompt], step)]] - start for prompt in of_side)
            for step in all_ends
        ]
        batches.append(Batch(own, at_steps) if of_side else None)
    is_text = options.emphasis is None and weights == "none"
    unread = [find_unread(*read_of[text, side], reading, bool(side), is_text) for text, side in reversed(keys)]
    return Plan(
        options,
        *batches,
        steps=all_ends,
        needed=needed,
        positions=plans[0].positions,
        cut_at=_cut_at(options, encoders),
        text=join_runs([run for part in parts[texts[0][0][0]] for run, _ in part.runs])[0] if first else "",
        taken_out=tuple(part for text in dict.fromkeys(first[0] if first else ()) for part in read_of[text, 0][1]),
        schedules=tuple(find_schedules(*changing)) if changing else (),
        unread={kind: sentence for of_text in unread for kind, sentence in of_text.items()},
    )


def _rows(texts: Sequence[Texts] | None, n_encoders: int, batch_size: int | None) -> list[tuple[str, ...]]:
    """[batch] the text for each encoder; empty for None. Raises ValueError as `read` does."""
    if texts is None:
        return []
    columns = [given or texts[0] for given in (*texts, *[None] * n_encoders)[:n_encoders]]
    if batch_size is None:
        batch_size = 1 if isinstance(columns[0], str) else len(columns[0] or ())
    if not batch_size:
        raise ValueError("the batch of prompts is empty: give a prompt, or a list of at least one")
    columns = [[given] * batch_size if isinstance(given, str) else list(given or ()) for given in columns]
    for column in columns:
        if len(column) != batch_size:
            raise ValueError(f"prompts must have one batch size, got {batch_size} and {len(column)}: {column}")
        for text in column:
            if not isinstance(text, str):
                raise ValueError(f"a prompt must be text, got {text!r}")
            text.encode()  # raises ValueError for half of a surrogate pair, which is no character
    return list(zip(*columns, strict=True))


def _cut_at(options: LongPromptOptions, encoders: Encoders) -> int | None:
    """See `PromptLayout`."""
    if options.reading == "kohya":
        return options.positions or KOHYA_POSITIONS
    return min(TRAINED_POSITIONS, *(context for _, context in encoders)) if options.reading == "cut" else None


def plan_tokens(
    tokens: Sequence[Sequence[Tokens]],
    encoders: Encoders,
    options: LongPromptOptions = DEFAULTS,
    positions: int | None = None,
    owners: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[TextPlan], int]:
    """What each encoder reads of texts that are tokenized, and the positions that the longest text needs.

    Args:
        tokens: [encoders][texts]
        positions: see `read`.
        owners: [texts] the prompt of each, and `PartPlan.entries`; None: each is of its own.

    Raises:
        ValueError: a text does not fit the positions.
    """
    reading, weights, end, plans = options.reading, options.weights, _cut_at(options, encoders), []
    for (tokenizer, context), texts in zip(encoders, tokens, strict=True):
        parts = [
            PartPlan(
                number, (prompt, at), count, part.first(end - 2) if end else part, part.ids[end - 2 :] if end else []
            )
            for number, (text, (prompt, count)) in enumerate(
                zip(texts, owners or enumerate([1] * len(texts)), strict=True)
            )
            for at, part in enumerate(text.separated if options.breaks == "average" else [text])
        ]
        plans.append(TextPlan(tokenizer, chunk_length(context, reading), 0, reading, weights, parts))
    length: Any = positions or options.positions or (KOHYA_POSITIONS if reading == "kohya" else None)
    if reading in WHOLE_ROWS:
        plans, size, rows = [plan.split() for plan in plans], plans[0].context_length, Counter()
        for plan in plans:
            for part in plan.parts:
                rows[part.text] = max(rows[part.text], len(part.chunks))
        needed, fits = size * max(rows.values()), not length or length % size == 0
        length = length or size * math.lcm(*rows.values())  # a text that is repeated leaves attention as it is
    else:
        n_tokens = max(len(part.tokens.ids) for plan in plans for part in plan.parts)
        needed, fits = n_tokens + 2, reading != "kohya" or (length - 2) % (TRAINED_POSITIONS - 2) == 0
        length = length or positions_for(n_tokens, [plan.context_length for plan in plans])
        plans = [plan._replace(context_length=min(plan.context_length, length)).split() for plan in plans]
    if needed > length or not fits:
        raise ValueError(
            f"a text that takes {needed} positions, read as {reading!r}, does not fit the {length} positions: encode"
            " prompt and negative prompt together, so that they share a length, or call set_long_prompt with other"
            " positions."
        )
    for number, plan in enumerate(plans):
        places = [positions_of(part.chunks, plan.context_length, length, reading) for part in plan.parts]
        parts = [part._replace(places=of_part) for part, of_part in zip(plan.parts, places, strict=True)]
        plans[number] = plan._replace(positions=length, parts=parts)
    return plans, needed
