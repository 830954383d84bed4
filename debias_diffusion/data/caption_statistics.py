"""What captions are like for training on their sentences: lengths, a summary first, sentences that refer back.

DeBias-CLIP drops the first sentence of a caption, a summary (Algorithm 1), and draws some of the others. A first
sentence that is none teaches little, and neither do sentences that make sense only behind another one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..text.sentences import join_sentences, split_sentences
from ..text.tokens import CaptionTokenizer

_WORD = re.compile(r"[^\W\d_]+")
_PRONOUNS = frozenset("it its he him his she her hers they them their theirs this that these those".split())
_DEMONSTRATIVES = frozenset("this that these those".split())
_PICTURES = frozenset(
    "image picture photo photograph scene painting drawing illustration artwork shot view collage poster".split()
)
# Words that recur in any caption and are no nouns, or name nothing in the image; singular.
_EMPTY = (
    _PRONOUNS
    | _PICTURES
    | frozenset(
        "a an the and or but nor so as if than then while when where which who whose what how there here with "
        "without within of in on at by to from for into onto over under above below behind beside between "
        "among across along around near next toward through up down out off is are was were be been being has "
        "have had do does did can could may might will would shall should must seem seems appear appears not "
        "no nothing one two three four five six several some many few more most much other another each every "
        "both any all such same own only also just very too quite slightly left right top bottom upper lower "
        "middle center centre central side front back foreground background corner edge part area place rest "
        "object thing visible seen stand stands standing sit sits sitting lie lies lying wear wears wearing "
        "hold holds holding show shows showing shown feature features featuring depict depicts capture "
        "captures contain contains include includes look looks looking hang hangs reach overall suggest "
        "suggests create creates add adds give gives make makes red orange yellow green blue purple violet "
        "pink brown black white grey gray golden gold silver beige dark light bright pale deep big large "
        "larger small smaller little tiny huge tall short long wide narrow high higher low old young new far "
        "close plain thin thick round flat sharp soft clear open whole half hand further color colour".split()
    )
)


@dataclass(frozen=True, slots=True)
class CaptionMeasure:
    """What one caption counts for in `CaptionStatistics`.

    Attributes:
        sentences: how many it has.
        tokens: of the whole caption, SOT and EOT included.
        first_two_tokens: of its first two sentences, SOT and EOT included.
        referring: sentences that begin with a pronoun.
        summary_first: whether the first sentence is a summary; None where `is_summary_first` cannot tell.
    """

    sentences: int
    tokens: int
    first_two_tokens: int
    referring: int
    summary_first: bool | None


@dataclass(frozen=True, slots=True)
class CaptionStatistics:
    """Means and shares over captions.

    Attributes:
        captions: how many.
        sentences_mean: sentences of a caption.
        tokens_mean: tokens of a caption, SOT and EOT included, under the tokenizer given.
        first_two_tokens_mean: tokens of its first two sentences. DeBias-CLIP's supplement, section F, has 46.6, 43.8
            and 40.4 for DOCCI and 49.5, 46.5 and 42.1 for Urban1k under CLIP's, SigLIP's and SigLIP 2's tokenizers; it
            does not say whether SOT and EOT count.
        judged: of how many it can be told whether their first sentence is a summary.
        summary_first: the share of these, from 0 to 1, whose first sentence is one; None if there are no such captions.
        referring: share, from 0 to 1, of all sentences that begin with a pronoun.
    """

    captions: int
    sentences_mean: float
    tokens_mean: float
    first_two_tokens_mean: float
    judged: int
    summary_first: float | None
    referring: float

    def __str__(self) -> str:
        judged = "captions" if self.judged == self.captions else f"{self.judged} captions that can be judged"
        return (
            ("" if self.summary_first is None else f"{self.summary_first:.0%} of the {judged} begin with a summary. ")
            + f"The first two sentences have {self.first_two_tokens_mean:.1f} tokens on average. "
            + f"{self.referring:.0%} of the sentences begin with a pronoun and refer back."
        )


def summarise(measures: Iterable[CaptionMeasure]) -> CaptionStatistics:
    """The statistics of captions that were measured one by one, at least one."""
    measures = list(measures)
    judged = [measure.summary_first for measure in measures if measure.summary_first is not None]
    return CaptionStatistics(
        captions=len(measures),
        sentences_mean=fmean(measure.sentences for measure in measures),
        tokens_mean=fmean(measure.tokens for measure in measures),
        first_two_tokens_mean=fmean(measure.first_two_tokens for measure in measures),
        judged=len(judged),
        summary_first=fmean(judged) if judged else None,
        referring=sum(measure.referring for measure in measures) / max(1, sum(each.sentences for each in measures)),
    )


def measure_caption(caption: str, tokenizer: CaptionTokenizer) -> CaptionMeasure:
    """One caption's part of the statistics."""
    sentences = split_sentences(caption)
    return CaptionMeasure(
        sentences=len(sentences),
        tokens=tokenizer.count(caption),
        first_two_tokens=tokenizer.count(join_sentences(sentences[:2])),
        referring=sum(map(begins_with_pronoun, sentences)),
        summary_first=is_summary_first(sentences),
    )


def begins_with_pronoun(sentence: str) -> bool:
    """Whether an English sentence refers back by its first word. "This image shows" does not."""
    words = [word.lower() for word in _WORD.findall(sentence)[:2]]
    if not words or words[0] not in _PRONOUNS:
        return False
    return not (words[0] in _DEMONSTRATIVES and words[1:] and _singular(words[1]) in _PICTURES)


def is_summary_first(sentences: Sequence[str]) -> bool | None:
    """Whether the first sentence says what the others, of a caption in English, are about.

    A summary shares a noun with as many of the other sentences as any sentence does. None where all share as many, as
    where none shares any: short captions seldom name a thing twice. Nouns are taken to be all words but common others,
    such as colours. (Ours: the papers call the first sentence a summary and measure nothing.)
    """
    words = ({_singular(word.lower()) for word in _WORD.findall(sentence) if len(word) > 1} for sentence in sentences)
    topics = [of_sentence - _EMPTY for of_sentence in words]
    sharing = [sum(not topic.isdisjoint(other) for other in topics if other is not topic) for topic in topics]
    return sharing[0] == max(sharing) if len(set(sharing)) > 1 else None


def _singular(word: str) -> str:
    """A word in lower case without a plural's ending: the same for both is enough."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3 else word
