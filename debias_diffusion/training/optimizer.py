"""AdamW for all trained parameters, and the learning rate of a step."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..clip.backbone import Backbone

MAX_LOGIT_SCALE = math.log(100)  # CLIP: similarities are multiplied with at most 100


def learning_rate(step: int, total_steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to `peak`, then half a cosine to 0 (as in Long-CLIP): a pure function, with nothing to save.

    Args:
        step: number of the step about to be made, from 0.
        total_steps: steps of the whole run.
        warmup: steps of warm-up; the last of them has the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
    decay: Literal["matrices", "all"] = "matrices",
) -> list[dict]:
    """Groups for AdamW, each with its weight decay and a "rate" that multiplies the learning rate; see `AdamW`."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        rate = next((rate for start, rate in (rates or {}).items() if name.startswith(start)), 1.0)
        groups.setdefault((parameter.ndim >= 2 or decay == "all", rate), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if has_decay else 0.0, "rate": factor}
        for (has_decay, factor), parameters in groups.items()
    ]


class AdamW:
    """torch's AdamW with weight decay on matrices only, as usual, or on all, and loss scaling for fp16.

    Args:
        named: parameters by name; those without `requires_grad` are left out.
        precision: for "fp16", gradients are scaled so that small ones do not vanish; a step in which one of them
            overflows is skipped and the scale lowered.
        rates: multiply the learning rate of some parameters, by how their names begin.
        decay: the parameters that weight decay acts on.

    Attributes:
        scaler: scales the loss before its gradient is computed; does nothing unless the precision is "fp16".
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        precision: str = "fp32",
        rates: Mapping[str, float] | None = None,
        decay: Literal["matrices", "all"] = "matrices",
    ):
        trained = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
        groups = parameter_groups(trained, weight_decay, rates, decay)
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.scaler = torch.amp.GradScaler(trained[0][1].device.type, enabled=precision == "fp16")

    def step(self, learning_rate: float, report: Mapping[str, Tensor]) -> Tensor:
        """Applies the parameters' gradients if "loss" and "gradient_norm" of `report` are finite, and clears them.

        Returns:
            Whether they are, on the device: it decides alone, and the host need not wait, but in fp16.
        """
        # Gradients overflow now and then in fp16; the scaler skips such a step.
        checked = ["loss"] if self.scaler.is_enabled() else ["loss", "gradient_norm"]
        is_finite = torch.stack([report[name] for name in checked]).isfinite().all()
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate * group["rate"]
        if not self.scaler.is_enabled() and is_finite.device.type != "mps":  # whose AdamW does not heed `found_inf`
            self.adamw.found_inf = is_finite.logical_not().float()  # as a scaler has it change nothing
            self.adamw.step()
        elif is_finite:
            self.scaler.step(self.adamw)
            self.scaler.update()
        self.clear()
        return is_finite

    def clear(self) -> None:
        """Removes the gradients without applying them."""
        self.adamw.zero_grad()

    def state_dict(self) -> dict:
        """AdamW's averages and step counts, and the scaler's state."""
        return {"adamw": self.adamw.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned, for the same parameters and precision.

        Raises:
            ValueError: it is that of other parameters.
        """
        self.adamw.load_state_dict(state["adamw"])
        self.scaler.load_state_dict(state["scaler"])


class Optimizer(AdamW):
    """AdamW on all trained parameters of a two-tower but the kept positions.

    The first `backbone.kept_positions` rows of the text tower's position table are not trained: whatever gradient,
    momentum and weight decay do to them, they are restored after each step.

    Args:
        settings, more: of `AdamW`, what follows the parameters.
        modules: the method's own, trained too.
    """

    def __init__(self, backbone: Backbone, *settings, modules: nn.Module | None = None, **more):
        self.backbone = backbone
        named = dict(backbone.model.named_parameters())
        if modules is not None:
            named |= {f"method/{name}": parameter for name, parameter in modules.named_parameters()}
        super().__init__(named, *settings, **more)
        self._rows = backbone.text.tower.positional_embedding[: backbone.kept_positions].detach()
        self._kept = self._rows.clone()

    @torch.no_grad()
    def step(self, learning_rate: float, report: Mapping[str, Tensor]) -> Tensor:
        is_finite = super().step(learning_rate, report)
        self._rows.copy_(self._kept)
        if self.backbone.loss == "softmax":
            self.backbone.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        return is_finite
