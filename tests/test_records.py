"""Data files of any size: what is read of them, what one bad byte costs, and what they cost in memory."""

import io
import json
import pickle
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import hypothesis
import pytest
from helpers.tiny_data import entry, tar
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from debias_diffusion.data import json_files
from debias_diffusion.data.captions import LONGEST_CAPTION
from debias_diffusion.data.json_files import BrokenList, read_entries, read_sharegpt4v
from debias_diffusion.data.records import PackedRecords, Record
from debias_diffusion.data.sources import read_captions
from debias_diffusion.errors import UserError


@pytest.fixture
def on_disk(monkeypatch):
    """Every data file counts as a large one."""
    monkeypatch.setattr(json_files, "_IN_MEMORY", -1)


# ---- JSON, entry by entry

SPACE = st.text(" \t\r\n", max_size=2)
STRINGS = st.builds(json.dumps, st.text(max_size=8), ensure_ascii=st.booleans()) | st.sampled_from(
    [r'"\ud800"', r'"\ud83d\ude00"', r'"\/\b\u00e9"', r'"a\\"', r'"\\\""', '"[{,"', '"\U0001f600\u2028"']
)
SCALARS = STRINGS | st.sampled_from(
    ["1", "-0", "123456789012345678901234567890", "1e5", "1.5E-3", "NaN", "Infinity", "-Infinity", "true", "null"]
)


def joined(parts, opening, closing):
    return st.lists(st.tuples(SPACE, parts, SPACE).map("".join), max_size=4).map(
        lambda rows: opening + ",".join(rows) + closing
    )


def nested(values):
    pairs = st.tuples(st.sampled_from(['"a"', '"image"', '"é"']) | STRINGS, SPACE, values)
    return joined(values, "[", "]") | joined(pairs.map(lambda pair: f"{pair[0]}{pair[1]}:{pair[2]}"), "{", "}")


VALUES = st.recursive(SCALARS, nested, max_leaves=6)
LISTS = st.tuples(st.sampled_from(["", "\ufeff"]), SPACE, joined(VALUES, "[", "]"), SPACE).map("".join)
PIECES = st.sampled_from([8, 9, 50, 1 << 20])


def listed(content, piece=1 << 20):
    with patch.object(json_files, "_CHUNK", piece):
        return list(read_entries(io.BytesIO(content)))


@hypothesis.settings(max_examples=40)
@hypothesis.given(LISTS, PIECES)
def test_a_list_gives_what_the_json_module_gives(text, piece):
    content = text.encode()
    whole, parts = json.loads(text.removeprefix("\ufeff")), listed(content, piece)
    assert repr([value for _, _, value in parts]) == repr(whole)  # in which NaN is NaN
    assert repr([json.loads(content[start:end]) for start, end, _ in parts]) == repr(whole)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.data(), LISTS | VALUES, PIECES)
def test_damaged_text_is_refused_as_the_json_module_would(data, text, piece):
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b'"', b"[", b"]", b",", b"\\", b"\n", b"\xff", b" ", b"9" * 5000])
        )
    try:
        whole = json.loads(content.decode("utf-8-sig"), strict=False)
    except ValueError:
        whole = None
    try:
        values = [value for _, _, value in listed(bytes(content), piece)]
    except BrokenList:
        assert not isinstance(whole, list)
    else:
        faults = [value for value in values if isinstance(value, ValueError)]
        assert faults if whole is None else repr(values) == repr(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-30], r"byte \d+, after 2 whole entries"),
        (lambda text: text.replace("},\n", "}\n", 1), r"Expecting ',' delimiter: byte \d+, after 1 whole"),
        (lambda text: text + "x", r"Extra data: byte \d+, after 3 whole entries"),
        (lambda text: text[5:], "it begins with .*: byte 0, after 0 whole entries"),
        (lambda text: text.replace('"2.jpg"', '"2.jpg", "a": ' + "[" * 100_000), r"recursion.*: byte \d+, after 2"),
        (lambda text: text.replace('"2.jpg"', '"2.jpg", "a": ' + "7" * 5000), r"digits.*: byte \d+, after 2"),
    ],
)
def test_a_broken_file_says_where(tmp_path, change, message):
    text = "[\n" + ",\n".join(json.dumps(entry(f"{number}.jpg", "x")) for number in range(3)) + "]"
    (tmp_path / "d.json").write_text(change(text))
    with pytest.raises(UserError, match=f"is not a JSON list .*{message}"):
        read_sharegpt4v(tmp_path / "d.json")


# ---- what of an entry is its caption


def turns(*rows, key="from"):
    return [{key: role, "value": value} if role else {"value": value} for role, value in rows]


