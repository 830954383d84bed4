"""The cache of evaluation results."""

import json

import pytest
import torch

from debias_diffusion.eval import session
from debias_diffusion.eval.session import ResultCache


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


def test_a_damaged_result_is_computed_again(tmp_path, computed):
    compute, calls = computed
    expected = ResultCache(tmp_path).result("part", {"a": 1}, compute)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", b"[]", whole[:-1], whole.replace(b"1.5", b"1.6"), None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert ResultCache(tmp_path).result("part", {"a": 1}, compute) == expected
    assert len(calls) == 6 and ResultCache(tmp_path).result("part", {"a": 1}, compute) == expected and len(calls) == 6


def test_tensors_and_notes_are_kept_too_with_the_seconds_that_they_took(tmp_path, computed):
    compute, calls = computed
    caches = [ResultCache(tmp_path) for _ in range(2)]
    for kept in caches:
        assert kept.tensors("images", {"a": 1}, lambda: {"x": torch.full((2, 3), compute()["number"])})["x"].sum() == 9
        assert kept.noted("answers", {"a": 1}, compute) == {"number": 1.5, "list": [1, 2, 3]}
        assert kept.has_notes("answers") and not kept.has_notes("answer")
    assert len(calls) == 2 and caches[0].seconds == caches[1].seconds > 0


def test_another_version_of_a_library_is_another_key(tmp_path, computed, monkeypatch):
    compute, calls = computed

    def result(number: float, **libraries: str) -> float:
        monkeypatch.setattr(session, "versions", lambda: libraries)
        return ResultCache(tmp_path).result("part", {"a": 1}, lambda: compute(number))["number"]

    assert [result(1, torch="2.11.0"), result(2, torch="2.12.0"), result(3, torch="2.11.0")] == [1, 2, 1]
    assert result(4, torch="2.11.0", diffusers="0.36.0") == 4 and calls == [1, 2, 4]


def test_keys_are_stable(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "versions", lambda: {"torch": "2.11.0"})
    ResultCache(tmp_path).result("retrieval", {"encoder": "ab", "good": (0, 2)}, lambda: {"ranks": [1]})
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name == "retrieval-d7ec7f2a7e64090c0686e913f2aebd32.json"
    assert json.loads(file.read_text()) == {"ranks": [1]}
