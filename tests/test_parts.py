"""Parts of an evaluation that are not done again."""

import json

import pytest
import torch

from debias_diffusion.eval.common.cache import Parts


@pytest.fixture
def done(tmp_path):
    """(what does the work of a part, the numbers it was asked for)"""
    asked = []

    def work(number=1.5):
        asked.append(number)
        return {"number": number, "list": [1, 2, 3]}

    return work, asked


def test_a_part_is_done_once_for_what_decides_it(tmp_path, done):
    work, asked = done
    for depends, number in (({"a": 1}, 1.5), ({"a": 1}, 2.5), ({"a": 2}, 3.5)):
        kept = Parts(tmp_path).result("part", depends, lambda number=number: work(number))
        assert kept == {"number": 3.5 if depends["a"] == 2 else 1.5, "list": [1, 2, 3]}
    assert asked == [1.5, 3.5]


def test_a_changed_character_of_a_part_makes_it_be_done_again(tmp_path, done):
    work, asked = done
    expected = Parts(tmp_path).result("part", {"a": 1}, work)
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()
    values = json.loads(whole)
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        before, changed = len(asked), False
        try:
            changed = json.loads(file.read_bytes()) != values
        except ValueError:
            changed = True
        assert Parts(tmp_path).result("part", {"a": 1}, work) == expected
        assert (len(asked) > before) == changed, at
    for damage in (b"", b"[]", b"[" * 100_000, whole[: len(whole) // 2]):
        file.write_bytes(damage)
        assert Parts(tmp_path).result("part", {"a": 1}, work) == expected


def test_damaged_tensors_are_made_again(tmp_path):
    made = []

    def work():
        made.append(0)
        return {"features": torch.arange(6.0).reshape(2, 3)}

    for damage in (None, b"", bytes(200)):
        if damage is not None:
            (file,) = tmp_path.glob("*.safetensors")
            file.write_bytes(damage)
        assert Parts(tmp_path).tensors("part", {}, work)["features"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(made) == 3
