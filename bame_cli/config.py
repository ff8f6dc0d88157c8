"""The options: one dataclass per config group, their registration with Hydra, and what they decide together.

With `cli`, the only place that knows Hydra. Two groups are generated rather than listed: `sparsity` has an option
for every valid N:M, `model` for every timm name; a YAML file of ours of that name wins over the generated one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS, name_of
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
    """N:M, and which layers it holds for; patterns of names are shell patterns of module names.

    `ramp`: share of training over which N falls from M to its target, for methods that can; 0 is off.
    """

    n: int = MISSING
    m: int = MISSING
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    ramp: float = 0.0


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
    """`every`: steps between two rows; `per_layer`: mask figures by layer; `masks_every`: steps between two records."""

    every: int = 50
    per_layer: bool = False
    masks_every: int | None = None


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
    try:
        if missing := OmegaConf.missing_keys(node):
            raise ConfigError(f"{', '.join(sorted(missing))} must be given: key=value")
        config = cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    validate(config)
    return config


def to_yaml(node: Any) -> str:
    """The composed node as text that loads again."""
    return OmegaConf.to_yaml(node, resolve=True)


_LEAST = {
    **dict.fromkeys(
        ("recipe.epochs", "recipe.batch_size", "recipe.eval_batch_size", "log.every", "log.masks_every"), 1
    ),
    **dict.fromkeys(
        ("recipe.lr", "recipe.min_lr", "recipe.momentum", "recipe.weight_decay", "recipe.warmup_epochs"), 0
    ),
    **dict.fromkeys(("dataset.image_size", "dataset.train_size", "dataset.val_size", "dataset.classes"), 1),
    **dict.fromkeys(("dataset.channels", "checkpoint.every_epochs", "model.width"), 1),
    **dict.fromkeys(("dataset.crop_padding", "dataset.workers", "recipe.warmup_epochs", "seed"), 0),
}


def validate(config: Config) -> None:
    """Raise ConfigError for values that have no meaning, before anything is built."""
    _ = config.pattern
    config.method.validate()
    for key, bound in _LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= bound:
            raise ConfigError(f"{key}={value}: must be {bound} or more")
    if not math.isfinite(config.recipe.lr):
        raise ConfigError(f"recipe.lr={config.recipe.lr}: a finite number")
    if config.recipe.momentum >= 1 or config.seed >= 2**63:
        raise ConfigError(f"recipe.momentum={config.recipe.momentum}, seed={config.seed}: below 1, and below 2**63")
    if not 0 <= config.recipe.label_smoothing < 1:
        raise ConfigError(f"recipe.label_smoothing={config.recipe.label_smoothing}: from 0 to below 1")
    if config.sparsity.ramp and not hasattr(config.method, "ramp"):
        able = ", ".join(name for name, kind in METHODS.items() if "ramp" in kind.__dataclass_fields__)
        raise ConfigError(f"sparsity.ramp: N cannot fall during method={name_of(config.method)}; it can during {able}")
    for key, known in (("run.resume", ("auto", "never")), ("logger.name", ("none", "wandb", "tensorboard"))):
        if _get(config, key) not in known:
            raise ConfigError(f"{key}={_get(config, key)}: one of {', '.join(known)}")


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def known_keys(method: str) -> Iterator[str]:
    """Every key that a command line with this method can set, for near misses."""
    yield from ("model", "dataset", "sparsity", "method", "recipe", "logger")
    for name, kind in (*_GROUPS, ("method", METHODS.get(method, METHODS["bame"]))):
        yield from (f"{name}.{key.name}" for key in dataclasses.fields(kind))
    yield from ("seed", "device")


_GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("model", ModelConfig),
    ("dataset", DatasetConfig),
    ("sparsity", SparsityConfig),
    ("recipe", RecipeConfig),
    ("logger", LoggerConfig),
    ("log", LogConfig),
    ("checkpoint", CheckpointConfig),
    ("flops", FlopsConfig),
    ("run", RunConfig),
)


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
