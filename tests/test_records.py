"""Data files of any size: what is read of them, what one bad byte costs, and what they cost in memory."""

import hashlib
import io
import json
import pickle
import random
import tarfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import hypothesis
import pytest
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from debias_diffusion.data import json_files
from debias_diffusion.data.captions import LONGEST_CAPTION
from debias_diffusion.data.json_files import BrokenList, read_entries, read_jsonl, read_sharegpt4v
from debias_diffusion.data.records import PackedRecords, Record
from debias_diffusion.data.sources import data_digest, read_captions
from debias_diffusion.errors import UserError


def entry(number, caption="A cat. A dog."):
    return {"image": f"{number}.jpg", "conversations": [{"from": "human", "value": "?"}, {"value": caption}]}


def write(path, entries):
    path.write_text(json.dumps(entries))
    return path


def tar(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


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


@hypothesis.given(LISTS, PIECES)
def test_a_list_gives_what_the_json_module_gives(text, piece):
    content = text.encode()
    whole, parts = json.loads(text.removeprefix("\ufeff")), listed(content, piece)
    assert repr([value for _, _, value in parts]) == repr(whole)  # in which NaN is NaN
    assert repr([json.loads(content[start:end]) for start, end, _ in parts]) == repr(whole)


@hypothesis.given(st.data(), LISTS | VALUES, PIECES)
def test_damaged_text_is_refused_or_its_entry_named_as_the_json_module_would_refuse_it(data, text, piece):
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


CONTROL = {chr(code) for code in (*range(32), 127, *range(0xD800, 0xE000))} - set("\t\n\v\f\r\x1c\x1d\x1e\x1f")


def plain(content):
    """The records of a data file as one would read them first."""
    records, bad = [], []
    for index, part in enumerate(json.loads(content)):
        caption = part.get("caption") if isinstance(part, dict) else None
        image = part.get("image") if isinstance(part, dict) else None
        good = isinstance(caption, str) and caption.strip() and isinstance(image, str) and image
        if good and not any("\ud800" <= letter <= "\udfff" for letter in image) and not CONTROL & set(caption):
            records.append(Record(image, image, " ".join(caption.split())))
        else:
            bad.append(f"entry {index}")
    return records, bad


@hypothesis.given(st.lists(st.dictionaries(st.sampled_from(["image", "caption", "x"]), st.text() | st.none())))
def test_records_are_those_of_a_plain_reader_in_memory_and_on_disk(tmp_path_factory, entries):
    path = write(tmp_path_factory.mktemp("plain") / "d.json", [*entries, {"image": "\ud800", "caption": "a"}, entry(0)])
    entries = json.loads(path.read_text())
    entries[-1]["caption"] = entries[-1]["conversations"][1]["value"]
    expected, bad = plain(json.dumps(entries))
    (path.parent / "d.jsonl").write_text("\n".join(map(json.dumps, entries)))
    for most in (1 << 20, -1):
        with patch.object(json_files, "_IN_MEMORY", most):
            captions = read_sharegpt4v(path)
            lines = read_jsonl(path.parent / "d.jsonl")
        assert list(captions.records) == expected == list(lines.records)
        assert [fault.where for fault in captions.bad] == bad and len(lines.bad) == len(bad)
        assert [fault.kind for fault in captions.bad] == [fault.kind for fault in lines.bad]
        assert data_digest(path, captions) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_one_bad_entry_costs_itself_and_is_named(tmp_path):
    entries = [json.dumps(entry(number)).encode() for number in range(6)]
    entries[1] = entries[1].replace(b"A dog", b"A d\xffg")
    entries[2] = b"[]"
    entries[4] = entries[4].replace(b"A dog", b"A \n dog")  # a control character, which is allowed
    (tmp_path / "d.json").write_bytes(b"[\n" + b",\n".join(entries) + b"]")
    captions = read_captions(tmp_path / "d.json")
    assert [record.image for record in captions.records] == ["0.jpg", "3.jpg", "4.jpg", "5.jpg"]
    assert captions.records[2].caption == "A cat. A dog."
    assert [(bad.where, bad.kind) for bad in captions.bad] == [
        ("entry 1", "bad entry of JSON"),
        ("entry 2", "not an object"),
    ]
    assert captions.bad[0].detail.startswith("not UTF-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-30], r"byte \d+, after 2 whole entries"),
        (lambda text: text.replace('"1.jpg"', '"1.jpg'), r"byte \d+, after 1 whole entries"),
        (lambda text: text.replace("},\n", "}\n", 1), "Expecting ',' delimiter: byte 88, after 1 whole"),
        (lambda text: text + "x", "Extra data: byte 265, after 3 whole entries"),
        (lambda text: text[5:], "it begins with .*: byte 0, after 0 whole entries"),
        (lambda text: text.replace('"2.jpg"', '"2.jpg", "a": ' + "[" * 100_000), r"recursion.*: byte \d+, after 2"),
        (lambda text: text.replace('"2.jpg"', '"2.jpg", "a": ' + "7" * 5000), r"digits.*: byte \d+, after 2"),
    ],
)
def test_a_broken_file_says_where(tmp_path, change, message):
    text = "[\n" + ",\n".join(json.dumps(entry(number, "x")) for number in range(3)) + "]"
    (tmp_path / "d.json").write_text(change(text))
    with pytest.raises(UserError, match=f"is not a JSON list .*{message}"):
        read_sharegpt4v(tmp_path / "d.json")


