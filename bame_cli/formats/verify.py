"""The proof that weights are N:M: a look at every block of every sparse weight of a file, ours or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bame_cli import formats
from bame_cli.errors import ConfigError
from bame_cli.sparsity.pattern import Pattern, Violation

CONVENTIONS = ("kept", "zeros")


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


def verify(path: Path, pattern: Pattern | None = None) -> list[dict[str, Any]]:
    """`bame verify`: a row per checked weight of a run folder's final network, or of a file in any of our formats."""
    saved = formats.read(path)
    patterns = _candidates(saved.weights, pattern) if pattern else saved.patterns
    if not patterns:
        known = f"has no weight with zeros that {pattern} fits" if pattern else "is dense, or was not made by us"
        raise ConfigError(
            f"{saved.file} {known}: there is nothing to check; pattern=N:M names a pattern to check against"
        )
    return [_row(verdict) for verdict in verify_weights(saved.weights, patterns)]


def asked(text: str, convention: str) -> Pattern | None:
    """The pattern that the words ask for. convention: whether N counts the weights that are kept, or the zeros."""
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention={convention}: {' or '.join(CONVENTIONS)}")
    if not text:
        if convention != "kept":
            raise ConfigError(f"convention={convention} says how to read pattern=N:M, and there is no pattern=")
        return None
    named = Pattern.parse(text)
    if convention == "kept":
        return named
    if named.n == named.m:
        raise ConfigError(f"pattern={text} convention={convention}: {named.n} zeros of {named.m} leave no weight")
    return Pattern(named.m - named.n, named.m)


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


def text(rows: list[dict[str, Any]]) -> str:
    """The verdicts for the eye: a line per weight, and one that sums up."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{row['name']:<{width}}  {row['pattern']:<6}density {row['density']:.4f}  {_said(row)}" for row in rows]
    patterns = ", ".join(sorted({row["pattern"] for row in rows}))
    blocks, broken = sum(row["blocks"] for row in rows), sum(not row["ok"] for row in rows)
    verdict = f"{broken} weights break their pattern" if broken else "all obey"
    return "\n".join([*lines, f"{len(rows)} weights, {blocks:,} blocks checked against {patterns}: {verdict}"])


def _said(row: dict[str, Any]) -> str:
    if row["ok"]:
        return f"{row['blocks']:,} blocks obey"
    return (
        f"{row['wrong_blocks']} of {row['blocks']} blocks break it; the first, at "
        f"(output, block, kernel...) {tuple(row['first'])}, has {row['first_kept']} non-zeros"
    )