# The answer of each conversation, or None, where it has none.
ANSWERED = [
    (turns(("gpt", "A"), ("human", "Q")), "A"),
    (turns(("assistant", "A"), ("user", "Q"), key="role"), "A"),
    (turns(("system", "S"), ("human", "Q"), ("gpt", "A"), ("human", "Q"), ("gpt", "B")), "A"),
    (turns(("GPT", "B"), ("gpt", "A")), "A"),
    (turns((None, "Q"), (None, "A")), "A"),
    (turns(("one", "Q"), ("two", "A")), "A"),
    (turns((None, "Q"), ("gpt", "A")), "A"),
    (turns((None, "?"), ("user", "Q")), None),
    (turns((None, "Q")), None),
    ("abc", None),
    ({"1": {"value": "Q"}}, None),
    ([{"from": ["gpt"], "value": "Q"}, {"from": None, "value": "A"}], "A"),
    ([{"from": "human", "value": "Q"}, {"from": "gpt"}], None),
]


def layouts(folder, fields):
    """The data files of all layouts whose entries have `fields`."""
    entries = [{"image": f"{number}.jpg", **part} for number, part in enumerate(fields)]
    (folder / "d.json").write_text(json.dumps(entries))
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, entries)))
    members = [(f"{number}.jpg", b"") for number in range(len(entries))]
    members += [(f"{number}.json", json.dumps(part).encode()) for number, part in enumerate(entries)]
    return folder / "d.json", folder / "d.jsonl", tar(folder / "s.tar", members)


def test_the_answer_is_the_caption_wherever_it_stands(tmp_path):
    for data in layouts(tmp_path, [{"conversations": conversations} for conversations, _ in ANSWERED]):
        captions = read_captions(data)
        expected = {f"{number}.jpg": answer for number, (_, answer) in enumerate(ANSWERED) if answer}
        assert {record.sample_id: record.caption for record in captions.records} == expected
        assert [bad.kind for bad in captions.bad] == ["no caption"] * (len(ANSWERED) - len(expected))


def test_one_rule_for_captions_wherever_they_lie(tmp_path):
    longest = "猫" * (LONGEST_CAPTION - 2) + " b"
    texts = [longest, longest.replace(" ", " \n" * 20_000), longest + "c", "A \x1b[2J.", "\0"]
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.jpg").write_bytes(b"")
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    for data in (*layouts(tmp_path, [{"caption": text} for text in texts]), tmp_path / "folder"):
        captions = read_captions(data)
        assert [record.caption for record in captions.records] == [longest, longest]
        control = "control character in a caption"
        assert [bad.kind for bad in captions.bad] == ["absurdly long caption", control, control]
        assert str(LONGEST_CAPTION + 1) in captions.bad[0].detail


# ---- large files, which stay on the disk


def test_records_are_a_sequence_whose_slices_are_views():
    records = [Record(str(index), f"{index}.jpg", f"Größe {index}. 猫 \u2028 " * index) for index in range(10)]
    packed = PackedRecords(iter(records))
    assert len(packed) == 10 and list(packed) == records and packed[-1] == records[-1]
    assert packed == records and packed[2:] == records[2:] and packed[::-3][1:] == records[::-3][1:]
    assert packed != records[1:] and packed != [*records[1:], records[0]] and packed != "abc"
    with pytest.raises(IndexError):
        packed[10]
    part = packed[4:][:2]
    assert part._content is packed._content and part == pickle.loads(pickle.dumps(part)) == records[4:6]


def test_workers_and_threads_read_the_file_and_are_sent_none_of_it(tmp_path, on_disk):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([entry(f"{number}.jpg", f"Number {number}. " + "x " * 500) for number in range(300)]))
    records = read_sharegpt4v(path).records
    sent = pickle.dumps(records)
    assert len(sent) < 50 * len(records) < path.stat().st_size / 20
    loader = DataLoader(records, None, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == list(records)
    numbers, copy = random.Random(0).choices(range(300), k=1200), pickle.loads(sent)
    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(lambda number: copy[number].image, numbers))
    assert images == [f"{number}.jpg" for number in numbers]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_memory_does_not_grow_with_captions(tmp_path, on_disk, monkeypatch, kind):
    """A record takes 16 bytes of memory; its entry, 2,000 here, stays in the file."""
    monkeypatch.setattr(json_files, "_CHUNK", 1 << 16)  # else small files are read at once
    memory = []
    for count in (200, 1_000):
        lines = [json.dumps(entry("1.jpg", "word " * 400)) for number in range(count)]
        path = tmp_path / f"{count}.{kind}"
        path.write_text(f"[{','.join(lines)}]" if kind == "json" else "\n".join(lines))
        del lines
        tracemalloc.start()
        try:
            captions = read_captions(path)
            total = sum(len(record.caption) for record in captions.records)
            memory.append(tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        assert (len(captions.records), total) == (count, 1999 * count)
    kept, most = (large - small for small, large in zip(*memory, strict=True))
    assert kept < 800 * 30 and most < 800 * 200
