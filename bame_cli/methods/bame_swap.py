"""BAME, the other reading: one instant, one exchange per block (ours; see `bame` for what is known of the paper).

During the last `gradient_steps` steps before an adaptation the dense weight gradient is accumulated: g is its mean,
v the estimated variance of that mean. The loss along one weight is modelled as a parabola of curvature 1 / (k n s):
k = `horizon` plain steps bring a weight to its minimum, n is the learning rate now, s makes a step's size the
optimizer's own (1 for SGD; 1 / (RMS of sqrt(second moment) over the layer's kept weights) for Adam and its kin).

Forward   m * w
Gradient  m * g
Dropped   exactly 0, with clean optimizer state
Cost      forward d, grad_input d, grad_weight d, or 1 on the steps of a window that ends in an adaptation
Rule      growing r from 0 wins  G = k n s * max(0, g_r^2 - confidence * v_r) / 2
          dropping p costs       C = w_p^2 / (2 k n s)  (minus g_p * w_p with `first_order`)
          per block p = argmin C, r = argmax G; the block is a candidate when C - G < 0; with several swaps the
          k-th smallest C meets the k-th largest G. A block with `freeze_after` flips keeps its mask; a `budget`
          takes the best (G - C) / (1 + flips) of each layer, a cosine share from `start` to `stop`.
Departs   from the paper in whatever it does that we could not read. An adaptation happens on steps with
          (step + 1) divisible by `interval`, in `after_backward`. Momentum is not counted in `horizon`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bame_cli.errors import ConfigError
from bame_cli.methods.base import Layers, Shapes, SparseMethod
from bame_cli.methods.master import MasterMethod
from bame_cli.methods.optimizers import clear_state, demand_zeros_kept, scales_as_known
from bame_cli.methods.options import at_share, demand_at_least, demand_one_of, demand_order, demand_share
from bame_cli.methods.windows import Gathered, barred, best, frozen_share
from bame_cli.sparsity.flops import ONE, Densities, Density
from bame_cli.sparsity.pattern import row_slices, zero_where_


@dataclass(kw_only=True)
class BAMESwap(MasterMethod):
    """Shares of training: start, stop, warmup (SR-STE first, at `decay`). Steps: interval, gradient_steps.

    criterion: `loss` (the rule) | `taylor` (C = |g w|, G = k n s g^2) | `magnitude_gradient` (smallest |w| out,
    largest |g| in; it accepts every swap, so it needs a `budget`, a share of blocks per adaptation and layer).
    regrow: `zero` | `step` (start at -k n s g). warmup_grad_input: `sparse` | `dense`, how warm-up is billed.
    """

    interval: int = 50
    gradient_steps: int = 10
    start: float = 0.0
    stop: float = 0.8
    horizon: float = 100.0
    confidence: float = 4.0
    criterion: str = "loss"
    first_order: bool = False
    freeze_after: int | None = None
    budget: float | None = None
    swaps: int = 1
    warmup: float = 0.0
    decay: float = 2e-4
    regrow: str = "zero"
    warmup_grad_input: str = "sparse"
    strange = ""  # no option: the optimizer's name, where the size of its steps is not known

    def validate(self) -> None:
        demand_share(start=self.start, stop=self.stop, warmup=self.warmup)
        demand_at_least(1, interval=self.interval, gradient_steps=self.gradient_steps, swaps=self.swaps)
        demand_at_least(0, confidence=self.confidence, decay=self.decay, horizon=self.horizon)
        demand_one_of(("loss", "taylor", "magnitude_gradient"), criterion=self.criterion)
        demand_one_of(("zero", "step"), regrow=self.regrow)
        demand_one_of(("sparse", "dense"), warmup_grad_input=self.warmup_grad_input)
        if self.budget is not None:
            demand_share(budget=self.budget)
        if self.freeze_after is not None:
            demand_at_least(1, freeze_after=self.freeze_after)
        self._demand_sense()

    def _demand_sense(self) -> None:
        demand_order(start=self.start, stop=self.stop)
        if self.gradient_steps > self.interval:
            raise ConfigError(f"method.gradient_steps={self.gradient_steps} exceeds method.interval={self.interval}")
        if self.criterion == "loss" and self.confidence > 0 and self.gradient_steps < 2:
            raise ConfigError("method.gradient_steps=1 gives no variance: use 2 or more, or method.confidence=0")
        if self.first_order and self.criterion != "loss":
            raise ConfigError(f"method.first_order has no meaning with method.criterion={self.criterion}")
        if self.criterion == "magnitude_gradient" and self.budget is None:
            raise ConfigError("method.criterion=magnitude_gradient accepts every swap: set method.budget, say .1")

    # --- the schedule: pure functions of the step ---

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        self.warm = at_share(self.warmup, total_steps)
        self.first, self.last = at_share(self.start, total_steps), at_share(self.stop, total_steps)
        named = [(name, pattern.density) for name, pattern in self.patterns.items()]
        as_srste = self.warmup_grad_input == "dense"
        self.cost_warm: Densities = {name: Density(d, ONE if as_srste else d, ONE) for name, d in named}
        self.cost_gather: Densities = {name: Density(d, d, ONE) for name, d in named}
        self.cost_fixed: Densities = {name: Density(d, d, d) for name, d in named}

    def adapts(self, step: int) -> bool:
        """Whether masks change at step `step`: its whole window lies after warm-up."""
        due = (step + 1) % self.interval == 0 and self.first <= step < self.last
        return due and step - self.gradient_steps + 1 >= self.warm

    def gathers(self, step: int) -> bool:
        """Whether step `step` accumulates the dense gradient, for the adaptation that ends its window."""
        end = step // self.interval * self.interval + self.interval - 1
        return end - step < self.gradient_steps and self.adapts(end) and end < self.total_steps

    def densities(self, step: int) -> Densities:
        if step < self.warm:
            return self.cost_warm
        return self.cost_gather if self.gathers(step) else self.cost_fixed

    def turns(self) -> Iterable[int]:
        ends = range(self.interval, self.total_steps + 1, self.interval)
        return {self.warm, *ends, *(end - self.gradient_steps for end in ends)}

    def warnings(self) -> list[str]:
        notes = list[str]()
        if not any(self.adapts(step) for step in range(self.interval - 1, self.total_steps, self.interval)):
            first = max(self.first, self.warm + self.gradient_steps - 1)
            notes += [f"the mask never adapts: no interval of {self.interval} ends within steps {first} to {self.last}"]
        if self.criterion != "magnitude_gradient" and self.strange:
            notes += [f"the size of {self.strange}'s steps is not known, and weighs exchanges: try SGD or AdamW"]
        return notes

    def budget_at(self, step: int) -> float:
        """Share of a layer's blocks that may swap at step `step`."""
        if self.budget is None:
            return 1.0
        return self.budget * (1 + math.cos(math.pi * (step - self.first) / max(1, self.last - self.first))) / 2

    # --- the three moments ---

    def admit(self, optimizer: Optimizer) -> None:
        demand_zeros_kept(optimizer)
        self.strange = "" if scales_as_known(optimizer) else type(optimizer).__name__

    def attach(self, layers: Layers, optimizer: Optimizer, total_steps: int) -> None:
        self.gathered = dict[str, Gathered]()
        self.expected = 0.0
        super().attach(layers, optimizer, total_steps)

    def take_over(self) -> None:
        if self.warm:
            super().take_over()
            for p in self.parameters.values():
                clear_state(self.optimizer, p)
        else:
            self.master = dict[str, Tensor]()
            SparseMethod.take_over(self)
        self.flips = {
            name: torch.zeros_like(self.patterns[name].blocks(mask)[:, :, 0], dtype=torch.int32)
            for name, mask in self.masks.items()
        }

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        if step >= self.warm and self.master:
            self._end_warmup()
        if step < self.warm:
            for name in self.parameters:
                self.add_decay(name, self.decay)
            super().after_backward(step)
            return
        for name, p in self.parameters.items():
            if p.grad is None:
                continue
            if self.gathers(step):
                self._gather(name, p.grad, step // self.interval)
            if self.adapts(step):
                self._adapt(name, step)
            zero_where_(p.grad, self.masks[name])

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if step < self.warm:
            super().after_update(step)

    def _end_warmup(self) -> None:
        """Dropped weights become 0 for good, and the dense weights behind them are let go."""
        for name, p in self.parameters.items():
            clear_state(self.optimizer, p, ~self.masks[name])
        self.master, self.effective = {}, {}

    def _gather(self, name: str, grad: Tensor, window: int) -> None:
        if name not in self.gathered or self.gathered[name].window != window:
            squares = None if self.gradient_steps == 1 else torch.zeros_like(grad)
            self.gathered[name] = Gathered(window, 0, torch.zeros_like(grad), squares)
        self.gathered[name].add(grad)

    # --- the exchange ---

    def _adapt(self, name: str, step: int) -> None:
        """Swap inside one layer: masks, weights and optimizer state of the entries that change."""
        gathered = self.gathered.pop(name)
        if gathered.count < self.gradient_steps:
            return  # a step of the window was skipped: too little is known
        size = self.horizon * self.learning_rate(name) * self.step_scale(name)
        if size == 0:
            return
        # A few rows at a time: temporaries of a layer's size would cost more in page faults than in arithmetic.
        found = [self._candidates(name, gathered, part, size) for part in row_slices(self.masks[name])]
        loss, out, gain, into = (torch.cat(part) for part in zip(*found, strict=True))
        win = self._accept(name, gain + loss, gain, step)
        start = -size * self.patterns[name].blocks(gathered.sum).gather(2, into) if self.regrow == "step" else None
        self._exchange(name, win, out, into, start)

    def _candidates(self, name: str, gathered: Gathered, rows: slice, size: float) -> tuple[Tensor, ...]:
        """-C and index of what each block of some rows would drop, G and index of what it would grow."""
        pattern = self.patterns[name]
        kept, weight = (pattern.blocks(t[rows]) for t in (self.masks[name], self.parameters[name].data))
        mean, noise = map(pattern.blocks, gathered.mean_and_noise(rows))
        cost, gain = self._judge(weight, mean, noise, size)
        pairs = min(self.swaps, pattern.n, pattern.m - pattern.n)
        out = best(-cost - barred(~kept, cost.dtype), pairs)
        return *out, *best(gain - barred(kept, gain.dtype), pairs)

    def step_scale(self, name: str) -> float:
        """s: what the optimizer multiplies a gradient by, besides the learning rate; 1 for SGD, and where unknown."""
        p = self.parameters[name]
        state = self.optimizer.state.get(p, {})
        moment = state.get("exp_avg_sq")
        group = self.optimizer.param_groups[self.group_of[name]]
        if not isinstance(moment, Tensor) or moment.shape != p.shape or "betas" not in group:
            return 1.0
        decay, eps, done = group["betas"][1], group["eps"], int(state["step"]) if "step" in state else group["step"]
        rms = (moment[self.masks[name]].mean() / (1 - decay**done)).sqrt() if done else moment.new_zeros(())
        return 1 / (float(rms) + eps)

    def _judge(self, weight: Tensor, mean: Tensor, noise: Tensor, size: float) -> tuple[Tensor, Tensor]:
        """C of dropping and G of growing each entry, by the criterion; both like the blocks."""
        if self.criterion == "taylor":
            return (mean * weight).abs(), size * mean**2
        if self.criterion == "magnitude_gradient":
            return weight.abs(), mean.abs()
        cost = weight**2 / (2 * size)
        if self.first_order:
            cost = cost - mean * weight
        return cost, size * (mean**2 - self.confidence * noise).clamp(min=0) / 2

    def _accept(self, name: str, profit: Tensor, gain: Tensor, step: int) -> Tensor:
        """Which swaps happen, (out, in/M, pairs, ...): profitable, not frozen, within the budget."""
        flips = self.flips[name].unsqueeze(2)
        always = self.criterion == "magnitude_gradient"
        win = gain > 0 if always else profit > 0
        if self.freeze_after is not None:
            win &= flips < self.freeze_after
        if self.budget is not None:
            # A block's rank is that of all its swaps together; incommensurable criteria rank by what comes in.
            worth = (gain if always else profit).masked_fill(~win, 0).sum(2, keepdim=True) / (1 + flips)
            allowed = round(self.budget_at(step) * worth.numel())
            chosen = torch.zeros(worth.numel(), dtype=torch.bool, device=worth.device)
            chosen[worth.flatten().sort(descending=True, stable=True).indices[:allowed]] = True
            win &= chosen.view_as(worth)
        self.expected -= 0.0 if always else float(profit.masked_select(win).sum())
        return win

    def _exchange(self, name: str, win: Tensor, out: Tensor, into: Tensor, start: Tensor | None) -> None:
        """Where a swap wins, drop entry `out` of the block and grow entry `into`, from `start` or from 0."""
        p, blocks = self.parameters[name], self.patterns[name].blocks
        new = self.masks[name].clone()
        blocks(new).scatter_(2, out, ~win).scatter_(2, into, win)
        changed = self.replace_mask(name, new)
        self.flips[name] += win.any(2)
        weight = blocks(p.data)
        weight.scatter_(2, out, weight.gather(2, out).masked_fill_(win, 0))
        if start is not None:
            weight.scatter_(2, into, torch.where(win, start, weight.gather(2, into)))
        clear_state(self.optimizer, p, changed)

    # --- what is logged and kept ---

    def metrics(self, *, per_layer: bool = False) -> dict[str, Any]:
        expected, self.expected = self.expected, 0.0
        return super().metrics(per_layer=per_layer) | {
            "expected_loss_change": expected,
            "frozen_share": frozen_share(self.flips, self.freeze_after),
        }

    def state_dict(self) -> dict[str, Any]:
        gathered = {name: vars(window) for name, window in self.gathered.items()}
        return super().state_dict() | {"flips": dict(self.flips), "gathered": gathered, "expected": self.expected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.master and not state["master"]:
            self.master, self.effective = {}, {}
        super().load_state_dict(state)
        self.expected = state["expected"]
        for name, flips in self.flips.items():
            flips.copy_(state["flips"][name])
        device = next(iter(self.parameters.values())).device
        self.gathered = {name: Gathered(**saved).to(device) for name, saved in state["gathered"].items()}
