import json
from pathlib import Path

import pytest

from debias_diffusion import split_sentences
from debias_diffusion.text.chunks import Cut
from debias_diffusion.text.prompt_tokens import fast_tokenizer, tokenize_text
from debias_diffusion.text.tokens import clip_tokenizer

CASES = [
    ["A cat.", "A dog!", "A bird?", "Yes."],
    ["It is 3.5 m tall.", "Mr. Lee, e.g. here, waits."],
    ['A sign says "Stop!" and it is red.', '"Go." is green.'],
    ["No full stop"],
    # Beside the tables, so that the rules behind them are not only tested on the words they were made with.
    ["Prof. A. Lenz sings.", "The Dr. Who poster hangs behind a chair in J. Smith's house."],
    ["The answer is no.", "The dog sat.", "3 cats ran to no. 5."],
    ["A 12 fl. oz. can and a 5-in. nail lie there.", "The board is 2 ft. 3 in. wide."],
    ["Er wohnt im 3. Stock.", "Ein Hund, z.B. ein Dackel, rennt.", "„Halt!“ ruft er.", "Der Hund steht."],
    ["Look at this cat! 😻", "It is asleep.", "Lovely day 🎉🎉", "The sun is out."],
    ["The list: 1. A dog.", "2. A cat.", "(3) A bird (small?) sings."],
    ['The box is 5" tall.', 'A ruler 3" long lies near.', "The end."],
    # On these other splitters fail.
    ["It is shown in Fig. A of the book.", "He ate a fig.", "A cat came on Sat.", "A dog barked."],
    ["Shorten it, e.g. Paris, not e.g.", "Continue."],
]


def test_sentences_of_known_captions():
    assert [split_sentences(" ".join(sentences)) for sentences in CASES] == CASES
    assert split_sentences("") == split_sentences(" \n ") == []
    assert split_sentences("这是猫！它很可爱。") == ["这是猫！", "它很可爱。"]
    assert split_sentences("「行こう。」と彼は言った。空は青い。") == ["「行こう。」と彼は言った。", "空は青い。"]
    lines = ["A dog\nruns.", "- a ball", "- a stick", "1) Grass"]
    assert split_sentences("\n".join(lines)) == lines


TABLES = Path(__file__).parent / "sentences"
HALVES = {half: json.loads((TABLES / f"{half}.json").read_text()) for half in ("open", "held_back")}


def answer(case):
    """What is returned for a case, and what should be; white space inside a sentence as single spaces."""
    caption = case.get("caption") or case.get("joined_by", " ").join(case["sentences"])
    return [[" ".join(s.split()) for s in sentences] for sentences in (split_sentences(caption), case["sentences"])]


@pytest.mark.parametrize(("half", "most_wrong"), [("open", 1), ("held_back", 7)])
def test_no_more_cases_are_wrong_than_were_measured(half, most_wrong):
    # Says how many of those held back and not which: they are there to measure with, not to tune on. Measured: 5.
    assert sum(split != expected for split, expected in map(answer, HALVES[half])) <= most_wrong
    assert len(HALVES["held_back"]) == 159


def test_chunks_may_end_where_sentences_end_and_not_inside_names():
    tokenizer = clip_tokenizer(77)
    texts = [" ".join(sentences) for sentences in [*CASES, *(case["sentences"] for case in HALVES["open"])]]
    texts = [text for text in texts if "\n" not in text] + ["By J. C. Leyendecker, of St. Ives, and N. C. Wyeth"]
    for text in texts:
        tokens = tokenize_text(text, tokenizer)
        spans = fast_tokenizer(tokenizer)(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        ends = [at for at, cut in enumerate(tokens.cuts) if cut == Cut.SENTENCE]
        bounds = zip([0, *(spans[at][1] for at in ends)], [*(spans[at][1] for at in ends)], strict=False)
        assert [text[start:end].strip() for start, end in bounds] == split_sentences(text)


# Each of these takes less than a second. What looked back or ahead without a limit would take minutes.
UNITS = [".", "a.", '("', ". . ", "A. ", "e.g. ", ": 1. ", '" ', "(a", "*. ", "\n- ", "\n\n ", "a", "。」", "« ", "😀 "]


@pytest.mark.parametrize("unit", UNITS)
def test_long_captions_of_one_kind_of_character_are_read(unit):
    caption = unit * (200_000 // len(unit))
    assert "".join("".join(split_sentences(caption)).split()) == "".join(caption.split())
