"""What methods need of an optimizer: its memory of single weights, and whether it leaves zeros at rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError


def clear_state(optimizer: Optimizer, p: nn.Parameter, where: Tensor | None = None) -> None:
    """Zero what the optimizer remembers of the entries where `where` is True; forget the weight when it is None.

    Single entries exist in state shaped like the weight (momentum, moments), not in step counts or factored statistics.
    """
    if where is None:
        optimizer.state.pop(p, None)  # step counts as well: what follows is a fresh start
        return
    for value in optimizer.state.get(p, {}).values():
        if isinstance(value, Tensor) and value.shape == p.shape:
            value.masked_fill_(where, 0)


def keeps_zeros(optimizer: Optimizer) -> bool:
    """Whether weight 0 with gradient 0 and clean state stays 0: true of element-wise optimizers, tried, not assumed.

    Every group that holds a matrix is tried, on a twin of the optimizer that shares its options and nothing else.
    Raises ConfigError for a wrapper with weights of its own (Lookahead).
    """
    if hasattr(optimizer, "_base_optimizer") or hasattr(optimizer, "base_optimizer"):
        name = type(optimizer).__name__
        raise ConfigError(f"{name} keeps weights of its own, which would bring dropped ones back: use what it wraps")
    return all(_keeps_zeros(optimizer, group) for group in _with_matrices(optimizer))


def _with_matrices(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if any(p.dim() > 1 for p in group["params"])]


def _keeps_zeros(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    values = torch.linspace(-1, 1, 24).view(4, 6)
    kept = torch.arange(24).view(4, 6) % 5 < 2  # no symmetric or low-rank arrangement that an optimizer could keep
    probe, _ = _tried(optimizer, group, values * kept, values.flip(0) * kept, steps=2)
    return bool((probe[~kept] == 0).all())


def _tried(
    optimizer: Optimizer, group: dict[str, Any], weight: Tensor, grad: Tensor, steps: int
) -> tuple[Tensor, dict[str, Any]]:
    """What a weight is after some steps of a twin of the optimizer, and what is remembered of it."""
    matrix = next(p for p in group["params"] if p.dim() > 1)
    device = "cpu" if matrix.is_meta else matrix.device
    probe = nn.Parameter(weight.to(device))
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__["state"] = type(optimizer.state)(optimizer.state.default_factory)
    twin.param_groups = [{**group, "params": [probe], "lr": 0.1}]
    for _ in range(steps):
        probe.grad = grad.to(device, copy=True)
        type(optimizer).step(twin)  # not twin.step: a scheduler puts a wrapper there that steps the real one
    return probe.detach().cpu(), twin.state[probe]


def scales_as_known(optimizer: Optimizer) -> bool:
    """Whether it is known by how much the optimizer scales a gradient: SGD, Adam and its kin. Tried, not assumed.

    Either nothing but a momentum is remembered, or `exp_avg_sq` is, after one step, a mean of squared gradients that
    `1 - betas[1] ** step` corrects.
    """
    return all(_scales_as_known(optimizer, group) for group in _with_matrices(optimizer))


def _scales_as_known(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    grad = torch.linspace(-1, 1, 24).view(4, 6)
    _, state = _tried(optimizer, group, torch.zeros_like(grad), grad, steps=1)  # nothing that could decay
    moment, betas = state.get("exp_avg_sq"), group.get("betas", ())
    if isinstance(moment, Tensor) and moment.shape == grad.shape and len(betas) == 2:
        return torch.allclose(moment.cpu() / (1 - betas[1]), grad**2, rtol=1e-3)
    return not betas and not set(state) - {"momentum_buffer", "step"}


def demand_zeros_kept(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that moves weights whose value, gradient and state are 0."""
    if not keeps_zeros(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(f"BAME needs dropped weights to rest, and {name} moves weights whose gradient is 0")


def group_index(optimizer: Optimizer, p: nn.Parameter) -> int:
    """By position, because `optimizer.load_state_dict` replaces the group objects."""
    for index, group in enumerate(optimizer.param_groups):
        if any(p is other for other in group["params"]):
            return index
    raise ValueError("a layer's weight is not among the optimizer's parameters")
