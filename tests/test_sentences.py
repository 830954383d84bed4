import pytest
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion import split_sentences

CASES = {
    "A cat. A dog! A bird? Yes.": ["A cat.", "A dog!", "A bird?", "Yes."],
    "A U.S. flag hangs. It is old.": ["A U.S. flag hangs.", "It is old."],
    "It is 3.5 m tall. Mr. Lee, e.g. here, waits.": ["It is 3.5 m tall.", "Mr. Lee, e.g. here, waits."],
    "He came at 3 p.m. The sun shone.": ["He came at 3 p.m.", "The sun shone."],
    "J. Smith sits near St. Mary's. Done": ["J. Smith sits near St. Mary's.", "Done"],
    'A sign says "Stop!" and it is red. "Go." is green.': ['A sign says "Stop!" and it is red.', '"Go." is green.'],
    "1. A dog. 2. A cat.": ["1. A dog.", "2. A cat."],
    "a small ... dog. lower case too.": ["a small ... dog.", "lower case too."],
    "Fruit, bread, etc. on a table. The end": ["Fruit, bread, etc. on a table.", "The end"],
    "Eine Straße. Über ihr Licht.": ["Eine Straße.", "Über ihr Licht."],
    "一只猫。一只狗！": ["一只猫。", "一只狗！"],
    "No full stop": ["No full stop"],
    "First line.\nSecond line.": ["First line.", "Second line."],
    "": [],
    " \n ": [],
}


@pytest.mark.parametrize("caption", CASES)
def test_sentences_of_known_captions(caption):
    assert split_sentences(caption) == CASES[caption]


@given(st.text(max_size=300))
def test_splitting_loses_no_text(caption):
    sentences = split_sentences(caption)
    assert "".join("".join(sentences).split()) == "".join(caption.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)
