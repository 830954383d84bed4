"""Prompts as the tokens of one text encoder, with how good it is to cut after each."""

import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import convert_slow_tokenizer

from .chunks import PROGRAMS, Breaks, Part, Reading, Tokens, join_runs, rate_cuts, rate_cuts_of_program
from .weighting import check_weight

Runs = Sequence[tuple[str, float]]  # pieces of a text and their weights


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens of a text, all of weight 1."""
    return tokenize_prompts([[Part([(text, 1.0)])]], tokenizer)[0]


def tokenize_prompts(
    prompts: Sequence[Sequence[Part]],
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading = "overlap",
    split_special_tokens: bool = False,
    breaks: Breaks = "concatenate",
) -> list[Tokens]:
    """The tokens of prompts in parts that begin new chunks, or are averaged, as `reading` finds and cuts them.

    Empty parts are left out; in the programs that are imitated they are empty chunks, but for one at the end. Raises
    ValueError where averaged strengths have no mean, or a weight, by its part's strength, is out of range.
    """
    runs = [_written_out(part.runs, tokenizer) for parts in prompts for part in parts]
    tokenized, found = iter(_tokenize_runs(runs, tokenizer, reading, split_special_tokens)), []
    for parts in prompts:
        text = " ".join(run for part in parts for run, _ in part.runs)
        tokens = [next(tokenized) for _ in parts]
        last = max((number for number, part in enumerate(tokens) if part.ids), default=0)
        kept = [at for at, part in enumerate(tokens[: last + 1]) if part.ids or reading in PROGRAMS] or [0]
        strengths = [parts[at].strength for at in kept]
        if not (total := sum(strengths) if breaks == "average" else 1.0):
            raise ValueError(f"the strengths of the parts of {text[:80]!r} add up to 0, so they have no mean")
        shares = [strength / total for strength in strengths]
        weights = [weight * share for at, share in zip(kept, shares, strict=True) for weight in tokens[at].weights]
        if any(share != 1 for share in shares):
            check_weight(text, max([*weights, *shares], key=abs))  # of the parts that are kept
        joined = tokens[kept[0]] if len(kept) == 1 else Tokens.joined([tokens[at] for at in kept], strengths)
        found.append(joined if breaks == "average" else joined._replace(weights=weights, strengths=()))
    return found


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


def _written_out(runs: Runs, tokenizer: PreTrainedTokenizerBase) -> Runs:
    """With all vectors of textual inversions of several, "<x> <x>_1 <x>_2", as diffusers writes them."""
    added = tokenizer.added_tokens_encoder
    if not any(name.endswith("_1") for name in added):
        return runs
    from diffusers.loaders import TextualInversionLoaderMixin  # takes seconds

    # verbose=False: transformers' warning about texts beyond the context length does not apply
    tokenize = partial(fast_tokenizer(tokenizer).tokenize, verbose=False)
    quiet: Any = SimpleNamespace(tokenize=tokenize, added_tokens_encoder=added)
    return [(TextualInversionLoaderMixin().maybe_convert_prompt(run, quiet), weight) for run, weight in runs]


def _tokenize_runs(
    texts: Sequence[Runs], tokenizer: PreTrainedTokenizerBase, reading: Reading, split_special_tokens: bool
) -> list[Tokens]:
    """The tokens of each text, whose weighted runs are tokenized by themselves."""
    tokenizer, encoded = fast_tokenizer(tokenizer), {}
    comma = tokenizer.convert_tokens_to_ids(",</w>")  # A1111's
    special = tokenizer.bos_token.lower(), tokenizer.eos_token.lower()
    for run in dict.fromkeys(run for runs in texts for run, _ in runs):  # one by one: threads cost more than they win
        is_typed = any(token in run.lower() for token in special)  # is text, in every reading
        batch = tokenizer(
            run,
            add_special_tokens=False,
            verbose=False,  # as above
            split_special_tokens=split_special_tokens or is_typed or reading in PROGRAMS,
            return_offsets_mapping=True,
        )
        encoded[run] = batch["input_ids"], batch["offset_mapping"]
    found = []
    for runs in texts:
        text, starts = join_runs([run for run, _ in runs])
        ids = [token for run, _ in runs for token in encoded[run][0]]
        numbers = [number for number, (run, _) in enumerate(runs) for _ in encoded[run][0]]  # of the tokens' runs
        same = _same_inversion(ids, tokenizer)
        if reading in PROGRAMS:
            cuts = rate_cuts_of_program(reading, same, [token == comma for token in ids], numbers)
        else:
            places = zip(runs, starts, strict=True)
            spans = [(begin + start, begin + end) for (run, _), begin in places for start, end in encoded[run][1]]
            cuts = rate_cuts(text, spans, same)
        found.append(Tokens(ids, cuts, [runs[number][1] for number in numbers]))
    return found


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
