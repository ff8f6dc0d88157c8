"""How the bench takes times: medians of ratios within a round, because machines are noisy and noise lasts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Row = dict[str, Any]


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds that a call takes."""
    start = now(device)
    call()
    return now(device) - start


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call in each round, all calls in every round; one round before them warms caches."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            seconds[name].append(timed(call, device))
    return {name: values[1:] for name, values in seconds.items()}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios within each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def row(method: str, metric: str, values: Sequence[float], **more: Any) -> Row:
    """`{method, metric, ratio, low, high}`: median and range of ratios."""
    figures = {"ratio": statistics.median(values), "low": min(values), "high": max(values)}
    return {"method": method, "metric": metric} | {key: round(value, 4) for key, value in figures.items()} | more


def figure(method: str, metric: str, value: float, **more: Any) -> Row:
    """`{method, metric, value}`: something that is no ratio to dense."""
    return {"method": method, "metric": metric, "value": round(value, 3) if value < 1000 else round(value)} | more
