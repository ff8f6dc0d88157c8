"""Patterns that tighten in stages: which stages lead to a target, and which of them holds at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from bame_cli.errors import ConfigError
from bame_cli.sparsity.pattern import Pattern


def stepwise(target: Pattern) -> list[Pattern]:
    """N_t = M, M-1, then halved from M/2 down to N, at a constant M: 16, 15, 8, 4, 2, 1 of 16 for 1:16."""
    kept, half = [target.m, target.m - 1], target.m // 2
    while half > target.n:
        kept.append(half)
        half //= 2
    unique = dict.fromkeys(n for n in (*kept, target.n) if n >= target.n)
    return [Pattern(n, target.m) for n in unique]


def geometric(target: Pattern) -> list[Pattern]:
    """8N:8M, 4N:4M, 2N:2M, N:M: constant density in ever smaller blocks."""
    return [Pattern(k * target.n, k * target.m) for k in (8, 4, 2, 1)]


def explicit(texts: Sequence[str], target: Pattern) -> list[Pattern]:
    """The stages a user wrote. ConfigError unless density and block size never grow and the last is the target."""
    stages = [Pattern.parse(text) for text in texts]
    falling = all(a.density >= b.density and a.m >= b.m for a, b in pairwise(stages))
    if not stages or not falling or stages[-1] != target:
        names = ", ".join(map(str, stages)) or "nothing"
        raise ConfigError(f"method.stages={names}: a falling list of patterns that ends in {target}")
    return stages


def fitted(stages: Sequence[Pattern], shape: tuple[int, ...]) -> list[Pattern]:
    """The stages of a layer: one that does not fit gives way to the one before, or to the first that does."""
    held = [next(stage for stage in stages if stage.fits(shape))]
    for stage in stages:
        held.append(stage if stage.fits(shape) else held[-1])
    return held[1:]


def stage_index(length: int, step: int, first: int, last: int) -> int:
    """Which of `length` stages holds: all but the last share the steps from `first` to `last` equally."""
    if step >= last:
        return length - 1
    return 0 if step < first else (length - 1) * (step - first) // (last - first)


def stage_turns(length: int, first: int, last: int) -> list[int]:
    """The steps at which `stage_index` rises."""
    return [first + math.ceil(index * (last - first) / (length - 1)) for index in range(1, length)]
