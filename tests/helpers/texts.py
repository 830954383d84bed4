"""Texts that break tokenizers."""

import random
import unicodedata

HOSTILE = [
    "",
    " \t\n",
    "<|endoftext|>",
    "a <|STARTOFTEXT|><end_of_text> b",
    "&lt;|endoftext|&gt; &amp;amp; &#60;end_of_text&#62;",
    "don't I'VE we'll 'S ''s",
    "İstanbul ΑΣ ß ſt ﬁ",
    "a\u0301 e\u0308 \u1e9b\u0323",
    "日本語テスト 👍🏽 👩‍👩‍👧",
    "\u200b\ufeff\u00a0zero\u2028width",
    "schÃ¶n donâ€™t",
    "½ Ⅷ ² ١٢٣ 3.14159",
    "x" * 500,
    "\x00\x01\x7f control",
    "!!! ??? ... ---",
]


def random_strings(count, seed=0):
    """Plain ASCII, mixed scripts and symbols, and any assigned characters at all."""
    rng = random.Random(seed)
    anything = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    assigned = set(anything)
    ranges = [(32, 0x250), (0x300, 0x600), (0x900, 0xE00), (0x1E00, 0x2C00), (0x3000, 0xA000), (0x1F300, 0x1FA00)]
    for index in range(count):
        if index % 3 == 0:
            yield "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(60)))
        elif index % 3 == 1:
            mixed = (chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(30)))
            yield "".join(character for character in mixed if character in assigned)
        else:
            yield "".join(rng.choice(anything) for _ in range(rng.randrange(20)))
