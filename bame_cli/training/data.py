"""The one door to torchvision's and scikit-learn's data sets: real images in, normalized batches out.

A small data set sits in memory as uint8 and is augmented a batch at a time; a folder of images is read by workers.
Either way a batch is a function of (seed, epoch, index): a run that stops in the middle of an epoch goes on with
exactly the batches that it would have seen, however many workers there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bame_cli.errors import ConfigError, near_misses
from bame_cli.training.arrays import ARRAYS, Arrays, choice, synthetic

Batch = tuple[Tensor, Tensor]
_FOLDERS = ("imagenet", "image_folder")
NAMES = (*ARRAYS, *_FOLDERS, "synthetic")


class Split(Protocol):
    """Images of one split: how many, and batches of (float images, int64 labels) on the device."""

    def __len__(self) -> int: ...

    def train_batches(self, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        """One shuffled, augmented epoch of full batches, from batch `start` on."""

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """Every image once, in order."""


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


def facts(name: str, *, look: Look, train_size: int | None = None, val_size: int | None = None) -> Facts | None:
    """A known data set under these options, without opening it; None when it must be looked at."""
    if name not in _FACTS:
        return None
    known = _FACTS[name]
    size = look.image_size or known.image_shape[1]
    shape = (known.image_shape[0], size, size)
    return Facts(train_size or known.train, val_size or known.val, known.classes, shape)


@dataclass(frozen=True)
class Look:
    """How images are shown: size (None keeps the native one), normalization, and what training adds."""

    image_size: int | None
    mean: Sequence[float]
    std: Sequence[float]
    crop_padding: int = 0
    flip: bool = False


def load(
    name: str,
    *,
    root: str,
    look: Look,
    download: bool = True,
    workers: int | None = None,
    train_size: int | None = None,
    val_size: int | None = None,
    classes: int | None = None,
    channels: int | None = None,
    device: torch.device | str = "cpu",
) -> Data:
    """Load a data set by name. train_size, val_size: take only so many images, a fixed random choice.

    classes, channels: of the synthetic data set alone. Raises ConfigError when the data is not there (one line that
    says where it was looked for and how to get it) or an option does not apply.
    """
    if name not in NAMES:
        raise ConfigError(f"dataset={name}: no such data set{near_misses(name, NAMES)} ({', '.join(NAMES)})")
    if name != "synthetic" and (classes or channels):
        raise ConfigError(f"dataset.classes and dataset.channels belong to dataset=synthetic, not to {name}")
    if name == "synthetic":
        made = synthetic(train_size or 1024, val_size or 256, classes or 10, channels or 3, look.image_size or 16)
        return _in_memory(made, look, device, "made-up images, for tests and benchmarks")
    if name in _FOLDERS:
        return _folders(Path(root), look, workers, train_size, val_size, device)
    read, about = ARRAYS[name]
    return _in_memory(read(Path(root), download).take(train_size, val_size), look, device, about)


# --- data sets that sit in memory ---


def _in_memory(arrays: Arrays, look: Look, device: torch.device | str, about: str) -> Data:
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

    def train_batches(self, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = _generator(seed, epoch).random(len(self)).argsort()
        for index in range(start, len(self) // batch_size):
            chosen = torch.from_numpy(order[index * batch_size : (index + 1) * batch_size]).to(self.labels.device)
            images = self._augment(self.images[chosen], _generator(seed, epoch, index))
            yield show(images, self.look), self.labels[chosen]

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        for start in range(0, len(self), batch_size):
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


def show(images: Tensor, look: Look) -> Tensor:
    """uint8 images as a network sees them: float, normalized, at the size asked for."""
    mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (look.mean, look.std))
    shown = (images.float() / 255 - mean) / std
    if look.image_size and look.image_size != images.shape[-1]:
        shown = F.interpolate(shown, (look.image_size, look.image_size), mode="bilinear", antialias=True)
    return shown


def _generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the key."""
    return np.random.default_rng(key)


# --- folders of images ---


def _folders(
    root: Path,
    look: Look,
    workers: int | None,
    train_size: int | None,
    val_size: int | None,
    device: torch.device | str,
) -> Data:
    """`train/` and `val/`, a folder per class in each, as torchvision's ImageFolder reads them."""
    try:
        train, val = (torchvision.datasets.ImageFolder(str(root / part)) for part in ("train", "val"))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"no images in {root}: {error}; dataset.root=<folder> must hold train/<class>/ and val/<class>/ "
            "with the pictures in them (ImageNet's own archives unpack to that)"
        ) from error
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(f"{root}: train/ and val/ differ in their classes: {', '.join(odd[:5])}")
    size = look.image_size or 224
    splits = [
        Folder([images.samples[i] for i in choice(len(images), wanted).tolist()], look, size, workers, device)
        for images, wanted in ((train, train_size), (val, val_size))
    ]
    return Data(splits[0], splits[1], train.classes, (3, size, size), f"pictures in {root}")


@dataclass
class Folder:
    """A split read from files by worker processes: (path, label) pairs."""

    samples: Sequence[tuple[str, int]]
    look: Look
    size: int
    workers: int | None
    device: torch.device | str

    def __len__(self) -> int:
        return len(self.samples)

    def train_batches(self, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Batch]:
        flip = [transforms.RandomHorizontalFlip()] if self.look.flip else []
        turn = transforms.Compose([transforms.RandomResizedCrop(self.size), *flip, transforms.PILToTensor()])
        order = _generator(seed, epoch).random(len(self)).argsort()[: len(self) // batch_size * batch_size]
        yield from self._read(turn, order[start * batch_size :].tolist(), batch_size, (seed, epoch))

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        # Eight sevenths of the crop: 256 for 224, as ImageNet networks are evaluated.
        resize = transforms.Resize(round(self.size * 8 / 7))
        turn = transforms.Compose([resize, transforms.CenterCrop(self.size), transforms.PILToTensor()])
        yield from self._read(turn, range(len(self)), batch_size, (0, 0))

    def _read(
        self, turn: Callable[[Any], Tensor], order: Sequence[int], batch_size: int, key: tuple[int, int]
    ) -> Iterator[Batch]:
        workers = default_workers() if self.workers is None else self.workers
        reader = Pictures(self.samples, turn, key)
        pinned = torch.device(self.device).type == "cuda"
        loader = DataLoader(reader, batch_size, sampler=order, num_workers=workers, pin_memory=pinned)
        for images, labels in loader:
            yield show(images.to(self.device, non_blocking=True), self.look), labels.to(self.device, non_blocking=True)


@dataclass
class Pictures(Dataset[tuple[Tensor, int]]):
    """Decodes one picture, its random crop drawn from (seed, epoch, index) alone."""

    samples: Sequence[tuple[str, int]]
    turn: Callable[[Any], Tensor]
    key: tuple[int, int]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(_generator(*self.key, index).integers(2**62)))
            return self.turn(torchvision.datasets.folder.pil_loader(path)), label


def default_workers() -> int:
    """One per CPU we may use, at most 8; none where shared memory is too small to carry batches."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.statvfs(shared).f_frsize * os.statvfs(shared).f_blocks < 2**27:
        return 0
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
