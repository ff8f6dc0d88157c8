"""ASP: one-shot magnitude mask of trained weights, then training again with the mask fixed (Mishra et al. 2021).

Forward   m * w, the mask chosen once from dense-trained weights
Gradient  m * g
Dropped   exactly 0 throughout, under every optimizer
Cost      forward d, grad_input d, grad_weight d; the dense training before it is the run's `inherited` bill
Departs   The public code multiplies the weights by the mask after every step; here the gradient is masked and the
          optimizer's state cleared when the mask is made, which keeps zeros at zero at the cost of one pass. Blocks
          run along the inputs, as in its `m4n2_1d`; any N:M is allowed; no channel permutation search.
          `shape_rule` reproduces which layers it prunes: outputs a multiple of 8, inputs a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from bame_cli.methods.base import SparseMethod
from bame_cli.sparsity.layers import Layer


@dataclass(kw_only=True)
class ASP(SparseMethod):
    """`shape_rule`: leave layers dense whose weight is not a multiple of 8 outputs by 16 inputs, as ASP's code does."""

    wants_dense_weights: ClassVar[bool] = True

    shape_rule: bool = False

    def review(self, row: Layer) -> Layer:
        out, inputs = row.shape[:2]
        if self.shape_rule and row.pattern and (out % 8 or inputs % 16):
            return replace(row, pattern=None, reason=f"ASP's shape rule: {out} % 8 or {inputs} % 16 is not 0")
        return row
