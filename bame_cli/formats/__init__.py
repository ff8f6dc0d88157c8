"""Networks as files: one module per format, and one way to read them all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bame_cli.errors import ConfigError, near_misses
from bame_cli.formats import compressed, onnx_file, semi_structured
from bame_cli.formats.plain import patterns_in, read_weights, write_weights
from bame_cli.sparsity.pattern import Pattern

NAMES = ("safetensors", "onnx", "semi_structured", "compressed")


@dataclass(frozen=True)
class Saved:
    """A network as a file holds it.

    weights: by state-dict name; of an ONNX file by initializer, and only those that multiply. patterns: of the sparse
    ones, as far as the file says. about: what else it says, text by key.
    """

    file: Path
    format: str
    weights: dict[str, Tensor]
    patterns: dict[str, Pattern]
    about: dict[str, str]


def read(path: Path) -> Saved:
    """A file, or a folder with `model.safetensors` in it. Raises ConfigError for anything else: no pickle is opened."""
    file = path / "model.safetensors" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{path} holds no model.safetensors: the run is not finished, or this is no run folder")
    if file.suffix == ".onnx":
        weights, about = onnx_file.read(file)
        return Saved(file, "onnx", weights, patterns_in(about), about)
    tensors, about = read_weights(file)
    patterns, kind = patterns_in(about), about.get("layout", "safetensors")
    if kind == "compressed":
        tensors = compressed.decode(tensors, patterns, json.loads(about["shapes"]))
    elif kind == "semi_structured":
        tensors = semi_structured.decode(tensors)
    return Saved(file, kind, tensors, patterns, about)


def write_packed(saved: Saved, path: Path, kind: str, about: Mapping[str, str]) -> None:
    """Write a network as `compressed` or `semi_structured`. Raises ConfigError when the format cannot hold it."""
    weights, patterns = saved.weights, saved.patterns
    tensors = (compressed if kind == "compressed" else semi_structured).encode(weights, patterns)
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {**about, "layout": kind, "shapes": json.dumps({name: list(w.shape) for name, w in weights.items()})}
    write_weights(path, tensors, patterns=patterns, about=told)


def layer(saved: Saved, name: str) -> tuple[str, Pattern]:
    """The sparse weight of that name, with or without `.weight`, or the largest one; and its pattern."""
    if not saved.patterns:
        raise ConfigError(f"{saved.file} names no sparse weight: it is dense, or was not made by us")
    if not name:
        name = max(saved.patterns, key=lambda key: saved.weights[key].numel())
    found = next((key for key in (name, f"{name}.weight") if key in saved.patterns), None)
    if found is None:
        close = near_misses(name, (key.removesuffix(".weight") for key in saved.patterns))
        raise ConfigError(f"layer={name}: no sparse weight of that name{close} (bame verify lists them)")
    return found, saved.patterns[found]
