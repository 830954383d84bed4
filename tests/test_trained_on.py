"""Evaluation of a training run on the data that it was trained on: that is said, and held-out pairs can be chosen."""

import json
import shutil
from pathlib import Path

import pytest

from debias_diffusion.errors import UserError
from debias_diffusion.eval.retrieval import RetrievalConfig, evaluate_retrieval

HELD_OUT = 6  # as in `helpers.training_runs.config`


def evaluate(encoders, world, tmp_path, **settings):
    _, data, images = world
    config = {"output": str(tmp_path / "scores"), "data": data, "images": images} | settings
    return evaluate_retrieval(RetrievalConfig([str(name) for name in encoders], **config))


def test_pairs_that_were_trained_on_are_counted(finished_run, world, tmp_path, capsys):
    report = evaluate([finished_run, world[0]], world, tmp_path)
    pairs = len(json.loads(Path(world[1]).read_text()))
    assert list(report["trained_on"].values()) == [pairs - HELD_OUT] and report["images"] == pairs
    (label,) = report["trained_on"]
    note = f"{label} was trained on {pairs - HELD_OUT} of these {pairs} pairs. --held-out evaluates on the others."
    assert report["notes"] == [note] and f"Note: {note}" in capsys.readouterr().out
    # The folder of the run's model is the same model, and the first pairs are the held-out ones.
    of_model = evaluate([Path(finished_run) / "last"], world, tmp_path, limit=HELD_OUT + 1)
    assert list(of_model["trained_on"].values()) == [1]


def test_held_out_pairs_are_those_of_the_run(finished_run, world, tmp_path):
    report = evaluate([world[0], finished_run], world, tmp_path, held_out=True)
    assert report["images"] == HELD_OUT and list(report["trained_on"].values()) == [0] and report["notes"] == []


def test_of_other_data_nothing_is_said(finished_run, world, tmp_path):
    other = shutil.copy(world[1], tmp_path / "data.json")
    other.write_text(other.read_text() + "\n")
    settings = {"data": str(other)}
    report = evaluate([finished_run], world, tmp_path, **settings)
    assert report["trained_on"] == {} and report["notes"] == []
    with pytest.raises(UserError, match="None of the encoders was trained on the data .* Leave out --held-out"):
        evaluate([finished_run], world, tmp_path, held_out=True, **settings)
