"""The cache of evaluation results."""

import json

import pytest

from debias_diffusion.eval import cache
from debias_diffusion.eval.cache import ResultCache


@pytest.fixture
def computed():
    """(a function to cache, the numbers that it was called with)"""
    calls = []

    def compute(number=1.5):
        calls.append(number)
        return {"number": number, "list": [1, 2, 3]}

    return compute, calls


def test_a_result_is_computed_once_for_each_key(tmp_path, computed):
    compute, calls = computed
    for depends, number in (({"a": 1}, 1.5), ({"a": 1}, 2.5), ({"a": 2}, 3.5)):
        result = ResultCache(tmp_path).result("part", depends, lambda number=number: compute(number))
        assert result == {"number": 3.5 if depends["a"] == 2 else 1.5, "list": [1, 2, 3]}
    assert calls == [1.5, 3.5]


def test_a_changed_character_in_the_cache_makes_it_compute_again(tmp_path, computed):
    compute, calls = computed
    expected = ResultCache(tmp_path).result("part", {"a": 1}, compute)
    (file,) = tmp_path.glob("*.json")
    whole = file.read_bytes()
    values = json.loads(whole)
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        before, changed = len(calls), False
        try:
            changed = json.loads(file.read_bytes()) != values
        except ValueError:
            changed = True
        assert ResultCache(tmp_path).result("part", {"a": 1}, compute) == expected
        assert (len(calls) > before) == changed, at
    for damage in (b"", b"[]", b"[" * 100_000, whole[: len(whole) // 2]):
        file.write_bytes(damage)
        assert ResultCache(tmp_path).result("part", {"a": 1}, compute) == expected


def test_another_version_of_a_library_is_another_key(tmp_path, computed, monkeypatch):
    compute, calls = computed

    def result(number: float, **libraries: str) -> float:
        monkeypatch.setattr(cache, "versions", lambda: libraries)
        return ResultCache(tmp_path).result("part", {"a": 1}, lambda: compute(number))["number"]

    assert [result(1, torch="2.11.0"), result(2, torch="2.12.0"), result(3, torch="2.11.0")] == [1, 2, 1]
    assert result(4, torch="2.11.0", diffusers="0.36.0") == 4 and calls == [1, 2, 4]


def test_files_and_keys_are_stable(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "versions", lambda: {"torch": "2.11.0"})
    ResultCache(tmp_path).result("retrieval", {"encoder": "ab", "good": (0, 2)}, lambda: {"ranks": [1]})
    (file,) = tmp_path.iterdir()
    assert file.name == "retrieval-9e3f2c7b2c5115b823a42d69.json"
    entry = json.loads(file.read_text())
    assert entry.keys() == {"depends", "seconds", "result", "sha256"} and entry["result"] == {"ranks": [1]}
    key = {"part": "retrieval", "encoder": "ab", "good": [0, 2], "versions": {"torch": "2.11.0"}}
    assert entry["depends"] == key
