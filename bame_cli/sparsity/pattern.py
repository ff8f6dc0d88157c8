"""N:M patterns: what a block is, which of its weights are kept, and whether a tensor obeys.

A block is M consecutive inputs of one output: along `in` of a Linear weight (out, in), and along the input
channels of a Conv2d weight (out, in/groups, kh, kw) at one fixed (out, kh, kw). That is the grouping of sparse
tensor cores. It is always dimension 1 of the weight, so `weight.unflatten(1, (-1, M))` exposes every block along
dimension 2 without copying, whatever the layer and the memory format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from bame_cli.errors import ConfigError

# Weights are projected a few rows at a time: the scratch memory stays in cache and never grows with the layer.
_CHUNK = 1 << 19
# Bytes become floats fast, bools do not: on a CPU a mask is widened a chunk at a time, within the cache.
_WIDENED = 1 << 19
# Numbers by their bytes, to move that many as one.
_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# From this many entries on, halves of a block meet as whole; fewer meet as strided vectors, one entry of every block.
_COLUMNS = 4


class Violation(NamedTuple):
    """Blocks that keep more than N weights: how many, the first one's index in `blocks(weight)[:, :, 0]`, its kept."""

    blocks: int
    first: tuple[int, ...]
    kept: int


@dataclass(frozen=True, order=True)
class Pattern:
    """N:M, N kept out of M consecutive inputs: `1:16` keeps 1 of 16 and is 93.75 % sparse. 1 <= N <= M."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m:
            raise ConfigError(f"no such pattern: {self.n}:{self.m}; N:M keeps N of M, 1 <= N <= M, for example 2:4")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read `"1:16"`. Raises ConfigError for anything that is not a valid pair."""
        match = re.fullmatch(r"(\d+):(\d+)", str(text).strip())
        if not match:
            raise ConfigError(f"no such pattern: {str(text)!r}; write N:M with 1 <= N <= M, for example 2:4 or 1:16")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def slug(self) -> str:
        """The pattern as a path may hold it: `1of16`."""
        return f"{self.n}of{self.m}"

    @property
    def density(self) -> Fraction:
        """Share of the weights that is kept, exactly."""
        return Fraction(self.n, self.m)

    def fits(self, shape: torch.Size | tuple[int, ...]) -> bool:
        """Whether the inputs of one output, dimension 1 of a weight, are a multiple of M."""
        return len(shape) >= 2 and shape[1] % self.m == 0

    def num_blocks(self, shape: torch.Size | tuple[int, ...]) -> int:
        """How many blocks a weight of this shape has."""
        return torch.Size(shape).numel() // self.m

    def blocks(self, weight: Tensor) -> Tensor:
        """A view of `weight`, (out, in, ...) as (out, in/M, M, ...): block entries lie along dimension 2."""
        if not self.fits(weight.shape):
            raise ValueError(f"a weight of shape {tuple(weight.shape)} has no blocks of {self.m} inputs")
        return weight.view(weight.shape[0], -1, self.m, *weight.shape[2:])

    def project(self, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The mask (bool, True = kept) of the N largest |w| of each block, ties to the lowest index.

        Scores are compared in fp32. Exactly N per block, also for all-equal, all-zero and infinite weights.
        `out`: a bool tensor like `weight` to write into. Raises FloatingPointError when a weight is NaN.
        """
        mask = torch.empty_like(weight, dtype=torch.bool) if out is None else out
        blocks, kept = self.blocks(weight.detach()), self.blocks(mask)
        parts = list(row_slices(weight, _CHUNK))
        scratch = torch.empty(blocks[parts[0]].shape, dtype=torch.float32, device=weight.device) if parts else blocks
        for part in parts:
            score = scratch[: len(blocks[part])].copy_(blocks[part]).abs_()
            kept[part] = keep_largest(score, self.n, dim=2)
        return mask

    def check(self, weight: Tensor) -> Violation | None:
        """None when every block of `weight` has at most N non-zeros, else what is wrong."""
        kept = (self.blocks(weight) != 0).sum(2)
        wrong = (kept > self.n).nonzero()
        if not len(wrong):
            return None
        first = tuple(int(i) for i in wrong[0])
        return Violation(blocks=len(wrong), first=first, kept=int(kept[first]))


class Picked:
    """Some blocks of a weight, as rows: reads and writes (len(ids), M) in any tensor laid out like that weight.

    `ids` (int64) number the blocks in the order of `pattern.blocks(weight).select(2, 0).flatten()`.
    """

    def __init__(self, pattern: Pattern, weight: Tensor, ids: Tensor) -> None:
        self.ids, self.m, self.stride = ids, pattern.m, weight.stride()
        view = pattern.blocks(weight)
        start, rest = torch.zeros_like(ids), ids
        for dim in reversed([d for d in range(view.dim()) if d != 2]):
            start += rest % view.shape[dim] * view.stride(dim)
            rest = rest // view.shape[dim]
        # A block whose entries are neighbours in memory moves as one row, else entry by entry.
        self.width = self.m if view.stride(2) == 1 else 1
        entries = view.stride(2) * torch.arange(self.m, device=ids.device)
        self.index = start // self.m if self.width == self.m else (start[:, None] + entries).flatten()

    def _units(self, tensor: Tensor) -> Tensor:
        """All of `tensor` in memory order, cut into what moves as one: an entry, or a block of neighbours.

        On a CPU a block no wider than the widest number is read as one such number: several times as fast as a row.
        """
        if tensor.stride() != self.stride:
            raise ValueError(f"blocks picked from strides {self.stride} cannot be found in {tensor.stride()}")
        flat = storage_order(tensor)
        if self.width == 1:
            return flat
        wide = _NUMBERS.get(self.width * flat.element_size())
        if wide and flat.is_cpu and flat.storage_offset() % self.width == 0:
            return flat.view(wide)
        return flat.view(-1, self.width)

    def read(self, tensor: Tensor) -> Tensor:
        """The picked blocks of `tensor`, a copy, (len(ids), M)."""
        return self._units(tensor).index_select(0, self.index).view(tensor.dtype).view(-1, self.m)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Put (len(ids), M) values of the same type into the picked blocks of `tensor`, in place."""
        units = self._units(tensor)
        if units.dim() == 1:
            units.scatter_(0, self.index, values.reshape(-1).view(units.dtype))
        else:
            units.index_copy_(0, self.index, values)


def row_slices(weight: Tensor, chunk: int = 1 << 18) -> Iterator[slice]:
    """Slices of dimension 0 that hold about `chunk` weights each, at least one row: scratch memory then stays small."""
    rows = max(1, chunk // max(1, weight.shape[1:].numel()))
    return (slice(start, start + rows) for start in range(0, weight.shape[0], rows))


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its stretch of memory without gaps, in any order of dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def storage_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor in memory order, channels-last or not."""
    return tensor.as_strided((tensor.numel(),), (1,))


def keep_where(tensor: Tensor, mask: Tensor, *, out: Tensor) -> Tensor:
    """mask * tensor, written to `out`, which may be `tensor`: one pass, no memory that grows with the weight."""
    if tensor.is_cuda or not (is_dense(tensor) and tensor.stride() == mask.stride() == out.stride()):
        return torch.mul(tensor, mask, out=out)
    source, kept, target = storage_order(tensor), storage_order(mask).view(torch.uint8), storage_order(out)
    scratch = torch.empty(min(_WIDENED, len(source)), dtype=tensor.dtype)
    for start in range(0, len(source), _WIDENED):
        part = slice(start, start + _WIDENED)
        wide = scratch[: len(kept[part])].copy_(kept[part])
        torch.mul(source[part], wide, out=target[part])
    return out


def zero_where_(tensor: Tensor, mask: Tensor) -> Tensor:
    """Multiply `tensor` by the mask in place; 0 times what is infinite is NaN, and stays visible."""
    return keep_where(tensor, mask, out=tensor)


def pack(mask: Tensor) -> Tensor:
    """A mask as uint8, eight entries a byte, the first in the lowest bit; entries in the order of `flatten()`."""
    bits = mask.flatten().to(torch.uint8)
    bits = torch.cat([bits, bits.new_zeros(-len(bits) % 8)]).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The mask of this shape that `pack` made smaller."""
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten()[: shape.numel()].bool().view(shape)


def keep_largest(score: Tensor, n: int, *, dim: int) -> Tensor:
    """Mask of the `n` largest entries along `dim`, exactly n, ties to the lowest index.

    FloatingPointError on NaN; not on CUDA, where asking would wait for the device: there `0 * NaN` keeps it visible.
    """
    m = score.shape[dim]
    if score.is_cpu and torch.isnan(score.amax()):
        raise FloatingPointError("cannot rank weights: some are NaN")
    if n == m:
        return torch.ones_like(score, dtype=torch.bool)
    nth = _nth_largest(score, n, dim)
    if score.is_cpu:
        # A comparison that writes floats is vectorized, one that writes bools is not.
        mask = torch.ge(score, nth, out=torch.empty_like(score)).bool()
        # The threshold keeps more than n only where entries tie with the n-th, which is rare.
        if int(mask.count_nonzero()) == score.numel() // m * n:
            return mask
    above, tied = score > nth, score == nth
    return above | tied & (tied.cumsum(dim) <= n - above.sum(dim, keepdim=True))


def _nth_largest(score: Tensor, n: int, dim: int) -> Tensor:
    """The n-th largest of more than n entries along `dim`, kept as a dimension of 1; no sort, no index.

    A tournament of sorted lists: halves meet halves as whole vectors while they are even and long, then entry meets
    entry, each the strided vector of that entry in every group.
    """
    ranked, m = [score], score.shape[dim]
    while m > _COLUMNS and m % 2 == 0:
        m //= 2
        ranked = _merged([r.narrow(dim, 0, m) for r in ranked], [r.narrow(dim, m, m) for r in ranked], n)
    *columns, last = ([r.narrow(dim, i, 1) for r in ranked] for i in range(m))
    return _rank(reduce(partial(_merged, n=n), columns), last, n)


def _merged(a: list[Tensor], b: list[Tensor], n: int) -> list[Tensor]:
    """Of two lists of tensors, sorted descending entry by entry, the n largest (or all) of both, sorted."""
    return [_rank(a, b, k) for k in range(1, min(n, len(a) + len(b)) + 1)]


def _rank(a: list[Tensor], b: list[Tensor], k: int) -> Tensor:
    """The k-th largest of both lists: the largest min(a_i, b_j) with i + j = k, where a_0 and b_0 are infinite."""
    alone = [each[k - 1] for each in (a, b) if k <= len(each)]
    pairs = [torch.minimum(a[i - 1], b[k - i - 1]) for i in range(max(1, k - len(b)), min(k - 1, len(a)) + 1)]
    return reduce(torch.maximum, alone + pairs)


def lowest(score: Tensor, count: int) -> Tensor:
    """Indices of the `count` lowest scores, ascending; ties to the lowest index. By selection, not by sorting."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    limit = torch.kthvalue(score, count).values
    chosen = score < limit
    ties = (score == limit).nonzero().squeeze(1)
    chosen[ties[: count - int(chosen.count_nonzero())]] = True
    return chosen.nonzero().squeeze(1)
