"""Texts of every kind: captions, data files, files of prompts, settings in PNGs."""

import json
import math

from helpers.fuzzing import fuzz, no_hang
from helpers.mutations import damaged_bytes
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.app.prompts import read_prompts
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError
from debias_diffusion.methods import find_method
from debias_diffusion.methods.sampling import SAMPLERS, draw_generator
from debias_diffusion.sentences import join_sentences, split_sentences
from debias_diffusion.tokens import CaptionTokenizer, clean, clip_tokenizer

PIECES = (
    *("Dr. No", "e.g.", "3.14", "...", "?!", "。", "॥", '"a." ', "(b. ", "\n", "\t", "\u2028", "\x00", "&amp;amp;"),
    *("<|endoftext|>", "<end_of_text>", "é", "e\u0301", "\u0345", "\ufeff", "\u200b", "👩‍👩‍👧", "ﬁ", "Ⅻ", "İ", "ſ"),
    *("1.", "- a", "A red cat sits. ", "U.S. ", "p. 3 ", "(word:1.3)", "BREAK", "[a]", "\\(", "++", "&#x41;", "&" * 50),
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=40).map(" ".join) | st.text(max_size=300)


def test_every_caption_is_split_sampled_and_tokenized():
    tokenizer = CaptionTokenizer(clip_tokenizer(248), 248)
    recipes = [find_method(name) for name in ("debias-clip", "long-clip", "smart-clip-sampling")]

    @given(TEXTS, st.integers(0, 2**31), st.sampled_from(sorted(SAMPLERS)))
    def search(text, seed, sampler):
        caption = " ".join(text.split())
        if not caption:
            return
        with no_hang():
            sentences = split_sentences(caption)
            assert sentences and "".join("".join(sentences).split()) == "".join(caption.split())
            drawn = SAMPLERS[sampler](sentences, draw_generator(seed, 0, "id"))
            if sampler == "summary-as-released":  # cut where Long-CLIP's code cuts, which may be within a sentence
                assert len(drawn) == 1 and join_sentences(sentences).startswith(drawn[0])
            else:
                assert drawn and set(drawn) <= set(sentences)
            assert clean(clean(caption)) == clean(clean(clean(caption)))
            for recipe in recipes:
                one, other = (recipe.captions(caption, tokenizer, seed, 0, "id") for _ in range(2))
                assert one == other
                rows = recipe.collate([one], tokenizer).padded()
                assert rows.shape[1] == 248 and (rows == tokenizer.markers.eot).sum(dim=1).min() == 1

    fuzz(search, seconds=15)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TURN = st.fixed_dictionaries(
    {"value": TEXTS | JSON}, optional={"from": st.sampled_from(("human", "gpt", "user", "assistant", "system")) | JSON}
)
ENTRY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "image": st.text(max_size=20) | st.sampled_from(("a.png", "../a.png", "/etc/passwd", "a\0b")) | JSON,
        "caption": TEXTS | JSON,
        "conversations": st.lists(TURN, max_size=3) | JSON,
        "id": JSON,
    },
)


def read_or_refuse(path, images):
    """What `open_data` makes of a file: (records, bad), or None where a UserError says what is wrong."""
    try:
        with no_hang():
            captions, _ = open_data(path, images)
    except UserError as error:
        assert str(path) in str(error)
        return None
    for record in captions.records:
        assert record.caption == " ".join(record.caption.split()) != "" and record.image == record.sample_id != ""
        record.image.encode()
    assert all(bad.where and bad.kind for bad in captions.bad)
    return len(captions.records), len(captions.bad)


def test_a_data_file_is_read_or_refused_and_every_entry_counts(tmp_path):
    @given(st.lists(ENTRY, max_size=6), st.data())
    def search(entries, data):
        whole = {
            "data.json": json.dumps(entries).encode(),
            "data.jsonl": b"".join(json.dumps(entry).encode() + b"\n" for entry in entries),
        }
        for name, content in whole.items():
            path = tmp_path / name
            path.write_bytes(content)
            counted = read_or_refuse(path, tmp_path)
            assert counted is None or sum(counted) == len(entries), "an entry was lost without a word"
            path.write_bytes(data.draw(damaged_bytes(content)))
            read_or_refuse(path, tmp_path)

    fuzz(search, seconds=15)


