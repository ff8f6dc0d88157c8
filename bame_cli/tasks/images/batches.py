"""What a batch of images is, how images are shown to a network, and what a split of a data set can do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bame_cli.errors import ConfigError
from bame_cli.training.distributed import ALONE, Ranks

Batch = tuple[Tensor, Tensor]


class Split(Protocol):
    """Images of one split: how many, and batches of (float images, int64 labels) on the device."""

    def __len__(self) -> int: ...

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, ranks: Ranks = ALONE
    ) -> Iterator[Batch]:
        """One shuffled, augmented epoch of full batches, from batch `start` on; of each batch this rank's share."""

    def eval_batches(self, batch_size: int, *, ranks: Ranks = ALONE) -> Iterator[Batch]:
        """Every image once, in order; of the batches every `world`-th, from this rank's number on."""


@dataclass(frozen=True)
class Look:
    """How images are shown: size (None keeps the native one), normalization, and what training adds.

    auto_augment: a policy in timm's words, such as rand-m9-mstd0.5-inc1, for pictures that are read from files.
    """

    image_size: int | None
    mean: Sequence[float]
    std: Sequence[float]
    crop_padding: int = 0
    flip: bool = False
    auto_augment: str | None = None
    channels_last: bool = False

    def demand_channels(self, channels: int) -> None:
        """Raise ConfigError unless images of so many channels can be normalized: by one value, or by one for each."""
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ConfigError(f"dataset.{key} has {len(values)} values, and the images have {channels} channels")
            if not all(math.isfinite(value) and (key == "mean" or value > 0) for value in values):
                raise ConfigError(f"dataset.{key}={list(values)}: finite numbers" + ", above 0" * (key == "std"))


def show(images: Tensor, look: Look) -> Tensor:
    """uint8 images as a network sees them: float, normalized, at the size asked for."""
    mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (look.mean, look.std))
    shown = (images.float() / 255 - mean) / std
    if look.image_size and look.image_size != images.shape[-1]:
        shown = F.interpolate(shown, (look.image_size, look.image_size), mode="bilinear", antialias=True)
    return shown.contiguous(memory_format=torch.channels_last) if look.channels_last else shown
