"""Data files, files of prompts and wildcards, with any values and damaged."""

import csv
import json

import pytest
from helpers.fuzzing import fuzz, no_hang
from helpers.mutations import damaged_bytes
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.app.prompts import read_prompts
from debias_diffusion.data.sources import open_data
from debias_diffusion.errors import UserError

TEXTS = st.text(max_size=300)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TURN = st.fixed_dictionaries({"value": TEXTS | JSON}, optional={"from": st.sampled_from(("human", "gpt")) | JSON})
ENTRY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "image": st.text(max_size=20) | st.sampled_from(("a.png", "../a.png", "/etc/passwd", "a\0b")) | JSON,
        "caption": TEXTS | JSON,
        "conversations": st.lists(TURN, max_size=3) | JSON,
        "id": JSON,
    },
)


ROW = st.fixed_dictionaries(
    {"prompt": TEXTS | st.just("a __w__ {b|__*__}")},
    optional={"seed": st.integers() | JSON, "negative_prompt": TEXTS | JSON, "prompt_2": TEXTS, "x": JSON},
)


def refused_or(read, path):
    """What `read` makes of a file, or None where a UserError says what is wrong with it."""
    try:
        with no_hang():
            return read(path)
    except UserError as error:
        assert str(path) in str(error)


def counted_data(path) -> int:
    captions, _ = open_data(path, path.parent)
    for record in captions.records:
        assert record.caption == " ".join(record.caption.split()) != "" and record.image == record.sample_id != ""
        record.image.encode()
    assert all(bad.where and bad.kind for bad in captions.bad)
    return len(captions.records) + len(captions.bad)


def counted_prompts(path) -> int:
    tasks, left_out = read_prompts(path)
    assert tasks and all(task.prompt.prompt and task.where for task in tasks)
    names = [task.name for task in tasks]
    assert names == sorted(set(names))
    return len(tasks) + len(left_out)


@pytest.mark.parametrize(
    ("entry", "names", "counted"),
    [(ENTRY, ("d.json", "d.jsonl"), counted_data), (ROW, ("p.jsonl", "p.txt", "p.csv"), counted_prompts)],
)
def test_a_file_is_read_or_refused_and_every_entry_counts(tmp_path, entry, names, counted):
    (tmp_path / "wildcards").mkdir()

    @given(st.lists(entry, max_size=6), st.sampled_from(",;\t"), st.data())
    def search(entries, separator, data):
        lines = [json.dumps(entry) for entry in entries]
        (tmp_path / "wildcards" / "w.txt").write_bytes(data.draw(damaged_bytes(data.draw(TEXTS).encode())))
        for path in (tmp_path / name for name in names):
            path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines))
            if path.suffix == ".csv":
                with open(path, "w", newline="") as file:
                    rows = csv.DictWriter(file, "prompt seed negative_prompt prompt_2 x".split(), delimiter=separator)
                    rows.writeheader()
                    rows.writerows(entries)
            count = refused_or(counted, path)
            assert count in (None, len(entries)) or "json" not in path.suffix, "an entry was lost without a word"
            path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
            refused_or(counted, path)

    fuzz(search, seconds=6)
