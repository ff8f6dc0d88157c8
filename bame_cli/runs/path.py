"""Where a run lives: a function of the options that can change its result, never of the time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS, name_of
from bame_cli.options.schema import Config

# Where things are, what is said and how often it is saved cannot change a result; on which device and by which of its
# kernels it is computed changes rounding alone.
_NO_RESULT = (
    *("logger", "log", "checkpoint", "run", "sweep"),
    *("device", "channels_last", "compile", "execution", "deterministic"),
)
_NO_RESULT_OF_DATASET = ("root", "download", "workers")


def digest(config: Config, *, seed: bool = True) -> str:
    """Eight hexadecimal digits over every option that can change the result; without the seed, those of its group."""
    options = dataclasses.asdict(config)
    options["method"]["name"] = name_of(config.method)
    for key in _NO_RESULT if seed else (*_NO_RESULT, "seed"):
        options.pop(key)
    if not seed:
        options["method"].pop("seed", None)
    for key in _NO_RESULT_OF_DATASET:
        options["dataset"].pop(key)
    if not config.method.sparse:
        options.pop("sparsity")
    if config.model.checkpoint:
        options["model"]["checkpoint"] = content(Path(config.model.checkpoint))
    if before := parent(config):
        options["model"]["parent"] = digest(before, seed=seed)
    return hashlib.sha256(json.dumps(_on(options), sort_keys=True, default=str).encode()).hexdigest()[:8]


def _on(options: Any) -> Any:
    """The options without those that are off (null, false, empty): one that we add later moves no finished run."""
    if not isinstance(options, dict):
        return options
    kept = {key: _on(value) for key, value in options.items()}
    return {key: value for key, value in kept.items() if not (value is None or value is False or value in ([], {}))}


def parent(config: Config) -> Config | None:
    """The run whose final weights this one starts from by `model.parent`: the same but for its method, at defaults."""
    if config.model.parent is None:
        return None
    kind = METHODS[config.model.parent]
    seeded = {"seed": config.seed} if "seed" in kind.__dataclass_fields__ else {}
    model, place = dataclasses.replace(config.model, parent=None), dataclasses.replace(config.run, dir=None)
    return dataclasses.replace(config, model=model, method=kind(**seeded), run=place)


def source(config: Config) -> Path | None:
    """The file or run folder that the first weights come from; None when the model brings its own."""
    if before := parent(config):
        return run_path(before)
    return Path(config.model.checkpoint) if config.model.checkpoint else None


def content(path: Path) -> str:
    """What a checkpoint is, wherever it lies: the digest of the weights file, or of a run's final one."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model.checkpoint={path}: no such file" + (", nor a finished run" if path.is_dir() else ""))
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def run_path(config: Config) -> Path:
    """The run's folder: outputs/<dataset>/<model>/<method>/<N>of<M>/seed<k>-<digest>, or `run.dir`."""
    if config.run.dir:
        return Path(config.run.dir)
    parts = [config.dataset.name, config.model.name, name_of(config.method)]
    parts += [config.target.slug] if config.target else []
    return Path(config.run.root, *parts, f"seed{config.seed}-{digest(config)}")
