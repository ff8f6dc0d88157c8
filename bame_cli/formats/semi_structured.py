"""2:4 weights of linear layers as torch's semi-structured tensors keep them, in float16, for sparse tensor cores.

A weight `w` (out, in) becomes `w.packed`, (out, in/2), and `w.meta`, (out, in/16) int16: two 2-bit positions per block,
in the order that CUTLASS reads them. The packing needs no GPU; on one, `serve` gives each weight to torch, which
arranges it for the kernels that this GPU has. Linear layers alone: torch's semi-structured tensors have no convolution
(a 1x1 kernel neither), so the weights of convolutions stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

# Torch's own packing. Its public door, `to_sparse_semi_structured`, opens on CUDA tensors only.
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from bame_cli.errors import ConfigError, first_line
from bame_cli.sparsity.pattern import Pattern

PATTERN = Pattern(2, 4)
# What torch asks of a float16 weight: multiples of so many outputs and inputs.
_OUTPUTS, _INPUTS = 32, 64


def refusals(weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, str]:
    """Why a sparse weight stays as it is, '' for one that is packed. ConfigError unless all are 2:4."""
    other = next((name for name, pattern in patterns.items() if pattern != PATTERN), None)
    if other:
        raise ConfigError(f"format=semi_structured holds 2:4 alone, and {other} is {patterns[other]}")
    reasons = {name: _refusal(weights[name]) for name in patterns}
    if all(reasons.values()):
        name, reason = next(iter(reasons.items()))
        raise ConfigError(f"format=semi_structured: no weight of this network can be packed ({name}: {reason})")
    return reasons


def _refusal(weight: Tensor) -> str:
    if weight.dim() != 2:
        return "a convolution, which torch's semi-structured tensors do not serve"
    for size, multiple, what in zip(weight.shape, (_OUTPUTS, _INPUTS), ("outputs", "inputs"), strict=True):
        if size % multiple:
            return f"its {size} {what} are not a multiple of {multiple}"
    return ""


def encode(weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, Tensor]:
    """The state dict with every weight that can be packed as `.packed` and `.meta`; the others as they are."""
    reasons, tensors = refusals(weights, patterns), dict[str, Tensor]()
    for name, weight in weights.items():
        if reasons.get(name, "dense"):
            tensors[name] = weight
        else:
            half = weight.to(torch.float16)
            tensors[f"{name}.packed"], tensors[f"{name}.meta"] = sparse_semi_structured_from_dense_cutlass(half)
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict in float32: packed weights are what float16 left of them."""
    weights = dict[str, Tensor]()
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part == "packed":
            weights[base] = _unpacked(base, tensor, tensors.get(f"{base}.meta")).float()
        elif part != "meta":
            weights[name] = tensor
    return weights


def _unpacked(name: str, packed: Tensor, meta: Tensor | None) -> Tensor:
    try:
        if meta is None:
            raise RuntimeError("it has no meta")
        return sparse_semi_structured_to_dense_cutlass(packed, meta)
    except RuntimeError as error:
        raise ConfigError(f"{name}: the semi-structured file is damaged ({first_line(error)})") from error


def packed_in(tensors: Iterable[str]) -> list[str]:
    """The names of the weights that a file holds packed."""
    return [name.removesuffix(".packed") for name in tensors if name.endswith(".packed")]


# What a network is called inside of `HalfInside`.
INSIDE = "network"


class HalfInside(nn.Module):
    """A float16 network between float32 images and float32 scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.half()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images.half()).float()
        return scores


def serve(network: nn.Module, names: Iterable[str]) -> nn.Module:
    """The network in float16, on its GPU, the named weights on sparse tensor cores. ConfigError where torch cannot."""
    inside = HalfInside(network)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = network.get_submodule(owner)
        try:
            sparse = torch.sparse.to_sparse_semi_structured(getattr(module, attribute).detach().contiguous())
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(f"{name}: {first_line(error)}; device=cpu evaluates it without") from error
        setattr(module, attribute, nn.Parameter(sparse, requires_grad=False))
    return inside
