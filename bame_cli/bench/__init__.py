"""`bame bench`: what methods cost in time and memory, as ratios taken in one run, because machines are noisy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from bame_cli.bench import around, steps
from bame_cli.bench.timing import Row
from bame_cli.config import Config

METHODS = "static,srste,decay_mask,bame"
PARTS = ("steps", "projection", "checkpoint", "loop", "memory")


def measure(
    configs: Mapping[str, Config], parts: Sequence[str], *, size: int, batch: int, rounds: int, device: torch.device
) -> list[Row]:
    """Rows `{method, metric, ratio, low, high, ...}` for each method of `configs`, which has `dense` among them."""
    made: list[Row] = []
    if {"steps", "projection", "checkpoint"} & set(parts):
        lanes = {name: steps.lane(config, size, device) for name, config in configs.items()}
        steps.race(lanes, *steps.random_batch(configs["dense"], size, batch, device), rounds)
        dense = statistics.median(lanes["dense"].totals())
        last = list(lanes)[-1]
        made += steps.rows(lanes) if "steps" in parts else ()
        made += around.projection(lanes[last], rounds) if "projection" in parts else ()
        for name in lanes if "checkpoint" in parts else ():
            made += around.checkpoint(name, lanes[name], dense, rounds)
    made += around.loop(configs["dense"], rounds, device) if "loop" in parts else ()
    made += around.memory(configs, size, batch, device) if "memory" in parts else ()
    return made


def text(rows: list[Row]) -> str:
    """The rows for the eye. Ratios are to the whole dense step of the same round unless the metric says otherwise."""
    lines = [f"{'method':<12}{'metric':<26}{'ratio':>8}   low .. high"]
    for row in rows:
        spread = f"   {row['low']:.3f} .. {row['high']:.3f}" if "ratio" in row else ""
        value = f"{row['ratio']:8.3f}" if "ratio" in row else f"{row['value']:>8,}"
        lines.append(f"{row['method']:<12}{row['metric']:<26}{value}{spread}")
    return "\n".join(lines)
