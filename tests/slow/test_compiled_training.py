"""Runs with --compile: what is compiled and when, what is recorded, and that they continue bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from helpers.training_runs import config, is_the_same_run, killed_copy, losses

from debias_diffusion.clip.backbone import Backbone
from debias_diffusion.errors import UserError
from debias_diffusion.training import two_tower
from debias_diffusion.training.checkpoints import TrainState
from debias_diffusion.training.two_tower import train

STATS = torch._dynamo.utils.counters["stats"]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """One without a C compiler; a test may exchange it."""
    backends, compile_towers = ["aot_eager"], Backbone.compile
    monkeypatch.setattr(Backbone, "compile", lambda self: compile_towers(self, backend=backends[-1]))
    torch.compiler.reset()
    return backends


def broken(graph, inputs):
    raise RuntimeError("no compiler\nfor this machine")


def test_a_compiled_run_compiles_once_and_continues_bit_for_bit(world, finished_run, tmp_path, monkeypatch, backend):
    graphs, backward = [], two_tower.backward

    def counted(*step, **settings):
        graphs.append(STATS["unique_graphs"])
        return backward(*step, **settings)

    monkeypatch.setattr(two_tower, "backward", counted)
    run, again = tmp_path / "run", tmp_path / "again"
    train(config(world, run, compile="on"))
    assert graphs[0] > 0 and graphs == [graphs[0]] * 7 == [STATS["unique_graphs"]] * 7  # nor for R@1 between them
    assert losses(run) == pytest.approx(losses(finished_run), rel=1e-4)
    torch.compiler.reset()
    train(config(world, killed_copy(run, again)))  # auto: as the record has it
    assert len(graphs) == 8 and graphs[-1] > graphs[0]
    is_the_same_run(again, run)
    with pytest.raises(UserError, match="compile is off, but the steps so far ran compiled"):
        train(config(world, killed_copy(run, tmp_path / "off"), compile="off"))
    backend.append(broken)
    with pytest.raises(UserError, match="cannot be compiled here: .*no compiler for this machine.*--compile off"):
        train(config(world, killed_copy(run, tmp_path / "elsewhere")))


def test_where_compilation_fails_a_run_is_the_plain_one_and_says_so(
    world, finished_run, tmp_path, backend, monkeypatch
):
    begin = two_tower._Training.begin

    def begin_on_a_gpu(self, state):
        begin(self, state)
        state.compiled, self._must_compile = True, True

    monkeypatch.setattr(two_tower._Training, "begin", begin_on_a_gpu)
    said = []
    monkeypatch.setattr(two_tower._Training, "say", lambda self, line: said.append(line))
    backend.append(broken)
    run = tmp_path / "run"
    train(config(world, run))
    assert sum("no compiler for this machine" in line and line.startswith("Not compiled: ") for line in said) == 1
    is_the_same_run(run, finished_run)
    assert torch.load(run / "checkpoint-00000007")["state"]["compiled"] is False


def test_auto_compiles_long_runs_on_a_gpu_and_keeps_to_the_record():
    for device, left, given, before, expected in (
        ("cuda", 1000, "auto", None, True),
        ("cuda", 999, "auto", None, False),
        ("cpu", 5000, "auto", None, False),
        ("cpu", 3, "on", None, True),
        ("cuda", 5000, "off", None, False),
        ("cuda", 3, "auto", True, True),
        ("cuda", 5000, "auto", False, False),
    ):
        run = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device(device)),
            batches=SimpleNamespace(total_steps=10 + left),
            config=SimpleNamespace(compile=given),
        )
        state = TrainState(step=10, compiled=before)
        two_tower._Training.begin(run, state)
        assert state.compiled is expected
