"""Folders of pictures, read by worker processes: ImageNet and a user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bame_cli.errors import ConfigError, first_line
from bame_cli.tasks.images.arrays import apart, choice
from bame_cli.tasks.images.augment import policy
from bame_cli.tasks.images.batches import Batch, Look, show
from bame_cli.training.distributed import ALONE, Ranks, local_share
from bame_cli.training.seeding import generator, seed_host

Turn = Callable[[Any], Tensor]


def read_folders(
    root: Path,
    look: Look,
    workers: int | None,
    sizes: tuple[int | None, int | None],
    holdout: int | None,
    device: torch.device | str,
) -> tuple[Folder, Folder, list[str]]:
    """`train/` and `val/`, a folder per class in each, as torchvision's ImageFolder reads them; and the classes.

    sizes: how many images of each split to take. holdout: validate on so many training images instead. Raises
    ConfigError when there are none, or classes differ.
    """
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
    policy(look, size)  # an unknown policy is refused now, not in a worker
    splits = train.samples, val.samples
    if holdout is not None:
        rest, held = ([train.samples[i] for i in part.tolist()] for part in apart(len(train), holdout))
        splits = rest, held
    first, second = (
        Folder([samples[i] for i in choice(len(samples), wanted).tolist()], look, size, workers, device)
        for samples, wanted in zip(splits, sizes, strict=True)
    )
    return first, second, train.classes


@dataclass
class Folder:
    """A split read from files: (path, label) pairs."""

    samples: Sequence[tuple[str, int]]
    look: Look
    size: int
    workers: int | None
    device: torch.device | str

    def __len__(self) -> int:
        return len(self.samples)

    def train_batches(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0, ranks: Ranks = ALONE
    ) -> Iterator[Batch]:
        flip = [transforms.RandomHorizontalFlip()] if self.look.flip else []
        steps = [transforms.RandomResizedCrop(self.size), *flip, *policy(self.look, self.size)]
        order = generator(seed, epoch).random(len(self)).argsort()[: len(self) // batch_size * batch_size]
        mine = order.reshape(-1, batch_size)[start:, ranks.part(batch_size)]
        yield from self._read(_turn(*steps), mine.tolist(), (seed, epoch))

    def eval_batches(self, batch_size: int, *, ranks: Ranks = ALONE) -> Iterator[Batch]:
        turn = _turn(*_central(self.size, margin=True))
        batches = [list(range(i, min(i + batch_size, len(self)))) for i in range(0, len(self), batch_size)]
        yield from self._read(turn, batches[ranks.rank :: ranks.world], (0, 0))

    def _read(self, turn: Turn, batches: list[list[int]], key: tuple[int, int]) -> Iterator[Batch]:
        workers = default_workers() if self.workers is None else self.workers
        reader = Pictures(self.samples, turn, key)
        pinned = torch.device(self.device).type == "cuda"
        for images, labels in DataLoader(reader, batch_sampler=batches, num_workers=workers, pin_memory=pinned):
            yield show(images.to(self.device, non_blocking=True), self.look), labels.to(self.device, non_blocking=True)


@dataclass
class Pictures(Dataset[tuple[Tensor, int]]):
    """Decodes one picture; whatever is drawn for it is drawn from (seed, epoch, index) alone.

    Raises ValueError that names the file when it cannot be read.
    """

    samples: Sequence[tuple[str, int]]
    turn: Turn
    key: tuple[int, int]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        seed_host(*self.key, index)
        try:
            return self.turn(torchvision.datasets.folder.pil_loader(path)), label
        except OSError as error:
            raise ValueError(f"{path} cannot be read as a picture ({error})") from error


def _turn(*steps: Any) -> Turn:
    return transforms.Compose([*steps, transforms.PILToTensor()])


def _central(size: int, *, margin: bool) -> list[Any]:
    """The central square. margin: cut from eight sevenths of it, 256 for 224, as ImageNet networks are evaluated."""
    return [transforms.Resize(round(size * 8 / 7) if margin else size), transforms.CenterCrop(size)]


def read_pictures(paths: Sequence[Path], *, size: int, grey: bool, margin: bool) -> Tensor:
    """Files as uint8 images (count, channels, size, size). Raises ConfigError that names one which is no picture."""
    turn, made = _turn(*_central(size, margin=margin)), []
    for path in paths:
        try:
            with Image.open(path) as picture:
                made.append(turn(picture.convert("L" if grey else "RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            said = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
            raise ConfigError(f"{path} cannot be read as a picture ({said})") from error
    return torch.stack(made)


def default_workers() -> int:
    """One per CPU that this rank may use, at most 8; none where shared memory is too small to carry batches."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.statvfs(shared).f_frsize * os.statvfs(shared).f_blocks < 2**27:
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, local_share(cpus))
