"""A beta for each head by gradient descent, everything else frozen (AAT, section 4.3)."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from debias_diffusion.ablation.suppression import Suppressed
from debias_diffusion.clip.image_tower import ImageTower
from debias_diffusion.clip.weight_files import save_tensors
from debias_diffusion.jobs import Job
from debias_diffusion.methods.objectives import contrastive_loss
from debias_diffusion.training.optimizer import learning_rate

SHARPNESS = 5.0  # beta = sigmoid(SHARPNESS * alpha), equation 4
START = 1.0  # alpha
_BETAS, _EPS = (0.9, 0.98), 1e-6  # of AdamW, as in OpenCLIP


def image_features(tower: ImageTower, embedded: Tensor, beta: Tensor) -> Tensor:
    """Features of images with a beta for each head, [blocks, heads]; differentiable.

    Args:
        embedded: the blocks' input, from `ImageTower.embed`, [images, tokens, width].
    """
    for block, of_heads in enumerate(beta):
        embedded = tower.run_block(block, embedded, Suppressed(of_heads))
    return tower.project(embedded)


def alpha_loss(tower: ImageTower, embedded: Tensor, texts: Tensor, scale: Tensor, alpha: Tensor) -> Tensor:
    """The contrastive loss of pairs, whose texts are features [pairs, dim], with alpha [blocks, heads]."""
    features = F.normalize(image_features(tower, embedded, torch.sigmoid(SHARPNESS * alpha)), dim=-1)
    return contrastive_loss(features, F.normalize(texts, dim=-1), scale.to(features))


def descend(
    tower: ImageTower,
    embedded: Tensor,
    texts: Tensor,
    scale: Tensor,
    job: Job,
    rate: float = 2e-2,
    epochs: int = 32,
    batch: int = 256,
    constant: bool = False,
    seed: int = 0,
) -> Tensor:
    """Learns alpha, [blocks, heads], by the contrastive loss of images and texts. Shows a progress bar.

    Args:
        embedded: the blocks' input of the images, which are run again in every step.
        texts: their texts' features, [pairs, dim].
        scale: multiplies the similarities: exp(logit_scale) of the model.
        job: keeps the state after each epoch, from which a stopped run continues.
        rate: peak learning rate.
        epochs, batch: passes over the pairs, and pairs a step; the last step of a pass may have fewer.
        constant: whether the learning rate stays; else half a cosine leads to 0.
        seed: of the order.

    Returns:
        the betas at the end, [blocks, heads]
    """
    blocks = tower.transformer.resblocks
    start = torch.full((len(blocks), blocks[0].attn.num_heads), START)
    averages = {name: torch.zeros_like(start) for name in ("exp_avg", "exp_avg_sq")}
    state = {"alpha": start, "step": torch.tensor(0.0)} | averages

    def run_epoch(epoch: int, state: dict[str, Tensor], file: Path) -> None:
        """Writes alpha and AdamW's averages after a pass, from those before it."""
        alpha, exp_avg, exp_avg_sq = (state[name].to(embedded.device) for name in ("alpha", "exp_avg", "exp_avg_sq"))
        adamw = torch.optim.AdamW([alpha.requires_grad_()], lr=rate, betas=_BETAS, eps=_EPS, weight_decay=0.0)
        # AdamW counts its steps on the CPU.
        adamw.state[alpha] = {"step": state["step"], "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        order = torch.from_numpy(np.random.default_rng([seed % 2**64, epoch]).permutation(len(texts)))
        batches = order.to(embedded.device).split(batch)
        for number, pairs in enumerate(batches):
            step, steps = epoch * len(batches) + number, epochs * len(batches)
            adamw.param_groups[0]["lr"] = rate if constant else learning_rate(step, steps, rate, warmup=0)
            loss = alpha_loss(tower, embedded[pairs], texts[pairs], scale.detach(), alpha)
            (alpha.grad,) = torch.autograd.grad(loss, [alpha])
            adamw.step()
        save_tensors({"alpha": alpha.detach()} | adamw.state[alpha], file)

    for epoch in tqdm(range(epochs), desc="beta", unit=" epochs"):
        state = load_file(job.ensure(f"epochs/{epoch:04}.safetensors", partial(run_epoch, epoch, state)))
    return torch.sigmoid(SHARPNESS * state["alpha"].to(embedded.device))
