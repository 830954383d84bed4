"""Counts of captions, by hand."""

from debias_diffusion.data.check import describe_captions, measure_caption
from debias_diffusion.text.tokens import CaptionTokenizer, clip_tokenizer

ROOM = "A dog and a cat share a sofa. The dog sleeps. Its ears hang down. The sofa is old. The cats purr."


def test_hand_counted_captions():
    tokenizer = CaptionTokenizer(clip_tokenizer(248), 248)  # to which each word of these captions is one token
    measures = [measure_caption(caption, tokenizer) for caption in (ROOM, "A dog sleeps.")]
    # Words, full stops, SOT and EOT.
    assert measures == [(5, 29, 15), (1, 6, 6)]
    expected = "3.0 sentences and 17.5 tokens on average, 95% within 28; the first two sentences have 10.5."
    assert describe_captions(measures) == expected
