"""The training loop: one screen, any method. It calls the method at its three moments and never asks which it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bame_cli.methods.base import Method
from bame_cli.sparsity.flops import Bill
from bame_cli.sparsity.pattern import Pattern
from bame_cli.tasks.images.augment import BatchAugment
from bame_cli.tasks.images.batches import Batch
from bame_cli.tasks.images.data import Data
from bame_cli.training.average import Average
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.distributed import ALONE, Ranks, unsynced
from bame_cli.training.log import RunLog, logger, progress_bar
from bame_cli.training.optim import Schedule
from bame_cli.training.precision import Precision
from bame_cli.training.seeding import seed_all
from bame_cli.training.signals import Interrupted, Stopped


@dataclass
class Progress:
    """Where a run is, apart from weights and states: all of it goes into the checkpoint."""

    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    last: dict[str, float] = field(default_factory=dict)
    best_top1: float | None = None
    best_epoch: int | None = None


@dataclass(frozen=True)
class Settings:
    """The numbers of a run. batch_size: images per optimizer step, over all ranks and micro-batches."""

    epochs: int
    batch_size: int
    seed: int
    label_smoothing: float = 0.0
    accumulate: int = 1
    eval_batch_size: int = 256
    log_every: int = 50
    per_layer: bool = False
    masks_every: int | None = None
    save_every_epochs: int = 1
    save_every_steps: int | None = None
    save_every_minutes: float | None = None


@dataclass
class Run:
    """Everything that one training run is made of. forward: the model as it is trained, compiled or over ranks.

    notes: what there is to say of the weights that it begins with.
    """

    model: nn.Module
    forward: nn.Module
    method: Method
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    data: Data
    augment: BatchAugment
    average: Average | None
    bill: Bill
    log: RunLog
    checkpoints: Checkpoints
    target: Mapping[str, Pattern]
    settings: Settings
    ranks: Ranks = ALONE
    notes: list[str] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    lap: float = field(default_factory=time.monotonic)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) // self.settings.batch_size

    @property
    def total_steps(self) -> int:
        return self.settings.epochs * self.steps_per_epoch

    def network(self) -> nn.Module:
        """The network that this run is judged by and leaves behind: the average of weights where there is one."""
        return self.average.network() if self.average else self.model


def train(run: Run, stopped: Stopped = lambda: 0) -> None:
    """Train from wherever `run.progress` is to the end.

    Raises Interrupted after saving when `stopped` names a signal, FloatingPointError when the loss or a weight is no
    longer a number (the last checkpoint is from before that).
    """
    settings, progress = run.settings, run.progress
    if settings.masks_every and progress.step == 0:
        run.log.masks(0, run.method.current_masks())
    with progress_bar(run.total_steps, progress.step, run.ranks.leads) as bar:
        while progress.step < run.total_steps:
            epoch, start = divmod(progress.step, run.steps_per_epoch)
            batches = run.data.train.train_batches(
                settings.batch_size, seed=settings.seed, epoch=epoch, start=start, ranks=run.ranks
            )
            for batch in batches:
                train_step(run, batch)
                if bar.update():
                    bar.set_postfix_str(_short(run))
                if progress.step % run.steps_per_epoch and progress.step % settings.log_every == 0:
                    run.log.row(_row(run) | {"loss": progress.last["step_loss"]})
                if settings.masks_every and progress.step % settings.masks_every == 0:
                    run.log.masks(progress.step, run.method.current_masks())
                if progress.step % run.steps_per_epoch == 0:
                    end_epoch(run)
                # All ranks stop and save at the same step, whichever of them was told to.
                signum, due = run.ranks.most(stopped(), _due(run))
                if signum or due:
                    save(run)
                if signum:
                    raise Interrupted(int(signum))


def train_step(run: Run, batch: Batch) -> None:
    """One optimizer step, billed by what the method says it cost. A step that the scaler skips calls no hook."""
    step, progress = run.progress.step, run.progress
    progress.last["lr"] = run.schedule.set(step)
    if not run.model.training:
        run.model.train()
    run.optimizer.zero_grad(set_to_none=True)
    loss = backward(run, batch)
    if made := run.precision.unscaled(run.model, run.optimizer):
        run.method.after_backward(step)
        run.precision.update(run.model, run.optimizer)
        run.method.after_update(step)
        if run.average:
            run.average.update(run.model, step)
    progress.skipped += not made
    run.precision.end_step()
    run.bill.charge(run.method.densities(step), run.settings.batch_size)
    progress.step += 1
    progress.loss_sum += loss
    progress.last |= {"step_loss": loss, "made": float(made)}


def backward(run: Run, batch: Batch) -> float:
    """Gradients of the batch, a micro-batch at a time; returns its mean loss over micro-batches and ranks."""
    settings, loss = run.settings, 0.0
    parts = list(zip(*(tensor.chunk(settings.accumulate) for tensor in batch), strict=True))
    for index, part in enumerate(parts):
        seed_all(settings.seed, run.progress.step, run.ranks.rank, index)  # mixing, dropout, drop path
        images, labels = run.augment(*part)
        with unsynced(run.forward, skip=index + 1 < len(parts)):
            with run.precision.autocast():
                share = F.cross_entropy(run.forward(images), labels, label_smoothing=settings.label_smoothing)
                share = share / len(parts)
            loss += share.item()
            run.precision.scale(share).backward()
    loss = run.ranks.mean(loss)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {run.progress.step}")
    return loss


def end_epoch(run: Run) -> None:
    """Evaluate the network at its target pattern, write the epoch's row, keep checkpoints."""
    progress, epoch = run.progress, run.progress.step // run.steps_per_epoch - 1
    now, network = run.method.pattern_at(progress.step), run.network()
    _demand_numbers(run)
    run.ranks.demand_same("the masks", mask_hash := run.method.mask_hash())
    with run.method.hardened():
        figures = _evaluated(run, network)
        if run.average:
            figures |= {f"raw_{key}": value for key, value in _evaluated(run, run.model).items()}
    if now is None:
        figures |= {f"soft_{key}": value for key, value in _evaluated(run, run.model).items()}
    progress.last |= figures | {"loss": progress.loss_sum / run.steps_per_epoch}
    progress.loss_sum = 0.0
    # No candidate for the best: an epoch whose network is not yet at the target pattern, or is a skipped step behind.
    best = -1.0 if progress.best_top1 is None else progress.best_top1
    if now == run.target and progress.last["made"] and figures["top1"] > best:
        progress.best_top1, progress.best_epoch = figures["top1"], epoch
        run.checkpoints.save_best({"model": network.state_dict(), "epoch": epoch, **figures})
    row = _row(run) | {"loss": progress.last["loss"]} | ({"mask_hash": mask_hash} if mask_hash else {}) | figures
    run.log.row(row | run.method.metrics(per_layer=run.settings.per_layer))
    said = f"loss {progress.last['loss']:.3f}, top-1 {figures['top1']:.2f} %"
    # Without a terminal there is no bar: a line per tenth of the run instead, and every epoch in the file.
    tenth = (epoch + 1) % max(1, run.settings.epochs // 10) == 0
    logger.info("epoch %d of %d: %s", epoch + 1, run.settings.epochs, said, extra={"instead_of_bar": tenth})


def _evaluated(run: Run, network: nn.Module) -> dict[str, float]:
    run.ranks.share_buffers(network)
    return evaluate(network, run.data.val.eval_batches(run.settings.eval_batch_size, ranks=run.ranks), run.ranks)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], ranks: Ranks = ALONE) -> dict[str, float]:
    """Top-1 and top-5 in percent and the mean cross-entropy in full precision, every image counted once.

    Over several ranks each brings its own batches, and all get the figures of all.
    """
    model.eval()
    count, correct1, correct5, loss = 0, 0, 0, 0.0
    for shown, labels in batches:
        scores = model(shown)
        hits = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        count += len(labels)
        correct1 += int(hits[:, 0].sum())
        correct5 += int(hits.sum())
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
    images, top1, top5, loss = ranks.total([count, correct1, correct5, loss])
    return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "val_loss": loss / images}


