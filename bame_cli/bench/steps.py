"""A training step of each method against a dense one, its parts apart; and what a method holds in memory.

Every method trains its own copy of the model on the same random batch; rounds are interleaved, so that a slow moment
of the machine meets all of them, and each ratio is taken within its round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bame_cli.bench.timing import Row, figure, now, ratios, row, timed
from bame_cli.methods import Method
from bame_cli.methods.base import Layers
from bame_cli.options.schema import Config
from bame_cli.runs.plan import layer_rows, model_options, optimization
from bame_cli.sparsity.layers import sparse_layers
from bame_cli.tasks.images import models
from bame_cli.training.execution import execute_sparsely
from bame_cli.training.precision import Precision

# A run this long, looked at from its middle: warm-up is over, decay is under way, windows are open.
_STEPS, _MIDDLE = 1000, 500
_PHASES = ("forward", "backward", "method", "optimizer")
_CLASSES = 1000


@dataclass
class Lane:
    """One method at work on its own copy of the model."""

    model: nn.Module
    method: Method
    optimizer: Optimizer
    precision: Precision
    layers: Layers
    device: torch.device
    step: int = _MIDDLE
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in _PHASES})

    def run(self, images: Tensor, labels: Tensor) -> None:
        """One training step, its phases timed."""
        self.optimizer.zero_grad(set_to_none=True)
        marks = [now(self.device)]
        with self.precision.autocast():
            loss = F.cross_entropy(self.model(images), labels)
        marks.append(now(self.device))
        self.precision.scale(loss).backward()
        self.precision.unscaled(self.model, self.optimizer)
        marks.append(now(self.device))
        self.method.after_backward(self.step)
        marks.append(now(self.device))
        self.precision.update(self.model, self.optimizer)
        marks.append(now(self.device))
        self.method.after_update(self.step)
        marks.append(now(self.device))
        self.precision.end_step()
        forward, backward, before, step, after = (b - a for a, b in pairwise(marks))
        for phase, seconds in zip(_PHASES, (forward, backward, before + after, step), strict=True):
            self.times[phase].append(seconds)
        self.step += 1

    def totals(self) -> list[float]:
        """Seconds of each step, all phases. The first opens windows and warms caches: it is left out."""
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)][1:]

    def hooks(self) -> list[float]:
        """Seconds that the method takes in each step of one interval of its own, without the network around it."""
        grads = {name: torch.randn_like(p) for name, (p, _) in self.layers.items()}
        self._hooks(grads)  # opens windows, warms caches
        return [self._hooks(grads) for _ in range(int(getattr(self.method, "interval", 1)))]

    def _hooks(self, grads: Mapping[str, Tensor]) -> float:
        for name, (p, _) in self.layers.items():
            p.grad = grads[name].clone()
        seconds = timed(lambda: self.method.after_backward(self.step), self.device)
        seconds += timed(lambda: self.method.after_update(self.step), self.device)
        self.step += 1
        return seconds


def lane(config: Config, size: int, device: torch.device) -> Lane:
    """A method in the middle of a run on images of `size` pixels."""
    torch.manual_seed(config.seed)
    model = models.create(image_shape=(3, size, size), **model_options(config, _CLASSES))
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = model.to(device)
    optimizer, schedule = optimization(config, model, _STEPS)
    schedule.set(_MIDDLE)  # at a learning rate of 0, as warm-up begins, BAME would exchange nothing
    layers = sparse_layers(model, layer_rows(config, model))
    config.method.attach(layers, optimizer, _STEPS)
    if config.execution == "sparse":
        execute_sparsely(model, config.method, device)
    precision = Precision(device, amp=config.amp, clip_grad=config.recipe.clip_grad, clip_mode=config.recipe.clip_mode)
    return Lane(model.train(), config.method, optimizer, precision, layers, device)


def random_batch(config: Config, size: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, size, size, device=device)
    if config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(0, _CLASSES, (batch,), device=device)


def race(lanes: Mapping[str, Lane], images: Tensor, labels: Tensor, rounds: int) -> None:
    """Train all lanes side by side, a step of each in every round."""
    for _ in range(rounds + 1):
        for each in lanes.values():
            each.run(images, labels)


def rows(lanes: Mapping[str, Lane]) -> Iterator[Row]:
    """Of lanes that raced, the one named `dense` among them: the whole step and its phases, in dense steps."""
    dense = lanes["dense"].totals()
    step = statistics.median(dense)
    for name, each in lanes.items():
        if name != "dense":
            yield row(name, "step", ratios(each.totals(), dense))
        for phase in _PHASES:
            yield row(name, phase, [seconds / step for seconds in each.times[phase][1:]])


def method_rows(lanes: Mapping[str, Lane], step: float | None) -> Iterator[Row]:
    """The methods' own work over one interval: a mean that no batch can flatter, and the step that takes longest.

    In units of one copy of the sparse weights and in time per weight; where lanes have raced, in dense steps (`step`
    seconds) as well.
    """
    for name, each in lanes.items():
        if not each.layers:
            continue
        hooks, copy = each.hooks(), _copy_seconds(each)
        mean = sum(hooks) / len(hooks)
        weights = sum(p.numel() for p, _ in each.layers.values())
        yield figure(name, "method_in_copies", mean / copy, steps=len(hooks), weights=weights)
        yield figure(name, "longest_in_copies", max(hooks) / copy)
        yield figure(name, "nanoseconds_per_weight", 1e9 * mean / weights)
        if step:
            yield row(name, "method_over_interval", [mean / step], steps=len(hooks))
            yield row(name, "longest_method_step", [max(hooks) / step])
        yield figure(name, "bytes_per_sparse_weight", _held(each) / weights)


def _copy_seconds(lane: Lane) -> float:
    weights = [p.detach() for p, _ in lane.layers.values()]
    copies = [torch.empty_like(w) for w in weights]
    torch._foreach_copy_(copies, weights)
    return min(timed(lambda: torch._foreach_copy_(copies, weights), lane.device) for _ in range(5))


def _held(lane: Lane) -> int:
    """Bytes of tensors that the method holds beyond the parameters it was given."""
    own = {p.data.untyped_storage().data_ptr() for p, _ in lane.layers.values()}
    held: dict[int, int] = {}
    pending: list[Any] = [v for k, v in vars(lane.method).items() if k not in ("optimizer", "parameters")]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif hasattr(value, "__dict__"):
            pending.extend(vars(value).values())
    return sum(size for pointer, size in held.items() if pointer not in own)
