"""One exact step over the global batch, however many processes share it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from ..methods.base import Batch, Method
from ..models.backbone import Backbone

MAX_LOGIT_SCALE = math.log(100)  # CLIP: similarities are multiplied with at most 100
_SCALER = "scaler/"  # prefix of the scaler's entries in the optimizer's state
_METHOD = "method/"  # prefix of the entries of a method's own parameters there
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")  # of each parameter
_BUCKET = 25_000_000  # numbers in a message between processes


def pack(features: dict[str, torch.Tensor]) -> torch.Tensor:
    """[batch, numbers of all features]: named features side by side, so that one message gathers them."""
    return torch.cat([feature.flatten(1) if feature.ndim > 1 else feature[:, None] for feature in features.values()], 1)


def unpack(packed: torch.Tensor, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The named features, as views; `shapes` are those of one sample each."""
    parts = packed.split([shape.numel() for shape in shapes.values()], dim=1)
    return {name: part.view(-1, *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def parameters(backbone: Backbone, modules: nn.Module | None) -> Iterator[nn.Parameter]:
    """Of the model and of the method's own modules."""
    yield from backbone.parameters()
    if modules is not None:
        yield from modules.parameters()


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Mixed precision for "bf16" and "fp16", nothing for "fp32". Not accelerate's, which a process sets but once."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


def backward(
    backbone: Backbone,
    method: Method,
    batch: Batch,
    accelerator: Accelerator,
    precision: str = "fp32",
    chunk: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    modules: nn.Module | None = None,
) -> dict[str, float]:
    """Leaves the gradients of the global batch's loss in the parameters, the same on every process.

    Every process gathers all features, computes the whole loss and its gradient with respect to all features, and
    sends the part of its samples back through the towers; the parameters' gradients are then summed over the processes.
    That is the plain gradient of the plain loss: nothing is scaled by the number of processes.

    With `chunk`, activations of at most that many samples are held: all features are computed first without keeping
    any, then each chunk again, to send its part of the gradient through (Gao et al. 2021, "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup"). The gradient is the same, for one forward pass more.

    Args:
        batch: the samples of this process, on any device; a chunk is moved when its turn comes.
        chunk: at least 1; None holds all.
        scaler: for "fp16": the gradients are left scaled by it.
        modules: the method's own, on the device.

    Returns:
        The loss, the method's report and the gradient's norm. If the loss is not finite, the report ends there and no
        gradients are left.
    """
    chunks = batch.chunks(chunk or len(batch))
    at_once = len(chunks) == 1
    seed = torch.initial_seed()

    shapes: dict[str, torch.Size] = {}

    def encode_chunk(number: int) -> torch.Tensor:
        if not at_once:  # random draws, such as dropped patches, must be the same both times
            torch.manual_seed(hash((seed, number)) & (2**63 - 1))
        with autocast(precision, accelerator.device):
            features = method.all_features(backbone, chunks[number].to(accelerator.device), modules)
            shapes.update({name: feature.shape[1:] for name, feature in features.items()})
            return pack(features)

    with torch.set_grad_enabled(at_once):
        encoded = [encode_chunk(number) for number in range(len(chunks))]
    local = torch.cat([part.detach() for part in encoded]).to(backbone.logit_scale.dtype)
    gathered = accelerator.gather(local).requires_grad_()
    losses, report = method.all_losses(unpack(gathered, shapes), backbone.logit_scale.exp(), backbone.logit_bias)
    total = torch.stack(list(losses.values())).sum()
    report = {"loss": total.detach(), **report}
    if not total.isfinite():
        return _numbers(report)
    (scaler.scale(total) if scaler else total).backward()
    # Every process holds the whole gradient of scale and bias; summed below, it must count once.
    for parameter in (backbone.logit_scale, backbone.logit_bias):
        if parameter is not None and parameter.grad is not None:
            parameter.grad /= accelerator.num_processes
    start = accelerator.process_index * len(local)
    for number, gradient in enumerate(gathered.grad[start : start + len(local)].split(len(chunks[0]))):
        part = encoded[number] if at_once else encode_chunk(number)
        part.backward(gradient.to(part.dtype))
    gradients = [parameter.grad for parameter in parameters(backbone, modules) if parameter.grad is not None]
    sum_over_processes(gradients, accelerator)
    report["gradient_norm"] = torch.nn.utils.get_total_norm(gradients) / (scaler.get_scale() if scaler else 1)
    return _numbers(report)


def _numbers(report: dict[str, torch.Tensor]) -> dict[str, float]:
    # One copy from the device instead of one, waited for, per number.
    return dict(zip(report, torch.stack(list(report.values())).tolist(), strict=True))


def sum_over_processes(gradients: list[torch.Tensor], accelerator: Accelerator) -> None:
    """In place; a few large messages instead of hundreds of small ones."""
    if accelerator.num_processes == 1:
        return
    bucket: list[torch.Tensor] = []
    for position, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(part.numel() for part in bucket) < _BUCKET and position < len(gradients) - 1:
            continue
        summed = accelerator.reduce(torch.cat([part.flatten() for part in bucket]), reduction="sum")
        for part, total in zip(bucket, summed.split([part.numel() for part in bucket]), strict=True):
            part.copy_(total.view_as(part))
        bucket = []


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Parameter groups for AdamW, with weight decay on matrices only."""
    parameters = list(parameters)
    matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _rated_groups(named: Mapping[str, nn.Parameter], weight_decay: float, rate: Callable[[str], float]) -> list[dict]:
    """`decay_groups` of the parameters of each rate, with that rate."""
    rated: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        rated.setdefault(rate(name), []).append(parameter)
    return [
        group | {"rate": factor}
        for factor, parameters in rated.items()
        for group in decay_groups(parameters, weight_decay)
        if group["params"]
    ]


class AdamW:
    """torch's AdamW with weight decay on matrices only, whose state is saved by the parameters' names.

    Args:
        named: parameters by name; those without `requires_grad` are left out.
        precision: for "fp16", gradients are scaled so that small ones do not vanish; a step in which one of them
            overflows is skipped and the scale lowered.
        rate: multiplies the learning rate of a parameter, by its name; None: 1 for all.

    Attributes:
        scaler: scales the loss before its gradient is computed; None unless the precision is "fp16".
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        precision: str = "fp32",
        rate: Callable[[str], float] | None = None,
    ):
        self.named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        groups = _rated_groups(self.named, weight_decay, rate or (lambda name: 1.0))
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        device = next(iter(self.named.values())).device.type
        self.scaler = torch.amp.GradScaler(device) if precision == "fp16" else None

    def step(self, learning_rate: float) -> None:
        """Applies the parameters' gradients and clears them."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate * group["rate"]
        if self.scaler:
            self.scaler.step(self.adamw)
            self.scaler.update()
        else:
            self.adamw.step()
        self.clear()

    def clear(self) -> None:
        """Removes the gradients without applying them."""
        self.adamw.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's averages and step counts by the parameters' names, and the scaler's state."""
        state = {
            f"{name}/{key}": value
            for name, parameter in self.named.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }
        scaler = self.scaler.state_dict() if self.scaler else {}
        return state | {f"{_SCALER}{key}": torch.tensor(value) for key, value in scaler.items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restores what `state` returned, for the same parameters and precision.

        Raises:
            ValueError: an entry is missing, has another shape, or belongs to nothing here.
        """
        rest = dict(state)
        for name, parameter in self.named.items():
            # Parameters without a gradient so far, as when all steps were skipped, have no entries.
            if any(f"{name}/{key}" in state for key in _ADAMW_STATE):
                shapes = (parameter.new_empty(()).shape, parameter.shape, parameter.shape)
                self.adamw.state[parameter] = {
                    key: _take(rest, f"{name}/{key}", shape).to(parameter.device)
                    for key, shape in zip(_ADAMW_STATE, shapes, strict=True)
                }
        if self.scaler:
            scaler = {key: _take(rest, _SCALER + key, torch.Size()).item() for key in self.scaler.state_dict()}
            self.scaler.load_state_dict(scaler)
        if rest:
            raise ValueError(f"the optimizer has no {min(rest)!r}")


class Optimizer(AdamW):
    """AdamW on all trained parameters of a two-tower but the kept positions.

    The first `backbone.kept_positions` rows of the text tower's position table are not trained: whatever gradient,
    momentum and weight decay do to them, they are restored after each step.

    Args:
        modules: the method's own, trained too.
        rate: see `AdamW`.
    """

    def __init__(
        self,
        backbone: Backbone,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        precision: str = "fp32",
        modules: nn.Module | None = None,
        rate: Callable[[str], float] | None = None,
    ):
        self.backbone = backbone
        named = dict(backbone.model.named_parameters())
        if modules is not None:
            named |= {f"{_METHOD}{name}": parameter for name, parameter in modules.named_parameters()}
        super().__init__(named, weight_decay, betas, eps, precision, rate)
        self.kept = self._kept_rows.detach().clone()

    @property
    def _kept_rows(self) -> torch.Tensor:
        table: nn.Parameter = self.backbone.text.tower.positional_embedding
        return table[: self.backbone.kept_positions]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        super().step(learning_rate)
        self._kept_rows.copy_(self.kept)
        if self.backbone.loss == "softmax":
            self.backbone.logit_scale.clamp_(max=MAX_LOGIT_SCALE)


def _take(state: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    if name not in state or state[name].shape != shape:
        problem = f"has the shape {list(state[name].shape)}" if name in state else "is missing"
        raise ValueError(f"the optimizer's {name!r} {problem}, and must be of shape {list(shape)}")
    return state.pop(name)
