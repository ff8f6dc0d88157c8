"""An exponential moving average of the weights (timm's), and the N:M network it stands for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from bame_cli.sparsity.pattern import Pattern, zero_where_


class Average:
    """Averages the effective weights and batch statistics after every step.

    After s steps the decay is min(decay, 1 - s ** (-2/3)), so that a short run forgets its first weights too: a
    function of the step, so nothing but the average itself has to outlive a restart. Where masks move, the average of
    N:M networks is none: its network keeps the N largest averages of each block.
    """

    def __init__(self, model: nn.Module, decay: float, patterns: Mapping[str, Pattern]) -> None:
        self.ema, self.patterns = ModelEmaV3(model, decay=decay, use_warmup=True), patterns

    def update(self, model: nn.Module, step: int) -> None:
        """Take up the weights that step `step`, from 0, left."""
        self.ema.update(model, step=step + 1)

    @torch.no_grad()
    def network(self) -> nn.Module:
        """A copy of the average, exactly at the target pattern."""
        model: nn.Module = copy.deepcopy(self.ema.module)
        for name, pattern in self.patterns.items():
            weight = model.get_parameter(name).data
            zero_where_(weight, pattern.project(weight))
        return model

    def state_dict(self) -> dict[str, Any]:
        return self.ema.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ema.module.load_state_dict(state)
