"""`execution=sparse`, an experiment: time back from sparsity on a CPU, by torch's own products of sparse matrices.

In training steps a Linear layer or 1x1 convolution whose weight and gradient are wanted at few entries computes its
three products with a CSR matrix of those entries: the results are those of the dense products up to rounding. Both
ways are timed on the layer's own input the first time it looks like this, and sparse products are taken from then on
where they were clearly faster. Evaluation is dense. The method says which entries are wanted (`Method.support`), and
where that is all of them the layer is dense too.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bame_cli.errors import ConfigError
from bame_cli.methods.base import Method
from bame_cli.training.log import logger

_TRIALS = 3
# Sparse products are taken where they save this much: a clock that errs by a little must not slow a run down.
_CLEARLY = 0.9


@dataclass(frozen=True)
class Entries:
    """The wanted entries of a matrix (out, in), in CSR layout, and of its transpose.

    index: where they are in the flattened matrix, ascending. order: where the transpose's are among them.
    """

    shape: tuple[int, int]
    index: Tensor
    order: Tensor
    layout: tuple[Tensor, Tensor]
    transposed: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, mask: Tensor) -> Entries:
        """The entries where a mask (out, in) is True."""
        shape = (mask.shape[0], mask.shape[1])
        index = mask.flatten().nonzero().squeeze(1)
        row, column = index // shape[1], index % shape[1]
        order = torch.argsort(column, stable=True)
        return cls(
            shape, index, order, _compressed(row, column, shape[0]), _compressed(column[order], row[order], shape[1])
        )

    def matrix(self, weight: Tensor) -> Tensor:
        """The entries of a weight, flattened or not, as a CSR matrix (out, in)."""
        return _csr(*self.layout, weight.flatten().index_select(0, self.index), self.shape)

    def transpose(self, matrix: Tensor) -> Tensor:
        """The transpose (in, out) of such a matrix, CSR too."""
        return _csr(*self.transposed, matrix.values().index_select(0, self.order), self.shape[::-1])


def _compressed(row: Tensor, column: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row pointers and columns, 32 bits each, of entries sorted by row."""
    pointers = F.pad(torch.bincount(row, minlength=rows).cumsum(0), (1, 0))
    return pointers.int(), column.int()


