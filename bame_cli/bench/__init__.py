"""`bame bench`: what methods cost in time and memory, as ratios taken in one run, because machines are noisy."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from bame_cli.bench import around, steps
from bame_cli.bench.timing import Row
from bame_cli.options.schema import Config

METHODS = "static,srste,decay_mask,bame"
PARTS = ("steps", "method", "projection", "checkpoint", "loop", "memory")
DEFAULT = "steps,method,projection"
_RACED = {"steps", "checkpoint"}


def measure(
    configs: Mapping[str, Config], parts: Sequence[str], *, size: int, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """Rows `{method, metric, ratio, low, high, ...}` for each method of `configs`, which has `dense` among them."""
    made: list[Row] = []
    if {"method", "projection", *_RACED} & set(parts):
        made += _on_lanes(configs, parts, size=size, batch=batch, rounds=rounds, device=device)
    made += around.loop(configs["dense"], rounds, device) if "loop" in parts else ()
    made += around.memory(configs, size, batch, device) if "memory" in parts else ()
    return made


def _on_lanes(
    configs: Mapping[str, Config], parts: Sequence[str], *, size: int, batch: int, rounds: int, device: torch.device
) -> Iterator[Row]:
    lanes = {name: steps.lane(config, size, device) for name, config in configs.items()}
    step: float | None = None
    if _RACED & set(parts):
        steps.race(lanes, *steps.random_batch(configs["dense"], size, batch, device), rounds)
        step = statistics.median(lanes["dense"].totals())
    if "steps" in parts:
        yield from steps.rows(lanes)
    if "checkpoint" in parts and step:
        for name, lane in lanes.items():
            yield from around.checkpoint(name, lane, step, rounds)
    if "method" in parts:
        yield from steps.method_rows(lanes, step)
    if "projection" in parts:
        yield from around.projection(lanes[next(name for name in lanes if name != "dense")], rounds)


def text(rows: list[Row]) -> str:
    """The rows for the eye. Ratios are to the whole dense step of the same round unless the metric says otherwise."""
    lines = [f"{'method':<12}{'metric':<26}{'ratio':>8}   low .. high"]
    for row in rows:
        spread = f"   {row['low']:.3f} .. {row['high']:.3f}" if "ratio" in row else ""
        value = f"{row['ratio']:8.3f}" if "ratio" in row else f"{row['value']:>8,}"
        lines.append(f"{row['method']:<12}{row['metric']:<26}{value}{spread}")
    return "\n".join(lines)
