"""A caption's sentences."""

import regex

# After these a sentence never ends; after those below it ends only where the next word opens one.
_NEVER_FINAL = frozenset("mr mrs ms dr prof st mt no vs fig e.g i.e cf approx ca jr sr gen col lt sgt rev hon".split())
_SELDOM_FINAL = frozenset("etc inc ltd co corp a.m p.m al".split())
_OPENERS = frozenset(
    "the a an in on at to of it its this that these those there here he she they we i you his her their and but or "
    "with behind above below beside next near under over from for as while each both all some one two three another "
    "overall".split()
)

# A possible end: closing marks of a sentence, quotes and brackets that close with it, white space (none after the
# full stops of scripts that write without spaces).
_END = regex.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？｡]+[」』”’）]*\s*")
_LAST_WORD = regex.compile(r"[\p{L}\p{N}.]*$")
_ACRONYM = regex.compile(r"(?:\p{L}\.)+\p{L}")
_NEXT_WORD = regex.compile(r"[^\p{L}\p{N}]*([\p{L}\p{N}]+)")


def split_sentences(caption: str) -> list[str]:
    """The sentences of `caption` in order, each with its closing marks, without white space around it.

    Abbreviations ("Mr. Lee", "e.g.", "U.S. flag"), initials, decimals ("3.5 m"), list numbers ("2. A dog") and an
    ellipsis inside a sentence do not end one. A missing last full stop is no matter. A caption without any text has no
    sentences.
    """
    sentences, start = [], 0
    for end in _END.finditer(caption):
        if _is_final(caption, start, end):
            sentences.append(caption[start : end.end()].strip())
            start = end.end()
    sentences.append(caption[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_final(caption: str, start: int, end: regex.Match) -> bool:
    """Whether the marks matched by `end` close the sentence that began at `start`."""
    marks = end.group().rstrip()
    if caption[end.end() : end.end() + 1].islower() and (
        marks.startswith(("..", "…")) or marks[-1] not in ".!?…。！？｡"
    ):
        return False  # "a cat ... asleep", '"Stop!" he said'
    if marks[0] != "." or marks.startswith(".."):
        return True
    before = caption[start : end.start()]
    # The longest abbreviation is short; looking further back would make long captions slow.
    word = _LAST_WORD.search(before[-24:]).group()
    if word.lower() in _NEVER_FINAL or (len(word) == 1 and word.isupper() and word not in "I"):
        return False
    if word.isdigit() and before.strip() == word:  # the number of a list's item
        return False
    if word.lower() in _SELDOM_FINAL or _ACRONYM.fullmatch(word):
        next_word = _NEXT_WORD.match(caption, end.end())
        return next_word is None or (next_word[1][0].isupper() and next_word[1].lower() in _OPENERS)
    return True
