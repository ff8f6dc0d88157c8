"""Decay recipes: dropped weights fade out, or the pattern tightens in stages (Kao et al. 2022; its 2024 successor).

Forward   mask decay: W * (m + (1 - m) * delta), delta falling from 1 at `start` to exactly 0 at `stop`
          structure decay: m_t * W, the pattern N_t:M_t in stages down to the target, which holds from `stop`
Gradient  `soft`: g * (m + (1 - m) * delta), differentiated through delta (the first paper's code)
          `ste`: g unmodified (the successor's code); structure decay is the same with delta = 0
Dropped   keep training with `ste`; with `soft` their gradient fades with them
Cost      1, 1, 1 while delta > 0; then d, 1, 1 (`ste`) or d, 1, d (`soft`); structure: N_t/M_t, 1, 1 or N_t/M_t
Departs   delta is exactly 0 from `stop`, whatever beta: in the public code an exponential never gets there, so its
          final network is not N:M. Which stage holds follows from the step's range, never from an equality. Defaults
          of `start`, `stop` and `interval` are ours: the papers' are tied to their epoch counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bame_cli.errors import ConfigError
from bame_cli.methods.base import Shapes
from bame_cli.methods.master import MasterMethod
from bame_cli.methods.options import demand_at_least, demand_one_of, demand_order, demand_share
from bame_cli.methods.stages import explicit, fitted, geometric, stepwise
from bame_cli.sparsity.flops import FULL, ONE, Densities, Density
from bame_cli.sparsity.layers import Layer
from bame_cli.sparsity.pattern import Pattern, keep_where

_SHAPES = {"mask": ("linear", "exponential"), "structure": ("stepwise", "geometric")}


@dataclass(kw_only=True)
class DecayMask(MasterMethod):
    """Masks are taken by magnitude of W every `interval` steps, in all phases unless `refresh_after_stop` is off.

    kind: `mask` | `structure`. shape: `linear` | `exponential` for mask, `stepwise` | `geometric` for structure;
    None takes the first of its kind. gradient: `soft` | `ste`. start, stop: shares of training.
    beta: what delta loses per interval (linear) or its rate (exponential); None reaches 0, or 0.01, at `stop`.
    stages: patterns such as ["4:4", "3:4", "2:4"], monotone, the last the target; None derives them from `shape`.
    """

    kind: str = "mask"
    shape: str | None = None
    gradient: str = "ste"
    start: float = 0.1
    stop: float = 0.6
    interval: int = 10
    beta: float | None = None
    stages: list[str] | None = None
    refresh_after_stop: bool = True

    def validate(self) -> None:
        demand_one_of(tuple(_SHAPES), kind=self.kind)
        demand_one_of(_SHAPES[self.kind], shape=self.form)
        demand_one_of(("soft", "ste"), gradient=self.gradient)
        demand_share(start=self.start, stop=self.stop)
        demand_at_least(1, interval=self.interval)
        if self.beta is not None:
            demand_at_least(0, beta=self.beta)
        demand_order(start=self.start, stop=self.stop)
        for key in ("beta",) if self.kind == "structure" else ("stages",):
            if getattr(self, key) is not None:
                raise ConfigError(f"method.{key} has no meaning with method.kind={self.kind}")
        if self.stages is not None and self.shape is not None:
            raise ConfigError("method.shape has no meaning beside method.stages, which are the stages themselves")

    @property
    def form(self) -> str:
        """The shape in force."""
        return self.shape or _SHAPES[self.kind][0]

    def review(self, row: Layer) -> Layer:
        if self.kind == "mask" or row.pattern is None:
            return row
        wanted = self.stages_of(row.pattern)[0]
        first = fitted(self.stages_of(row.pattern), row.shape)[0]
        return row if first == wanted else replace(row, reason=f"starts at {first}: {wanted} does not fit its inputs")

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        self.first, self.last = self.span
        self.cost_soft: Densities = dict.fromkeys(self.patterns, FULL)

    def stage_span(self) -> tuple[float, float]:
        return self.start, self.stop

    def stages_of(self, target: Pattern) -> list[Pattern]:
        if self.kind == "mask":
            return [target]
        if self.stages is not None:
            return explicit(self.stages, target)
        return stepwise(target) if self.form == "stepwise" else geometric(target)

    # --- the schedule: pure functions of the step ---

    def delta(self, step: int) -> float:
        """What remains of dropped weights at step `step`: 1 before `start`, exactly 0 from `stop`."""
        if self.kind == "structure" or step >= self.last:
            return 0.0
        if step < self.first:
            return 1.0
        done = (step - self.first) // self.interval
        intervals = max(1, math.ceil((self.last - self.first) / self.interval))
        if self.form == "linear":
            return max(0.0, 1 - done * (1 / intervals if self.beta is None else self.beta))
        return math.exp(-done * (math.log(100) / intervals if self.beta is None else self.beta))

    def densities(self, step: int) -> Densities:
        return self.cost_soft if self.delta(step) > 0 else super().densities(step)

    def turns(self) -> Iterable[int]:
        # Delta may reach 0 at any refresh before `stop`, as its `beta` has it.
        return {*super().turns(), *range(self.first, self.last, self.interval), self.last}

    def stage_cost(self, stage: Pattern) -> Density:
        return Density(stage.density, ONE, ONE if self.gradient == "ste" else stage.density)

    def pattern_at(self, step: int) -> Mapping[str, Pattern] | None:
        return None if self.delta(step) > 0 else super().pattern_at(step)

    def warnings(self) -> list[str]:
        if self.kind == "mask" and self.first < self.last <= self.first + self.interval:
            return [f"decay lasts {self.last - self.first} steps, one interval: dropped weights go at once at its end"]
        return []

    # --- the three moments ---

    def show(self, name: str) -> None:
        """Write W * (m + (1 - m) * delta): hard when delta is 0."""
        soften(self.master[name], self.masks[name], self.delta(self.now), out=self.effective[name])
        self.parameters[name].data = self.effective[name]

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        for p, mask in ((p, self.masks[name]) for name, p in self.parameters.items()):
            if self.gradient == "soft" and p.grad is not None:
                soften(p.grad, mask, self.delta(self.now), out=p.grad)  # of the network shown, if a step was skipped
        super().after_backward(step)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        before, self.now = self.now, step + 1
        for name in self.parameters:
            stage = self.stage_at(name, self.now)
            if self._refreshes(before, self.now) or stage != self.stage_at(name, before):
                self.replace_mask(name, stage.project(self.master[name]))
            self.show(name)

    def _refreshes(self, before: int, now: int) -> bool:
        """Intervals are counted from `start`, so that delta and mask change together; `stop` always refreshes."""
        if before < self.last <= now:
            return True
        if before >= self.last and not self.refresh_after_stop:
            return False
        return (now - self.first) // self.interval != (before - self.first) // self.interval

    def metrics(self, *, per_layer: bool = False) -> dict[str, Any]:
        delta = {"delta": self.delta(self.now)} if self.kind == "mask" else {}
        return super().metrics(per_layer=per_layer) | delta


def soften(weight: Tensor, mask: Tensor, factor: float, *, out: Tensor) -> Tensor:
    """weight * (m + (1 - m) * factor), written to `out`, which may be `weight` itself."""
    if factor == 1:
        return weight if out is weight else out.copy_(weight)
    if factor == 0:
        return keep_where(weight, mask, out=out)
    faded = weight * factor if out is weight else torch.mul(weight, factor, out=out)
    return torch.where(mask, weight, faded, out=out)
