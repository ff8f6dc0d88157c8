"""A run as far as it got, and what ended it early: in one line, with what would help where we know it."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bame_cli.errors import ConfigError
from bame_cli.runs.plan import RunPlan
from bame_cli.runs.summary import figures
from bame_cli.training.distributed import Ranks
from bame_cli.training.loop import Run
from bame_cli.training.signals import Interrupted


@dataclass
class Attempt:
    """A run as far as it was built, what is known of it before its first step, and how it ended.

    begun: whether it has trained, so that nothing is the options' fault any more. proof: of its final network.
    trace: the traceback of what it failed by.
    """

    plan: RunPlan
    place: tuple[Ranks, torch.device]
    identity: dict[str, Any]
    inherited: int
    run: Run | None = None
    begun: bool = False
    proof: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    code: int = 0
    error: str = ""
    trace: str = ""

    def ends(self, status: str, code: int, error: str) -> None:
        self.status, self.code, self.error = status, code, error

    def result(self) -> dict[str, Any]:
        """`result.json`: what tables and other programs read."""
        said: dict[str, Any] = {"status": self.status} | ({"error": self.error} if self.error else {})
        said |= self.identity | (figures(self.plan, self.run, self.inherited) if self.run else {})
        return said | self.proof


@contextmanager
def caught(attempt: Attempt, where: Path) -> Iterator[None]:
    """Note in `attempt` what ended it. A ConfigError before the first step goes on: the options are refused."""
    try:
        yield
    except ConfigError as error:
        if not attempt.begun:
            raise
        attempt.ends("failed", 1, str(error))
    except Interrupted as stop:
        attempt.ends("interrupted", stop.exit_code, f"{stop}; the same command goes on")
    except FloatingPointError as diverged:
        attempt.ends("diverged", 1, str(diverged))
    except Exception as failure:
        attempt.ends("failed", 1, said(failure, where))
        attempt.trace = traceback.format_exc()


def said(failure: BaseException, where: Path) -> str:
    """One line for `result.json` and the terminal; the traceback goes to `train.log`. where: the run's folder."""
    chain = list(_chain(failure))
    if any(getattr(error, "errno", None) == errno.ENOSPC for error in chain):
        return f"no space left on the disk of {where}; with room made, the same command goes on"
    if any(_memory(error) for error in chain):
        return "out of memory; recipe.accumulate=2 (or more) computes the same step in smaller parts"
    lines = [line for line in str(failure).splitlines() if line.strip()] or ["no message"]
    if lines[0].startswith("Caught "):  # a worker's exception, whose own words come last
        return lines[-1].strip()
    if "onnection closed by peer" in lines[0] or "onnection reset by peer" in lines[0]:
        return "another rank failed first: train.log and the launcher say how; the same command goes on"
    text = f"{type(failure).__name__}: {lines[0].strip()}"
    if "DataLoader worker" in text:
        return f"{text} (dataset.workers=0 reads without workers)"
    return text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _memory(error: BaseException) -> bool:
    told = isinstance(error, RuntimeError) and ("not enough memory" in str(error) or "out of memory" in str(error))
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)
