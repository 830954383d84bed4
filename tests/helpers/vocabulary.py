"""A small CLIP vocabulary, of 256 bytes and the words that the tests use most.

CLIP's own has 49,408 entries: loading its tokenizer takes a quarter of a second, and 97% of a tiny model are its
embeddings. Tests of the real one use `debias_diffusion.text.tokens.clip_tokenizer`.
"""

from functools import lru_cache
from itertools import pairwise

from transformers import CLIPTokenizer

from debias_diffusion.text.tokens import byte_symbols, make_clip_tokenizer

# Each is one token. All other words are several: letters, and the beginnings of these.
WORDS = """
a an the is are it in on of and to with at no not one two three this that its from
red blue green white grey yellow black cat dog bird birds dogs house tree sky sofa table window bicycle dragon
large small old photo picture image number left right side shows colours star ring circle street night
next sleeps sits stands front flat low bad
""".split()


@lru_cache
def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(ids by symbol, merges): the bytes, each also as a word's end, then what the merges make, SOT and EOT."""
    symbols = byte_symbols()
    merges = {}  # ranks by pair
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            first = min(pairs, key=lambda pair: merges.get(pair, len(merges)))  # as every later reading of the word
            merges.setdefault(first, len(merges))
            at = pairs.index(first)
            parts[at : at + 2] = ["".join(first)]
    made = dict.fromkeys("".join(merge) for merge in merges)
    names = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *made, "<|startoftext|>", "<|endoftext|>"]
    return {name: index for index, name in enumerate(names)}, list(merges)


SIZE = len(vocabulary()[0])
BOS, EOS = SIZE - 2, SIZE - 1


def tiny_tokenizer(context_length: int, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """As `debias_diffusion.text.tokens.clip_tokenizer`, of the small vocabulary."""
    ids, merges = vocabulary()
    return make_clip_tokenizer(ids, merges, pad_token=pad_token, model_max_length=context_length)
