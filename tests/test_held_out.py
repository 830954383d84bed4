"""`--held-out`: each evaluation of pairs uses those alone that no encoder has seen."""

import pytest

from debias_diffusion.eval.all_options import AllConfig
from debias_diffusion.eval.page import settings_of_all
from debias_diffusion.eval.registry import EVALUATIONS
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint, Defaults

pytestmark = pytest.mark.usefixtures("coarse_results")
PAIRS = ("robustness", "retrieval", "attention", "drift", "generation")


@pytest.mark.parametrize("name", PAIRS)
def test_held_out_pairs_alone_are_evaluated(finished_run, sdxl_folder, world, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Checkpoint, "defaults", Defaults(steps=1, guidance_scale=1.0))
    where = {"output": str(tmp_path), "data": world[1], "images": world[2], "base": str(sdxl_folder)}
    config = AllConfig([str(finished_run / "last")], own_features="toy/features", held_out=True, **where)
    report = EVALUATIONS[name].run(settings_of_all(config)[name])
    assert report["captions" if name in ("attention", "drift") else "images"] == 6  # of 24
    assert report["trained_on"] == {"last": 0}