def _row(run: Run) -> dict[str, Any]:
    """What every row of metrics starts with. `step` counts the steps made."""
    epoch = (run.progress.step - 1) // run.steps_per_epoch
    row = {"step": run.progress.step, "epoch": epoch, "lr": run.progress.last["lr"], "flops": run.bill.total}
    row["density"] = _density(run)
    return row | ({"skipped_steps": run.progress.skipped} if run.precision.scales else {})


def _density(run: Run) -> float:
    """Share of the sparse layers' weights that the last step's forward pass used; 1 for a dense network."""
    now = run.method.densities(run.progress.step - 1)
    sizes = {name: run.model.get_parameter(name).numel() for name in run.target}
    used = sum(float(now[name].forward) * size for name, size in sizes.items())
    return used / sum(sizes.values()) if sizes else 1.0


def _short(run: Run) -> str:
    """What the bar says besides its rate and what is left."""
    last = run.progress.last
    top1 = f", top-1 {last['top1']:.2f} %" if "top1" in last else ""
    return f"loss {last['step_loss']:.3f}{top1}, density {_density(run):.3g}, {run.bill.total:.2e} FLOPs"


# --- stopping and going on ---


def _due(run: Run) -> bool:
    """Whether a checkpoint is due after this step, by steps, minutes or epochs, whichever comes first."""
    settings, step = run.settings, run.progress.step
    epoch, rest = divmod(step, run.steps_per_epoch)
    by_epoch = rest == 0 and (epoch % settings.save_every_epochs == 0 or step == run.total_steps)
    by_step = settings.save_every_steps is not None and step % settings.save_every_steps == 0
    minutes = settings.save_every_minutes
    return by_epoch or by_step or (minutes is not None and time.monotonic() - run.lap >= 60 * minutes)


def save(run: Run) -> None:
    """Write the last checkpoint: all that the uncut run would know at this step."""
    _demand_numbers(run)
    now = time.monotonic()
    run.progress.seconds, run.lap = run.progress.seconds + now - run.lap, now
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "method": run.method.state_dict(),
        "precision": run.precision.state_dict(),
        "average": run.average.state_dict() if run.average else None,
        "bill": run.bill.state_dict(),
        "progress": asdict(run.progress),
        "rows": run.log.position(),
    }
    run.checkpoints.save(state)


def _demand_numbers(run: Run) -> None:
    for name, p in run.model.named_parameters():
        if not p.isfinite().all():
            raise FloatingPointError(f"{name} holds what is not a number after step {run.progress.step}")


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put a run, freshly attached, where a checkpoint left it."""
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.method.load_state_dict(state["method"])
    run.precision.load_state_dict(state["precision"])
    if run.average:
        run.average.load_state_dict(state["average"])
    run.bill.load_state_dict(state["bill"])
    run.progress = Progress(**state["progress"])
    run.log.rewind(state["rows"])
    logger.info("resumed at step %d of %d", run.progress.step, run.total_steps)
