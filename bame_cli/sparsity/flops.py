"""Counted FLOPs: what one image costs forward, and what every training step adds to the bill.

FLOPs are 2 x multiply-accumulates. Dense training of a layer is three products of its forward cost f: forward,
gradient of the input, gradient of the weight. A sparse layer charges f * (forward + grad_input + grad_weight) with
the densities its method declares for that step. All counts are exact integers: a density N/M divides f, because a
layer's inputs are a multiple of M. Bias, normalization, activation, projection and optimizer are not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Density(NamedTuple):
    """Share of a layer's products that one training step computes, for each of the three."""

    forward: Fraction
    grad_input: Fraction
    grad_weight: Fraction


ONE = Fraction(1)
FULL = Density(ONE, ONE, ONE)
Densities = Mapping[str, Density]
ALL_DENSE: Densities = {}


@dataclass(frozen=True)
class ForwardCost:
    """FLOPs of one image, forward, all dense.

    layers: state-dict name of a weight -> FLOPs. products: FLOPs of products of two activations (attention).
    first: the weight that sees the image. not_counted: operations that do arithmetic we have no rule for.
    """

    layers: dict[str, int]
    products: int = 0
    first: str = ""
    not_counted: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.layers.values()) + self.products

    def at(self, density: Mapping[str, Fraction]) -> int:
        """Forward FLOPs of one image when the named layers have these densities."""
        return self.products + sum(_exact(f * density.get(name, ONE)) for name, f in self.layers.items())


def forward_cost(model: nn.Module, image_shape: tuple[int, int, int]) -> ForwardCost:
    """Count one image (channels, height, width) through `model`, on the model's own device; `meta` needs no memory.

    The model comes back as it was: mode, gradients, statistics and random state are left alone. A layer called
    twice is counted twice. Attention counts the same fused or not.
    """
    training = [module for module in model.modules() if module.training]
    one = next(model.parameters())
    device = one.device
    devices = [device] if device.type == "cuda" else []
    fast, counter = torch.backends.mha.get_fastpath_enabled(), _Counter(model)
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one opaque operation would hide its products
        with torch.random.fork_rng(devices=devices), torch.no_grad(), counter.watching(model), counter:
            model.eval()(torch.zeros((1, *image_shape), dtype=one.dtype, device=device))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True
    return counter.result()


