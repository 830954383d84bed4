"""Drift: closed forms, what a shift and a linear map undo, and the command from end to end."""

import copy
import json

import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_data import caption, make_tiny_data
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.encoders.transformers_folder import write_text_encoder
from debias_diffusion.errors import UserError
from debias_diffusion.eval.images import drift
from debias_diffusion.eval.images.drift import DriftConfig, Moments, StatesReader, evaluate_drift, measure_drift

LONG = " ".join(f"House number {n} has {n} red windows." for n in range(1, 20))
CAPTIONS = [caption(0), LONG, "A cat.", caption(1)]


def reader(encoder) -> StatesReader:
    return StatesReader("tiny", encoder.eval(), tiny_tokenizer(77))


@pytest.fixture(scope="module")
def base():
    return reader(tiny_sdxl.text_encoder())


def shifted(encoder, shift: torch.Tensor):
    """The encoder with `shift` added to each of its penultimate states: a block adds a bias last."""
    encoder = copy.deepcopy(encoder)
    layers = getattr(encoder, "text_model", encoder).encoder.layers
    with torch.no_grad():
        layers[-2].mlp.fc2.bias += shift
    return encoder


def test_one_shift_of_all_states_is_seen_and_undone(base):
    shift, texts = torch.randn(32, generator=torch.Generator().manual_seed(0)), base.tokens(CAPTIONS)
    result = measure_drift(reader(shifted(base.encoder, shift)), base, CAPTIONS, None, 3, "shifted")
    expected = []
    for text, states in zip(texts, base.states(texts), strict=True):
        variance = states[1 : len(text.ids) + 2].var(0, correction=0).mean()
        expected.append((shift.square().mean() / variance).item())
    assert result["errors"] == {part: pytest.approx(expected, rel=1e-3) for part in ("text", "sot", "eot", "pads")}
    assert result["after_shift"] == pytest.approx(0, abs=1e-6)
    assert result["by_position"][-1] == pytest.approx(expected[1], rel=1e-3)  # the long one alone reaches so far
    lengths = [len(text.ids) for text in texts]
    assert result["captions_at_position"] == [sum(n > at for n in lengths) for at in range(max(lengths))]


def test_maps_are_fitted_on_other_families_than_they_are_scored_on(base):
    moved = reader(tiny_sdxl.text_encoder(seed=3))
    by_family = measure_drift(moved, base, CAPTIONS, ["a", "a", "b", "b"], 3, "families")
    swapped = measure_drift(moved, base, [CAPTIONS[at] for at in (0, 2, 1, 3)], None, 3, "every second caption")
    for name in ("after_shift", "after_linear"):
        assert by_family[name] == pytest.approx(swapped[name])
        assert by_family[name] != pytest.approx(measure_drift(moved, base, CAPTIONS, None, 3, "alone")[name], rel=1e-3)
    assert measure_drift(moved, base, CAPTIONS, ["a"] * 4, 3, "one family")["after_shift"] is None


def test_fits_and_their_errors_are_those_of_least_squares():
    rng = np.random.default_rng(0)
    mapping, moments, weights, states, targets = rng.normal(size=(5, 5)), Moments(5), [], [], []
    for tokens, variance in ((40, 2.0), (7, 0.5), (90, 1.0)):
        student = rng.normal(size=(tokens, 5)) + 3
        teacher = student @ mapping + 1 + 0.5 * rng.normal(size=(tokens, 5))
        moments.add(torch.tensor(student), torch.tensor(teacher), variance)
        weights += [1 / (variance * tokens)] * tokens
        states.append(student)
        targets.append(teacher)
    states, targets, root = np.concatenate(states), np.concatenate(targets), np.sqrt(weights)[:, None]
    ones = np.ones((len(states), 1))
    solution = np.linalg.lstsq(root * np.hstack([states, ones]), root * targets, rcond=None)[0]
    left = (root * (np.hstack([states, ones]) @ solution - targets)) ** 2
    assert moments.error(*moments.linear()) == pytest.approx(left.sum() / 5 / 3, abs=2e-3)
    shift = (np.array(weights)[:, None] * (targets - states)).sum(0) / sum(weights)
    left = (root * (states + shift - targets)) ** 2
    assert moments.error(*moments.shift()) == pytest.approx(left.sum() / 5 / 3)


# ---- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("drift")
    write_text_encoder(base.encoder, base.tokenizer, folder / "base")
    write_text_encoder(shifted(base.encoder, torch.full((32,), 0.5)), base.tokenizer, folder / "near")
    write_text_encoder(shifted(base.encoder, torch.full((32,), 2.0)), base.tokenizer, folder / "far")
    make_tiny_data(folder, count=12)
    return folder


def config(folders, output, **changes) -> DriftConfig:
    settings = {"encoders": [str(folders / "near"), str(folders / "far")], "base": str(folders / "base")}
    return DriftConfig(output=str(output), data=str(folders / "data.json"), **settings | changes)


def test_the_command_ranks_encoders_and_refuses_others(folders, tmp_path, base, coarse_results):
    report = evaluate_drift(config(folders, tmp_path))
    near, far = (numbers["state_error"]["text"] for numbers in report["encoders"].values())
    assert far["value"] == pytest.approx(16 * near["value"], rel=1e-3) and near["low"] <= near["value"] <= near["high"]
    (line,) = report["compared"]
    assert (line["a"], line["b"], line["difference"] > 0, line["p"] < 0.01) == ("far", "near", True, True)
    write_text_encoder(tiny_sdxl.text_encoder(width=64), base.tokenizer, tmp_path / "64")
    with pytest.raises(UserError, match="64 channels and those of the base .* 32"):
        evaluate_drift(config(folders, tmp_path / "out", encoders=[str(tmp_path / "64")]))


def test_another_tokenizer_is_measured_anew(folders, tmp_path, coarse_results, copy_of, monkeypatch):
    measured = []
    monkeypatch.setattr(drift, "measure_drift", lambda *_: measured.append(1) or measure_drift(*_))
    near, base = (copy_of(folders / name, tmp_path / name) for name in ("near", "base"))
    settings = config(folders, tmp_path / "out", encoders=[str(near)], base=str(base))
    first = evaluate_drift(settings)
    assert evaluate_drift(settings)["encoders"] == first["encoders"] and len(measured) == 1
    for folder in (near, base):  # alike: only the pads after a text are others
        settings_file = folder / "tokenizer" / "tokenizer_config.json"
        content = json.loads(settings_file.read_text())
        settings_file.write_text(json.dumps(content | {"pad_token": content["bos_token"]}))
    second = evaluate_drift(settings)
    assert len(measured) == 2 and second["digests"]["base"] != first["digests"]["base"]
