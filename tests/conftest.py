"""What tests share: one thread, so that results do not depend on the machine; an empty folder; a small network."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The current folder is an empty one: where commands write stays out of the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_net() -> nn.Sequential:
    """Conv2d, grouped Conv2d and Linear, all eligible at M up to 16, for images of 16 x 4 x 4 and 4 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, groups=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )
