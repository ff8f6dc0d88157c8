"""The options: one dataclass per config group, and what their values must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bame_cli.errors import ConfigError, first_line, near_misses
from bame_cli.methods import METHODS, Method, name_of
from bame_cli.sparsity.pattern import Pattern


@dataclass
class ModelConfig:
    """`name`: a timm model. `args`: further arguments of its constructor.

    Weights to start from: `checkpoint`, a file or run folder, or those of the same run by another method, `parent`.
    """

    name: str = MISSING
    pretrained: bool = False
    checkpoint: str | None = None
    parent: str | None = None
    width: int | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class DatasetConfig:
    """`holdout`: validate on so many of the training images, for choices that the validation images must not see."""

    name: str = MISSING
    root: str = MISSING
    download: bool = True
    image_size: int | None = None
    mean: list[float] = MISSING
    std: list[float] = MISSING
    crop_padding: int = 0
    flip: bool = False
    holdout: int | None = None
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
    """`batch_size`: images per optimizer step, however many ranks and micro-batches (`accumulate`) share them."""

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
    accumulate: int = 1
    clip_grad: float | None = None
    clip_mode: str = "norm"
    ema: float | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    auto_augment: str | None = None
    drop_path: float | None = None


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
    """When `last` is written; whichever comes first. A signal to stop writes it too."""

    every_epochs: int = 1
    every_steps: int | None = None
    every_minutes: float | None = None


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
class SweepConfig:
    """`fail_fast`: once a job of a sweep has failed, those that have not started do not start."""

    fail_fast: bool = False


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
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = 0
    device: str = "auto"
    amp: str = "none"
    channels_last: bool = False
    compile: bool = False
    execution: str = "dense"
    deterministic: bool = False
    sync_batchnorm: bool = False

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
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}") from error
    if not isinstance(config, Config):
        raise ConfigError("this configuration does not build on ours: begin it with defaults: [train, _self_]")
    _demand_known(config)
    validate(config)
    return config


def _demand_known(config: Config) -> None:
    """Hydra adds whatever a `+` asks it to add; what no schema knows would be ignored."""
    for prefix, options in [("", config), *((f"{group}.", options) for group, options in _groups(config))]:
        for key in vars(options).keys() - {known.name for known in dataclasses.fields(options)}:
            name = prefix + key
            raise ConfigError(f"no such option: {name}{near_misses(name, known_keys(name_of(config.method)))}")


def _groups(config: Config) -> list[tuple[str, Any]]:
    """The groups of options by name."""
    return [(group, value) for group, value in vars(config).items() if dataclasses.is_dataclass(value)]


def to_yaml(node: Any) -> str:
    """The composed node as text that loads again, as a primary configuration that names its method."""
    method = name_of(cast(Method, OmegaConf.to_object(node.method)))
    return f"defaults: [train, override method: {method}, _self_]\n{OmegaConf.to_yaml(node, resolve=True)}"


_LEAST = {
    1: (
        *("recipe.epochs", "recipe.batch_size", "recipe.eval_batch_size", "recipe.accumulate"),
        *("dataset.image_size", "dataset.train_size", "dataset.val_size", "dataset.classes", "dataset.holdout"),
        *("dataset.channels", "model.width", "log.every", "log.masks_every"),
        *("checkpoint.every_epochs", "checkpoint.every_steps"),
    ),
    0: (
        *("recipe.lr", "recipe.min_lr", "recipe.weight_decay", "recipe.warmup_epochs"),
        *("recipe.mixup", "recipe.cutmix", "recipe.erasing"),
        *("dataset.crop_padding", "dataset.workers", "seed"),
    ),
}
_ONE_OF = {
    "run.resume": ("auto", "never"),
    "logger.name": ("none", "wandb", "tensorboard"),
    "amp": ("none", "bfloat16", "float16"),
    "recipe.clip_mode": ("norm", "value", "agc"),
    "execution": ("dense", "sparse"),
}
_BELOW_ONE = ("recipe.label_smoothing", "recipe.momentum", "recipe.drop_path", "recipe.ema")
_ABOVE_ZERO = ("recipe.clip_grad", "checkpoint.every_minutes")


def validate(config: Config) -> None:
    """Raise ConfigError for values that have no meaning, before anything is built."""
    _ = config.pattern
    config.method.validate()
    for bound, key in ((bound, key) for bound, keys in _LEAST.items() for key in keys):
        value = _get(config, key)
        if value is not None and not value >= bound:
            raise ConfigError(f"{key}={value}: must be {bound} or more")
    for key in _BELOW_ONE:
        if not 0 <= (_get(config, key) or 0) < 1:
            raise ConfigError(f"{key}={_get(config, key)}: from 0 to below 1")
    for key in _ABOVE_ZERO:
        if (value := _get(config, key)) is not None and not value > 0:
            raise ConfigError(f"{key}={value}: must be more than 0")
    _demand_finite(config)
    for key, most in (("seed", 2**63 - 1), ("recipe.erasing", 1)):
        if _get(config, key) > most:
            raise ConfigError(f"{key}={_get(config, key)}: at most {most}")
    if config.sparsity.ramp and not hasattr(config.method, "ramp"):
        able = ", ".join(name for name, kind in METHODS.items() if "ramp" in kind.__dataclass_fields__)
        raise ConfigError(f"sparsity.ramp: N cannot fall during method={name_of(config.method)}; it can during {able}")
    for key, known in _ONE_OF.items():
        if _get(config, key) not in known:
            raise ConfigError(f"{key}={_get(config, key)}: one of {', '.join(known)}")
    if config.execution == "sparse":
        _demand_plain_products(config)
    if config.model.parent not in (None, *METHODS):
        raise ConfigError(f"model.parent={config.model.parent}: the method of a run, one of {', '.join(METHODS)}")


def _demand_finite(config: Config) -> None:
    for group, options in _groups(config):
        for key, number in vars(options).items():
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{group}.{key}={number}: a finite number")


def _demand_plain_products(config: Config) -> None:
    """`execution=sparse` computes single-precision products, chosen by the clock, where gradients may be sparse."""
    for key, plain in (("amp", "none"), ("compile", False), ("deterministic", False)):
        if _get(config, key) != plain:
            raise ConfigError(f"execution=sparse goes with {key}={str(plain).lower()}, not {_get(config, key)}")
    if config.method.sparse and not config.method.sparse_gradients:
        able = ", ".join(name for name, kind in METHODS.items() if kind.sparse_gradients)
        raise ConfigError(f"execution=sparse: method={name_of(config.method)} wants dense gradients; {able} do not")


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def known_keys(method: str) -> Iterator[str]:
    """Every key that a command line with this method can set, for near misses."""
    yield "experiment"
    for name, kind in {**get_type_hints(Config), "method": METHODS.get(method, METHODS["bame"])}.items():
        yield name
        if dataclasses.is_dataclass(kind):
            yield from (f"{name}.{key.name}" for key in dataclasses.fields(kind))
