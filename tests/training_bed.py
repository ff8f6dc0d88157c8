"""A bed for the tests of methods: a tiny network, seeded batches, every method with its variants, and bare loops.

Nothing here looks inside a method; what is expected of one is computed in the tests.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from bame_cli.methods import METHODS, Method
from bame_cli.sparsity.layers import sparse_layers, survey
from bame_cli.sparsity.pattern import Pattern

STEPS = 20

# Weight decay everywhere: it must not move a dropped weight that is to rest.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda params: AdamW(params, lr=5e-3, weight_decay=0.1),
}

# Every method, and every option that changes what it does; intervals are short so that all happens within STEPS.
_MASK, _STRUCTURE = {"interval": 3, "start": 0.15, "stop": 0.7}, {"kind": "structure", "interval": 3}
_LIVE = {"interval": 3, "decay": 0.02, "designate": 0.2, "warmup": 0.1}
_SWAP = {"interval": 4, "gradient_steps": 2, "confidence": 0.0, "horizon": 300.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "static": ("static", {}),
    "static random": ("static", {"choose": "random", "seed": 3}),
    "asp": ("asp", {}),
    "ste": ("ste", {}),
    "srste": ("srste", {"decay": 0.02}),
    "srste decoupled": ("srste", {"decay": 0.02, "decoupled": True}),
    "srste ramp": ("srste", {"decay": 0.02, "ramp": 0.5}),
    "decay linear": ("decay_mask", _MASK),
    "decay exponential soft": ("decay_mask", _MASK | {"shape": "exponential", "gradient": "soft", "beta": 0.3}),
    "decay held": ("decay_mask", _MASK | {"refresh_after_stop": False}),
    "structure stepwise": ("decay_mask", _STRUCTURE),
    "structure geometric soft": ("decay_mask", _STRUCTURE | {"shape": "geometric", "gradient": "soft"}),
    "structure stages": ("decay_mask", _STRUCTURE | {"stages": ["4:4", "3:4", "2:4"], "refresh_after_stop": False}),
    "bame": ("bame", _LIVE),
    "bame gap": ("bame", _LIVE | {"pick": "gap", "warmup": 0.0, "start": 0.2}),
    "bame random": ("bame", _LIVE | {"pick": "random", "warmup": 0.2, "stop": 1.0}),
    "bame oscillation": ("bame", _LIVE | {"oscillation": 1.0, "designate": 0.5}),
    "bame ramp": ("bame", _LIVE | {"ramp": 0.5, "warmup": 0.1}),
    "bame taper": ("bame", _LIVE | {"designate": 1.0, "taper": 2.0, "warmup": 0.0}),
    "bame frozen": ("bame", _LIVE | {"freeze_after": 2, "designate": 0.7, "warmup": 0.0}),
    "swap": ("bame_swap", _SWAP),
    "swap confident": ("bame_swap", _SWAP | {"confidence": 0.5, "gradient_steps": 4, "stop": 1.0}),
    "swap warmed up": ("bame_swap", _SWAP | {"warmup": 0.3, "decay": 0.02}),
    "swap taylor": ("bame_swap", _SWAP | {"criterion": "taylor", "gradient_steps": 1}),
    "swap magnitude": ("bame_swap", _SWAP | {"criterion": "magnitude_gradient", "budget": 0.4}),
    "swap many": ("bame_swap", _SWAP | {"swaps": 2, "regrow": "step", "first_order": True, "horizon": 30.0}),
    "swap frozen": ("bame_swap", _SWAP | {"freeze_after": 1, "budget": 0.5}),
}
SPARSE = [case for case in CASES if case != "dense"]


def build(case: str, **options: Any) -> Method:
    """The method of a case, options on top."""
    name, chosen = CASES[case]
    return METHODS[name](**(chosen | options))


def net(seed: int = 0) -> nn.Sequential:
    """Conv2d, grouped Conv2d and Linear for images of 16 x 4 x 4 and 4 classes; inputs per output: 16, 8, 64, 32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


