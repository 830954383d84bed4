"""benchmarks/: what all share."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers.modules import ROOT


def test_options_have_the_types_of_their_defaults(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    harness = importlib.import_module("harness")
    words = "x --short-prompts 3 --rates 1 2 --seeds 7 --precision bf16 --more --peer a --output b"
    monkeypatch.setattr("sys.argv", words.split())
    defaults = dict(rates=[0.5], seeds=[], precision=("fp32", "bf16"), more=False, peer=None, output=Path("runs"))
    options = vars(harness.read_options("", short_prompts=1, **defaults))
    assert options.pop("output") == Path("b") and options.pop("rates") == [1.0, 2.0]
    assert options == {"short_prompts": 3, "seeds": [7], "precision": "bf16", "more": True, "peer": "a"}


def test_train_speed_measures_train_as_it_is_and_the_peer_beside_it(world, tmp_path, monkeypatch):
    """With two workers, so that steps wait for a process, and a model of the peer's that is one product."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed = importlib.import_module("train_speed")
    monkeypatch.setattr("sys.argv", ["x", "--model", world[0], "--peer", "there", *SMALL])
    monkeypatch.setattr(speed, "load_peer", Peer)
    monkeypatch.setattr(speed, "PEER_WORKERS", 0)
    monkeypatch.setattr(speed, "publish", lambda name, result, *parts, **more: published.append((result, parts)))
    published = []
    speed.main()
    ((result, (table, _)),) = published
    assert [row[0] for row in table.rows] == ["train", "Long-CLIP's loop"]
    for name in ("train", "Long-CLIP's loop"):
        assert result["loops"][name]["steps"] > 0 and result["loops"][name]["samples_per_second"] > 0
        assert 0 <= result["loops"][name]["share_waiting"] < 1


SMALL = [*"--pairs 24 --width 40 --height 30 --batch 8 --seconds 0.5 --limit 20 --train".split(), "--components 3"]


class Peer(torch.nn.Module):
    """The interface of Long-CLIP's model."""

    def __init__(self, folder, backbone):
        super().__init__()
        self.visual, self.scale = SimpleNamespace(input_resolution=32), torch.nn.Parameter(torch.ones(()))

    def forward(self, images, long, short, rank):
        assert images.shape[1:] == (3, 32, 32) and long.shape == short.shape == (len(images), 248)
        return self.scale * images.mean(), self.scale * (long.float().mean() - short.float().mean())
