"""How the toy models are made: stages that continue."""

import pytest
import torch
from torch import nn

from research.toymodels.stage import run_stage


def test_a_killed_stage_ends_as_an_unbroken_one(tmp_path):
    def stage(folder, fail_at=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def loss(step):
            if step == fail_at:
                raise KeyboardInterrupt
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            return (model(x) - x[:, :2]).square().mean()

        run_stage(folder, model, loss, steps=1200, peak=1e-2)
        return [p.detach().clone() for p in model.parameters()]

    whole = stage(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path / "killed", fail_at=700)
    continued = stage(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole, continued, strict=True))
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert len(logs[0]) == len(logs[1]) == 12  # a step that was made again is logged once
