"""What BAME holds while a window is open: designated blocks (`live`), or a gathered dense gradient (`swap`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bame_cli.sparsity.pattern import Pattern, Picked, keep_largest

# Up to this M, running through a block's entries one by one beats torch's maximum with index.
_STRIDED = 8


@dataclass(frozen=True)
class Calendar:
    """When blocks are designated and which share of them: pure functions of the step.

    All of them before step `warm`; from `first` to before `last` a share that falls as (1 - progress) ** taper,
    designated anew every `interval` steps; none from `last` on.
    """

    warm: int
    first: int
    last: int
    interval: int
    share: float
    taper: float

    def due(self, step: int) -> int:
        """The step at which the designation that holds at `step` was made."""
        if step < self.warm:
            return 0
        if step >= self.last:
            return max(self.warm, self.last)
        return self.warm if step < self.first else step - (step - self.first) % self.interval

    def share_at(self, step: int) -> float:
        """The share of a layer's blocks that is designated at `step`."""
        if step < self.warm:
            return 1.0
        if not self.first <= step < self.last:
            return 0.0
        if not self.taper:
            return self.share
        left = 1 - (self.due(step) - self.first) / (self.last - self.first)
        return self.share * left**self.taper

    def turns(self) -> Iterable[int]:
        """The steps at which `share_at` may change."""
        tapers = range(self.first, self.last, self.interval) if self.taper else ()
        return {self.warm, self.first, self.last, *tapers}


@dataclass
class Window:
    """The designated blocks of one layer: all their weights, and which of them are kept, both (blocks, M)."""

    picked: Picked
    live: Tensor
    kept: Tensor

    def add_decay(self, grad: Tensor, decay: float) -> None:
        """grad += decay * (1 - m) * W in the designated blocks."""
        mine = self.picked.read(grad)
        self.picked.write(grad, mine.add_(self.live * ~self.kept, alpha=decay))

    def settle(self, weight: Tensor, n: int) -> Tensor:
        """Take the blocks' new weights, keep the n largest of each, leave only those in `weight`.

        Returns the entries whose mask changed, (blocks, M).
        """
        self.live = self.picked.read(weight)
        before, self.kept = self.kept, keep_largest(self.live.float().abs(), n, dim=1)
        self.picked.write(weight, self.live * self.kept)
        return before ^ self.kept

    def state(self) -> dict[str, Tensor]:
        return {"ids": self.picked.ids, "live": self.live, "kept": self.kept}

    @classmethod
    def of(cls, state: Mapping[str, Tensor], pattern: Pattern, weight: Tensor) -> Window:
        """A window as `state` saved it, over a weight laid out as the one it was opened on."""
        ids, live, kept = (state[key].to(weight.device) for key in ("ids", "live", "kept"))
        return cls(Picked(pattern, weight, ids), live, kept)


@dataclass
class Gathered:
    """The dense gradient of one layer over the steps of one window: their count, sum, and sum of squares."""

    window: int
    count: int
    sum: Tensor
    squares: Tensor | None

    def add(self, grad: Tensor) -> None:
        self.count += 1
        self.sum += grad
        if self.squares is not None:
            self.squares.addcmul_(grad, grad)

    def mean_and_noise(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The mean gradient of some rows and the estimated variance of that mean (sample variance / count).

        Uses those rows up: `sum` then holds the mean.
        """
        mean = self.sum[rows].div_(self.count)
        if self.squares is None:
            return mean, torch.zeros_like(mean)
        spread = self.squares[rows].div_(self.count).addcmul_(mean, mean, value=-1).clamp_(min=0)
        return mean, spread.div_(self.count - 1)

    def to(self, device: torch.device) -> Gathered:
        squares = None if self.squares is None else self.squares.to(device)
        return Gathered(self.window, self.count, self.sum.to(device), squares)


def frozen_share(flips: Mapping[str, Tensor], freeze_after: int | None) -> float:
    """Share of all blocks whose mask flipped so often that it stays."""
    if freeze_after is None:
        return 0.0
    return sum(int((f >= freeze_after).sum()) for f in flips.values()) / sum(f.numel() for f in flips.values())


def barred(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where `mask` is True, 0 elsewhere: to add to scores, several times as fast as to fill by a mask."""
    return (~mask).view(torch.uint8).to(dtype).reciprocal_().sub_(1)


def best(value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each block (dimension 2) and their indices, ties to the lowest index."""
    if count == 1 and value.shape[2] <= _STRIDED:
        return _first_max(value)
    if count == 1:
        top = value.max(2, keepdim=True)
        return top.values, top.indices
    order = torch.sort(value, dim=2, descending=True, stable=True)
    return order.values[:, :, :count], order.indices[:, :, :count]


def _first_max(value: Tensor) -> tuple[Tensor, Tensor]:
    """`value.max(2, keepdim=True)` by comparing the entries of blocks as strided vectors: fast where M is small."""
    first, *others = value.unbind(2)
    highest, index = first, torch.zeros_like(first, dtype=torch.uint8)
    for number, entry in enumerate(others, 1):
        torch.maximum(index, (entry > highest).view(torch.uint8) * number, out=index)
        highest = torch.maximum(highest, entry)
    return highest.unsqueeze(2), index.long().unsqueeze(2)
