"""A trained network put to use: opened from a run, an export or a checkpoint, evaluated, asked about pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bame_cli import formats
from bame_cli.errors import ConfigError
from bame_cli.formats import onnx_file, semi_structured
from bame_cli.networks import finished
from bame_cli.options import compose
from bame_cli.options.schema import Config
from bame_cli.runs.plan import known_facts, load_data, model_options
from bame_cli.tasks.images import data as datasets
from bame_cli.tasks.images import models
from bame_cli.tasks.images.batches import Look
from bame_cli.training.distributed import join
from bame_cli.training.loop import evaluate

_OURS = (".safetensors", ".onnx")
_WORDS = ("dataset", "device", "channels_last", "recipe.eval_batch_size")
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """Where a network comes from. saved: None for a checkpoint that says nothing of itself. given: the words' keys."""

    path: Path
    saved: formats.Saved | None
    config: Config
    given: tuple[str, ...]

    @property
    def about(self) -> dict[str, str]:
        return self.saved.about if self.saved else {}

    @property
    def format(self) -> str:
        return self.saved.format if self.saved else "checkpoint"

    @property
    def name(self) -> str:
        return self.about.get("model", self.config.model.name)

    @property
    def logged(self) -> dict[str, float]:
        """What the run scored, for an evaluation on the same images."""
        same = not any(key.startswith("dataset") for key in self.given)
        return {key: json.loads(self.about[key]) for key in ("top1", "top5") if same and key in self.about}


def source(path: Path, words: list[str]) -> Source:
    """What a path and the words beside it amount to. Raises ConfigError when they do not say enough, or too much."""
    saved = _saved(path)
    given = tuple(word.partition("=")[0].lstrip("+") for word in words)
    known = saved is not None and ("model" in saved.about or saved.format == "onnx")
    _demand_words(path, given, known, "dataset_options" in (saved.about if saved else {}))
    config, *more = compose.configs(words)
    if more:
        raise ConfigError("one evaluation at a time: name one value for each key")
    if saved and "dataset" not in given:
        _as_trained(config, saved.about, given)
    return Source(path, saved if known else None, config, given)


def _saved(path: Path) -> formats.Saved | None:
    if finished.is_run(path):
        return finished.read_run(path)
    if path.is_dir() or path.suffix in _OURS:
        return formats.read(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    return None


def _demand_words(path: Path, given: Sequence[str], known: bool, has_data: bool) -> None:
    allowed = _WORDS if known else (*_WORDS, "model")
    for key in given:
        if key not in allowed and key.partition(".")[0] not in ("dataset", *(() if known else ("model",))):
            said = f"{path} says itself which network it is" if key.startswith("model") else "it has no place here"
            raise ConfigError(f"{key}: {said}; what can be said is {', '.join(allowed)} and dataset.*")
    missing = [] if known or "model" in given else ["model=<name>"]
    missing += [] if has_data or "dataset" in given else ["dataset=<name>"]
    if missing:
        raise ConfigError(f"{path} does not say all that is needed: add {' '.join(missing)}")


def _as_trained(config: Config, about: dict[str, str], given: Sequence[str]) -> None:
    """Read images as the run did, apart from what the words say."""
    for key, value in json.loads(about["dataset_options"]).items():
        if f"dataset.{key}" not in given:
            setattr(config.dataset, key, value)
    if "recipe.eval_batch_size" not in given:
        config.recipe.eval_batch_size = json.loads(about["eval_batch_size"])
    if "channels_last" not in given:
        config.channels_last = json.loads(about["channels_last"])


# --- a network that maps images to scores ---


def place(source: Source) -> torch.device:
    """Where the network runs. Raises ConfigError when it cannot run there."""
    asked = source.config.device
    if source.format != "onnx":
        return join(asked)[1]
    if asked not in ("auto", "cpu"):
        raise ConfigError(f"device={asked}: ONNX files are run on the CPU")
    return torch.device("cpu")


def network(source: Source, *, image_shape: Shape, classes: int) -> tuple[nn.Module, torch.device]:
    """The network and its device. Raises ConfigError when it does not fit the images or the classes."""
    device = place(source)
    demand_fit(source, image_shape[0], classes)
    if source.saved and source.format == "onnx":
        return _session(source.saved.file, image_shape, classes), device
    options = _options(source, classes)
    models.skeleton(image_shape=image_shape, **options)
    model = models.create(image_shape=image_shape, **options)
    _fill(source, model)
    if source.config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return _placed(source.saved, model.to(device).eval(), device), device


def demand_fit(source: Source, channels: int, classes: int) -> None:
    """Raise ConfigError when the network sees other channels or tells other classes apart, as far as its file says."""
    about, dataset = source.about, source.config.dataset.name
    sees = json.loads(about["image_shape"])[0] if "image_shape" in about else channels
    tells = len(json.loads(about["classes"])) if "classes" in about else classes
    if (sees, tells) != (channels, classes):
        raise ConfigError(
            f"{source.path} tells {tells} classes apart on images of {sees} channels, "
            f"and dataset={dataset} has {classes} on {channels}"
        )


def _session(file: Path, image_shape: Shape, classes: int) -> nn.Module:
    session = onnx_file.Session(file)
    for what, wants, has in (("images", session.image_shape, image_shape), ("classes", session.classes, (classes,))):
        if wants != has and all(isinstance(size, int) for size in wants):  # a size that may vary has a name instead
            raise ConfigError(f"{file} was made for {what} {wants}, and the data set has {has}")
    return session


def _options(source: Source, classes: int) -> dict[str, Any]:
    if "model" not in source.about:
        return model_options(source.config, classes)
    return {"name": source.name, "num_classes": classes, "args": json.loads(source.about["model_args"])}


def _fill(source: Source, model: nn.Module) -> None:
    """Load the weights, all of them and nothing else."""
    if source.saved is None:
        if notes := models.load_weights(model, source.path, key=""):
            raise ConfigError(f"{source.path} was trained for other classes: {notes[0]}")
        return
    try:
        model.load_state_dict(source.saved.weights)
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:]), str(error))
        raise ConfigError(f"{source.path} does not fit {source.name}: {first}") from error


