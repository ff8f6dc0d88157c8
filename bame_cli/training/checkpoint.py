"""Checkpoints that survive a power cut: written aside, flushed, renamed; the one before is kept; safe to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bame_cli.errors import ConfigError

State = dict[str, Any]


def to_cpu(value: Any) -> Any:
    """The same nest of dicts and lists with every tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    return [to_cpu(item) for item in value] if isinstance(value, list) else value


class Checkpoints:
    """`last.pt`, `previous.pt` (the last before it) and `best.pt` (weights of the best epoch) in one folder.

    Only a process that `writes` writes: the others of a run read what it wrote.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.last, self.previous, self.best = (folder / f"{name}.pt" for name in ("last", "previous", "best"))

    def save(self, state: State) -> None:
        """Make `state` the last checkpoint. At no instant is there no complete one."""
        if not self.writes:
            return
        aside = _write(self.last, state)
        if self.last.exists():
            os.replace(self.last, self.previous)
        os.replace(aside, self.last)

    def save_best(self, state: State) -> None:
        """Keep the weights of the best epoch."""
        if self.writes:
            os.replace(_write(self.best, state), self.best)

    def load(self) -> tuple[State | None, str]:
        """The newest state that can be read, and a warning when that is not the last one; None when there is none.

        Raises ConfigError when checkpoints exist but none can be read: a fresh start must be asked for.
        """
        there = [path for path in (self.last, self.previous) if path.exists()]
        damaged = []
        for path in there:
            try:
                state: State = torch.load(path, map_location="cpu", weights_only=True)
            except Exception:  # whatever a torn file makes the reader raise
                damaged.append(f"{path.name} is damaged")
                continue
            return state, "; ".join([*damaged, f"going on from {path.name}"]) if damaged else ""
        if damaged:
            raise ConfigError(f"{self.folder}: {'; '.join(damaged)}; run.overwrite=true starts again from nothing")
        return None, ""


def _write(path: Path, state: State) -> Path:
    aside = path.with_suffix(".tmp")
    try:
        with aside.open("wb") as file:
            torch.save(to_cpu(state), file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)  # half a checkpoint is of no use, and may be what fills the disk
        raise
    return aside
