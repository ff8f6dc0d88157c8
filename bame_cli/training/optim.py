"""Parameter groups, optimizer and learning-rate schedule, all timm's; the schedule is a function of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError, near_misses


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    momentum: float,
    weight_decay: float,
    args: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Any optimizer of timm's factory; no weight decay on biases and normalization.

    `sgd` is plain momentum SGD, as the papers use it; `args: {nesterov: true}` makes it Nesterov's. `args` reaches
    the optimizer as it is. Raises ConfigError for an unknown name or an option that the optimizer does not take.
    """
    known = [str(optimizer) for optimizer in list_optimizers()]
    if name not in known:
        raise ConfigError(f"recipe.optimizer={name}: timm has no such optimizer{near_misses(name, known)}")
    extra = ({"nesterov": False} if name == "sgd" else {}) | dict(args or {})
    try:
        return create_optimizer_v2(model, opt=name, lr=lr, weight_decay=weight_decay, momentum=momentum, **extra)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"recipe.optimizer={name}: {error}") from error


class Schedule:
    """Linear warm-up from 0, then a cosine that reaches `min_lr` on the last step; set before each step."""

    def __init__(self, optimizer: Optimizer, *, total_steps: int, warmup_steps: int, min_lr: float) -> None:
        if warmup_steps >= total_steps:
            raise ConfigError(f"recipe.warmup_epochs is {warmup_steps} steps, the whole run has {total_steps}")
        self.optimizer = optimizer
        self.cosine = CosineLRScheduler(
            optimizer,
            t_initial=max(1, total_steps - warmup_steps - 1),
            lr_min=min_lr,
            warmup_t=warmup_steps,
            warmup_lr_init=0.0,
            warmup_prefix=True,
            t_in_epochs=False,
        )

    def set(self, step: int) -> float:
        """Set the learning rate that step `step` (from 0) is made with, and return it (that of the first group)."""
        self.cosine.step_update(step)
        return float(self.optimizer.param_groups[0]["lr"])
