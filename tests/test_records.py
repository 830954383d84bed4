"""Data files of any size: what is read of them, what one bad byte costs, and what they cost in memory."""

import io
import json
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import hypothesis
import pytest
from helpers.ranks import forked
from helpers.tiny_data import entry, tar
from hypothesis import strategies as st

from debias_diffusion.data import json_files
from debias_diffusion.data.captions import LONGEST_CAPTION
from debias_diffusion.data.json_files import read_data_file, read_entries
from debias_diffusion.data.records import PackedRecords, Record
from debias_diffusion.data.sources import read_captions


@pytest.fixture
def on_disk(monkeypatch):
    """Every data file counts as a large one."""
    monkeypatch.setattr(json_files, "_IN_MEMORY", -1)


# ---- JSON, entry by entry

STRINGS = st.text('a"\\[{,]}\n\u00e9\u2028\U0001f600\ud800', max_size=6)
VALUES = st.recursive(
    STRINGS | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=8,
)
TEXTS = st.builds(
    json.dumps,
    st.lists(VALUES, max_size=5) | VALUES,
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    separators=st.sampled_from([(",", ":"), (" ,\t", " :\r\n")]),
)
DAMAGES = st.binary(max_size=2) | st.sampled_from([b'"', b"[", b"]", b",", b"\\", b"\n", b"\xff", b" ", b"9" * 5000])


def is_utf8(content: bytes) -> bool:
    return content.decode(errors="ignore").encode() == content


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data(), st.sampled_from(["", "\ufeff"]), TEXTS, st.sampled_from([8, 9, 50, 1 << 20]))
def test_a_list_whole_or_damaged_is_read_as_the_json_module_reads_it(data, mark, text, piece):
    content = bytearray((mark + text).encode(errors="surrogatepass"))
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(DAMAGES)
    try:
        whole = json.loads(content.decode("utf-8-sig"), strict=False)
    except ValueError:
        whole = None
    try:
        with patch.object(json_files, "_CHUNK", piece):
            parts = list(read_entries(io.BytesIO(content)))
    except ValueError:
        assert not isinstance(whole, list)
    else:
        if whole is None:
            assert any(isinstance(value, bytes) and not is_utf8(value) for *_, value in parts)
        else:
            values = [json.loads(value, strict=False) if isinstance(value, bytes) else value for *_, value in parts]
            assert repr(values) == repr(whole)  # in which NaN is NaN
            assert repr([json.loads(content[start:end], strict=False) for _, start, end, _ in parts]) == repr(whole)


# ---- what of an entry is its caption


def turns(*rows, key="from"):
    return [{key: role, "value": value} if role else {"value": value} for role, value in rows]


ANSWERED = [  # each conversation with its answer, or None
    (turns(("gpt", "A"), ("human", "Q")), "A"),
    (turns(("assistant", "A"), ("user", "Q"), key="role"), "A"),
    (turns(("system", "S"), ("human", "Q"), ("gpt", "A"), ("human", "Q"), ("gpt", "B")), "A"),
    (turns((None, "Q"), (None, "A")), "A"),
    (turns((None, "Q"), ("gpt", "A")), "A"),
    (turns((None, "Q")), None),
    ("abc", None),
    ([{"from": ["gpt"], "value": "Q"}, {"from": None, "value": "A"}], "A"),
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
    packed = PackedRecords.pack(iter(records))
    part = packed[4:][:2]
    assert list(packed) == records and packed[-1] == records[-1] and list(packed[::-3]) == records[::-3]
    assert part._content is packed._content and list(part) == list(pickle.loads(pickle.dumps(part))) == records[4:6]


def test_workers_and_threads_read_the_file_and_are_sent_none_of_it(tmp_path, on_disk):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([entry(f"{number}.jpg", f"Number {number}. " + "x " * 500) for number in range(300)]))
    records = read_data_file(path).records
    captions, sent = [record.caption for record in records], pickle.dumps(records)
    assert len(sent) < 50 * len(records) < path.stat().st_size / 20
    assert forked(2, lambda _: [record.caption for record in records], group=False) == [captions] * 2
    copy = pickle.loads(sent)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda number: copy[number].caption, range(300))) == captions


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_memory_does_not_grow_with_captions(tmp_path, on_disk, monkeypatch, kind):
    """A record takes 16 bytes of memory; its entry, 2,000 here, stays in the file."""
    monkeypatch.setattr(json_files, "_CHUNK", 1 << 16)  # else small files are read at once
    memory = []
    for count in (200, 1_000):
        path = tmp_path / f"{count}.{kind}"
        content = [json.dumps(entry("1.jpg", "word " * 400))] * count
        path.write_text(f"[{','.join(content)}]" if kind == "json" else "\n".join(content))
        tracemalloc.start()
        captions = read_captions(path)
        total = sum(len(record.caption) for record in captions.records)
        memory.append(tracemalloc.get_traced_memory())
        tracemalloc.stop()
        assert (len(captions.records), total) == (count, 1999 * count)
    kept, most = (large - small for small, large in zip(*memory, strict=True))
    assert kept < 800 * 30 and most < 800 * 200