def double() -> nn.Sequential:
    """In float64 two orders of summation differ by 1e-16, and masks do not hang on it."""
    return net().double()


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The images and labels of a step, a function of the step alone: four prototypes in noise, so there is a signal."""
    generator = torch.Generator().manual_seed(1000 + step)
    prototypes = torch.randn(4, 16, 4, 4, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(4, (size,), generator=generator)
    return prototypes[labels] + torch.randn(size, 16, 4, 4, generator=generator), labels


@dataclass
class Training:
    """One run: a model, its optimizer and an attached method."""

    model: nn.Module
    optimizer: Optimizer
    method: Method
    total: int = STEPS

    def backward(self, step: int, *, parts: int = 1, model: nn.Module | None = None) -> float:
        """Gradients of a step's batch, averaged over `parts` micro-batches."""
        self.optimizer.zero_grad()
        images, labels = batch(step)
        parameter = next(self.model.parameters())
        loss = 0.0
        for x, y in zip(images.to(parameter.dtype).chunk(parts), labels.chunk(parts), strict=True):
            part = F.cross_entropy((model or self.model)(x), y) / parts
            part.backward()
            loss += part.item()
        return loss

    def update(self, step: int) -> None:
        self.method.after_backward(step)
        self.optimizer.step()
        self.method.after_update(step)

    def step(self, step: int, **options: Any) -> float:
        loss = self.backward(step, **options)
        self.update(step)
        return loss

    def run(self, steps: Iterable[int] | None = None, **options: Any) -> list[float]:
        return [self.step(step, **options) for step in (range(self.total) if steps is None else steps)]

    def masks(self) -> dict[str, Tensor]:
        """Which entries of the sparse layers are not 0, as anyone would see it."""
        return {name: self.model.get_parameter(name) != 0 for name in self.method.patterns}

    def save(self) -> bytes:
        """What a checkpoint would hold."""
        parts = {"model": self.model, "optimizer": self.optimizer, "method": self.method}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.method.load_state_dict(state["method"])


def start(
    method: Method,
    optimizer: str | Callable[[Iterable[nn.Parameter]], Optimizer] = "sgd",
    *,
    pattern: str = "2:4",
    total: int = STEPS,
    model: nn.Module | None = None,
) -> Training:
    """A training of the tiny network, every eligible layer sparse."""
    model = model or net()
    made = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())
    method.attach(sparse_layers(model, survey(model, Pattern.parse(pattern))), made, total)
    return Training(model, made, method, total)


def train_on_a_rank(rank: int, folder: str, cases: Sequence[str]) -> None:
    """One of two processes: half of every batch, gradients averaged as DistributedDataParallel averages them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    done = {}
    for case in cases:
        training = start(build(case), model=double())
        for step in range(STEPS):
            images, labels = (half.chunk(2)[rank] for half in batch(step))
            training.optimizer.zero_grad()
            F.cross_entropy(training.model(images.double()), labels).backward()
            grads = [p.grad for p in training.model.parameters()]
            total = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(total)
            for grad, mean in zip(grads, (total / 2).split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
            training.update(step)
        done[case] = training.model.state_dict()
    torch.save(done, Path(folder, f"rank{rank}"))
    dist.destroy_process_group()


class OneLayer:
    """A single weight, set and driven by hand: gradients are given, not computed."""

    def __init__(
        self,
        method: Method,
        weight: Sequence[Sequence[float]] | Tensor,
        pattern: str,
        *,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        total: int = 10,
        name: str = "layer",
    ) -> None:
        self.method, self.name = method, name
        self.p = nn.Parameter(torch.as_tensor(weight).clone())
        self.optimizer = optimizer([self.p]) if optimizer else SGD([self.p], lr=0.1)
        method.attach({name: (self.p, Pattern.parse(pattern))}, self.optimizer, total)

    def backward(self, step: int, grad: Sequence[Sequence[float]] | Tensor) -> Tensor:
        """Give a gradient; returns what the optimizer will see."""
        self.p.grad = torch.as_tensor(grad, dtype=self.p.dtype).clone()
        self.method.after_backward(step)
        return self.p.grad.clone()

    def update(self, step: int) -> Tensor:
        """Make the step; returns the effective weight."""
        self.optimizer.step()
        self.method.after_update(step)
        return self.weight

    def step(self, step: int, grad: Sequence[Sequence[float]] | Tensor) -> Tensor:
        self.backward(step, grad)
        return self.update(step)

    @property
    def weight(self) -> Tensor:
        return self.p.detach().clone()

    @property
    def mask(self) -> Tensor:
        return self.weight != 0


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have bit for bit the same weights."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def sgd(lr: float = 0.1, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: SGD(params, lr=lr, **options)


def adam(lr: float = 0.1, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: Adam(params, lr=lr, **options)


def adamw(lr: float = 0.1, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: AdamW(params, lr=lr, **options)
