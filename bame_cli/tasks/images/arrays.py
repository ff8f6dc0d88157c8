"""Small data sets, read whole: scikit-learn's digits, torchvision's Fashion-MNIST and CIFAR, made-up ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bame_cli.errors import ConfigError


@dataclass(frozen=True)
class Arrays:
    """uint8 images (count, channels, height, width) and int64 labels of both splits."""

    train_images: Tensor
    train_labels: Tensor
    val_images: Tensor
    val_labels: Tensor
    classes: Sequence[str]

    def hold_out(self, count: int | None) -> Arrays:
        """Validate on so many training images, taken out of training, and leave the validation images alone."""
        if count is None:
            return self
        train, held = apart(len(self.train_labels), count)
        images, labels = self.train_images, self.train_labels
        return Arrays(images[train], labels[train], images[held], labels[held], self.classes)

    def take(self, train_size: int | None, val_size: int | None) -> Arrays:
        """Only so many images of each split."""
        train, val = choice(len(self.train_labels), train_size), choice(len(self.val_labels), val_size)
        return Arrays(
            self.train_images[train], self.train_labels[train], self.val_images[val], self.val_labels[val], self.classes
        )


def choice(count: int, wanted: int | None) -> Tensor:
    """The first `wanted` of a fixed shuffle, in order; all when None."""
    number = demand_chosen(count, wanted)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:number].sort().values


def demand_chosen(count: int, wanted: int | None) -> int:
    """How many of a split's images are used: `wanted`, or all. Raises ConfigError when there are not so many."""
    if wanted is not None and not 1 <= wanted <= count:
        raise ConfigError(f"the split has {count} images, not the {wanted} asked for")
    return wanted or count


def demand_left(count: int, held: int) -> int:
    """How many of `count` training images are left when `held` are held out. Raises ConfigError when none would be."""
    if not 1 <= held < count:
        raise ConfigError(f"dataset.holdout={held}: from 1 to {count - 1} of the {count} training images")
    return count - held


def apart(count: int, held: int) -> tuple[Tensor, Tensor]:
    """The numbers from 0 to `count` in two parts by a fixed shuffle, each in order: the rest, and `held` of them."""
    demand_left(count, held)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return shuffled[held:].sort().values, shuffled[:held].sort().values


def _digits(root: Path, download: bool) -> Arrays:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    pixels = np.round(images.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    split = train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, val_images, train_labels, val_labels = (torch.from_numpy(part) for part in split)
    return Arrays(train_images, train_labels.long(), val_images, val_labels.long(), [str(i) for i in range(10)])


# Where Debian's package dataset-fashion-mnist puts the four files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]


def _fashion_mnist(root: Path, download: bool) -> Arrays:
    places = [root / "FashionMNIST" / "raw", root, DEBIAN]
    place = next((p for p in places if _idx_file(p, "train-images-idx3-ubyte")), None)
    if place is None and download:
        import torchvision

        try:
            torchvision.datasets.FashionMNIST(str(root), download=True)
            place = places[0]
        except (OSError, RuntimeError) as error:
            raise _missing("fashion_mnist", places, f"the download failed ({error})") from error
    if place is None:
        raise _missing("fashion_mnist", places, "dataset.download=true fetches it")
    parts = [_read_idx(place, f"{part}-{kind}") for part in ("train", "t10k") for kind in _IDX]
    train_images, train_labels, val_images, val_labels = parts
    return Arrays(train_images[:, None], train_labels.long(), val_images[:, None], val_labels.long(), _FASHION)


_IDX = ("images-idx3-ubyte", "labels-idx1-ubyte")


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _read_idx(folder: Path, name: str) -> Tensor:
    """A file of MNIST's format, compressed or not: magic number (its last byte the rank), sizes, bytes."""
    path = _idx_file(folder, name)
    if path is None:
        raise ConfigError(f"{folder / name} is missing")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        raw = file.read()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def _cifar(kind: str, name: str) -> Callable[[Path, bool], Arrays]:
    def read(root: Path, download: bool) -> Arrays:
        import torchvision

        made = getattr(torchvision.datasets, kind)
        try:
            train, val = (made(str(root), train=part, download=download) for part in (True, False))
        except (OSError, RuntimeError) as error:
            hint = f"the download failed ({error})" if download else "dataset.download=true fetches it"
            raise _missing(name, [root / made.base_folder], hint) from error
        images = [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, val)]
        labels = [torch.tensor(part.targets) for part in (train, val)]
        return Arrays(images[0], labels[0], images[1], labels[1], train.classes)

    return read


def _missing(name: str, places: Sequence[Path], hint: str) -> ConfigError:
    looked = ", ".join(str(place) for place in places)
    return ConfigError(f"dataset={name} is not in {looked}: {hint}; dataset.root=<folder> says where it is")


def synthetic(train_size: int, val_size: int, classes: int, channels: int, size: int) -> Arrays:
    """Seeded images that can be learned: a random picture per class, under noise."""
    random = torch.Generator().manual_seed(0)
    templates = torch.randint(0, 256, (classes, channels, size, size), generator=random)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, classes, (count,), generator=random)
        noise = torch.randint(0, 256, (count, channels, size, size), generator=random)
        return ((templates[labels] + 2 * noise) // 3).to(torch.uint8), labels

    return Arrays(*draw(train_size), *draw(val_size), [str(i) for i in range(classes)])


ARRAYS: dict[str, tuple[Callable[[Path, bool], Arrays], str]] = {
    "digits": (_digits, "scikit-learn's handwritten digits, 8x8 pixels; small and easy, no benchmark"),
    "fashion_mnist": (_fashion_mnist, "Zalando's clothing pictures, 28x28 pixels"),
    "cifar10": (_cifar("CIFAR10", "cifar10"), "32x32 photographs in 10 classes"),
    "cifar100": (_cifar("CIFAR100", "cifar100"), "32x32 photographs in 100 classes"),
}
