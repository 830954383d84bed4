"""A beta for each head by gradient descent, everything else frozen (AAT, section 4.3)."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from ..clip.weight_files import save_tensors
from ..jobs import Job
from ..methods.objectives import contrastive_loss
from ..training.optimizer import learning_rate
from .problems import ImageProblem

SHARPNESS = 5.0  # beta = sigmoid(SHARPNESS * alpha), equation 4
START = 1.0  # alpha
_BETAS, _EPS = (0.9, 0.98), 1e-6  # of AdamW, as in OpenCLIP


class Backprop:
    """Learns alpha, [blocks, heads], by the contrastive loss of images and texts.

    Args:
        problem: its images are run again in every step, from the blocks' input on; its first set of texts stays.
        scale: multiplies the similarities: exp(logit_scale) of the model.
        job: keeps the state after each epoch, from which a stopped run continues.
        rate: peak learning rate.
        epochs, batch: passes over the pairs, and pairs a step; the last step of a pass may have fewer.
        constant: whether the learning rate stays; else half a cosine leads to 0.
        seed: of the order.
    """

    def __init__(
        self,
        problem: ImageProblem,
        scale: Tensor,
        job: Job,
        rate: float = 2e-2,
        epochs: int = 32,
        batch: int = 256,
        constant: bool = False,
        seed: int = 0,
    ):
        self.problem, self.scale, self.job = problem, scale.detach(), job
        self.texts = next(iter(problem.texts.values()))
        self.rate, self.epochs, self.batch, self.constant, self.seed = rate, epochs, batch, constant, seed
        self.alpha = torch.full(problem.shape, START, device=problem.embedded.device, requires_grad=True)
        self.adamw = torch.optim.AdamW([self.alpha], lr=rate, betas=_BETAS, eps=_EPS, weight_decay=0.0)

    @property
    def beta(self) -> Tensor:
        """[blocks, heads]"""
        return torch.sigmoid(SHARPNESS * self.alpha)

    def loss(self, images: Tensor) -> Tensor:
        """The contrastive loss of the pairs of these numbers."""
        features = F.normalize(self.problem.features(images, self.beta), dim=-1)
        texts = F.normalize(self.texts[images], dim=-1)
        return contrastive_loss(features, texts, self.scale.to(features))

    def run(self) -> Tensor:
        """The betas at the end, [blocks, heads]. Shows a progress bar."""
        state: dict[str, Tensor] = {}
        for epoch in tqdm(range(self.epochs), desc="beta", unit=" epochs"):
            file = self.job.ensure(f"epochs/{epoch:04}.safetensors", partial(self._epoch, epoch, state))
            state = load_file(file)
        self._restore(state)
        return self.beta.detach()

    def _epoch(self, epoch: int, state: dict[str, Tensor], file: Path) -> None:
        """Writes alpha and AdamW's averages after a pass, from those before it."""
        self._restore(state)
        order = torch.from_numpy(np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.texts)))
        batches = order.to(self.alpha.device).split(self.batch)
        for number, images in enumerate(batches):
            step, steps = epoch * len(batches) + number, self.epochs * len(batches)
            rate = self.rate if self.constant else learning_rate(step, steps, self.rate, warmup=0)
            self.adamw.param_groups[0]["lr"] = rate
            (self.alpha.grad,) = torch.autograd.grad(self.loss(images), [self.alpha])
            self.adamw.step()
        save_tensors({"alpha": self.alpha} | self.adamw.state[self.alpha], file)

    def _restore(self, state: dict[str, Tensor]) -> None:
        if state:
            with torch.no_grad():
                self.alpha.copy_(state["alpha"])
            self.adamw.state[self.alpha] = {
                "step": state["step"],  # AdamW counts its steps on the CPU
                **{name: state[name].to(self.alpha.device) for name in ("exp_avg", "exp_avg_sq")},
            }