def _placed(saved: formats.Saved | None, model: nn.Module, device: torch.device) -> nn.Module:
    """The network ready to run; a semi-structured one on the sparse tensor cores of its GPU."""
    if saved is None or saved.format != "semi_structured" or device.type != "cuda":
        return model
    reasons = semi_structured.refusals(saved.weights, saved.patterns)
    return semi_structured.serve(model, [name for name, reason in reasons.items() if not reason])


# --- the two questions ---


def score(source: Source, data: datasets.Data | None = None) -> dict[str, Any]:
    """`bame eval`: accuracy and loss on the validation images, each once, and images a second, reading included."""
    data = data or load_data(source.config, place(source))
    model, device = network(source, image_shape=data.image_shape, classes=len(data.classes))
    batches = data.val.eval_batches(source.config.recipe.eval_batch_size)
    start = time.monotonic()
    figures = evaluate(model, ((images.to(device), labels.to(device)) for images, labels in batches))
    seconds = time.monotonic() - start
    return {
        "network": str(source.path),
        "format": source.format,
        "model": source.name,
        "dataset": source.config.dataset.name,
        "images": len(data.val),
        "top1": figures["top1"],
        "top5": figures["top5"],
        "loss": figures["val_loss"],
        "images_per_second": round(len(data.val) / seconds, 1),
        "logged": source.logged or None,
    }


def score_text(row: dict[str, Any]) -> str:
    """The figures for the eye, and what the run said of the same images."""
    lines = {
        "network": f"{row['network']} ({row['format']}, {row['model']})",
        "data": f"{row['images']} validation images of {row['dataset']}",
        "top-1": f"{row['top1']:.2f} %, top-5 {row['top5']:.2f} %, loss {row['loss']:.4f}",
        "speed": f"{row['images_per_second']:.0f} images/s, reading included",
    }
    if row["logged"]:
        equal = all(row[key] == value for key, value in row["logged"].items())
        logged = f"top-1 {row['logged']['top1']:.2f} %, top-5 {row['logged']['top5']:.2f} %"
        lines["run said"] = f"{logged}: {'the same' if equal else 'not the same'}"
    return "\n".join(f"{key:<10}{line}" for key, line in lines.items())


@torch.no_grad()
def predict(source: Source, pictures: Sequence[Path], *, most: int = 5) -> list[dict[str, Any]]:
    """A row per picture: its `most` likeliest classes and their probabilities, the likeliest first."""
    classes, shape = _known(source)
    model, device = network(source, image_shape=shape, classes=len(classes))
    dataset = source.config.dataset
    look = Look(None, dataset.mean, dataset.std, channels_last=source.config.channels_last)
    shown = datasets.show_pictures(pictures, dataset.name, look=look, image_shape=shape, device=device)
    best = model.eval()(shown).softmax(1).topk(min(most, len(classes)), dim=1)
    return [
        {
            "picture": str(path),
            "classes": [{"class": classes[i], "probability": p} for p, i in zip(ps, at, strict=True)],
        }
        for path, ps, at in zip(pictures, best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _known(source: Source) -> tuple[list[str], Shape]:
    """Names of the classes (numbers, where nothing says them) and the shape of an image."""
    if "classes" in source.about:
        return json.loads(source.about["classes"]), _shape(json.loads(source.about["image_shape"]))
    facts = known_facts(source.config)
    return [str(index) for index in range(facts.classes)], facts.image_shape


def _shape(sizes: list[int]) -> Shape:
    channels, height, width = sizes
    return channels, height, width


def predictions_text(rows: list[dict[str, Any]]) -> str:
    """A line per picture: its classes, the likeliest first."""
    width = max(len(row["picture"]) for row in rows)
    return "\n".join(
        f"{row['picture']:<{width}}  "
        + ", ".join(f"{entry['class']} {100 * entry['probability']:.1f} %" for entry in row["classes"])
        for row in rows
    )
