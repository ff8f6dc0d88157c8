"""Sparse weights as files others read: plain safetensors under timm's names, and the proof that they are N:M."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bame_cli.errors import ConfigError
from bame_cli.sparsity.pattern import Pattern, Violation


def write_weights(
    path: Path, weights: Mapping[str, Tensor], *, patterns: Mapping[str, Pattern], about: Mapping[str, Any]
) -> None:
    """Write a state dict as safetensors; metadata hold `patterns` (JSON, name -> "N:M") and every key of `about`."""
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    metadata |= {"format": "pt", "patterns": json.dumps({name: str(pattern) for name, pattern in patterns.items()})}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    aside = path.with_suffix(".tmp")
    save_file(tensors, aside, metadata)
    os.replace(aside, path)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises ConfigError for anything else: pickles are not opened."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file ({error}); other formats are not opened") from error


@dataclass(frozen=True)
class Verdict:
    """What a look at every block of one weight says; `violation` None when all obey."""

    name: str
    pattern: Pattern
    blocks: int
    density: float
    violation: Violation | None


def verify_weights(weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> list[Verdict]:
    """Check every block of every named weight. Raises ConfigError when a named weight is missing or has no blocks."""
    verdicts = []
    for name, pattern in patterns.items():
        if name not in weights:
            raise ConfigError(f"the file has no weight named {name}")
        weight = weights[name]
        if not pattern.fits(weight.shape):
            raise ConfigError(f"{name}: a weight of shape {tuple(weight.shape)} has no blocks of {pattern.m} inputs")
        density = int(weight.count_nonzero()) / weight.numel()
        blocks = pattern.num_blocks(weight.shape)
        verdicts.append(Verdict(name, pattern, blocks, density, pattern.check(weight)))
    return verdicts


def patterns_in(metadata: Mapping[str, str]) -> dict[str, Pattern]:
    """The patterns that a file of ours says it holds; empty for other files and for dense networks."""
    return {name: Pattern.parse(text) for name, text in json.loads(metadata.get("patterns", "{}")).items()}


def verify(path: Path, pattern: str | None) -> list[dict[str, Any]]:
    """`bame verify`: a row per checked weight of a run folder's final network, or of a safetensors file."""
    file = path / "model.safetensors" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{path} holds no model.safetensors: the run is not finished, or this is no run folder")
    weights, metadata = read_weights(file)
    patterns = _candidates(weights, Pattern.parse(pattern)) if pattern else patterns_in(metadata)
    if not patterns:
        known = "is dense, or was not made by us" if not pattern else f"has no weight with zeros that {pattern} fits"
        raise ConfigError(f"{file} {known}: there is nothing to check; pattern=N:M names a pattern to check against")
    return [_row(verdict) for verdict in verify_weights(weights, patterns)]


def _candidates(weights: Mapping[str, Tensor], pattern: Pattern) -> dict[str, Pattern]:
    """The weights of a foreign file that can be meant to be sparse: shaped for it, and holding zeros."""
    shaped = [(name, w) for name, w in weights.items() if w.dim() in (2, 4) and pattern.fits(w.shape)]
    return {name: pattern for name, w in shaped if int(w.count_nonzero()) < w.numel()}


def _row(verdict: Verdict) -> dict[str, Any]:
    row = {"name": verdict.name, "pattern": str(verdict.pattern), "blocks": verdict.blocks}
    row |= {"density": verdict.density, "ok": verdict.violation is None}
    if verdict.violation:
        row |= {"wrong_blocks": verdict.violation.blocks, "first": list(verdict.violation.first)}
        row |= {"first_kept": verdict.violation.kept}
    return row


def verify_text(rows: list[dict[str, Any]]) -> str:
    """The verdicts for the eye: every broken weight with its first block, and one line that sums up."""
    lines = [
        f"{row['name']}: {row['wrong_blocks']} of {row['blocks']} blocks break {row['pattern']}; the first, at "
        f"(output, block, kernel...) {tuple(row['first'])}, has {row['first_kept']} non-zeros"
        for row in rows
        if not row["ok"]
    ]
    patterns = ", ".join(sorted({row["pattern"] for row in rows}))
    blocks, broken = sum(row["blocks"] for row in rows), sum(not row["ok"] for row in rows)
    verdict = f"{broken} weights break their pattern" if broken else "all obey"
    return "\n".join([*lines, f"{len(rows)} weights, {blocks:,} blocks checked against {patterns}: {verdict}"])
