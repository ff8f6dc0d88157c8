"""What surrounds a step: projection, checkpoints, reading images, the loop itself, peak memory."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bame_cli.bench.steps import Lane, lane, race, random_batch
from bame_cli.bench.timing import Row, figure, interleaved, now, ratios, row, timed
from bame_cli.options.schema import Config
from bame_cli.runs.assembly import build
from bame_cli.runs.plan import load_data, optimization, run_plan
from bame_cli.tasks.images.data import Data
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.distributed import ALONE
from bame_cli.training.log import RunLog
from bame_cli.training.loop import Run, evaluate, train


def projection(lane: Lane, rounds: int) -> Iterator[Row]:
    """All masks of the model: against sort-and-scatter, and against a plain copy of the same weights."""
    layers = [(p.detach(), pattern, torch.empty_like(p, dtype=torch.bool)) for p, pattern in lane.layers.values()]
    copies = [torch.empty_like(w) for w, _, _ in layers]
    calls = {
        "ours": lambda: [pattern.project(w, out=mask) for w, pattern, mask in layers],
        "sort": lambda: [_by_sorting(pattern.blocks(w), pattern.n) for w, pattern, _ in layers],
        "copy": lambda: [c.copy_(w) for c, (w, _, _) in zip(copies, layers, strict=True)],
    }
    seconds = interleaved(calls, rounds, lane.device)
    yield row("projection", "time_against_sort", ratios(seconds["ours"], seconds["sort"]))
    yield row("projection", "time_against_copy", ratios(seconds["ours"], seconds["copy"]))
    weights = sum(w.numel() for w, _, _ in layers)
    yield figure("projection", "weights_per_second", weights / statistics.median(seconds["ours"]), weights=weights)


def _by_sorting(blocks: Tensor, n: int) -> Tensor:
    """The usual way to an N:M mask: sort every block, scatter ones to the first N."""
    order = torch.sort(blocks.abs(), dim=2, descending=True, stable=True).indices.narrow(2, 0, n)
    return torch.zeros_like(blocks, dtype=torch.bool).scatter_(2, order, True)


def checkpoint(name: str, lane: Lane, step: float, rounds: int) -> Iterator[Row]:
    """Saving and loading all that a run of this method would keep, in dense steps."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        parts: dict[str, Any] = {"model": lane.model, "optimizer": lane.optimizer, "method": lane.method}
        calls = {
            "save": lambda: checkpoints.save({key: part.state_dict() for key, part in parts.items()}),
            "load": checkpoints.load,
        }
        for what, seconds in interleaved(calls, rounds, lane.device).items():
            yield row(name, f"checkpoint_{what}", [value / step for value in seconds])


def loop(config: Config, rounds: int, device: torch.device) -> Iterator[Row]:
    """An epoch by `train`, with its log, evaluation and checkpoints, against a bare loop with an evaluation.

    Both see the data set of the options and start from a run that is built. And how long reading the images takes, and
    building the run, of a bare epoch.
    """
    recipe = replace(config.recipe, epochs=1, warmup_epochs=0)
    config, data = replace(config, recipe=recipe), load_data(config, device)
    seconds: dict[str, list[float]] = {"built": [], "ours": [], "bare": [], "read": []}
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), quiet=True) as log:
            start = now(device)
            ours = build(run_plan(config, data.facts), data, Path(folder), (ALONE, device))
            seconds["built"].append(now(device) - start)
            bare = build(run_plan(config, data.facts), data, Path(folder), (ALONE, device))
            ours.log = log
            ours.checkpoints.folder.mkdir()
            seconds["ours"].append(timed(partial(train, ours), device))
            seconds["bare"].append(timed(partial(_bare, config, bare), device))
            seconds["read"].append(timed(partial(_read, config, data), device))
    seconds = {name: values[1:] for name, values in seconds.items()}  # the first round warms caches
    images = len(data.train) // config.recipe.batch_size * config.recipe.batch_size
    yield row("loop", "epoch_against_bare_loop", ratios(seconds["ours"], seconds["bare"]))
    yield row("loop", "reading_of_bare_epoch", ratios(seconds["read"], seconds["bare"]))
    yield row("loop", "building_of_bare_epoch", ratios(seconds["built"], seconds["bare"]))
    yield figure("loop", "images_per_second_read", images / statistics.median(seconds["read"]))


def _read(config: Config, data: Data) -> None:
    for _ in data.train.train_batches(config.recipe.batch_size, seed=0, epoch=0):
        pass


def _bare(config: Config, run: Run) -> None:
    optimizer, _ = optimization(config, run.model, run.steps_per_epoch)
    run.model.train()
    for images, labels in run.data.train.train_batches(config.recipe.batch_size, seed=0, epoch=0):
        optimizer.zero_grad()
        F.cross_entropy(run.model(images), labels).backward()
        optimizer.step()
    evaluate(run.model, run.data.val.eval_batches(config.recipe.eval_batch_size))


def memory(configs: Mapping[str, Config], size: int, batch: int, device: torch.device) -> Iterator[Row]:
    """Peak memory of two steps of each method against dense: on the device, or what a process grows by on a CPU."""
    peaks = {name: _peak(config, size, batch, device) for name, config in configs.items()}
    for name, peak in peaks.items():
        yield row(name, "peak_memory", [peak / peaks["dense"]], bytes=peak)


def _peak(config: Config, size: int, batch: int, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _two_steps(config, size, batch, device)
        return torch.cuda.max_memory_allocated(device)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        kilobytes: Any = pool.apply(_resident, (config, size, batch, torch.get_num_threads()))
    return int(kilobytes) * 1024


def _resident(config: Config, size: int, batch: int, threads: int) -> int:
    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _two_steps(config, size, batch, torch.device("cpu"))
    return max(1, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def _two_steps(config: Config, size: int, batch: int, device: torch.device) -> None:
    race({"": lane(config, size, device)}, *random_batch(config, size, batch, device), rounds=1)
