"""A program of benchmarks/ from end to end, in small."""

import importlib
from types import SimpleNamespace

import torch
from helpers.modules import ROOT


class Peer(torch.nn.Module):
    """The interface of Long-CLIP's model, which is one product."""

    def __init__(self, folder, backbone):
        super().__init__()
        self.visual, self.scale = SimpleNamespace(input_resolution=32), torch.nn.Parameter(torch.ones(()))

    def forward(self, images, long, short, rank):
        assert images.shape[1:] == (3, 32, 32) and long.shape == short.shape == (len(images), 248)
        return self.scale * images.mean(), self.scale * (long.float().mean() - short.float().mean())


def test_train_speed_measures_train_as_it_is_and_the_peer_beside_it(world, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed, published = importlib.import_module("train_speed"), []
    small = "--pairs 24 --width 40 --height 30 --batch 8 --seconds 0.5 --limit 20 --peer there --train"
    monkeypatch.setattr("sys.argv", ["x", "--model", world[0], *small.split(), "--components 3"])
    monkeypatch.setattr(speed, "load_peer", Peer)
    monkeypatch.setattr(speed, "PEER_WORKERS", 0)
    monkeypatch.setattr(speed, "publish", lambda name, result, *parts, **more: published.append((result, parts)))
    speed.main()
    ((result, (table, _)),) = published
    assert [row[0] for row in table.rows] == [*result["loops"]] == ["train", "Long-CLIP's loop"]
    for loop in result["loops"].values():
        assert loop["steps"] > 0 and loop["samples_per_second"] > 0 and 0 <= loop["share_waiting"] < 1
