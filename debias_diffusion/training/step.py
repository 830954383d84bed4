"""One exact step over the global batch, however many processes share it."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from ..clip.backbone import Backbone
from ..data.batch import Batch
from ..devices import autocast
from ..methods import Method

_BUCKET = 25_000_000  # numbers in a message between processes


def pack(features: dict[str, torch.Tensor]) -> torch.Tensor:
    """[batch, numbers of all features]: named features side by side, so that one message gathers them."""
    return torch.cat([feature.flatten(1) if feature.ndim > 1 else feature[:, None] for feature in features.values()], 1)


def unpack(packed: torch.Tensor, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The named features, as views; `shapes` are those of one sample each."""
    parts = packed.split([shape.numel() for shape in shapes.values()], dim=1)
    return {name: part.view(-1, *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def parameters(model: nn.Module, modules: nn.Module | None) -> list[nn.Parameter]:
    """Of the model and of the method's own modules."""
    return [*model.parameters(), *(modules.parameters() if modules is not None else ())]


def backward(
    backbone: Backbone,
    method: Method,
    batch: Batch,
    accelerator: Accelerator,
    precision: str = "fp32",
    chunk: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    modules: nn.Module | None = None,
) -> dict[str, torch.Tensor]:
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
        scaler: for "fp16": the gradients are left scaled by it. None scales nothing.
        modules: the method's own, on the device.

    Returns:
        The loss, the method's report and the gradient's norm, on the device. If loss or norm is not finite, no gradient
        may be used.
    """
    chunks = batch.chunks(chunk or len(batch))
    at_once = len(chunks) == 1
    seed, scaler = torch.initial_seed(), scaler or torch.amp.GradScaler(enabled=False)

    shapes: dict[str, torch.Size] = {}

    def encode_chunk(number: int) -> torch.Tensor:
        if not at_once:  # random draws, such as dropped patches, must be the same both times
            torch.manual_seed(hash((seed, number)) & (2**63 - 1))
        with autocast(precision, accelerator.device):
            features = method.features(backbone, chunks[number].to(accelerator.device), modules)
            shapes.update({name: feature.shape[1:] for name, feature in features.items()})
            return pack(features)

    with torch.set_grad_enabled(at_once):
        encoded = [encode_chunk(number) for number in range(len(chunks))]
    local = torch.cat([part.detach() for part in encoded]).to(backbone.logit_scale.dtype)
    gathered = accelerator.gather(local).requires_grad_()
    losses, report = method.losses(unpack(gathered, shapes), backbone.logit_scale.exp(), backbone.logit_bias)
    total = torch.stack(list(losses.values())).sum()
    scaler.scale(total).backward()
    # Every process holds the whole gradient of scale and bias; summed below, it must count once.
    for parameter in (backbone.logit_scale, backbone.logit_bias):
        if parameter is not None and parameter.grad is not None:
            parameter.grad /= accelerator.num_processes
    start = accelerator.process_index * len(local)
    for number, gradient in enumerate(gathered.grad[start : start + len(local)].split(len(chunks[0]))):
        part = encoded[number] if at_once else encode_chunk(number)
        part.backward(gradient.to(part.dtype))
    norm = sum_over_processes(parameters(backbone, modules), accelerator)
    return {"loss": total.detach(), **report, "gradient_norm": norm / scaler.get_scale()}


def sum_over_processes(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> torch.Tensor:
    """Sums gradients in place, in a few large messages instead of hundreds of small ones. Returns their total norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    bucket: list[torch.Tensor] = []
    for position, gradient in enumerate(gradients if accelerator.num_processes > 1 else ()):
        bucket.append(gradient)
        if sum(part.numel() for part in bucket) < _BUCKET and position < len(gradients) - 1:
            continue
        summed = accelerator.reduce(torch.cat([part.flatten() for part in bucket]), reduction="sum")
        for part, total in zip(bucket, summed.split([part.numel() for part in bucket]), strict=True):
            part.copy_(total.view_as(part))
        bucket = []
    return torch.nn.utils.get_total_norm(gradients)
