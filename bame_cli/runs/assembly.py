"""Options and a blueprint made into the parts of a run, at its first step. No logic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn

from bame_cli.options.schema import Config
from bame_cli.runs.path import source
from bame_cli.runs.plan import RunPlan, model_options, optimization
from bame_cli.sparsity.flops import Bill
from bame_cli.sparsity.layers import sparse_layers
from bame_cli.tasks.images import models
from bame_cli.tasks.images.augment import BatchAugment
from bame_cli.tasks.images.data import Data
from bame_cli.training.average import Average
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.distributed import Ranks
from bame_cli.training.execution import execute_sparsely
from bame_cli.training.log import NoLog
from bame_cli.training.loop import Run, Settings
from bame_cli.training.precision import Precision


def build(plan: RunPlan, data: Data, where: Path, place: tuple[Ranks, torch.device]) -> Run:
    """Everything a run is made of, at its first step; it has no log yet, and nothing is written."""
    config, recipe, (ranks, device) = plan.config, plan.config.recipe, place
    torch.manual_seed(config.seed)
    model, notes = _model(plan, data, device)
    optimizer, schedule = optimization(config, model, plan.steps_per_epoch)
    config.method.attach(sparse_layers(model, plan.rows), optimizer, plan.total_steps)
    forward = ranks.wrapped(model, device)
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix, "erasing": recipe.erasing}
    run = Run(
        model=model,
        forward=cast(nn.Module, torch.compile(forward)) if config.compile else forward,
        method=config.method,
        optimizer=optimizer,
        schedule=schedule,
        precision=Precision(device, amp=config.amp, clip_grad=recipe.clip_grad, clip_mode=recipe.clip_mode),
        data=data,
        augment=BatchAugment(classes=len(data.classes), device=device, **alphas),
        average=Average(model, recipe.ema, plan.patterns) if recipe.ema else None,
        bill=Bill(plan.cost, config.flops.skip_first),
        log=NoLog(),
        checkpoints=Checkpoints(where / "checkpoints", writes=ranks.leads),
        target=plan.patterns,
        settings=_settings(config),
        ranks=ranks,
        notes=notes,
    )
    if config.execution == "sparse":
        execute_sparsely(model, config.method, device)  # now that the average has made its copy of the model
    return run


def _model(plan: RunPlan, data: Data, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The network with its first weights, and what there is to say of them."""
    config = plan.config
    options = model_options(config, plan.facts.classes)
    model = models.create(
        image_shape=data.image_shape, pretrained=config.model.pretrained and not config.model.parent, **options
    )
    notes = _load_weights(config, model)
    if config.sync_batchnorm:
        model = models.synchronized(model)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model.to(device), notes


def _settings(config: Config) -> Settings:
    recipe, log, checkpoint = config.recipe, config.log, config.checkpoint
    return Settings(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        seed=config.seed,
        label_smoothing=recipe.label_smoothing,
        accumulate=recipe.accumulate,
        eval_batch_size=recipe.eval_batch_size,
        log_every=log.every,
        per_layer=log.per_layer,
        masks_every=log.masks_every,
        save_every_epochs=checkpoint.every_epochs,
        save_every_steps=checkpoint.every_steps,
        save_every_minutes=checkpoint.every_minutes,
    )


def _load_weights(config: Config, model: nn.Module) -> list[str]:
    path = source(config)
    if path is None:
        return []
    return models.load_weights(model, path / "model.safetensors" if path.is_dir() else path)
