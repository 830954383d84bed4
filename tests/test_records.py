"""Data files of any size: what of them is a caption, and what they cost in memory."""

import json
import tracemalloc

import pytest
from helpers.tiny_data import entry, tar

from debias_diffusion.data import json_files
from debias_diffusion.data.captions import LONGEST_CAPTION
from debias_diffusion.data.sources import read_captions

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


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_memory_does_not_grow_with_captions(tmp_path, monkeypatch, kind):
    """A record takes 16 bytes of memory; its entry, 2,000 here, stays in the file."""
    monkeypatch.setattr(json_files, "_IN_MEMORY", -1)
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
