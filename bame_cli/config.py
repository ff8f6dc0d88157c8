"""The options: one dataclass per config group, their registration with Hydra, and what they decide together.

With `cli`, the only place that knows Hydra. Two groups are generated rather than listed: `sparsity` has an option
for every valid N:M, `model` for every timm name; a YAML file of ours of that name wins over the generated one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, OmegaConf

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS, Method, name_of
from bame_cli.sparsity.pattern import Pattern


@dataclass
class ModelConfig:
    """`name`: a timm model. `args`: further arguments of its constructor. `checkpoint`: weights to start from."""

    name: str = MISSING
    pretrained: bool = False
    checkpoint: str | None = None
    width: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class DatasetConfig:
    name: str = MISSING
    root: str = MISSING
    download: bool = True
    image_size: int | None = None
    mean: list[float] = MISSING
    std: list[float] = MISSING
    crop_padding: int = 0
    flip: bool = False
    train_size: int | None = None
    val_size: int | None = None
    classes: int | None = None
    channels: int | None = None
    workers: int | None = None


@dataclass
class SparsityConfig:
    """N:M, and which layers it holds for; patterns of names are shell patterns of module names."""

    n: int = MISSING
    m: int = MISSING
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)


@dataclass
class RecipeConfig:
    name: str = MISSING
    epochs: int = MISSING
    batch_size: int = MISSING
    eval_batch_size: int = 256
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    lr: float = MISSING
    min_lr: float = 0.0
    momentum: float = 0.9
    weight_decay: float = MISSING
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0


@dataclass
class LoggerConfig:
    """`name`: none, wandb or tensorboard. The rest is wandb's."""

    name: str = "none"
    project: str = "bame-cli"
    mode: str = "online"


@dataclass
class LogConfig:
    every: int = 50


@dataclass
class CheckpointConfig:
    every_epochs: int = 1


@dataclass
class FlopsConfig:
    """The convention of the bill. `skip_first`: the layer that sees the image is not charged an input gradient."""

    skip_first: bool = False


@dataclass
class RunConfig:
    """`root`: where run folders are made. `dir`: this run's folder instead. `resume`: auto or never."""

    root: str = "outputs"
    dir: str | None = None
    resume: str = "auto"
    overwrite: bool = False


@dataclass
class Config:
    model: ModelConfig = MISSING
    dataset: DatasetConfig = MISSING
    sparsity: SparsityConfig = MISSING
    method: Any = MISSING
    recipe: RecipeConfig = MISSING
    logger: LoggerConfig = MISSING
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    flops: FlopsConfig = field(default_factory=FlopsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    device: str = "auto"

    @property
    def pattern(self) -> Pattern:
        """The pattern asked for. Raises ConfigError for an invalid pair."""
        return Pattern(self.sparsity.n, self.sparsity.m)

    @property
    def target(self) -> Pattern | None:
        """The pattern of the final network; None for a method without one."""
        return self.pattern if self.method.sparse else None


def from_hydra(node: Any) -> Config:
    """Hydra's composed node as typed options, every reference resolved. ConfigError for values without meaning."""
    if missing := OmegaConf.missing_keys(node):
        raise ConfigError(f"{', '.join(sorted(missing))} must be given: key=value")
    config = cast(Config, OmegaConf.to_object(node))
    validate(config)
    return config


def to_yaml(node: Any) -> str:
    """The composed node as text that loads again."""
    return OmegaConf.to_yaml(node, resolve=True)


def validate(config: Config) -> None:
    """Raise ConfigError for values that have no meaning, before anything is built."""
    _ = config.pattern
    config.method.validate()
    least = {"recipe.epochs": 1, "recipe.batch_size": 1, "recipe.eval_batch_size": 1, "log.every": 1}
    least |= {"checkpoint.every_epochs": 1, "recipe.lr": 0, "recipe.weight_decay": 0, "recipe.warmup_epochs": 0}
    least |= {"recipe.min_lr": 0, "recipe.momentum": 0, "dataset.crop_padding": 0, "seed": 0}
    least |= {f"dataset.{key}": 1 for key in ("image_size", "train_size", "val_size", "classes", "channels")}
    least |= {"dataset.workers": 0, "model.width": 1}
    for key, bound in least.items():
        value = OmegaConf.select(OmegaConf.create({"x": _get(config, key)}), "x")
        if value is not None and not value >= bound:
            raise ConfigError(f"{key}={value}: must be {bound} or more")
    if not 0 <= config.recipe.label_smoothing < 1:
        raise ConfigError(f"recipe.label_smoothing={config.recipe.label_smoothing}: from 0 to below 1")
    for key, known in (("run.resume", ("auto", "never")), ("logger.name", ("none", "wandb", "tensorboard"))):
        if _get(config, key) not in known:
            raise ConfigError(f"{key}={_get(config, key)}: one of {', '.join(known)}")


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


# --- where a run lives: a function of what can change its result ---

# Where things are, what is said and how often it is saved cannot change a result.
_NO_RESULT = ("logger", "log", "checkpoint", "run", "device")
_NO_RESULT_OF_DATASET = ("root", "download", "workers")


def digest(config: Config) -> str:
    """Eight hexadecimal digits over every option that can change the result."""
    options = dataclasses.asdict(config) | {"method": {"name": name_of(config.method)} | vars_of(config.method)}
    for key in _NO_RESULT:
        options.pop(key)
    for key in _NO_RESULT_OF_DATASET:
        options["dataset"].pop(key)
    if not config.method.sparse:
        options.pop("sparsity")
    if config.model.checkpoint:
        options["model"]["checkpoint"] = content(Path(config.model.checkpoint))
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:8]


