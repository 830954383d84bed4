import unicodedata

import open_clip
import pytest
import torch
from helpers.texts import HOSTILE, random_strings
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_diffusion.text.tokens import PAD, CaptionTokenizer, clean, clip_tokenizer

LENGTH = 248
TOKENIZER = CaptionTokenizer(clip_tokenizer(LENGTH), LENGTH)
OPEN_CLIP = open_clip.SimpleTokenizer(context_length=LENGTH)


def still_differs(text):
    """What the two libraries class differently, as `clean` documents."""
    return any(character == "\u0345" or unicodedata.category(character) == "Cn" for character in clean(text))


def test_equal_to_open_clips_tokenizer_on_cleaned_text():
    texts = HOSTILE + list(random_strings(3_000 - len(HOSTILE)))
    compared = [text for text in texts if not still_differs(text)]
    assert len(compared) > 2_900
    cleaned = [clean(text) for text in compared]
    ours, theirs = TOKENIZER(compared).padded(), OPEN_CLIP(cleaned)
    different = [cleaned[i] for i in (ours != theirs).any(dim=1).nonzero().flatten().tolist()]
    assert different == []


def test_what_cleaning_does_to_cleaned_text():
    assert clean(" CAFE\u0301 &amp;lt;3\t schÃ¶n <|endoftext|>") == "café <3 schön < |endoftext| >"


@given(st.text(max_size=200))
@settings(max_examples=300)
def test_cleaning_leaves_no_special_token_and_is_done_once(text):
    ids = TOKENIZER(["x " + text]).padded()[0].tolist()
    assert ids.count(49406) == ids.count(49407) == 1 and "  " not in clean(text)


def test_a_long_caption_is_cut_and_still_ends_in_eot():
    row = TOKENIZER(["word " * 1000]).padded()[0]
    assert len(row) == LENGTH and row[0] == 49406 and row[-1] == 49407 and PAD not in row
    assert TOKENIZER.count("word " * 1000) == 1002


@pytest.mark.parametrize("pads_before_sot", [False, True])
def test_literal_rows_have_pads_beside_sot_and_after_eot(pads_before_sot):
    ids = TOKENIZER.text_ids(["a cat", "a dog"])
    batch = TOKENIZER.batch(ids, [3, 0], pads_before_sot)
    start = [PAD, PAD, PAD, 49406] if pads_before_sot else [49406, PAD, PAD, PAD]
    rows = batch.padded()
    assert rows[0, :8].tolist() == [*start, *ids[0], 49407, PAD]
    assert rows[1, :5].tolist() == [49406, *ids[1], 49407, PAD]
    # the prefix that captions share has SOT where it stands first
    assert batch.prefix_ids.tolist() == start[: 4 - pads_before_sot]
    assert batch.n_prefix.tolist() == [4 - pads_before_sot, 1 - pads_before_sot]
    assert TOKENIZER.n_post(ids[0]) == LENGTH - 4


@pytest.mark.parametrize("pads_before_sot", [False, True])
def test_a_selection_has_the_same_rows_and_no_more_prefix_than_it_needs(pads_before_sot):
    batch = TOKENIZER.batch(TOKENIZER.text_ids(["a cat", "two dogs run", "", "birds"]), [2, 7, 0, 1], pads_before_sot)
    for some in ([0, 1, 2, 3], [3, 0], [2]):
        assert torch.equal(batch.select(some).padded(), batch.padded()[some])
    assert len(batch.select([3, 0]).prefix_ids) == 2 + (not pads_before_sot)


def test_another_context_length_leaves_the_tokenizer_as_it_is():
    longer = TOKENIZER.with_context_length(LENGTH + 50)
    assert (TOKENIZER.tokenizer.model_max_length, longer.tokenizer.model_max_length) == (LENGTH, LENGTH + 50)
    assert (
        longer.text_ids(["word " * 999])[0]
        == TOKENIZER.text_ids(["word " * 999])[0] + longer.text_ids(["word"])[0] * 50
    )
