"""BAME: sparse forward and backward all along, while masks evolve inside designated blocks (ICML 2025; our reading).

The paper's formulas were not available to us. Known from its abstract, reviews and setup: Loss-aware Mask
Adaptation prunes and regrows inside designated blocks, Oscillation-aware Block Freezing stops adapting blocks whose
mask keeps flipping; an initial and a final iteration of adaptation, and an interval. **The rules below are ours.**
This reading, `live`, designates blocks that train all their weights for a while; the other one, `bame_swap`,
exchanges weights at an instant.

Forward   m * W, masks by magnitude of the initial weights, then moving inside designated blocks only
Gradient  m * g, and g + decay * (1 - m) * W in designated blocks
Dropped   train where designated; elsewhere they hold their value, with clean optimizer state and no weight decay
Cost      forward d, grad_input d, grad_weight d + share * (1 - d); warm-up is share 1, after `stop` share 0
Departs   from the paper in whatever it does that we could not read. Every `interval` steps, per layer, the share
          `designate` of the blocks is designated: those whose weakest kept weight costs least to give up
          (expected loss of dropping it ~ w^2, hence the smallest |w|), each penalized by its flips:
          |w| * (1 + flips / oscillation); a block with `freeze_after` flips is never designated again.
          With `taper` the share falls as (1 - progress) ** taper from `start` to `stop`. The defaults won the study
          of docs/study.md; designate=.2 interval=100 warmup=.1, the plain reading, cost 13 to 20 % more there.
          Designating all blocks always is SR-STE; designating none is a fixed mask. Both identities are tested.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from bame_cli.methods.base import Layers, Shapes
from bame_cli.methods.master import RampMethod
from bame_cli.methods.optimizers import clear_state, demand_zeros_kept
from bame_cli.methods.options import at_share, demand_at_least, demand_one_of, demand_order, demand_share
from bame_cli.methods.windows import Calendar, Window, barred, frozen_share
from bame_cli.sparsity.flops import ONE, Densities, Density
from bame_cli.sparsity.pattern import Picked, lowest, row_slices, zero_where_


@dataclass(kw_only=True)
class BAME(RampMethod):
    """Shares of training: start, stop, warmup (all blocks designated first). Shares of blocks: designate.

    pick: `small` (smallest |w| of a kept weight) | `gap` (largest |W| of a dropped weight minus that) | `random`.
    oscillation, freeze_after: flips; None is off. warmup_grad_input: `sparse` | `dense`, how warm-up is billed (SR-STE
    is billed densely).
    """

    sparse_gradients: ClassVar[bool] = True

    designate: float = 0.15
    taper: float = 0.0
    interval: int = 30
    start: float = 0.0
    stop: float = 0.9
    decay: float = 2e-4
    warmup: float = 0.05
    pick: str = "small"
    oscillation: float | None = None
    freeze_after: int | None = None
    warmup_grad_input: str = "sparse"
    seed: int = 0

    def validate(self) -> None:
        demand_share(ramp=self.ramp, designate=self.designate, start=self.start, stop=self.stop, warmup=self.warmup)
        demand_at_least(0, decay=self.decay, taper=self.taper)
        demand_at_least(1, interval=self.interval)
        demand_one_of(("small", "gap", "random"), pick=self.pick)
        demand_one_of(("sparse", "dense"), warmup_grad_input=self.warmup_grad_input)
        if self.oscillation is not None:
            demand_at_least(1e-9, oscillation=self.oscillation)
        if self.freeze_after is not None:
            demand_at_least(1, freeze_after=self.freeze_after)
        demand_order(start=self.start, stop=self.stop)
        demand_order(warmup=self.warmup, stop=self.stop)

    # --- the schedule: pure functions of the step ---

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        warm = at_share(self.warmup, total_steps)
        first, last = max(warm, at_share(self.start, total_steps)), at_share(self.stop, total_steps)
        self.calendar = Calendar(warm, first, last, self.interval, self.designate, self.taper)
        self.num_blocks = {name: self.patterns[name].num_blocks(shape) for name, shape in self.shapes.items()}
        self.short = dict[str, int]()

    def scheduled(self, name: str, step: int) -> int:
        """How many blocks of a layer step `step` designates, frozen ones aside."""
        stage = self.stage_at(name, step)
        return 0 if stage.n == stage.m else round(self.calendar.share_at(step) * self.num_blocks[name])

    def began(self, step: int) -> list[int]:
        """The step at which the designation that holds at `step` was due, and the stages it was made for."""
        return [self.calendar.due(step), *self.stages_now(step)]

    def densities(self, step: int) -> Densities:
        short = self.short if self.calendar.first <= step < self.calendar.last else {}
        key = (step < self.calendar.warm, self.calendar.share_at(step), *self.stages_now(step), *short.values())
        if key not in self.costs:
            counts = {name: self.scheduled(name, step) for name in self.patterns} | short
            self.costs[key] = {name: self._cost(name, count, step) for name, count in counts.items()}
        return self.costs[key]

    def turns(self) -> Iterable[int]:
        return {*super().turns(), *self.calendar.turns()}

    def _cost(self, name: str, designated: int, step: int) -> Density:
        d = self.stage_at(name, step).density
        grad_input = ONE if step < self.calendar.warm and self.warmup_grad_input == "dense" else d
        return Density(d, grad_input, d + Fraction(designated, self.num_blocks[name]) * (ONE - d))

    def warnings(self) -> list[str]:
        first, last = self.calendar.first, self.calendar.last
        if first >= last:
            return [f"the mask never adapts after warm-up: start {first} is not before stop {last} (steps)"]
        if self.designate == 0:
            return ["method.designate=0: no block is ever designated after warm-up; this is a fixed mask"]
        return []

    # --- the three moments ---

    def admit(self, optimizer: torch.optim.Optimizer) -> None:
        demand_zeros_kept(optimizer)

    def attach(self, layers: Layers, optimizer: torch.optim.Optimizer, total_steps: int) -> None:
        self.windows = dict[str, Window]()
        self.designated = list[int]()
        self.free = set[str]()
        super().attach(layers, optimizer, total_steps)

    def take_over(self) -> None:
        super().take_over()
        for p in self.parameters.values():
            clear_state(self.optimizer, p)
        self.flips = {
            name: torch.zeros(blocks, dtype=torch.int32, device=self.parameters[name].device)
            for name, blocks in self.num_blocks.items()
        }

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        began = self.began(step)
        for name in self.parameters:
            if began != self.designated:
                self.designate_blocks(name, self.scheduled(name, step), began[0])
            if name in self.free:
                self.add_decay(name, self.decay)
                self.parameters[name].data = self.master[name]
            else:
                self._prepare(name)
        self.designated = began

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        before, self.now = self.now, step + 1
        for name in self.parameters:
            old, stage = self.stage_at(name, before), self.stage_at(name, self.now)
            if name in self.windows:
                self._settle(name, stage.n)
            if stage != old and name not in self.free:
                self._close(name)
                self.designated = []  # designate anew, and clear what the optimizer knows of dropped ones
            if stage != old or name in self.free:
                changed = self.patterns[name].blocks(self.replace_mask(name, stage.project(self.master[name])))
                self.flips[name] += changed.any(2).flatten()
                self.show(name)

    def _prepare(self, name: str) -> None:
        """Show the optimizer the kept weights, and all weights of designated blocks, with their gradients."""
        p, window = self.parameters[name], self.windows.get(name)
        if window is not None:
            window.picked.write(p.data, window.live)
        if p.grad is None:
            return
        if p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
        zero_where_(p.grad, self.masks[name])
        if window is not None and self.decay:
            window.add_decay(p.grad, self.decay)

    def _settle(self, name: str, n: int) -> None:
        window = self.windows[name]
        changed = window.settle(self.parameters[name].data, n)
        self.changes[name] += changed.count_nonzero()
        self.flips[name].index_add_(0, window.picked.ids, changed.any(1).int())

    # --- designation ---

    def designate_blocks(self, name: str, count: int, step: int) -> None:
        """Close the layer's window, if any, and open one over `count` blocks; all of them train W as a whole."""
        free = count == self.num_blocks[name] and (step < self.calendar.warm or self.freeze_after is None)
        if free and name in self.free:
            return
        self._close(name)
        if free:
            self.free.add(name)
            return
        ids = self._choose(name, count, step)
        self._forget(name, ids)
        if len(ids):
            self._open(name, ids)

    def _close(self, name: str) -> None:
        """Bring master weights and mask up to date, so that the layer is as if nothing had been designated."""
        window = self.windows.pop(name, None)
        if name in self.free:
            self.free.remove(name)
            return
        # Outside windows the kept weights live in the network; the master holds the dropped ones.
        torch.where(self.masks[name], self.effective[name], self.master[name], out=self.master[name])
        if window is not None:
            window.picked.write(self.master[name], window.live)
            window.picked.write(self.masks[name], window.kept)

    def _open(self, name: str, ids: Tensor) -> None:
        picked = Picked(self.patterns[name], self.effective[name], ids)
        window = Window(picked, picked.read(self.master[name]), picked.read(self.masks[name]))
        # While the window is open, the layer's mask says which weights are trained; the window knows which are kept.
        picked.write(self.masks[name], torch.ones_like(window.kept))
        self.windows[name] = window

    def _forget(self, name: str, ids: Tensor) -> None:
        """Clear the optimizer's memory of dropped weights, except in the blocks designated next."""
        held = ~self.masks[name]
        if len(ids):
            picked = Picked(self.patterns[name], held, ids)
            picked.write(held, torch.zeros(len(ids), self.patterns[name].m, dtype=torch.bool, device=held.device))
        clear_state(self.optimizer, self.parameters[name], held)

    def _choose(self, name: str, count: int, step: int) -> Tensor:
        """The ids of the blocks to designate, ascending: the lowest scores among blocks that are not frozen."""
        score = self._score(name, step)
        if self.freeze_after is not None:
            score = score.masked_fill(self.flips[name] >= self.freeze_after, torch.inf)
            count = min(count, int((score < torch.inf).sum()))
            self.short[name] = count
        return lowest(score, count)

    def _score(self, name: str, step: int) -> Tensor:
        """What giving up a block's weakest kept weight costs, penalized by its flips; (blocks,), low goes first."""
        if self.pick == "random":
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {self.seed}".encode()))
            score = torch.rand(self.num_blocks[name], generator=generator).to(self.master[name].device)
        else:
            score = torch.cat([self._margin(name, rows) for rows in row_slices(self.masks[name])])
        if self.oscillation is None:
            return score
        penalty = 1 + self.flips[name] / self.oscillation
        return torch.where(score > 0, score * penalty, score / penalty)

    def _margin(self, name: str, rows: slice) -> Tensor:
        """The smallest |w| kept in each block of some rows, with `gap` less the largest |W| dropped there."""
        blocks = self.patterns[name].blocks
        weight, mask = blocks(self.master[name][rows]).float().abs(), blocks(self.masks[name][rows])
        weakest = (weight + barred(~mask, weight.dtype)).amin(2).flatten()
        return weakest - weight.masked_fill(mask, 0).amax(2).flatten() if self.pick == "gap" else weakest

    # --- what is computed, logged and kept ---

    def support(self, name: str) -> Tensor | None:
        # A designation due takes effect on the very gradient that precedes it, in blocks that are not known yet.
        due = self.began(self.now) != self.designated
        return None if due or name in self.free else self.masks[name]

    def dense_weight(self, name: str) -> Tensor:
        return self.effective[name]  # W is brought up to date only now and then; M never changes, so kept weights do

    def current_masks(self) -> dict[str, Tensor]:
        masks = super().current_masks()
        for name, window in self.windows.items():
            masks[name] = masks[name].clone()
            window.picked.write(masks[name], window.kept)
        return masks

    def metrics(self, *, per_layer: bool = False) -> dict[str, Any]:
        blocks = sum(self.num_blocks.values())
        designated = sum(len(w.picked.ids) for w in self.windows.values()) + sum(self.num_blocks[n] for n in self.free)
        return super().metrics(per_layer=per_layer) | {
            "designated_share": designated / blocks,
            "frozen_share": frozen_share(self.flips, self.freeze_after),
        }

    def state_dict(self) -> dict[str, Any]:
        windows = {name: window.state() for name, window in self.windows.items()}
        more = {"flips": dict(self.flips), "windows": windows, "free": sorted(self.free), "short": self.short}
        return super().state_dict() | more | {"designated": self.designated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.designated, self.free, self.short = state["designated"], set(state["free"]), dict(state["short"])
        for name, flips in self.flips.items():
            flips.copy_(state["flips"][name])
        self.windows = {
            name: Window.of(saved, self.patterns[name], self.effective[name])
            for name, saved in state["windows"].items()
        }
