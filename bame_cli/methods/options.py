"""Checks that hyperparameters share: a value without meaning fails before anything is built, in one line."""

from __future__ import annotations

import math

from bame_cli.errors import ConfigError


def at_share(share: float, total_steps: int) -> int:
    """The step that a share of training names."""
    return round(share * total_steps)


def demand_share(**shares: float) -> None:
    """Raise ConfigError unless every value is a share, from 0 to 1."""
    for name, value in shares.items():
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ConfigError(f"method.{name}={value}: a share, from 0 to 1")


def demand_at_least(least: float, **values: float) -> None:
    """Raise ConfigError unless every value is a finite number of at least `least`."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"method.{name}={value}: must be {least} or more")


def demand_order(**pair: float) -> None:
    """Raise ConfigError unless the first of two values is at most the second."""
    (early, first), (late, last) = pair.items()
    if first > last:
        raise ConfigError(f"method.{early}={first} is after method.{late}={last}")


def demand_one_of(known: tuple[str, ...], **values: str) -> None:
    """Raise ConfigError unless every value is one of the known words."""
    for name, value in values.items():
        if value not in known:
            raise ConfigError(f"method.{name}={value}: one of {', '.join(known)}")
