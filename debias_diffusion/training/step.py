"""One exact step over the global batch, however many processes share it."""

import math
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from ..data.dataset import Batch
from ..methods.dual_caption import Recipe
from ..models.backbone import Backbone

MAX_LOGIT_SCALE = math.log(100)  # CLIP: similarities are multiplied with at most 100
_SCALER = "scaler/"  # the prefix of the scaler's entries among those of the parameters
_AVERAGES = ("step", "exp_avg", "exp_avg_sq")  # AdamW's of a parameter
_BUCKET = 25_000_000  # numbers in a message between processes


def encode(backbone: Backbone, batch: Batch) -> torch.Tensor:
    """[batch, 1 + captions, embed_dim]: the features of each sample's image and of its captions."""
    image = backbone.encode_image(batch.images)
    texts = backbone.encode_text(batch.tokens).unflatten(0, (-1, len(batch)))
    return torch.stack([image.to(texts.dtype), *texts], dim=1)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Mixed precision for "bf16" and "fp16", nothing for "fp32". Not accelerate's, which a process sets but once."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def backward(
    backbone: Backbone,
    recipe: Recipe,
    batch: Batch,
    accelerator: Accelerator,
    precision: str = "fp32",
    chunk: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, float]:
    """Leaves the gradients of the global batch's loss in the parameters, the same on every process.

    Every process gathers all features, computes the whole loss and its gradient with respect to all features, and
    sends its own samples' part back through its towers; the parameters' gradients are then summed over the processes.
    That is the plain gradient of the plain loss, with nothing to be scaled by the number of processes.

    With `chunk`, no more than so many samples' activations are held: all features are computed first without keeping
    any, then each chunk again, to send its part of the gradient through (Gao et al. 2021, "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup"). The gradient is the same, for one forward pass more.

    Args:
        batch: this process's samples, anywhere; each part is moved to the device when its turn comes.
        chunk: at least 1; None holds all.
        scaler: for "fp16": the gradients are left scaled by it.

    Returns:
        The loss, what the recipe reports, and the gradient's norm. Where the loss is not finite it is all there is,
        and no gradients are left.
    """
    chunks = batch.chunks(chunk or len(batch))
    at_once = len(chunks) == 1
    seed = torch.initial_seed()

    def encode_chunk(number: int) -> torch.Tensor:
        if not at_once:  # what is drawn at random, such as dropped patches, must be the same both times
            torch.manual_seed(hash((seed, number)) & (2**63 - 1))
        with autocast(precision, accelerator.device):
            return encode(backbone, chunks[number].to(accelerator.device))

    with torch.set_grad_enabled(at_once):
        encoded = [encode_chunk(number) for number in range(len(chunks))]
    local = torch.cat([part.detach() for part in encoded]).to(backbone.logit_scale.dtype)
    features = accelerator.gather(local).requires_grad_()
    losses, report = recipe.losses(recipe.features(features), backbone.logit_scale.exp(), backbone.logit_bias)
    total = torch.stack(list(losses.values())).sum()
    report = {"loss": total.detach(), **report}
    if not total.isfinite():
        return _numbers(report)
    (scaler.scale(total) if scaler else total).backward()
    # Every process holds the whole gradient of scale and bias; summed below, it must count once.
    for whole in (backbone.logit_scale, backbone.logit_bias):
        if whole is not None:
            whole.grad /= accelerator.num_processes
    start = accelerator.process_index * len(local)
    for number, gradient in enumerate(features.grad[start : start + len(local)].split(len(chunks[0]))):
        part = encoded[number] if at_once else encode_chunk(number)
        part.backward(gradient.to(part.dtype))
    gradients = [parameter.grad for parameter in backbone.parameters() if parameter.grad is not None]
    _sum_over_processes(gradients, accelerator)
    report["gradient_norm"] = torch.nn.utils.get_total_norm(gradients) / (scaler.get_scale() if scaler else 1)
    return _numbers(report)


