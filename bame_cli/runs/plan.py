"""A run before it exists: its data, its layers, its bill. Everything that can be refused is refused here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError
from bame_cli.options.schema import Config
from bame_cli.sparsity.flops import Bill, ForwardCost, forecast, forward_cost
from bame_cli.sparsity.layers import Layer, demand_sparse, survey
from bame_cli.sparsity.pattern import Pattern
from bame_cli.tasks.images import data as datasets
from bame_cli.tasks.images import models
from bame_cli.tasks.images.batches import Look
from bame_cli.training import optim


@dataclass(frozen=True)
class RunPlan:
    """A run before it exists: what it would train on, which layers would be sparse, what it would cost."""

    config: Config
    facts: datasets.Facts
    model: nn.Module  # on the meta device: shapes without memory
    rows: list[Layer]
    cost: ForwardCost
    expected: Bill

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def patterns(self) -> dict[str, Pattern]:
        return {row.name: row.pattern for row in self.rows if row.pattern}

    def sparse_rows(self) -> list[tuple[Layer, Fraction]]:
        """Sparse layers with their densities."""
        return [(row, row.pattern.density) for row in self.rows if row.pattern]

    @property
    def density(self) -> dict[str, Fraction]:
        return {name: pattern.density for name, pattern in self.patterns.items()}

    @property
    def steps_per_epoch(self) -> int:
        return self.facts.train // self.config.recipe.batch_size

    @property
    def total_steps(self) -> int:
        return self.config.recipe.epochs * self.steps_per_epoch


def run_plan(config: Config, facts: datasets.Facts, like: RunPlan | None = None) -> RunPlan:
    """Everything that can be known, and refused, before anything is trained or written; from shapes alone.

    `like`: a blueprint made before; where it is of the same model, that is not built and counted again.
    """
    demand_parts(config)
    batch = config.recipe.batch_size
    steps = config.recipe.epochs * (facts.train // batch)
    if not steps:
        raise ConfigError(f"recipe.batch_size={batch} is more than the {facts.train} training images")
    options = model_options(config, facts.classes)
    if like and like.facts == facts and model_options(like.config, facts.classes) == options:
        model, cost = like.model, like.cost
    else:
        model = models.skeleton(image_shape=facts.image_shape, **options)
        cost = forward_cost(model, facts.image_shape)
    rows = layer_rows(config, model)
    shapes = {row.name: (torch.Size(row.shape), row.pattern) for row in rows if row.pattern}
    config.method.plan(shapes, steps)
    optimizer, _ = optimization(config, model, facts.train // batch)
    config.method.admit(optimizer)
    expected = forecast(cost, config.method, images_per_step=batch, skip_first=config.flops.skip_first)
    return RunPlan(config, facts, model, rows, cost, expected)


def demand_parts(config: Config, ranks: int = 1) -> None:
    """Raise ConfigError when a batch cannot be shared out, over so many ranks, as the options ask."""
    recipe = config.recipe
    parts = ranks * recipe.accumulate
    if recipe.batch_size % parts:
        raise ConfigError(
            f"recipe.batch_size={recipe.batch_size} cannot be divided by {ranks} ranks x "
            f"recipe.accumulate={recipe.accumulate}"
        )
    if (recipe.mixup or recipe.cutmix) and recipe.batch_size // parts % 2:
        raise ConfigError(f"recipe.mixup and cutmix mix pairs: {recipe.batch_size // parts} images at a time are odd")


def optimization(config: Config, model: nn.Module, steps_per_epoch: int) -> tuple[Optimizer, optim.Schedule]:
    """The recipe's optimizer and learning-rate schedule for a model."""
    recipe = config.recipe
    optimizer = optim.build_optimizer(
        model,
        name=recipe.optimizer,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        args=recipe.optimizer_args,
    )
    schedule = optim.Schedule(
        optimizer,
        total_steps=recipe.epochs * steps_per_epoch,
        warmup_steps=round(recipe.warmup_epochs * steps_per_epoch),
        min_lr=recipe.min_lr,
    )
    return optimizer, schedule


def load_data(config: Config, device: torch.device | str = "cpu") -> datasets.Data:
    """The data set that the options name."""
    options, look = _dataset_options(config)
    return datasets.load(options.pop("name"), look=look, device=device, **options)


def known_facts(config: Config) -> datasets.Facts:
    """The facts of the data set, without opening it where that can be."""
    options, look = _dataset_options(config)
    sizes = {key: options[key] for key in ("holdout", "train_size", "val_size")}
    return datasets.facts(options["name"], look=look, **sizes) or load_data(config).facts


def _dataset_options(config: Config) -> tuple[dict[str, Any], Look]:
    options = asdict(config.dataset)
    shown = {key: options.pop(key) for key in ("image_size", "mean", "std", "crop_padding", "flip")}
    return options, Look(**shown, auto_augment=config.recipe.auto_augment, channels_last=config.channels_last)


def layer_rows(config: Config, model: nn.Module) -> list[Layer]:
    """Which weights would be sparse under these options; none for a method without a pattern."""
    sparsity = config.sparsity
    rows = survey(
        model,
        config.pattern,
        keep_dense=models.always_dense(model),
        include=sparsity.include,
        exclude=sparsity.exclude,
        overrides=sparsity.overrides,
    )
    if not config.method.sparse:
        return [Layer(row.name, row.shape, None, "dense training") for row in rows]
    rows = [config.method.review(row) for row in rows]
    demand_sparse(rows)
    return rows


def model_options(config: Config, num_classes: int) -> dict[str, Any]:
    model, drop_path = config.model, config.recipe.drop_path
    args = model.args | ({} if drop_path is None else {"drop_path_rate": drop_path})
    return {"name": model.name, "num_classes": num_classes, "width": model.width, "args": args}
