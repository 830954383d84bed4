"""Statistics of captions: hand-counted ones, and captions whose summary is taken away."""

import json
from functools import cache
from pathlib import Path

import pytest
from helpers.tiny_clip import siglip_tokenizer

from debias_diffusion.data.caption_statistics import begins_with_pronoun, is_summary_first, measure_caption, summarise
from debias_diffusion.data.sources import open_data
from debias_diffusion.sentences import split_sentences
from debias_diffusion.tokens import CaptionTokenizer, Markers, clip_tokenizer

ROOM = ["A dog and a cat share a sofa.", "The dog sleeps.", "Its ears hang down.", "The sofa is old.", "The cats purr."]
LIST = ["A lamp shines.", "A dog lies on a rug.", "The dog is black.", "The rug has a long fringe."]


def caption_statistics(captions, tokenizer):
    return summarise(measure_caption(caption, tokenizer) for caption in captions)


@cache
def words() -> CaptionTokenizer:
    """CLIP's, to which each word of these captions is one token."""
    return CaptionTokenizer(clip_tokenizer(248), 248)


def test_a_hand_counted_caption():
    statistics = caption_statistics([" ".join(ROOM), "A dog sleeps."], words())
    assert (statistics.captions, statistics.sentences_mean) == (2, 3)
    assert statistics.tokens_mean == (29 + 6) / 2  # words, full stops, SOT and EOT
    assert statistics.first_two_tokens_mean == (15 + 6) / 2
    assert statistics.referring == 1 / 6
    assert statistics.summary_first == 1  # of the one caption with three sentences or more
    assert "100% of the captions begin with a summary" in str(statistics) and "17% of the sentences" in str(statistics)
    assert "summary" not in str(caption_statistics(["A dog."], words()))


def test_tokens_are_those_of_the_tokenizer_given():
    tokenizer = siglip_tokenizer(1)
    siglip = CaptionTokenizer(tokenizer, 64, Markers(None, tokenizer.eos_token_id, tokenizer.pad_token_id))
    caption = " ".join(ROOM)
    assert caption_statistics([caption], siglip).first_two_tokens_mean == siglip.count(" ".join(ROOM[:2])) != 15


def test_a_summary_names_what_the_others_speak_of():
    assert is_summary_first(ROOM)
    assert not is_summary_first(ROOM[1:]) and not is_summary_first(LIST)
    assert not is_summary_first(["The image shows a dog.", "The image is dark.", "In the image the dog sleeps."])  # one


def test_pronouns_begin_sentences_that_refer_back():
    referring = ["It is blue.", "They sit.", "Its door is open.", "These are two.", "This is it."]
    others = ["This image shows it.", "These photos are old.", "A cat.", "Itself.", ""]
    assert list(filter(begins_with_pronoun, referring + others)) == referring


@pytest.mark.parametrize(("name", "referring"), [("toy/test", 0), ("toy/referring-test", 0.2)])
def test_toy_captions_have_a_summary_first_and_refer_back_where_they_should(name, referring):
    captions = [record.caption for record in open_data(name)[0].records[:60]]
    statistics = caption_statistics(captions, words())
    assert statistics.summary_first > 0.9
    dropped = caption_statistics([" ".join(split_sentences(caption)[1:]) for caption in captions], words())
    assert dropped.summary_first < 0.3
    assert referring <= statistics.referring < referring + 0.1


def test_captions_of_photographs_lose_their_summary_with_their_first_sentence():
    entries = json.loads((Path(__file__).parent / "photographs" / "captions.json").read_text())
    captions = [split_sentences(entry["conversations"][1]["value"]) for entry in entries]
    assert sum(map(is_summary_first, captions)) == 6
    assert sum(is_summary_first(caption[1:]) for caption in captions) == 1
