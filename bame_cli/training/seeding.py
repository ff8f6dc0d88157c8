"""Random numbers as functions of where they are needed: of (seed, epoch, index) or (seed, step, rank), nothing else.

Whoever draws seeds first, so no generator's state has to outlive a restart, and what one part draws never moves
what another sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import torch


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the key."""
    return np.random.default_rng(key)


def seed_all(*key: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (all devices) from the key."""
    # Without an accelerator, torch.manual_seed would note down where it was asked, at every step.
    _seed(key, torch.manual_seed if _accelerated() else torch.default_generator.manual_seed)


def seed_host(*key: int) -> None:
    """The same without the accelerators, for workers that only prepare data."""
    _seed(key, torch.default_generator.manual_seed)


def _seed(key: tuple[int, ...], torch_seed: Callable[[int], torch.Generator]) -> None:
    number = _mixed(key)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch_seed(number)


@cache
def _accelerated() -> bool:
    return torch.accelerator.is_available()


def _mixed(key: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
