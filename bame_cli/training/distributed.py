"""Ranks: the processes that train one network together, started by torchrun; a rank of one when there are no others.

Gradients travel through DistributedDataParallel (nccl on GPUs, gloo on CPUs). Everything else that ranks tell each
other is a few numbers, over gloo, so that no accelerator waits for it. Rank 0 leads: it alone writes.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bame_cli.errors import ConfigError, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Which of `world` processes this one is, and the few things that they do together."""

    rank: int = 0
    world: int = 1
    control: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> slice:
        """This rank's share of a batch of `count` images, which the world divides."""
        size = count // self.world
        return slice(self.rank * size, (self.rank + 1) * size)

    def total(self, values: list[float]) -> list[float]:
        """Sums over ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def most(self, *values: float) -> list[float]:
        """Maxima over ranks."""
        return self._reduced(list(values), dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """The mean over ranks; no number when it is none on any rank."""
        return self.total([value])[0] / self.world

    def lead(self, call: Callable[[], T]) -> T:
        """What rank 0 makes of `call`, on every rank. A ConfigError it raises there is raised on every rank."""
        if self.world == 1:
            return call()
        said: list[Any] = [None, None]
        if self.leads:
            said = _outcome(call)
        dist.broadcast_object_list(said, src=0, group=self.control)
        if said[1] is not None:
            raise ConfigError(said[1])
        result: T = said[0]
        return result

    def first(self, call: Callable[[], T]) -> T:
        """`call` on every rank, on rank 0 before the others: what it leaves on disk they find."""
        mine: list[T] = []
        self.lead(lambda: mine.append(call()))
        return mine[0] if mine else call()

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def demand_same(self, what: str, value: str) -> None:
        """Raise RuntimeError unless every rank has the same value."""
        if self.world == 1:
            return
        seen: list[Any] = [None] * self.world
        dist.all_gather_object(seen, value, group=self.control)
        if len(set(seen)) > 1:
            raise RuntimeError(f"the ranks do not agree on {what}: {', '.join(map(str, seen))}")

    def wrapped(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model whose backward pass averages gradients over ranks."""
        if self.world == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the batch statistics of rank 0: those that will be saved are those that are evaluated."""
        for buffer in model.buffers() if self.world > 1 else ():
            dist.broadcast(buffer, src=0)

    def _reduced(self, values: list[float], how: Any) -> list[float]:
        if self.world == 1:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, how, group=self.control)
        reduced: list[float] = numbers.tolist()
        return reduced


ALONE = Ranks()


def unsynced(model: nn.Module, skip: bool) -> AbstractContextManager[None]:
    """Within it, where `skip`, a backward pass keeps its gradients to itself: for all micro-batches but the last."""
    if skip and isinstance(model, DistributedDataParallel):
        quiet: AbstractContextManager[None] = model.no_sync()
        return quiet
    return nullcontext()


def join(device: str) -> tuple[Ranks, torch.device]:
    """This process among those that torchrun started, and the device it trains on.

    `auto` is this rank's GPU where there are GPUs. Raises ConfigError for a device that is not there.
    """
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = ("cuda" if world == 1 else f"cuda:{local}") if cuda else "cpu"
    elif device == "cuda" and world > 1:
        device = f"cuda:{local}"
    elif device.startswith("cuda:") and world > 1:
        raise ConfigError(f"device={device}: every rank takes the GPU of its number; leave device=auto, or device=cpu")
    chosen = _there(device)
    if world == 1:
        return ALONE, chosen
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), world, _control()), chosen


def local_share(count: int) -> int:
    """Of so many CPUs of a machine, those of one of its ranks; at least one."""
    return max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


_groups: list[Any] = []


def _control() -> Any:
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


def _there(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name}: not on this machine ({first_line(error)})") from error
    return device


def _outcome(call: Callable[[], Any]) -> list[Any]:
    try:
        return [call(), None]
    except ConfigError as error:
        return [None, str(error)]
