"""The honest size on disk of an N:M network: the kept values of every block, and where in the block they stand.

A weight `w` becomes `w.values`, N per block, and either `w.positions`, ceil(log2 M) bits a value, or `w.mask`, M bits a
block, whichever is smaller (positions when they tie). Blocks come in the order (output, kernel position..., block of
inputs), bits eight a byte, the lowest first. Whatever is not sparse is kept as it is. Decoding gives back every bit of
weights whose dropped entries are +0, which is how we write them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bame_cli.errors import ConfigError, first_line
from bame_cli.sparsity.pattern import Pattern, pack, unpack

Shapes = Mapping[str, torch.Size | list[int]]


def encode(weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, Tensor]:
    """The state dict with every sparse weight as its values and positions."""
    tensors = dict[str, Tensor]()
    for name, weight in weights.items():
        if name not in patterns or is_dense(patterns[name]):
            tensors[name] = weight
            continue
        pattern = patterns[name]
        kept = _rows(pattern.project(weight), pattern)
        tensors[f"{name}.values"] = _rows(weight, pattern)[kept]
        tensors[f"{name}.{_code(pattern)}"] = pack(kept if _code(pattern) == "mask" else _bits(kept, pattern))
    return tensors


def decode(tensors: Mapping[str, Tensor], patterns: Mapping[str, Pattern], shapes: Shapes) -> dict[str, Tensor]:
    """The state dict that `encode` made smaller, in the order of `shapes`. ConfigError when parts are missing."""
    return {name: _decoded(name, tensors, patterns.get(name), torch.Size(shape)) for name, shape in shapes.items()}


def _decoded(name: str, tensors: Mapping[str, Tensor], pattern: Pattern | None, shape: torch.Size) -> Tensor:
    if pattern is None or is_dense(pattern):
        return tensors[name].view(shape)
    try:
        values, packed = tensors[f"{name}.values"], tensors[f"{name}.{_code(pattern)}"]
        rows = torch.Size((shape.numel() // pattern.m, pattern.m))
        kept = unpack(packed, rows) if _code(pattern) == "mask" else _mask(packed, rows, pattern)
        weight = values.new_zeros(shape)
        moved = pattern.blocks(weight).movedim(2, -1)
        moved.copy_(torch.zeros_like(moved).masked_scatter_(kept.view(moved.shape), values))
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"{name}: the compressed file is damaged ({first_line(error)})") from error
    return weight


def is_dense(pattern: Pattern) -> bool:
    """Whether nothing is dropped."""
    return pattern.n == pattern.m


def bits_per_block(pattern: Pattern) -> int:
    """What it takes to say which of a block's weights are kept."""
    return min(pattern.n * _width(pattern), pattern.m)


def _code(pattern: Pattern) -> str:
    return "mask" if pattern.m < pattern.n * _width(pattern) else "positions"


def _width(pattern: Pattern) -> int:
    """ceil(log2 M)"""
    return (pattern.m - 1).bit_length()


def _rows(weight: Tensor, pattern: Pattern) -> Tensor:
    return pattern.blocks(weight).movedim(2, -1).reshape(-1, pattern.m)


def _bits(kept: Tensor, pattern: Pattern) -> Tensor:
    """The positions of the kept entries, as rows of bits."""
    positions = kept.nonzero()[:, 1:]
    return (positions >> torch.arange(_width(pattern)) & 1).bool()


def _mask(packed: Tensor, rows: torch.Size, pattern: Pattern) -> Tensor:
    """The mask whose positions are packed."""
    bits = unpack(packed, torch.Size((rows[0], pattern.n, _width(pattern)))).long()
    positions = (bits << torch.arange(_width(pattern))).sum(2)
    return torch.zeros(rows, dtype=torch.bool).scatter_(1, positions, True)
