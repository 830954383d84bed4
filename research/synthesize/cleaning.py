"""Captions that a model wrote and nobody should train on: repeated words, meaningless sentences, short results.

Fix-CLIP names these three kinds (sections 3.1 and 7) and no rules; the rules are ours.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from debias_diffusion.data.captions import check_caption
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import CaptionTokenizer, clip_tokenizer

from .instructions import INSTRUCTIONS

FEWEST_TOKENS = 30  # of a long caption, in CLIP's tokens, without SOT and EOT
FEWEST_WORDS = 3  # of a short one

_RUNNING_WORDS, _RUNNING_PHRASES, _SENTENCES = 4, 3, 3  # so often is too often
_LONGEST_PHRASE = 8  # words
_GRAM, _COUNTED_FROM, _DISTINCT = 4, 40, 0.5
_LETTERS = 0.6  # of all characters but white space
_ECHO = 8  # words of a prompt in a row

_WORD = re.compile(r"\w+(?:['’]\w+)?")
_END = re.compile(r"[.!?…‼⁇⁈⁉。！？｡।॥؟۔։።፧។៕][\"'”’»)\]*_」』）]*$")
_QUOTED = re.compile(r'"[^"\n]{1,200}"|“[^”\n]{1,200}”|«[^»\n]{1,200}»')
_APOLOGY = re.compile(
    r"\b(?:I['’]m|I am|we are) (?:very |really )?sorry\b|\bsorry, (?:but )?I\b|\bmy apologies\b|\bI apologi[sz]e\b|"
    r"\bas an? (?:AI\b|artificial intelligence|(?:text|language)[- ](?:based )?(?:AI |model))|"
    r"\bI(?:['’]m| am) (?:just |only )?an? (?:AI\b|language model)",
    re.IGNORECASE,
)
_INABILITY = re.compile(
    r"\bI(?:['’]m| am) (?:not able|unable)\b|\bI (?:cannot|can['’]t|can not|could not|couldn['’]t|do not|don['’]t) "
    r"(?:\w+ )?(?:see|view|access|provide|describe|assist|help|identify|open|process|have)\b|"
    r"\bno (?:image|picture|photo) (?:was|is|has been|to)? ?(?:provided|attached|uploaded|given|available|describe)\b|"
    r"\bplease (?:provide|upload|share|attach)(?: \w+)? (?:image|picture|photo)\b|"
    r"\b(?:image|picture|photo) (?:did not|didn['’]t|failed to|could not be|cannot be|can['’]t be) "
    r"(?:load|loaded|open|opened|displayed|viewed|processed)\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"</?[a-zA-Z][\w:-]*(?:\s[^<>]*)?/?>|<\|[^<>|]+\|>|\[/?INST\]|<<?/?SYS>>?|&(?:nbsp|lt|gt|amp|quot);|"  # tags
    r"\b(?:USER|ASSISTANT|SYSTEM|Human|Assistant):|"  # turns of a chat
    r"\*\*[^*\n]+\*\*|^#{1,6} |```|\]\(\w+:|^\s*\|.*\|\s*$|\\[a-zA-Z]+\{|"  # Markdown and LaTeX
    r'\A\s*(?:\{|\[\s*[{\d"])',  # JSON
    re.MULTILINE,
)


def drop_unfinished(text: str, kind: str = "long") -> str:
    """`text` without a last sentence that has no end, as the limit of new tokens leaves it.

    A short caption of one sentence is kept whole: many models write it without a full stop.
    """
    text = text.strip()
    sentences = split_sentences(text)
    if not sentences or _END.search(sentences[-1]) or (kind == "short" and len(sentences) == 1):
        return text
    return text[: text.rindex(sentences[-1])].rstrip()


def fault(text: str, kind: str = "long") -> str | None:
    """Why a caption is removed, "repeated: ...", "meaningless: ..." or "short: ..."; None for one that is kept.

    Args:
        text: as the model wrote it, line breaks included, after `drop_unfinished`.
        kind: "long" or "short": what the model was asked for.
    """
    words = [word.lower() for word in _WORD.findall(text)]
    try:
        check_caption(text or "empty", "")  # what `train` refuses, but an empty caption is short
    except ValueError as error:
        return f"meaningless: {str(error).partition(':')[0]}"
    return next(chain(_repeated(text, words), _meaningless(text, words), _short(text, words, kind)), None)


def _repeated(text: str, words: list[str]) -> Iterator[str]:
    for length in range(1, _LONGEST_PHRASE + 1):
        limit = _RUNNING_WORDS if length == 1 else _RUNNING_PHRASES
        if phrase := _running(words, length, limit):
            yield f"repeated: {phrase!r} {limit} times running"
    sentences = Counter(" ".join(_WORD.findall(sentence.lower())) for sentence in split_sentences(text))
    for sentence, count in sentences.items():
        if sentence and count >= _SENTENCES:
            yield f"repeated: {count} times the sentence {sentence!r}"
    grams = list(_grams(words, _GRAM))
    share = len(set(grams)) / max(1, len(grams))
    if len(words) >= _COUNTED_FROM and share < _DISTINCT:
        yield f"repeated: {share:.0%} of the {_GRAM}-grams are distinct"


def _running(words: list[str], length: int, limit: int) -> str | None:
    """The first phrase of `length` words that stands `limit` times in a row."""
    for start in range(len(words) - length * limit + 1):
        phrase = words[start : start + length]
        # "X O X, O X O" stands on a board.
        if words[start : start + length * limit] == phrase * limit and (length == 1 or max(map(len, phrase)) > 1):
            return " ".join(phrase)
    return None


def _meaningless(text: str, words: list[str]) -> Iterator[str]:
    visible = "".join(text.split())
    if visible and (share := sum(map(str.isalpha, visible)) / len(visible)) < _LETTERS:
        yield f"meaningless: {share:.0%} of the characters are letters"
    unquoted = _QUOTED.sub('""', text)  # an image may show a refusal or a tag
    first = next(iter(split_sentences(unquoted)), "")
    if refusal := _APOLOGY.search(unquoted) or _INABILITY.search(first):
        yield f"meaningless: a refusal ({refusal[0]!r})"
    prompts = _prompt_grams()
    for length in sorted(set(map(len, prompts))):
        for gram in _grams(words, length):
            if gram in prompts:
                yield f"meaningless: words of a prompt ({' '.join(gram)!r})"
    if markup := _MARKUP.search(unquoted):
        yield f"meaningless: markup ({markup[0].strip()!r})"


def _short(text: str, words: list[str], kind: str) -> Iterator[str]:
    if kind == "short" and len(words) < FEWEST_WORDS:
        yield f"short: {len(words)} words, fewer than {FEWEST_WORDS}"
    tokenizer = counting_tokenizer()
    if kind == "long" and (tokens := tokenizer.count(text) - tokenizer.n_special) < FEWEST_TOKENS:
        yield f"short: {tokens} tokens, fewer than {FEWEST_TOKENS}"


def _grams(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


@lru_cache
def _prompt_grams() -> frozenset[tuple[str, ...]]:
    prompts = [_WORD.findall(prompt.lower()) for prompts in INSTRUCTIONS.values() for prompt in prompts]
    return frozenset(gram for words in prompts for gram in _grams(words, min(_ECHO, len(words))))


@lru_cache
def counting_tokenizer() -> CaptionTokenizer:
    """CLIP's, which counts tokens whatever its context length is."""
    return CaptionTokenizer(clip_tokenizer(77), 77)
