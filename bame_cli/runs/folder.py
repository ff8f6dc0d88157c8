"""A run's folder: claimed by one process at a time, in a known state, with every file written whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bame_cli.errors import ConfigError, first_line

FILES = ("config.yaml", "layers.json", "metrics.jsonl", "train.log", "model.safetensors", "result.json", "digest")
FOLDERS = ("checkpoints", "export", "masks", "plots", "tensorboard", "wandb")
_RESERVE = ".reserve"
# Files on their way to being those, which a cut may leave. By themselves they are no run.
_ASIDE = tuple(f"{name}.tmp" for name in FILES)
_NO_RUN = {".lock", _RESERVE, *_ASIDE}


def result_of(folder: Path) -> dict[str, Any] | None:
    """The run's result as far as it got; None when there is none. ConfigError when the file cannot be read."""
    path = folder / "result.json"
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); run.overwrite=true starts the run again") from error
    known = isinstance(result, dict) and "status" in result
    if not known or (result["status"] == "finished" and "top1" not in result):
        raise ConfigError(f"{path} is damaged: it is no result; run.overwrite=true starts the run again")
    return result


def options_of(folder: Path) -> dict[str, Any]:
    """The options of a run, as plain values by group. Raises ConfigError when they cannot be read."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run: there is no config.yaml in it")
    try:
        options = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(options, dict) or not isinstance(options.get("model"), dict):
        raise ConfigError(f"{path} is damaged: it holds no options")
    options.pop("defaults", None)  # what Hydra needs to load it again
    return cast(dict[str, Any], options)


def demand_ours(folder: Path, digest: str, *, replace: bool = False) -> bool:
    """Whether the folder holds a run of this configuration (of any, to `replace` it); False when it holds none.

    Raises ConfigError when it holds another one, or files that no run of ours wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a run folder")
    if not folder.is_dir() or not any(path.name not in _NO_RUN for path in folder.iterdir()):
        return False
    mark = folder / "digest"
    if not mark.is_file():
        raise ConfigError(f"{folder} is not empty and holds no run of ours; choose another run.dir")
    if not replace and mark.read_text().strip() != digest:
        raise ConfigError(
            f"{folder} holds a run of another configuration (see its config.yaml); choose another run.dir, "
            "or run.overwrite=true to replace it"
        )
    return True


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder: made if need be, locked against other processes until the context or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to the run folder {folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is training in {folder}") from error
        except OSError as error:
            raise ConfigError(f"{folder} is on a disk that has no locks ({error.strerror}): choose another") from error
        yield


def clear(folder: Path) -> None:
    """Remove what a run wrote, and nothing else; its digest last, so that one that is cut here is still known."""
    for name in FOLDERS:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    for name in (_RESERVE, *_ASIDE, *FILES):
        (folder / name).unlink(missing_ok=True)


def reserve(folder: Path) -> None:
    """Set a little space aside, so that a run whose disk is full can still say so."""
    (folder / _RESERVE).write_bytes(bytes(2**16))


def release(folder: Path) -> None:
    """Give that space back."""
    (folder / _RESERVE).unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text file so that it is never seen half-written."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
