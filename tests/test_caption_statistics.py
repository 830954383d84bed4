"""Statistics of captions: hand-counted ones, and captions whose summary is taken away."""

from debias_diffusion.data.caption_statistics import is_summary_first, measure_caption, summarise
from debias_diffusion.text.sentences import split_sentences
from debias_diffusion.text.tokens import CaptionTokenizer, clip_tokenizer

ROOM = ["A dog and a cat share a sofa.", "The dog sleeps.", "Its ears hang down.", "The sofa is old.", "The cats purr."]
LIST = ["A lamp shines.", "A dog lies on a rug.", "The dog is black.", "The rug has a long fringe."]


def statistics_of(captions):
    tokenizer = CaptionTokenizer(clip_tokenizer(248), 248)  # to which each word of these captions is one token
    return summarise(measure_caption(caption, tokenizer) for caption in captions)


def test_hand_counted_captions():
    statistics = statistics_of([" ".join(ROOM), "A dog sleeps."])
    assert (statistics.captions, statistics.sentences_mean) == (2, 3)
    assert statistics.tokens_mean == (29 + 6) / 2  # words, full stops, SOT and EOT
    assert statistics.first_two_tokens_mean == (15 + 6) / 2
    assert (statistics.referring, statistics.judged, statistics.summary_first) == (1 / 6, 1, 1)


SHORT = [  # captions that begin with a summary, most of which name nothing twice
    "A harbour at dawn. Three boats lie at the quay. The water is calm.",
    "A birthday party in a garden. Five children sit at a long table. A cake with candles stands in the middle.",
    "A dog in a park. The dog is brown. It runs after a ball.",
]


def test_captions_that_name_nothing_twice_do_not_count_as_without_a_summary():
    assert [is_summary_first(split_sentences(caption)) for caption in SHORT] == [None, None, True]
    assert is_summary_first(LIST) is False
    same_words = ["On the first shelf there are plates.", "On the second shelf there is a cup.", "A shelf is empty."]
    assert is_summary_first(same_words) is is_summary_first(ROOM[1:]) is is_summary_first(ROOM[:1]) is None
    statistics = statistics_of(SHORT)
    assert (statistics.captions, statistics.judged, statistics.summary_first) == (3, 1, 1)
    assert str(statistics).startswith("100% of the 1 captions that can be judged begin with a summary.")
    assert "summary" not in str(statistics_of(SHORT[:2]))
