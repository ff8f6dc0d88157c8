"""The training loop: one screen, any method. It calls the method at its three moments and never asks which it is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bame_cli.methods.base import Method
from bame_cli.sparsity.flops import Bill
from bame_cli.sparsity.pattern import Pattern
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.data import Batch, Data
from bame_cli.training.log import RunLog, logger, progress_bar
from bame_cli.training.optim import Schedule


class Interrupted(Exception):
    """The run was told to stop; everything is saved, the same command goes on."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


@dataclass
class Progress:
    """Where a run is, apart from weights and states: all of it goes into the checkpoint."""

    step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    best_top1: float | None = None
    best_epoch: int | None = None


@dataclass
class Run:
    """Everything that one training run is made of."""

    model: nn.Module
    method: Method
    optimizer: Optimizer
    schedule: Schedule
    data: Data
    bill: Bill
    log: RunLog
    checkpoints: Checkpoints
    target: Mapping[str, Pattern]
    epochs: int
    batch_size: int
    seed: int
    label_smoothing: float = 0.0
    eval_batch_size: int = 256
    log_every: int = 50
    per_layer: bool = False
    masks_every: int | None = None
    save_every_epochs: int = 1
    progress: Progress = field(default_factory=Progress)
    lap: float = field(default_factory=time.monotonic)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) // self.batch_size

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch


def train(run: Run) -> None:
    """Train from wherever `run.progress` is to the end.

    Raises Interrupted after saving when SIGINT or SIGTERM came, FloatingPointError when the loss or a weight is no
    longer a number (the last checkpoint is from before that).
    """
    if run.masks_every and run.progress.step == 0:
        run.log.masks(0, run.method.current_masks())
    with stop_signals() as stopped, progress_bar(run.total_steps, run.progress.step) as bar:
        while run.progress.step < run.total_steps:
            epoch, start = divmod(run.progress.step, run.steps_per_epoch)
            for batch in run.data.train.train_batches(run.batch_size, seed=run.seed, epoch=epoch, start=start):
                train_step(run, batch)
                bar.update()
                if run.progress.step % run.steps_per_epoch and run.progress.step % run.log_every == 0:
                    run.log.row(_row(run) | {"loss": run.progress.last["step_loss"]})
                if run.masks_every and run.progress.step % run.masks_every == 0:
                    run.log.masks(run.progress.step, run.method.current_masks())
                if stopped():
                    break
            if run.progress.step % run.steps_per_epoch == 0:
                end_epoch(run)
                said = f"loss {run.progress.last['loss']:.3f}, top-1 {run.progress.last['top1']:.2f} %"
                bar.set_postfix_str(said)
                # Without a terminal there is no bar: a line per tenth of the run instead, and every epoch in the file.
                tenth = (epoch + 1) % max(1, run.epochs // 10) == 0
                extra = {"file_only": not (bar.disable and tenth)}
                logger.info("epoch %d of %d: %s", epoch + 1, run.epochs, said, extra=extra)
            if signum := stopped():
                save(run)
                raise Interrupted(signum)


def train_step(run: Run, batch: Batch) -> None:
    """One optimizer step, billed by what the method says it cost."""
    step, (images, labels) = run.progress.step, batch
    run.progress.last["lr"] = run.schedule.set(step)
    run.model.train()
    run.optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(run.model(images), labels, label_smoothing=run.label_smoothing)
    value = loss.item()
    if value != value or abs(value) == float("inf"):
        raise FloatingPointError(f"the loss is {value} at step {step}")
    loss.backward()
    run.method.after_backward(step)
    run.optimizer.step()
    run.method.after_update(step)
    run.bill.charge(run.method.densities(step), len(labels))
    run.progress.step += 1
    run.progress.loss_sum += value
    run.progress.last["step_loss"] = value


def end_epoch(run: Run) -> None:
    """Evaluate the network at its target pattern, write the epoch's row, keep checkpoints."""
    progress = run.progress
    epoch = progress.step // run.steps_per_epoch - 1
    now = run.method.pattern_at(progress.step)
    with run.method.hardened():
        figures = evaluate(run.model, run.data.val.eval_batches(run.eval_batch_size))
    if now is None:
        soft = evaluate(run.model, run.data.val.eval_batches(run.eval_batch_size))
        figures |= {f"soft_{key}": value for key, value in soft.items()}
    progress.last |= figures | {"loss": progress.loss_sum / run.steps_per_epoch}
    progress.loss_sum = 0.0
    # An epoch whose network is not yet at the target pattern is no candidate for the best one.
    if now == run.target and (progress.best_top1 is None or figures["top1"] > progress.best_top1):
        progress.best_top1, progress.best_epoch = figures["top1"], epoch
        run.checkpoints.save_best({"model": run.model.state_dict(), "epoch": epoch, **figures})
    run.log.row(_row(run) | {"loss": progress.last["loss"]} | figures | run.method.metrics(per_layer=run.per_layer))
    if (epoch + 1) % run.save_every_epochs == 0 or progress.step == run.total_steps:
        save(run)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """Top-1 and top-5 in percent and the mean cross-entropy, every image counted once."""
    model.eval()
    count, correct1, correct5, loss = 0, 0, 0, 0.0
    for images, labels in batches:
        scores = model(images)
        hits = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels[:, None]
        count += len(labels)
        correct1 += int(hits[:, 0].sum())
        correct5 += int(hits.sum())
        loss += float(F.cross_entropy(scores, labels, reduction="sum"))
    return {"top1": 100 * correct1 / count, "top5": 100 * correct5 / count, "val_loss": loss / count}


def _row(run: Run) -> dict[str, Any]:
    """What every row of metrics starts with. `step` counts the steps made."""
    epoch = (run.progress.step - 1) // run.steps_per_epoch
    return {"step": run.progress.step, "epoch": epoch, "lr": run.progress.last["lr"], "flops": run.bill.total}


# --- stopping and going on ---


def save(run: Run) -> None:
    """Write the last checkpoint: all that the uncut run would know at this step."""
    now = time.monotonic()
    run.progress.seconds, run.lap = run.progress.seconds + now - run.lap, now
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "method": run.method.state_dict(),
        "bill": run.bill.state_dict(),
        "progress": asdict(run.progress),
        "rows": run.log.position(),
        "random": random_state(),
    }
    run.checkpoints.save(state)


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put a run, freshly attached, where a checkpoint left it."""
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.method.load_state_dict(state["method"])
    run.bill.load_state_dict(state["bill"])
    run.progress = Progress(**state["progress"])
    run.log.rewind(state["rows"])
    set_random_state(state["random"])
    logger.info("resumed at step %d of %d", run.progress.step, run.total_steps)


def random_state() -> dict[str, Tensor]:
    """Torch's generators, which dropout and drop path draw from; data draw from (seed, epoch, index) instead."""
    cuda = {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return {"cpu": torch.get_rng_state(), **(cuda if torch.cuda.is_available() else {})}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda{index}"], index)


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Within it, SIGINT and SIGTERM are noted instead of obeyed; the function says which came, or 0.

    A second SIGINT is obeyed at once. Outside the main thread signals are left alone.
    """
    seen: list[int] = []

    def note(signum: int, frame: object) -> None:
        seen.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: seen[0] if seen else 0
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