def test_one_damaged_entry_costs_no_other(tmp_path):
    """A bad byte or an endless caption inside one entry of a list."""
    faults = (b'"caption": "\xff"', b'"caption": "' + b"a. " * 700_000 + b'"')

    @given(st.integers(2, 30), st.data())
    def search(size, data):
        entries = [f'{{"image": "{number}.png", "caption": "A {number}."}}'.encode() for number in range(size)]
        at = data.draw(st.integers(0, size - 1))
        entries[at] = b'{"image": "x.png", ' + data.draw(st.sampled_from(faults)) + b"}"
        for name, content in (("d.json", b"[" + b", ".join(entries) + b"]"), ("d.jsonl", b"\n".join(entries))):
            (tmp_path / name).write_bytes(content)
            with no_hang():
                captions, _ = open_data(tmp_path / name, tmp_path)
            assert [record.image for record in captions.records] == [f"{n}.png" for n in range(size) if n != at]
            assert [bad.where for bad in captions.bad] == [f"entry {at}" if name == "d.json" else f"line {at + 1}"]

    fuzz(search, seconds=5, count=20)


def test_a_file_of_prompts_is_read_or_refused_and_every_line_counts(tmp_path):
    rows = st.lists(
        st.fixed_dictionaries(
            {"prompt": TEXTS},
            optional={"seed": st.integers() | JSON, "negative_prompt": TEXTS | JSON, "prompt_2": TEXTS, "x": JSON},
        ),
        max_size=5,
    )

    def read(path):
        try:
            with no_hang():
                prompts, left_out = read_prompts(path)
        except UserError:
            return None
        assert prompts and all(prompt.text and prompt.where for prompt in prompts)
        numbers = [prompt.number for prompt in prompts]
        assert numbers == sorted(set(numbers))
        return len(prompts) + len(left_out)

    @given(rows, st.data())
    def search(entries, data):
        lines = [json.dumps(entry) for entry in entries]
        cells = ["prompt,seed", *(f'"{str(entry["prompt"]).replace(chr(34), chr(34) * 2)}",7' for entry in entries)]
        for name, content in (
            ("p.jsonl", "\n".join(lines)),
            ("p.txt", "\n".join(entry["prompt"] for entry in entries)),
            ("p.csv", "\n".join(cells)),
        ):
            path = tmp_path / name
            path.write_bytes(content.encode("utf-8", "surrogatepass"))
            counted = read(path)
            if name == "p.jsonl" and counted is not None:
                assert counted == len(entries), "a line was lost without a word"
            path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
            read(path)

    fuzz(search, seconds=15)


def test_a_damaged_table_never_loses_a_row_without_a_word(tmp_path):
    """Quotes set anywhere in a CSV: every row is drawn, or named, or nothing is."""

    @given(st.integers(3, 40), st.booleans(), st.data())
    def search(size, quoted, data):
        rows = [f'"prompt {n}; a",{n}' if quoted else f"prompt {n}; a,{n}" for n in range(size)]
        at = data.draw(st.integers(0, size - 1))
        place = data.draw(st.integers(0, len(rows[at])))
        quote = data.draw(st.sampled_from(('"', '""', "'", '",', '"\n')))
        rows[at] = rows[at][:place] + quote + rows[at][place:]
        path = tmp_path / "p.csv"
        path.write_text("\n".join(["prompt,seed", *rows]) + "\n")
        try:
            prompts, left_out = read_prompts(path)
        except UserError:
            return
        drawn = [prompt.text for prompt in prompts]
        lost = [n for n in range(size) if n != at and f"prompt {n}; a" not in drawn]
        assert len(lost) <= len(left_out), f"{lost} are neither drawn nor named"
        assert all(math.isfinite(prompt.number) for prompt in prompts)

    fuzz(search, seconds=5)