def _csr(pointers: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(pointers, columns, values, shape, check_invariants=False)


class _Product(torch.autograd.Function):
    """A layer's product without bias, where its weight and the weight's gradient are wanted at some entries only.

    `dim` is the features' dimension. What comes out, and the gradient of what went in, lie in memory as those of the
    dense product do, so that a sparse layer costs its neighbours nothing.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, entries: Entries, dim: int) -> Tensor:
        ctx.entries, ctx.matrix, ctx.shape, ctx.dim = entries, entries.matrix(weight.detach()), weight.shape, dim
        ctx.rest, ctx.layout = inputs.movedim(dim, 0).shape[1:], _layout(inputs, dim)
        columns = _columns(inputs, dim)
        ctx.save_for_backward(columns)
        return _laid_out(ctx.matrix @ columns, ctx)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (columns,), entries, grad, of_inputs = ctx.saved_tensors, ctx.entries, _columns(grads[0], ctx.dim), None
        if ctx.needs_input_grad[0]:
            of_inputs = _laid_out(entries.transpose(ctx.matrix) @ grad, ctx)
        sampled = torch.sparse.sampled_addmm(ctx.matrix, grad, columns.t(), beta=0.0).values()
        of_weight = sampled.new_zeros(entries.shape[0] * entries.shape[1]).scatter_(0, entries.index, sampled)
        return of_inputs, of_weight.view(ctx.shape), None, None


def _columns(tensor: Tensor, dim: int) -> Tensor:
    """Features first, (features, tokens), contiguous."""
    return tensor.movedim(dim, 0).flatten(1).contiguous()


def _laid_out(columns: Tensor, ctx: Any) -> Tensor:
    """The way back from `_columns`, to the shape and layout of what the layer was given."""
    return columns.unflatten(1, ctx.rest).movedim(0, ctx.dim).contiguous(memory_format=ctx.layout)


def _layout(tensor: Tensor, dim: int) -> torch.memory_format:
    is_last = tensor.dim() == 4 and dim == 1 and tensor.stride(1) == 1
    return torch.channels_last if is_last else torch.contiguous_format


def _linear(layer: nn.Linear, inputs: Tensor, entries: Entries) -> Tensor:
    out = _Product.apply(inputs, layer.weight, entries, inputs.dim() - 1)
    return out if layer.bias is None else out + layer.bias


def _pointwise(layer: nn.Conv2d, inputs: Tensor, entries: Entries) -> Tensor:
    seen = inputs[:, :, :: layer.stride[0], :: layer.stride[1]]
    out = _Product.apply(seen, layer.weight, entries, 1)
    return out if layer.bias is None else out + layer.bias[:, None, None]


def _way(layer: nn.Module) -> Callable[[Any, Tensor, Entries], Tensor] | None:
    """How a layer is computed by sparse products; None for one that cannot be."""
    if type(layer) is nn.Linear:
        return _linear
    if type(layer) is nn.Conv2d and layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding == (0, 0):
        return _pointwise
    return None


class SparseLayer:
    """Stands in for a layer's `forward`: sparse products while they are clearly faster, the layer's own ones else."""

    def __init__(self, layer: nn.Module, name: str, method: Method, way: Callable[..., Tensor]) -> None:
        self.layer, self.name, self.method, self.way = layer, name, method, way
        self.seen: tuple[Tensor, int] | None = None
        self.count = 0
        self.entries: Entries | None = None
        self.ratios: dict[tuple[int, ...], float] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        support = self.method.support(self.name) if self.layer.training and torch.is_grad_enabled() else None
        if support is None:
            return self._dense(inputs)
        self._look(support)
        looks = (*inputs.shape, round(4 * math.log2(max(1, self.count))))
        if looks not in self.ratios:
            self.ratios[looks] = self._ratio(inputs, support)
        if self.ratios[looks] >= _CLEARLY:
            return self._dense(inputs)
        return self.way(self.layer, inputs, self._entries(support))

    def _dense(self, inputs: Tensor) -> Tensor:
        return type(self.layer).forward(self.layer, inputs)

    def _look(self, mask: Tensor) -> None:
        """Forget the entries where the mask is another tensor than before, or has been written to since."""
        if self.seen is None or self.seen[0] is not mask or self.seen[1] != mask._version:
            self.seen, self.count, self.entries = (mask, mask._version), int(mask.count_nonzero()), None

    def _entries(self, mask: Tensor) -> Entries:
        if self.entries is None:
            self.entries = Entries.of(mask.flatten(1))
        return self.entries

    def _ratio(self, inputs: Tensor, mask: Tensor) -> float:
        """Seconds of the sparse products, forward and backward, in those of the dense ones: the best of a few."""
        inputs, weight = inputs.detach().requires_grad_(), self.layer.get_parameter("weight")
        entries = self._entries(mask)
        best = {"sparse": math.inf, "plain": math.inf}
        for _ in range(_TRIALS):
            for kind in best:
                start = time.perf_counter()
                out = self.way(self.layer, inputs, entries) if kind == "sparse" else self._dense(inputs)
                torch.autograd.grad(out, (inputs, weight), torch.ones_like(out))
                best[kind] = min(best[kind], time.perf_counter() - start)
        ratio, density = best["sparse"] / best["plain"], self.count / mask.numel()
        text = "%s: sparse products take %.2f of the dense ones' time at density %.3f"
        logger.info(text, self.name, ratio, density, extra={"file_only": True})
        return ratio


def execute_sparsely(model: nn.Module, method: Method, device: torch.device) -> list[SparseLayer]:
    """Let every layer that can compute its training steps by sparse products, where those are clearly faster.

    To be called when the model will be copied no more: a copy would compute with the weights of the original.
    """
    if device.type != "cpu" or not torch.backends.mkl.is_available():
        raise ConfigError(f"execution=sparse needs device=cpu and a torch with MKL, not {device.type}")
    made = []
    for name in method.patterns:
        layer = model.get_submodule(name.rpartition(".")[0])
        if way := _way(layer):
            made.append(SparseLayer(layer, name, method, way))
            layer.forward = made[-1]
    return made
