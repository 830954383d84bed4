"""Drift: closed forms, what a shift and a linear map undo, and the command from end to end."""

import copy

import numpy as np
import pytest
import torch
from helpers import tiny_sdxl
from helpers.tiny_data import caption, make_tiny_data
from helpers.vocabulary import tiny_tokenizer

from debias_diffusion.encoders.text_encoders import write_text_encoder
from debias_diffusion.errors import UserError
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


def test_maps_are_fitted_on_other_families_than_they_are_scored_on(base):
    moved = reader(tiny_sdxl.text_encoder(seed=3))
    by_family = measure_drift(moved, base, CAPTIONS, ["a", "a", "b", "b"], 3, "families")
    swapped = measure_drift(moved, base, [CAPTIONS[at] for at in (0, 2, 1, 3)], None, 3, "every second caption")
    for name in ("after_shift", "after_linear"):
        assert by_family[name] == pytest.approx(swapped[name])
        assert by_family[name] != pytest.approx(measure_drift(moved, base, CAPTIONS, None, 3, "alone")[name], rel=1e-3)


def test_fits_and_their_errors_are_those_of_least_squares():
    rng = np.random.default_rng(0)
    moments, states = Moments(5), rng.normal(size=(90, 5)) + 3
    targets = states @ rng.normal(size=(5, 5)) + 1 + 0.5 * rng.normal(size=(90, 5))
    moments.add(torch.tensor(states), torch.tensor(targets), 2.0)
    with_ones = np.hstack([states, np.ones((90, 1))])
    left = with_ones @ np.linalg.lstsq(with_ones, targets, rcond=None)[0] - targets
    assert moments.error(*moments.linear()) == pytest.approx((left**2).mean() / 2, abs=2e-3)
    assert moments.error(*moments.shift()) == pytest.approx((targets - states).var(axis=0).mean() / 2)


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
