"""Data sets by name: real images in, normalized batches out.

A small data set sits in memory as uint8 and is augmented a batch at a time; a folder of images is read by workers.
Either way a batch is a function of (seed, epoch, index): a run that stops in the middle of an epoch goes on with
exactly the batches that it would have seen, however many workers there are.

What reads folders of pictures is imported where it reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bame_cli.errors import ConfigError, near_misses
from bame_cli.tasks.images.arrays import ARRAYS, Arrays, demand_chosen, demand_left, synthetic
from bame_cli.tasks.images.batches import Batch, Look, Split, show
from bame_cli.training.distributed import ALONE, Ranks
from bame_cli.training.seeding import generator

_FOLDERS = ("imagenet", "image_folder")
NAMES = (*ARRAYS, *_FOLDERS, "synthetic")


@dataclass(frozen=True)
class Facts:
    """What a bill and a layer report need of a data set: image and class counts, (channels, height, width)."""

    train: int
    val: int
    classes: int
    image_shape: tuple[int, int, int]


@dataclass(frozen=True)
class Data:
    """A data set: its splits, the classes, the shape (channels, height, width) of an image, and a word on it."""

    train: Split
    val: Split
    classes: Sequence[str]
    image_shape: tuple[int, int, int]
    about: str

    @property
    def facts(self) -> Facts:
        return Facts(len(self.train), len(self.val), len(self.classes), self.image_shape)


# Known without opening a file, so that nothing need be downloaded to count FLOPs.
_FACTS = {
    "digits": Facts(1437, 360, 10, (1, 8, 8)),
    "fashion_mnist": Facts(60_000, 10_000, 10, (1, 28, 28)),
    "cifar10": Facts(50_000, 10_000, 10, (3, 32, 32)),
    "cifar100": Facts(50_000, 10_000, 100, (3, 32, 32)),
    "imagenet": Facts(1_281_167, 50_000, 1000, (3, 224, 224)),
}


def facts(
    name: str,
    *,
    look: Look,
    holdout: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
) -> Facts | None:
    """A known data set under these options, without opening it; None when it must be looked at."""
    if name not in _FACTS:
        return None
    known = _FACTS[name]
    size = look.image_size or known.image_shape[1]
    shape = (known.image_shape[0], size, size)
    look.demand_channels(shape[0])
    train, val = (demand_left(known.train, holdout), holdout) if holdout else (known.train, known.val)
    return Facts(demand_chosen(train, train_size), demand_chosen(val, val_size), known.classes, shape)


def load(
    name: str,
    *,
    root: str,
    look: Look,
    download: bool = True,
    workers: int | None = None,
    holdout: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    classes: int | None = None,
    channels: int | None = None,
    device: torch.device | str = "cpu",
) -> Data:
    """Load a data set by name. train_size, val_size: take only so many images, a fixed random choice.

    holdout: validate on so many of the training images instead, so that choices are not made on the validation images.
    classes, channels: of the synthetic data set alone. Raises ConfigError when the data is not there (one line that
    says where it was looked for and how to get it) or an option does not apply.
    """
    if name not in NAMES:
        raise ConfigError(f"dataset={name}: no such data set{near_misses(name, NAMES)} ({', '.join(NAMES)})")
    if name != "synthetic" and (classes or channels):
        raise ConfigError(f"dataset.classes and dataset.channels belong to dataset=synthetic, not to {name}")
    if look.auto_augment and name not in _FOLDERS:
        raise ConfigError(f"recipe.auto_augment works on {' and '.join(_FOLDERS)}, which are files, not on {name}")
    if name == "synthetic":
        made = synthetic(train_size or 1024, val_size or 256, classes or 10, channels or 3, look.image_size or 16)
        return _in_memory(made.hold_out(holdout), look, device, "made-up images, for tests and benchmarks")
    if name in _FOLDERS:
        from bame_cli.tasks.images.files import read_folders

        look.demand_channels(3)
        train, val, names = read_folders(Path(root), look, workers, (train_size, val_size), holdout, device)
        return Data(train, val, names, (3, train.size, train.size), f"pictures in {root}")
    read, about = ARRAYS[name]
    arrays = read(Path(root), download).hold_out(holdout).take(train_size, val_size)
    return _in_memory(arrays, look, device, about)


def central_crop(name: str) -> float:
    """The share of a picture's shorter side that validation looks at."""
    return 7 / 8 if name in _FOLDERS else 1.0


def show_pictures(
    paths: Sequence[Path], name: str, *, look: Look, image_shape: tuple[int, int, int], device: torch.device | str
) -> Tensor:
    """A user's pictures as a network trained on this data set sees its validation images: one batch.

    Raises ConfigError that names a file which is no picture.
    """
    from bame_cli.tasks.images.files import read_pictures

    channels, size, _ = image_shape
    look.demand_channels(channels)
    pixels = read_pictures(paths, size=size, grey=channels == 1, margin=name in _FOLDERS)
    return show(pixels.to(device), replace(look, image_size=size))


# --- data sets that sit in memory ---


def _in_memory(arrays: Arrays, look: Look, device: torch.device | str, about: str) -> Data:
    look.demand_channels(arrays.train_images.shape[1])
    train = InMemory(arrays.train_images.to(device), arrays.train_labels.to(device), look)
    val = InMemory(arrays.val_images.to(device), arrays.val_labels.to(device), look)
    size = look.image_size or arrays.train_images.shape[-1]
    return Data(train, val, arrays.classes, (arrays.train_images.shape[1], size, size), about)


@dataclass
class InMemory:
    """A split held as one tensor on the device; batches are cut, augmented and normalized there."""

    images: Tensor
    labels: Tensor
    look: Look

    def __len__(self) -> int:
        return len(self.labels)

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, ranks: Ranks = ALONE
    ) -> Iterator[Batch]:
        order, part = generator(seed, epoch).random(len(self)).argsort(), ranks.part(batch_size)
        for index in range(start, len(self) // batch_size):
            chosen = torch.from_numpy(order[index * batch_size : (index + 1) * batch_size]).to(self.labels.device)
            # The whole batch is augmented on every rank, so that what an image looks like does not depend on ranks.
            images = self._augment(self.images[chosen], generator(seed, epoch, index))
            yield show(images[part], self.look), self.labels[chosen[part]]

    def eval_batches(self, batch_size: int, *, ranks: Ranks = ALONE) -> Iterator[Batch]:
        for start in range(ranks.rank * batch_size, len(self), ranks.world * batch_size):
            yield show(self.images[start : start + batch_size], self.look), self.labels[start : start + batch_size]

    def _augment(self, images: Tensor, random: np.random.Generator) -> Tensor:
        """Crop at random from the padded image, flip at random: each image by itself, the batch at once."""
        count, _, height, width = images.shape
        if pad := self.look.crop_padding:
            padded = F.pad(images, (pad, pad, pad, pad))
            top, left = (torch.from_numpy(random.integers(0, 2 * pad + 1, count)) for _ in range(2))
            rows = (top[:, None] + torch.arange(height)).to(images.device)[:, None, :, None]
            columns = (left[:, None] + torch.arange(width)).to(images.device)[:, None, None, :]
            batch, channel = (
                torch.arange(count, device=images.device),
                torch.arange(images.shape[1], device=images.device),
            )
            images = padded[batch[:, None, None, None], channel[None, :, None, None], rows, columns]
        if self.look.flip:
            turned = torch.from_numpy(random.random(count) < 0.5).to(images.device)[:, None, None, None]
            images = torch.where(turned, images.flip(3), images)
        return images
