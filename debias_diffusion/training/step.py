"""One exact step over the global batch, however many processes share it."""

import math
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from ..backbones import Backbone
from ..data.dataset import Batch
from ..objectives import Features
from ..recipes import Recipe

MAX_LOGIT_SCALE = math.log(100)  # CLIP: similarities are multiplied with at most 100


def encode(backbone: Backbone, batch: Batch) -> torch.Tensor:
    """[batch, 3, embed_dim]: the features of each sample's image, long caption and short caption."""
    image = backbone.encode_image(batch.images)
    long_text, short_text = backbone.encode_text(batch.tokens).chunk(2)
    return torch.stack([image, long_text, short_text], dim=1)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Mixed precision for "bf16", nothing for "fp32". Not accelerate's, which is fixed for the life of a process."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def backward(
    backbone: Backbone, recipe: Recipe, batch: Batch, accelerator: Accelerator, precision: str = "fp32"
) -> dict[str, float]:
    """Leaves the gradients of the global batch's loss in the parameters, the same on every process.

    Every process gathers all features, computes the whole loss and its gradient with respect to all features, and
    sends its own samples' part back through its towers; the parameters' gradients are then summed over the processes.
    That is the plain gradient of the plain loss, with nothing to be scaled by the number of processes.

    Returns:
        The loss and what the recipe reports.
    """
    with autocast(precision, accelerator.device):
        local = encode(backbone, batch)
    features = accelerator.gather(local.detach().to(backbone.logit_scale.dtype)).requires_grad_()
    losses, report = recipe.losses(Features(*features.unbind(1)), backbone.logit_scale.exp())
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    # Every process holds the whole gradient of the scale; summed below, it must count once.
    backbone.logit_scale.grad /= accelerator.num_processes
    start = accelerator.process_index * len(local)
    local.backward(features.grad[start : start + len(local)].to(local.dtype))
    _sum_gradients(backbone, accelerator)
    return {"loss": total.item(), **{name: value.item() for name, value in report.items()}}


def _sum_gradients(backbone: Backbone, accelerator: Accelerator) -> None:
    if accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
    # One message instead of hundreds.
    summed = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), reduction="sum")
    for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Parameter groups for AdamW, with weight decay on matrices only."""
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class Optimizer:
    """AdamW with weight decay on matrices only, on everything but the kept positions.

    The first `backbone.kept_positions` rows of the text tower's position table are not trained: whatever gradient,
    momentum and weight decay would do to them, they are put back after each step.
    """

    def __init__(self, backbone: Backbone, weight_decay: float, betas: tuple[float, float], eps: float):
        self.backbone = backbone
        self.named = {name: p for name, p in backbone.model.named_parameters() if p.requires_grad}
        self.adamw = torch.optim.AdamW(decay_groups(self.named.values(), weight_decay), lr=0.0, betas=betas, eps=eps)
        self.kept = self._kept_rows.detach().clone()

    @property
    def _kept_rows(self) -> torch.Tensor:
        table: nn.Parameter = self.backbone.text.tower.positional_embedding
        return table[: self.backbone.kept_positions]

    def step(self, learning_rate: float) -> None:
        """Applies the gradients that lie in the parameters, and clears them."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with torch.no_grad():
            self._kept_rows.copy_(self.kept)
            self.backbone.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        self.adamw.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's averages and step counts under the parameters' names."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.named.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.named.items():
            entries = {
                key: state[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" in state
            }
            if entries:
                # The step counts stay on the CPU, as AdamW keeps them.
                self.adamw.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in entries.items()
                }
