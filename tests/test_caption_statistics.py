"""Statistics of captions: hand-counted ones, and captions whose summary is taken away."""

import json
from pathlib import Path

from debias_diffusion.data.caption_statistics import begins_with_pronoun, is_summary_first, measure_caption, summarise
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import CaptionTokenizer, clip_tokenizer

ROOM = ["A dog and a cat share a sofa.", "The dog sleeps.", "Its ears hang down.", "The sofa is old.", "The cats purr."]
LIST = ["A lamp shines.", "A dog lies on a rug.", "The dog is black.", "The rug has a long fringe."]


def test_hand_counted_captions():
    tokenizer = CaptionTokenizer(clip_tokenizer(248), 248)  # to which each word of these captions is one token
    statistics = summarise(measure_caption(caption, tokenizer) for caption in (" ".join(ROOM), "A dog sleeps."))
    assert (statistics.captions, statistics.sentences_mean) == (2, 3)
    assert statistics.tokens_mean == (29 + 6) / 2  # words, full stops, SOT and EOT
    assert statistics.first_two_tokens_mean == (15 + 6) / 2
    assert statistics.referring == 1 / 6
    assert statistics.summary_first == 1  # of the one caption with three sentences or more
    assert "100% of the captions begin with a summary" in str(statistics) and "17% of the sentences" in str(statistics)


def test_a_summary_names_what_the_others_speak_of():
    assert is_summary_first(ROOM)
    assert not is_summary_first(ROOM[1:]) and not is_summary_first(LIST)
    assert not is_summary_first(["The image shows a dog.", "The image is dark.", "In the image the dog sleeps."])  # one


def test_pronouns_begin_sentences_that_refer_back():
    referring = ["It is blue.", "They sit.", "Its door is open.", "These are two.", "This is it."]
    others = ["This image shows it.", "These photos are old.", "A cat.", "Itself.", ""]
    assert list(filter(begins_with_pronoun, referring + others)) == referring


def test_captions_of_photographs_lose_their_summary_with_their_first_sentence():
    entries = json.loads((Path(__file__).parent / "photographs" / "captions.json").read_text())
    captions = [split_sentences(entry["conversations"][1]["value"]) for entry in entries]
    assert sum(map(is_summary_first, captions)) == 6
    assert sum(is_summary_first(caption[1:]) for caption in captions) == 1
