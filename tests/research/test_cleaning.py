"""Which synthesized captions are removed, why, and what is asked for."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from debias_diffusion.files import bytes_digest
from debias_diffusion.text.tokens import clip_tokenizer
from research.synthesize.cleaning import drop_unfinished, fault
from research.synthesize.instructions import LONG, SHORT, draw_instruction

LABELLED = json.loads(Path(__file__).with_name("labelled-captions.json").read_text())
WORDS = "ant bee cat dog elk fox gnu hen ibis jay koi lark mole newt owl pug quail rook seal toad".split()


def kind(text, asked="long"):
    fault_of = fault(drop_unfinished(text, asked), asked)
    return fault_of and fault_of.partition(":")[0]


def padded(text):
    return f"{text} {'. '.join(f'Here sits a {word}' for word in WORDS)}."


def test_labelled_captions():
    wrong = {}
    for name, captions in LABELLED.items():
        assert Counter(caption["kind"] is None for caption in captions) == {True: 15, False: 15}
        wrong[name] = [caption for caption in captions if kind(caption["text"]) != caption["kind"]]
    # Of the thirty captions written after the cleaning was finished, it misses four, and removes no good one.
    assert wrong["seen"] == [] and len(wrong["held_back"]) <= 4
    assert all(caption["kind"] for caption in wrong["held_back"])


@pytest.mark.parametrize(
    ("kept", "removed", "named"),
    [
        ("A red, red, red door.", "A red, red, Red, red door.", "repeated: 'red' 4 times running"),
        ("It is near a pond, near a pond.", "It is near a pond, near a pond, near a pond.", "'near a pond' 3 times"),
        ("X O X O X O, a board says.", "An X on an X on an X on a board.", "'an x on' 3 times|'x on an' 3 times"),
        ("It is. A cow. It is.", "It is. A cow. It is. A pig. It is!", "3 times the sentence 'it is'"),
        ('A sign says "I\'m sorry".', "I'm sorry, I cannot see that.", "a refusal"),
        ("We see a door and, if I may say so, a cat.", "As an AI model I know no cats.", "a refusal"),
        ("A door. I cannot see a handle.", "I cannot see an image.", "a refusal"),
        ('A screen shows "<br>".', "A screen<br/>shows it.", "markup"),
        ("He is no. 1 * 2 in #3.", "**He** is no. 1.", "markup"),
        ("The main subjects and the background.", f"{LONG[2]} So.", "words of a prompt"),
        ("It has 7 7 7 stripes.", f"It has {' '.join(map(str, range(400)))}.", "of the characters are letters"),
    ],
)
def test_each_rule_at_its_limit(kept, removed, named):
    assert fault(padded(kept)) is None
    assert re.search(named, fault(padded(removed)))


def test_short_captions_are_counted_in_tokens_or_in_words():
    texts = [" ".join([*WORDS, *WORDS[:more]]) for more in range(len(WORDS))]
    by_count = {len(clip_tokenizer(77)(text)["input_ids"]) - 2: text for text in texts}
    assert fault(by_count[29]) == "short: 29 tokens, fewer than 30" and fault(by_count[30]) is None
    assert fault("A dog", "short") == "short: 2 words, fewer than 3" and fault("A dog runs", "short") is None


def test_an_unfinished_last_sentence_is_dropped():
    assert drop_unfinished(" A dog runs. A cat in the ") == "A dog runs."
    assert drop_unfinished('A dog runs. It says "Woof!"\n') == 'A dog runs. It says "Woof!"'
    assert drop_unfinished("**A** dog runs.\nThe cat") == "**A** dog runs."  # as it stands, for the markup
    assert drop_unfinished("A dog on the") == "" and drop_unfinished("A dog on a sofa", "short") == "A dog on a sofa"
    assert drop_unfinished("A dog runs. A cat", "short") == "A dog runs." and drop_unfinished("") == ""


def test_prompts_are_the_papers_and_a_function_of_seed_and_sample():
    # As they stood in the paper's text.
    assert len(set(LONG)) == 20 and bytes_digest(["\n".join(LONG).encode()])[:16] == "638ec0bdfb74f60a"
    drawn = Counter(draw_instruction("long", 0, f"{index}.jpg") for index in range(4000))
    assert drawn.keys() == set(LONG)
    assert sum((count - 200) ** 2 / 200 for count in drawn.values()) < 43.8  # chi-square, 19 degrees, p = 0.001
    once, again, other = ([draw_instruction("long", seed, f"{n}.jpg") for n in range(50)] for seed in (0, 0, 1))
    assert once == again != other
    assert draw_instruction("short", 3, "a.jpg") == SHORT[0]
