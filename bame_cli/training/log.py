"""What a run says: lines on the terminal and in `train.log`, rows in `metrics.jsonl`, and a tracker if asked.

The local files are the truth. A tracker that fails is reported once and never stops training.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from tqdm import tqdm

Row = dict[str, Any]
logger = logging.getLogger("bame_cli")


class Tracker(Protocol):
    """Somewhere else that rows go to."""

    def log(self, row: Row) -> None: ...

    def finish(self, status: str) -> None: ...


class RunLog:
    """The log of one run in its folder. Use as a context manager: its handlers leave with it.

    A record with `file_only` stays out of the terminal; one with `instead_of_bar` is shown there, when that is true,
    only where there is no progress bar.
    """

    def __init__(
        self, folder: Path, *, tracker: Callable[[], Tracker | None] = lambda: None, quiet: bool = False
    ) -> None:
        self.path = folder / "metrics.jsonl"
        terminal: logging.Handler = logging.NullHandler() if quiet else _Terminal()
        self.handlers: list[logging.Handler] = [terminal, _File(folder / "train.log")]
        self.open_tracker, self.tracker = tracker, None

    def __enter__(self) -> RunLog:
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in self.handlers:
            logger.addHandler(handler)
        self.rows = self.path.open("a")
        self.tracker = self._guard(self.open_tracker)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk has been reported by now
            self.rows.close()
        for handler in self.handlers:
            logger.removeHandler(handler)
            handler.close()

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row of metrics. What is not a finite number is written as null: the file stays valid JSON."""
        clean = {key: _plain(value) for key, value in row.items()}
        self.rows.write(json.dumps(clean, allow_nan=False) + "\n")
        self.rows.flush()
        if self.tracker is not None:
            tracker = self.tracker
            self._guard(lambda: tracker.log(clean))

    def masks(self, step: int, masks: Mapping[str, Tensor]) -> None:
        """Record masks in `masks/<step>.npz`, a bit per weight, entries in the order of each weight's `flatten()`."""
        folder = self.path.parent / "masks"
        folder.mkdir(exist_ok=True)
        packed: Any = {name: np.packbits(mask.cpu().numpy().ravel()) for name, mask in masks.items()}
        aside = folder / f"{step:08d}.tmp"
        with aside.open("wb") as file:
            np.savez(file, **packed)
        os.replace(aside, folder / f"{step:08d}.npz")

    def finish(self, status: str) -> None:
        """Tell the tracker how the run ended."""
        if self.tracker is not None:
            tracker = self.tracker
            self._guard(lambda: tracker.finish(status))

    def position(self) -> int:
        """Where the file of rows ends now, for a checkpoint to remember."""
        return self.rows.tell()

    def rewind(self, position: int) -> None:
        """Drop the rows that a checkpoint does not know of: they will be made again."""
        self.rows.truncate(min(position, self.rows.seek(0, 2)))
        self.rows.seek(0, 2)

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            logger.warning("the tracker failed and is left out from here on: %s", error)
            self.tracker = None
            return None


class NoLog(RunLog):
    """The log of a rank that does not lead: it says and writes nothing."""

    def __init__(self) -> None:
        self.handlers: list[logging.Handler] = [logging.NullHandler()]
        self.tracker = None

    def __enter__(self) -> RunLog:
        logger.propagate = False
        logger.addHandler(self.handlers[0])
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self.handlers[0])

    def row(self, row: Mapping[str, Any]) -> None: ...

    def masks(self, step: int, masks: Mapping[str, Tensor]) -> None: ...

    def position(self) -> int:
        return 0

    def rewind(self, position: int) -> None: ...


class _File(logging.FileHandler):
    """Every line, with its time. One that cannot be written ends nothing: a full disk is reported elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Terminal(logging.Handler):
    """Lines on standard output that do not tear the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tenth = getattr(record, "instead_of_bar", None)
        if getattr(record, "file_only", False) or (tenth is not None and not (tenth and not sys.stderr.isatty())):
            return
        text = self.format(record)
        with suppress(
            OSError, ValueError, AttributeError
        ):  # a terminal that is gone or a pipe that is full does not end a run
            tqdm.write(text if record.levelno < logging.WARNING else f"warning: {text}", file=sys.stdout)


def progress_bar(total: int, done: int, leads: bool = True) -> tqdm[Any]:
    """A bar over steps on standard error, for the rank that leads; silent when that is not a terminal."""
    disable = None if leads else True
    return tqdm(total=total, initial=done, unit="step", disable=disable, dynamic_ncols=True, file=sys.stderr)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- trackers ---


def _needed(module: str, extra: str) -> Any:
    """A library that is not installed with us. Raises RuntimeError that says how to have it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"logger={extra} needs pip install 'bame-cli[{extra}]' ({error})") from error


class WandbTracker:
    """Weights & Biases. Without an account it logs offline; it never asks for anything.

    Its run's id is kept in the folder, so that a run that goes on goes on in the same tracker run.
    """

    def __init__(self, *, project: str, name: str, group: str, mode: Any, folder: Path, config: Row) -> None:
        wandb = _needed("wandb", "wandb")
        mark = folder / "wandb" / "run-id"
        if not mark.is_file():
            mark.parent.mkdir(exist_ok=True)
            mark.write_text(secrets.token_hex(4))

        if mode == "online" and not wandb.api.api_key:
            logger.warning("wandb: no API key, logging offline; `wandb sync` sends it later")
            mode = "offline"
        self.run = wandb.init(
            project=project,
            name=name,
            group=group,
            mode=mode,
            dir=str(folder),
            config=config,
            id=mark.read_text(),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, row: Row) -> None:
        self.run.log(row, step=row["step"])

    def finish(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status == "finished" else 1)


class TensorBoardTracker:
    """Scalars under `tensorboard/` in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(self, row: Row) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self.writer.add_scalar(key, value, row["step"])

    def finish(self, status: str) -> None:
        self.writer.add_text("status", status)
        self.writer.close()
