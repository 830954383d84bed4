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
    """Plain ASCII, Latin and symbols, and any assigned characters at all."""
    rng = random.Random(seed)
    assigned = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    for index in range(count):
        letters = assigned[32 : (127, 2000, None)[index % 3]]
        yield "".join(rng.choice(letters) for _ in range(rng.randrange(40)))
