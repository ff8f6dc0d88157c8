"""What ended a run early, in one line, with what would help where we know it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import torch


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