def vars_of(method: Method) -> dict[str, Any]:
    """A method's hyperparameters."""
    return dataclasses.asdict(method)


def content(path: Path) -> str:
    """What a checkpoint is, wherever it lies: the digest of the weights file, or of a run's final one."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model.checkpoint={path}: no such file" + (", nor a finished run" if path.is_dir() else ""))
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder(config: Config) -> Path:
    """The run's folder: outputs/<dataset>/<model>/<method>/<N>of<M>/seed<k>-<digest>, or `run.dir`."""
    if config.run.dir:
        return Path(config.run.dir)
    parts = [config.dataset.name, config.model.name, name_of(config.method)]
    parts += [config.target.slug] if config.target else []
    return Path(config.run.root, *parts, f"seed{config.seed}-{digest(config)}")


def known_keys() -> Iterator[str]:
    """Every key that a command line can set, for near misses."""
    yield from ("model", "dataset", "sparsity", "method", "recipe", "logger")
    for name, kind in _groups():
        yield from (f"{name}.{key.name}" for key in dataclasses.fields(kind))
    yield from ("seed", "device")


def _groups() -> Iterator[tuple[str, type[Any]]]:
    yield from (("model", ModelConfig), ("dataset", DatasetConfig), ("sparsity", SparsityConfig))
    yield from (("recipe", RecipeConfig), ("logger", LoggerConfig), ("log", LogConfig))
    yield from (("checkpoint", CheckpointConfig), ("flops", FlopsConfig), ("run", RunConfig))
    yield from (("method", kind) for kind in METHODS.values())


# --- registration ---


class GeneratedOptions(ConfigSource):
    """The options of `sparsity` (all N:M) and `model` (all timm names) that no file has to list."""

    @staticmethod
    def scheme() -> str:
        return "bame"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group == "sparsity":
            pattern = Pattern.parse(name)
            node: dict[str, Any] = {"n": pattern.n, "m": pattern.m}
        else:
            node = {"name": name}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(node), header={"package": group}
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "sparsity", "model")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return group in ("sparsity", "model") and bool(name) and "/" not in name

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class GeneratedPath(SearchPathPlugin):
    """Puts the generated options last on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("bame", "bame://generated")


def register() -> None:
    """Make the schemas and the generated options known to Hydra; again does no harm."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, kind in METHODS.items():
        store.store(group="method", name=f"{name}_schema", node=kind)
    plugins = Plugins.instance()
    known = plugins.discover(ConfigSource)
    for plugin in (GeneratedOptions, GeneratedPath):
        if plugin not in known:
            plugins.register(plugin)
