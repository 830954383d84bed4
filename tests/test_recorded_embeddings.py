"""Embeddings are those that were recorded, in each reading, and in half precision near them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.recorded_embeddings import READINGS, embeddings, pipeline, record
from helpers.tiny_sdxl import assemble_copy

RECORD = dict(map(json.loads, (Path(__file__).parent / "data" / "embeddings.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def pipe():
    return pipeline()


@pytest.fixture(scope="module")
def single(pipe):
    return {reading: embeddings(pipe, reading) for reading in READINGS}


@pytest.mark.parametrize("reading", READINGS)
def test_embeddings_are_those_recorded(single, reading):
    """To what another processor may round otherwise."""
    for name, now in record(single[reading]).items():
        assert now["shape"] == RECORD[reading][name]["shape"], name
        np.testing.assert_allclose(now["projections"], RECORD[reading][name]["projections"], atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)], ids=str)
def test_half_precision_on_a_cpu_is_near_single_in_every_reading(pipe, single, dtype, error):
    half = assemble_copy(type(pipe), pipe.components).to(dtype=dtype)
    for reading in READINGS:
        for name, values in embeddings(half, reading).items():
            exact = single[reading][name]
            assert values.dtype == dtype and torch.isfinite(values).all()
            assert (values.float() - exact).norm() < error * exact.norm(), (reading, name)
