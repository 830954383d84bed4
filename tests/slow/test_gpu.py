"""Training on an NVIDIA GPU: its losses against a CPU's, every precision, chunks, and a run that is killed."""

import signal

import numpy as np
import pytest
import torch
from helpers.training_runs import config, losses, run_in_a_process, same_weights, settings_of, wait_for_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU on this machine")
HOW_NEAR = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}  # losses, in relation to a CPU's in fp32


def start(settings, on_cpu="false"):
    """`train` in a process that may use the GPU, whatever this one has decided."""
    return run_in_a_process(settings, ACCELERATE_USE_CPU=on_cpu)


def finish(process) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


@pytest.fixture(scope="module")
def on_cpu(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    finish(start(config(world, folder), on_cpu="true"))
    return losses(folder)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("precision", HOW_NEAR)
def test_a_gpu_trains_as_a_cpu(world, on_cpu, precision, chunk, tmp_path):
    finish(start(config(world, tmp_path, precision=precision, chunk=chunk)))
    assert settings_of(tmp_path)["precision"] == precision
    steps = 1 if precision == "fp16" else 3  # its first steps find the scale, and are not applied
    np.testing.assert_allclose(losses(tmp_path)[:steps], on_cpu[:steps], rtol=HOW_NEAR[precision])


@pytest.mark.parametrize(
    "settings", [{"freeze_image_tower": True}, {"keep_states": 1.0}, {"recipe": "long-clip"}], ids=str
)
def test_other_kinds_of_training(world, settings, tmp_path):
    finish(start(config(world, tmp_path, **settings)))
    assert np.isfinite(losses(tmp_path)).all() and len(losses(tmp_path)) == 7


def test_a_killed_run_goes_on(world, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(config(world, whole)))
    process = start(config(world, killed))
    wait_for_step(killed, 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(config(world, killed)))
    assert settings_of(killed)["precision"] == "bf16"  # auto, on this GPU
    # Kernels for gradients of attention may add in any order, so not the same bits.
    np.testing.assert_allclose(losses(killed), losses(whole), rtol=2e-2)
    print("the same bits" if same_weights(killed, whole) else "other bits")