class _Counter(TorchDispatchMode):
    """Sees every tensor operation and books its multiply-accumulates on the weight it uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # A weight is known by its storage, so that transposes and slices of it are known as well.
        self.names = {_storage(p): name for name, p in model.named_parameters(remove_duplicate=True) if p.dim() > 1}
        self.layers: Counter[str] = Counter()
        self.products = 0
        self.not_counted: Counter[str] = Counter()
        self.inside: list[str] = []

    def watching(self, model: nn.Module) -> ExitStack:
        """Hooks that say inside which weighted module we are, for weights that are transformed before use."""
        stack = ExitStack()
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() > 1:
                owner = self.names.get(_storage(weight), f"{name}.weight")
                enter = module.register_forward_pre_hook(partial(self._enter, owner))
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
        return stack

    def _enter(self, owner: str, *_: object) -> None:
        self.inside.append(owner)

    def _leave(self, *_: object) -> None:
        self.inside.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _MACS:  # linear, matmul, einsum, ... arrive whole in inference mode: look inside
            with self:
                inner = func.decompose(*args, **kwargs)
            if inner is not NotImplemented:
                return inner
        out = func(*args, **kwargs)
        if func in _MACS:
            self._book(2 * _MACS[func](args, out), [a for a in args if isinstance(a, Tensor)])
        elif func.namespace not in ("aten", "prim", "prims") or _COSTLY.search(str(func)):
            self.not_counted[str(func)] += 1
        return out

    def _book(self, flops: int, operands: list[Tensor]) -> None:
        owner = next((self.names[s] for t in operands if (s := _storage(t)) in self.names), None)
        owner = owner or (self.inside[-1] if self.inside else None)
        if owner is None:
            self.products += flops
        else:
            self.layers[owner] += flops

    def result(self) -> ForwardCost:
        first = next(iter(self.layers), "")
        return ForwardCost(dict(self.layers), self.products, first, dict(self.not_counted))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    x, weight, transposed = args[0], args[1], args[6]
    pixels = x if transposed else out
    return pixels.numel() // pixels.shape[1] * weight.numel()


def _attention(args: tuple[Any, ...], out: Any) -> int:
    q, k, v = args[:3]
    return q.numel() * k.shape[-2] + q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1]


_aten = torch.ops.aten
# Multiply-accumulates of an operation from (args, out). Everything with a matrix product in it ends in one of these.
_MACS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    _aten.convolution.default: _convolution,
    _aten.mm.default: lambda args, out: args[0].numel() * args[1].shape[-1],
    _aten.bmm.default: lambda args, out: args[0].numel() * args[1].shape[-1],
    _aten.addmm.default: lambda args, out: args[1].numel() * args[2].shape[-1],
    _aten.baddbmm.default: lambda args, out: args[1].numel() * args[2].shape[-1],
    _aten.mv.default: lambda args, out: args[0].numel(),
    _aten.addmv.default: lambda args, out: args[1].numel(),
    _aten.dot.default: lambda args, out: args[0].numel(),
    _aten.vdot.default: lambda args, out: args[0].numel(),
    _aten.addbmm.default: lambda args, out: args[1].numel() * args[2].shape[-1],
    _aten._scaled_dot_product_flash_attention.default: _attention,
    _aten._scaled_dot_product_efficient_attention.default: _attention,
    _aten._scaled_dot_product_cudnn_attention.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}
# Arithmetic that no rule above covers: reported as not counted, never dropped in silence.
_COSTLY = re.compile(
    "fft|grid_sampler|cdist|lstm|gru|rnn|linalg|cholesky|trilinear|attention|embedding_bag|conv_tbc|_int_mm|_scaled_mm|"
    "_grouped_mm|sparse_mm|sparse_addmm"
)


@dataclass
class Bill:
    """Training FLOPs so far, by product. `skip_first` leaves out the first layer's input gradient, which none needs."""

    cost: ForwardCost
    skip_first: bool = False
    images: int = 0
    forward: int = 0
    grad_input: int = 0
    grad_weight: int = 0
    _last: tuple[Densities, tuple[int, int, int]] | None = field(default=None, repr=False, compare=False)

    def charge(self, densities: Densities, images: int) -> None:
        """Add one step, or several alike: `images` images at these densities; layers not named are dense.

        Densities that are the same object as last time cost the same: a loop that charges every step counts once.
        """
        if self._last is None or self._last[0] is not densities:
            self._last = densities, _per_image(self.cost, densities, self.skip_first)
        forward, grad_input, grad_weight = self._last[1]
        self.images += images
        self.forward += forward * images
        self.grad_input += grad_input * images
        self.grad_weight += grad_weight * images

    @property
    def total(self) -> int:
        return self.forward + self.grad_input + self.grad_weight

    def dense(self) -> Bill:
        """What the same images would have cost densely."""
        bill = Bill(self.cost, self.skip_first)
        bill.charge({}, self.images)
        return bill

    def ratio(self) -> float:
        """This bill as a share of the dense one."""
        return _share(self.total, self.dense().total)

    def ratio_dense_grad_input(self) -> float:
        """The same with every input gradient charged densely: what hardware without transposable masks would do."""
        dense = self.dense()
        return _share(self.forward + dense.grad_input + self.grad_weight, dense.total)

    def state_dict(self) -> dict[str, int]:
        return {key: getattr(self, key) for key in ("images", "forward", "grad_input", "grad_weight")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for key, value in state.items():
            setattr(self, key, value)


class Planned(Protocol):
    """What each of `total_steps` steps will compute: a method, once planned."""

    total_steps: int

    def densities(self, step: int) -> Densities: ...

    def turns(self) -> Iterable[int]: ...


def forecast(cost: ForwardCost, planned: Planned, *, images_per_step: int, skip_first: bool = False) -> Bill:
    """The bill of a whole run, before it: what all of its steps cost."""
    # Densities come back, as when windows open and close: each is charged once, for all of its steps.
    seen, lengths = dict[int, Densities](), Counter[int]()
    for current, length in spans(planned):
        seen[id(current)] = current
        lengths[id(current)] += length
    bill = Bill(cost, skip_first)
    for key, current in seen.items():
        bill.charge(current, images_per_step * lengths[key])
    return bill


def spans(planned: Planned) -> Iterator[tuple[Densities, int]]:
    """Runs of consecutive steps that cost the same, and their lengths."""
    start, current = 0, planned.densities(0)
    for step in sorted(turn for turn in set(planned.turns()) if 0 < turn < planned.total_steps):
        now = planned.densities(step)
        if now is not current:
            yield current, step - start
            start, current = step, now
    yield current, planned.total_steps - start


def _per_image(cost: ForwardCost, densities: Densities, skip_first: bool) -> tuple[int, int, int]:
    """FLOPs of one image by product. Attention's products cost one forward and two, both input gradients, backward."""
    forward, grad_input, grad_weight = cost.products, 2 * cost.products, 0
    for name, f in cost.layers.items():
        density = densities.get(name, FULL)
        forward += _exact(f * density.forward)
        grad_input += 0 if skip_first and name == cost.first else _exact(f * density.grad_input)
        grad_weight += _exact(f * density.grad_weight)
    return forward, grad_input, grad_weight


def _exact(value: Fraction | int) -> int:
    if value.denominator != 1:
        raise ArithmeticError(f"{value} FLOPs: a density that does not divide its layer's count")
    return int(value)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
