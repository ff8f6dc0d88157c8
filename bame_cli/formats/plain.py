"""Plain safetensors under timm's names, with the patterns in the metadata: what a run leaves behind."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bame_cli.errors import ConfigError
from bame_cli.sparsity.pattern import Pattern


def write_weights(
    path: Path, weights: Mapping[str, Tensor], *, patterns: Mapping[str, Pattern], about: Mapping[str, Any]
) -> None:
    """Write a state dict as safetensors; metadata hold `patterns` (JSON, name -> "N:M") and every key of `about`."""
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    metadata |= {"format": "pt", "patterns": json.dumps({name: str(pattern) for name, pattern in patterns.items()})}
    tensors = {name: _plain(value) for name, value in weights.items()}
    aside = path.with_name(f"{path.name}.tmp")
    aside.touch()
    mode = aside.stat().st_mode  # what the user's files have; safetensors makes them private
    save_file(tensors, aside, metadata)
    _put_in_order(aside)
    aside.chmod(mode)
    os.replace(aside, path)


def _put_in_order(path: Path) -> None:
    """Sort the metadata, which safetensors writes at random: the same network is the same bytes, with one address."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # as it is, unless somebody's JSON becomes longer than it was
            file.seek(8)
            file.write(text.ljust(size))


def _plain(tensor: Tensor) -> Tensor:
    """A copy on the CPU, gapless. A dropped weight is +0, whatever sign its product with the mask had."""
    copy = tensor.detach().cpu().contiguous().clone()
    return copy.add_(0) if copy.is_floating_point() else copy


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises ConfigError for anything else: pickles are not opened."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file ({error}); other formats are not opened") from error


def patterns_in(metadata: Mapping[str, str]) -> dict[str, Pattern]:
    """The patterns that a file of ours says it holds; empty for other files and for dense networks."""
    return {name: Pattern.parse(text) for name, text in json.loads(metadata.get("patterns", "{}")).items()}
