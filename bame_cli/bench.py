"""`bame bench`: what methods cost in time and memory, as ratios taken in one run. Machines are noisy: no seconds alone.

Every method trains its own copy of the model on the same random batch; rounds are interleaved, so that a slow moment
of the machine meets all of them, and each ratio is taken within its round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bame_cli.blueprint import layer_rows, model_options, optimization
from bame_cli.config import Config
from bame_cli.methods import Method
from bame_cli.methods.base import Layers
from bame_cli.sparsity.layers import sparse_layers
from bame_cli.training import models

METHODS = "static,srste,decay_mask,bame"
Row = dict[str, Any]
# A run this long, looked at from its middle: warm-up is over, decay is under way, windows are open.
_STEPS, _MIDDLE = 1000, 500
_PHASES = ("forward_backward", "method", "optimizer")


@dataclass
class Lane:
    """One method at work on its own copy of the model."""

    model: nn.Module
    method: Method
    optimizer: Optimizer
    layers: Layers
    step: int = _MIDDLE
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in _PHASES})

    def run(self, images: Tensor, labels: Tensor) -> None:
        """One training step, its phases timed."""
        self.optimizer.zero_grad(set_to_none=True)
        marks = [_now(images)]
        F.cross_entropy(self.model(images), labels).backward()
        marks.append(_now(images))
        self.method.after_backward(self.step)
        marks.append(_now(images))
        self.optimizer.step()
        marks.append(_now(images))
        self.method.after_update(self.step)
        marks.append(_now(images))
        forward, before, step, after = (b - a for a, b in pairwise(marks))
        for phase, seconds in zip(_PHASES, (forward, before + after, step), strict=True):
            self.times[phase].append(seconds)
        self.step += 1

    def hooks(self, interval: int, like: Tensor) -> list[float]:
        """Seconds that the method takes in each step of one interval, without the network around it."""
        grads = {name: p.grad.clone() for name, (p, _) in self.layers.items() if p.grad is not None}
        seconds = []
        for _ in range(interval):
            for name, (p, _) in self.layers.items():
                p.grad = grads[name].clone()
            start = _now(like)
            self.method.after_backward(self.step)
            self.method.after_update(self.step)
            seconds.append(_now(like) - start)
            self.step += 1
        return seconds


def measure(
    config: Config, configs: Mapping[str, Config], *, size: int, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """Rows `{method, metric, ratio, low, high, ...}` for each method of `configs`, against dense in the same rounds."""
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    lanes = {name: _lane(chosen, size, device) for name, chosen in {"dense": config, **configs}.items()}
    for _ in range(rounds + 1):
        for lane in lanes.values():
            lane.run(images, labels)
    dense = lanes.pop("dense")
    rows = [row for name, lane in lanes.items() for row in _lane_rows(name, lane, dense, images)]
    return [*rows, *_projection_rows(next(iter(lanes.values())), rounds, images)]


def _lane(config: Config, size: int, device: torch.device) -> Lane:
    torch.manual_seed(config.seed)
    model = models.create(image_shape=(3, size, size), **model_options(config, 1000)).to(device)
    optimizer, schedule = optimization(config, model, _STEPS)
    schedule.set(_MIDDLE)  # at a learning rate of 0, as warm-up begins, BAME would exchange nothing
    layers = sparse_layers(model, layer_rows(config, model))
    config.method.attach(layers, optimizer, _STEPS)
    return Lane(model.train(), config.method, optimizer, layers)


def _lane_rows(name: str, lane: Lane, dense: Lane, like: Tensor) -> Iterator[Row]:
    """The first round opens windows and warms caches: it is left out of the step, and has a row of its own."""
    totals = [_total(lane, i) / _total(dense, i) for i in range(1, len(dense.times["method"]))]
    yield _row(name, "step", totals)
    step = statistics.median(_total(dense, i) for i in range(1, len(totals) + 1))
    for phase in _PHASES:
        yield _row(name, phase, [seconds / step for seconds in lane.times[phase][1:]])
    interval = int(getattr(lane.method, "interval", 1))
    hooks = lane.hooks(interval, like)
    yield _row(name, "method_over_interval", [sum(hooks) / len(hooks) / step]) | {"steps": interval}
    yield _row(name, "longest_method_step", [max(hooks) / step])
    weights = sum(p.numel() for p, _ in lane.layers.values())
    yield {"method": name, "metric": "bytes_per_sparse_weight", "value": round(_held(lane) / weights, 3)}


def _projection_rows(lane: Lane, rounds: int, like: Tensor) -> Iterator[Row]:
    """All masks of the model: against sort-and-scatter, and against a plain copy of the same weights."""
    layers = [(p.detach(), pattern, torch.empty_like(p, dtype=torch.bool)) for p, pattern in lane.layers.values()]
    copies = [torch.empty_like(w) for w, _, _ in layers]
    ours, sort, copy = [], [], []
    for _ in range(rounds):
        ours.append(_timed(lambda: [pattern.project(w, out=mask) for w, pattern, mask in layers], like))
        sort.append(_timed(lambda: [_by_sorting(pattern.blocks(w), pattern.n) for w, pattern, _ in layers], like))
        copy.append(_timed(lambda: [c.copy_(w) for c, (w, _, _) in zip(copies, layers, strict=True)], like))
    weights = sum(w.numel() for w, _, _ in layers)
    yield _row("projection", "time_against_sort", [a / b for a, b in zip(ours, sort, strict=True)])
    yield _row("projection", "time_against_copy", [a / b for a, b in zip(ours, copy, strict=True)])
    rate = weights / statistics.median(ours)
    yield {"method": "projection", "metric": "weights_per_second", "value": round(rate), "weights": weights}


def _by_sorting(blocks: Tensor, n: int) -> Tensor:
    """The usual way to an N:M mask: sort every block, scatter ones to the first N."""
    order = torch.sort(blocks.abs(), dim=2, descending=True, stable=True).indices.narrow(2, 0, n)
    return torch.zeros_like(blocks, dtype=torch.bool).scatter_(2, order, True)


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


def _total(lane: Lane, index: int) -> float:
    return sum(lane.times[phase][index] for phase in _PHASES)


def _row(method: str, metric: str, ratios: list[float]) -> Row:
    low, high = min(ratios), max(ratios)
    ratio = statistics.median(ratios)
    return {"method": method, "metric": metric, "ratio": round(ratio, 4), "low": round(low, 4), "high": round(high, 4)}


def _timed(call: Callable[[], Any], like: Tensor) -> float:
    start = _now(like)
    call()
    return _now(like) - start


def _now(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def text(rows: list[Row]) -> str:
    """The rows for the eye. Ratios are to the whole dense step of the same round unless the metric says otherwise."""
    lines = [f"{'method':<12}{'metric':<26}{'ratio':>8}   low .. high"]
    for row in rows:
        spread = f"   {row['low']:.3f} .. {row['high']:.3f}" if "ratio" in row else ""
        value = f"{row['ratio']:8.3f}" if "ratio" in row else f"{row['value']:>8,}"
        lines.append(f"{row['method']:<12}{row['metric']:<26}{value}{spread}")
    return "\n".join(lines)