# ---- what of an entry is its caption


def turns(*rows, key="from"):
    return [{key: role, "value": value} if role else {"value": value} for role, value in rows]


ANSWERED = [
    (turns(("human", "Q"), ("gpt", "A")), "A"),
    (turns(("gpt", "A"), ("human", "Q")), "A"),
    (turns(("assistant", "A"), ("user", "Q"), key="role"), "A"),
    (turns(("system", "S"), ("human", "Q"), ("gpt", "A"), ("human", "Q"), ("gpt", "B")), "A"),
    (turns(("human", "Q"), ("gpt", "A"), ("human", "Q"), ("gpt", "B")), "A"),
    (turns(("GPT", "B"), ("gpt", "A")), "A"),
    (turns(("gpt", "A")), "A"),
    (turns((None, "Q"), (None, "A")), "A"),
    (turns(("one", "Q"), ("two", "A")), "A"),
    (turns((None, "Q"), ("gpt", "A")), "A"),
    (turns(("human", "Q"), ("human", "Q")), None),
    (turns((None, "?"), ("user", "Q")), None),
    (turns(("human", "Q")), None),
    (turns((None, "Q")), None),
    ("abc", None),
    ({"1": {"value": "Q"}}, None),
    (7, None),
    ([{"from": ["gpt"], "value": "Q"}, {"from": None, "value": "A"}], "A"),
    ([{"from": "human", "value": "Q"}, {"from": "gpt"}], None),
]


@pytest.mark.parametrize(("conversations", "answer"), ANSWERED)
def test_the_answer_is_the_caption_wherever_it_stands(tmp_path, conversations, answer):
    fields = {"image": "1.jpg", "conversations": conversations}
    write(tmp_path / "d.json", [fields, entry(2)])
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(fields)}\n{json.dumps(entry(2))}")
    samples = [("1.jpg", b""), ("1.json", json.dumps(fields).encode()), ("2.jpg", b""), ("2.txt", b"A cat.")]
    tar(tmp_path / "s.tar", samples)
    for data in ("d.json", "d.jsonl", "s.tar"):
        captions = read_captions(tmp_path / data)
        assert [record.caption for record in captions.records[:-1]] == ([answer] if answer else [])
        assert [bad.kind for bad in captions.bad] == ([] if answer else ["no caption"])


def test_one_rule_for_captions_wherever_they_lie(tmp_path):
    longest = "猫" * (LONGEST_CAPTION - 2) + " b"
    texts = [longest, longest.replace(" ", " \n" * 20_000), longest + "c", "A \x1b[2J.", "\0"]
    write(tmp_path / "d.json", [entry(number, text) for number, text in enumerate(texts)])
    lines = [json.dumps({"image": f"{number}.jpg", "caption": text}) for number, text in enumerate(texts)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    (tmp_path / "folder").mkdir()
    members = []
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.jpg").write_bytes(b"")
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
        content = json.dumps({"caption": text}).encode() if number else text.encode()
        members += [(f"{number}.jpg", b""), (f"{number}.{'json' if number else 'txt'}", content)]
    tar(tmp_path / "s.tar", members)
    for data in ("d.json", "d.jsonl", "folder", "s.tar"):
        captions = read_captions(tmp_path / data)
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
    assert packed != records[1:] and packed != [*records[1:], records[0]] and packed != "abc" and packed != 7
    assert list(reversed(packed)) == records[::-1] and records[3] in packed
    with pytest.raises(IndexError):
        packed[10]
    part = packed[4:][:2]
    assert part._content is packed._content and part == pickle.loads(pickle.dumps(part)) == records[4:6]


def test_workers_and_threads_read_the_file_and_are_sent_none_of_it(tmp_path, on_disk):
    path = write(tmp_path / "d.json", [entry(number, f"Number {number}. " + "x " * 500) for number in range(300)])
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
        lines = [json.dumps(entry(number, "word " * 400)) for number in range(count)]
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
