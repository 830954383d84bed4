"""A small vision transformer whose CLS features stand in for Inception's and DINO's among toy pictures.

It learns to say what stands in each place, on rendered pictures; it is none of the models that it scores, and the
checker has no part in it.
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from open_clip.constants import IMAGENET_MEAN, IMAGENET_STD
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from debias_diffusion.toyworld.scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, Scene

from .stage import run_stage
from .vae import SIZE, draw_pictures, draw_scenes

_WIDTH = 64


class _Learner(nn.Module):
    """The network with a linear head: for each place its kind and colour, 0 for none, and the background."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        sizes = dict(hidden_size=_WIDTH, intermediate_size=4 * _WIDTH, num_attention_heads=4, num_hidden_layers=3)
        self.network = ViTModel(ViTConfig(image_size=SIZE, patch_size=8, **sizes), add_pooling_layer=False)
        self.classes = [len(KINDS) + 1, len(COLOURS) + 1] * len(PLACES) + [len(BACKGROUNDS)]
        self.head = nn.Linear(_WIDTH, sum(self.classes))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return self.head(self.network(pixel_values=pixels).last_hidden_state[:, 0]).split(self.classes, dim=1)


def _answers(scene: Scene) -> list[int]:
    there = {thing.place: thing for thing in scene.things}
    answers = []
    for place in PLACES:
        thing = there.get(place)
        answers += [1 + KINDS.index(thing.kind), 1 + list(COLOURS).index(thing.colour)] if thing else [0, 0]
    return [*answers, list(BACKGROUNDS).index(scene.background)]


def train_features(
    folder: Path, *, pictures: int = 20_000, steps: int = 4000, batch: int = 64, seed: int = 0
) -> ViTModel:
    """Trains the network; returns it without its head."""
    learner = _Learner(seed)
    scenes = draw_scenes(pictures)
    images, answers = draw_pictures(scenes), torch.tensor([_answers(scene) for scene in scenes])
    run_stage(folder, learner, partial(_loss, learner, images, answers, batch, seed), steps=steps, peak=1e-3)
    return learner.network.eval()


def _loss(learner: _Learner, pictures: Tensor, answers: Tensor, batch: int, seed: int, step: int) -> Tensor:
    chosen = torch.randint(len(pictures), (batch,), generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
    # As eval/images/networks.py prepares images for any such network.
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    said = learner((pictures[chosen].float() / 255 - mean) / std)
    return sum(F.cross_entropy(logits, answers[chosen, i]) for i, logits in enumerate(said)) / len(said)
