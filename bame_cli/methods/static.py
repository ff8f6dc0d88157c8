"""A mask fixed at initialization: the yardstick that every mask-moving method has to beat.

Forward   m * w, the mask chosen once from the initial weights
Gradient  m * g
Dropped   exactly 0 throughout
Cost      forward d, grad_input d, grad_weight d
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bame_cli.methods.base import SparseMethod
from bame_cli.methods.options import demand_one_of


@dataclass(kw_only=True)
class Static(SparseMethod):
    """`choose`: `magnitude` keeps the N largest |w| of each block at initialization, `random` any N, by `seed`."""

    choose: str = "magnitude"
    seed: int = 0

    def validate(self) -> None:
        demand_one_of(("magnitude", "random"), choose=self.choose)

    def first_mask(self, name: str, weight: nn.Parameter) -> Tensor:
        if self.choose == "magnitude":
            return super().first_mask(name, weight)
        # Drawn on the CPU from the seed and the layer's name: the same on every device, rank and restart.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.seed}".encode()))
        score = torch.rand(weight.shape, generator=generator)
        return torch.empty_like(weight, dtype=torch.bool).copy_(self.patterns[name].project(score))