def _numbers(report: dict[str, torch.Tensor]) -> dict[str, float]:
    # From the device in one piece: each piece is waited for.
    return dict(zip(report, torch.stack(list(report.values())).tolist(), strict=True))


def _sum_over_processes(gradients: list[torch.Tensor], accelerator: Accelerator) -> None:
    """In place; a few large messages instead of hundreds of small ones."""
    if accelerator.num_processes == 1:
        return
    bucket: list[torch.Tensor] = []
    for position, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(part.numel() for part in bucket) < _BUCKET and position < len(gradients) - 1:
            continue
        summed = accelerator.reduce(torch.cat([part.flatten() for part in bucket]), reduction="sum")
        for part, its_sum in zip(bucket, summed.split([part.numel() for part in bucket]), strict=True):
            part.copy_(its_sum.view_as(part))
        bucket = []


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Parameter groups for AdamW, with weight decay on matrices only."""
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class Optimizer:
    """AdamW with weight decay on matrices only, on everything trained but the kept positions.

    The first `backbone.kept_positions` rows of the text tower's position table are not trained: whatever gradient,
    momentum and weight decay would do to them, they are put back after each step.

    Args:
        precision: for "fp16", gradients are scaled so that small ones do not vanish, and a step in which one of them
            overflows is left out and the scale lowered.

    Attributes:
        scaler: what `backward` scales the loss with; None unless the precision is "fp16".
    """

    def __init__(
        self, backbone: Backbone, weight_decay: float, betas: tuple[float, float], eps: float, precision: str = "fp32"
    ):
        self.backbone = backbone
        self.named = {name: p for name, p in backbone.model.named_parameters() if p.requires_grad}
        groups = decay_groups(self.named.values(), weight_decay)
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.kept = self._kept_rows.detach().clone()
        device = backbone.logit_scale.device.type
        self.scaler = torch.amp.GradScaler(device) if precision == "fp16" else None

    @property
    def _kept_rows(self) -> torch.Tensor:
        table: nn.Parameter = self.backbone.text.tower.positional_embedding
        return table[: self.backbone.kept_positions]

    def step(self, learning_rate: float) -> None:
        """Applies the gradients that lie in the parameters, and clears them."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if self.scaler:
            self.scaler.step(self.adamw)
            self.scaler.update()
        else:
            self.adamw.step()
        with torch.no_grad():
            self._kept_rows.copy_(self.kept)
            if self.backbone.loss == "softmax":
                self.backbone.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        self.clear()

    def clear(self) -> None:
        """Removes the gradients without applying them."""
        self.adamw.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's averages and step counts under the parameters' names, and the scaler's state."""
        state = {
            f"{name}/{key}": value
            for name, parameter in self.named.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }
        scaler = self.scaler.state_dict() if self.scaler else {}
        return state | {f"{_SCALER}{key}": torch.tensor(value) for key, value in scaler.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes what `state` gave, of the same parameters and precision.

        Raises:
            ValueError: an entry is missing, has another shape, or belongs to nothing here.
        """
        rest = dict(state)
        for name, parameter in self.named.items():
            if any(f"{name}/{key}" in state for key in _AVERAGES):  # not all have been trained: steps may be left out
                shapes = (parameter.new_empty(()).shape, parameter.shape, parameter.shape)
                self.adamw.state[parameter] = {
                    key: _take(rest, f"{name}/{key}", shape).to(parameter.device)
                    for key, shape in zip(_AVERAGES, shapes, strict=True)
                }
        if self.scaler:
            scaler = {key: _take(rest, _SCALER + key, torch.Size()).item() for key in self.scaler.state_dict()}
            self.scaler.load_state_dict(scaler)
        if rest:
            raise ValueError(f"the optimizer has no {min(rest)!r}")


def _take(state: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    if name not in state or state[name].shape != shape:
        there = f"has the shape {list(state[name].shape)}" if name in state else "is missing"
        raise ValueError(f"the optimizer's {name!r} {there}, and must be of shape {list(shape)}")
    return state.pop(name)
