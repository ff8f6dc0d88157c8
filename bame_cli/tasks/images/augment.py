"""What a recipe does to images beyond crop and flip, all timm's: policies on pictures; mixing, erasing on batches."""

from __future__ import annotations

from typing import Any

import torch
from timm.data import Mixup
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from bame_cli.errors import ConfigError
from bame_cli.tasks.images.batches import Look


def policy(look: Look, size: int) -> list[Any]:
    """The transform of pictures that `look.auto_augment` names, in timm's words; none when it is not set."""
    words = look.auto_augment
    if not words:
        return []
    mean = tuple(round(255 * value) for value in look.mean)
    hints = {"translate_const": int(size * 0.45), "img_mean": mean}  # as timm gives them to its own recipes
    made = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}
    try:
        return [made.get(words.split("-")[0], auto_augment_transform)(words, hints)]
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"recipe.auto_augment={words}: no policy of timm's (rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original)"
        ) from error


class BatchAugment:
    """Random erasing, then mixup or cutmix, of a batch of normalized images; soft labels where images are mixed.

    mixup, cutmix: alpha of their Beta distributions, 0 is off; both on, each batch draws one of them. erasing: the
    probability per image. Draws from the global generators: seed them first.
    """

    def __init__(self, *, classes: int, mixup: float, cutmix: float, erasing: float, device: torch.device) -> None:
        self.mix = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=classes) if mixup or cutmix else None
        self.erase = RandomErasing(erasing, mode="pixel", device=str(device)) if erasing else None

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.erase:
            images = self.erase(images)
        return self.mix(images, labels) if self.mix else (images, labels)
