"""Dense master weights W behind the effective ones: the mechanism of every method that trains dropped weights too.

The Parameter object and its optimizer group never change. Between steps its data are the effective weights mask * W,
in a fixed buffer; from `after_backward` to `after_update` they are W itself, so that the optimizer, its state, the
gradient scaler and clipping see dense weights. The gradient taken at the effective weights is the gradient that W
gets: straight-through by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError
from bame_cli.methods.base import Layers, Shapes, SparseMethod
from bame_cli.methods.options import at_share
from bame_cli.methods.stages import fitted, stage_index, stage_turns, stepwise
from bame_cli.sparsity.flops import ONE, Densities, Density
from bame_cli.sparsity.pattern import Pattern, is_dense, keep_where


@dataclass(kw_only=True)
class MasterMethod(SparseMethod):
    """A method that trains dropped weights too. As it stands: straight-through, a new mask after every update.

    Its pattern may tighten in stages (`stages_of`, over the shares of training `stage_span`); one stage, the target,
    unless a method says otherwise.
    """

    moves: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = False

    def stage_span(self) -> tuple[float, float]:
        """Shares of training between which the stages before the target follow one another."""
        return 0.0, 0.0

    def stages_of(self, target: Pattern) -> list[Pattern]:
        """The stages that lead to a target, the target last."""
        return [target]

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        self.span = tuple(at_share(share, total_steps) for share in self.stage_span())
        self.staged = {n: fitted(self.stages_of(pattern), shape) for n, (shape, pattern) in shapes.items()}
        self.lengths = sorted({len(stages) for stages in self.staged.values()})
        self.target = tuple(length - 1 for length in self.lengths)
        self.costs = dict[tuple[object, ...], Densities]()
        early = max(self.lengths, default=1) - 1
        if self.span[1] - self.span[0] < early:
            raise ConfigError(
                f"{early} stages before the target do not fit the {self.span[1] - self.span[0]} steps for them"
            )

    def stage_at(self, name: str, step: int) -> Pattern:
        """The pattern that a layer's mask has at step `step`."""
        stages = self.staged[name]
        return stages[stage_index(len(stages), step, *self.span)]

    def stages_now(self, step: int) -> tuple[int, ...]:
        """Which stages hold at step `step`: a layer's stage depends on how many it has, and on nothing else."""
        if step >= self.span[1]:  # asked at every step that is billed, and nearly always so
            return self.target
        return tuple(stage_index(length, step, *self.span) for length in self.lengths)

    def pattern_at(self, step: int) -> Mapping[str, Pattern] | None:
        return {name: self.stage_at(name, step) for name in self.patterns}

    def densities(self, step: int) -> Densities:
        key = self.stages_now(step)
        if key not in self.costs:
            self.costs[key] = {name: self.stage_cost(self.stage_at(name, step)) for name in self.patterns}
        return self.costs[key]

    def turns(self) -> Iterable[int]:
        return {turn for length in self.lengths for turn in stage_turns(length, *self.span)}

    def stage_cost(self, stage: Pattern) -> Density:
        """What a step costs while a layer is at `stage`."""
        return Density(stage.density, ONE, ONE)

    def attach(self, layers: Layers, optimizer: Optimizer, total_steps: int) -> None:
        self.now = 0
        super().attach(layers, optimizer, total_steps)

    def first_mask(self, name: str, weight: nn.Parameter) -> Tensor:
        return self.stage_at(name, 0).project(weight)

    @torch.no_grad()
    def take_over(self) -> None:
        # A weight that is a slice of something larger gets memory of its own, so that all buffers are laid out alike.
        self.master = {name: p.data if is_dense(p) else p.data.clone() for name, p in self.parameters.items()}
        self.effective = {name: torch.empty_like(w) for name, w in self.master.items()}
        for name in self.parameters:
            self.show(name)

    def show(self, name: str) -> None:
        """Point the parameter at the effective weights mask * W, freshly written."""
        keep_where(self.master[name], self.masks[name], out=self.effective[name])
        self.parameters[name].data = self.effective[name]

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        for name, p in self.parameters.items():
            p.data = self.master[name]

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        self.now = step + 1
        for name in self.parameters:
            self.replace_mask(name, self.stage_at(name, self.now).project(self.master[name]))
            self.show(name)

    def support(self, name: str) -> Tensor | None:
        return None

    def dense_weight(self, name: str) -> Tensor:
        """What a layer's next mask is chosen from: W."""
        return self.master[name]

    @contextmanager
    def hardened(self) -> Iterator[None]:
        if self.pattern_at(self.now) == self.patterns:
            yield
            return
        shown = {name: weight.clone() for name, weight in self.effective.items()}
        with torch.no_grad():
            for name, target in self.patterns.items():
                there = self.stage_at(name, self.now) == target
                mask = self.masks[name] if there else target.project(self.dense_weight(name))
                keep_where(self.dense_weight(name), mask, out=self.effective[name])
        try:
            yield
        finally:
            for name, weight in shown.items():
                self.effective[name].copy_(weight)

    def add_decay(self, name: str, decay: float) -> None:
        """grad += decay * (1 - mask) * W: SR-STE's pull on dropped weights, while p.data is the effective weight.

        The effective buffer is free between backward and update: mask * W less W leaves -(1 - mask) * W there, exactly.
        """
        grad, effective = self.parameters[name].grad, self.effective[name]
        if decay and grad is not None:
            grad.add_(effective.sub_(self.master[name]), alpha=-decay)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"master": dict(self.master), "now": self.now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.now = state["now"]
        for name, weight in self.master.items():
            weight.copy_(state["master"][name])


@dataclass(kw_only=True)
class RampMethod(MasterMethod):
    """A master method whose N may fall from M to its target: `ramp` is the share of training it takes, 0 is off."""

    ramp: float = 0.0

    def stage_span(self) -> tuple[float, float]:
        return 0.0, self.ramp

    def stages_of(self, target: Pattern) -> list[Pattern]:
        return stepwise(target) if self.ramp else [target]
