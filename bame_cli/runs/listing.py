"""`bame runs`: what lies under a folder of outputs, and what sets two runs apart. No torch, no Hydra."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.plots.columns import aligned
from bame_cli.runs import folder as folders
from bame_cli.runs.state import state

FILTERS = ("status", "method", "dataset", "model", "pattern", "seed")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class Found:
    """A run's folder. `options`: its configuration, flat (method.interval -> 100). `changed`: seconds since 1970."""

    folder: Path
    status: str
    error: str
    options: dict[str, Any]
    result: dict[str, Any]
    changed: float

    @property
    def resumable(self) -> bool:
        """Whether the same command would go on from a checkpoint."""
        return self.status != "finished" and (self.folder / "checkpoints" / "last.pt").is_file()

    @property
    def method(self) -> str | None:
        """As the result says; before there is one, as the folder's place says (<method>/<N>of<M>/seed, dense/seed)."""
        place = re.search(r"/([a-z_]+)(/\d+of\d+)?/seed\d+-\w{8}$", self.folder.as_posix())
        return self.result.get("method") or (place[1] if place else None)

    def record(self) -> dict[str, Any]:
        """The run as a row: what `result.json` says of it, and its configuration."""
        options, result = self.options, self.result
        pattern = None if self.method == "dense" else f"{options.get('sparsity.n')}:{options.get('sparsity.m')}"
        return {
            "status": self.status,
            "resumable": self.resumable,
            "dataset": options.get("dataset.name"),
            "model": options.get("model.name"),
            "method": self.method,
            "pattern": pattern,
            "seed": options.get("seed"),
            "top1": result.get("top1"),
            "train_ratio": result.get("flops", {}).get("train_ratio"),
            "changed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.changed)),
            "folder": str(self.folder),
            "error": self.error,
        }


def find(root: Path) -> list[Found]:
    """Every run below a folder, the longest untouched first."""
    if not root.is_dir():
        raise ConfigError(f"root={root}: no such folder")
    made = [_found(mark.parent) for mark in sorted(root.rglob("digest")) if (mark.parent / "config.yaml").is_file()]
    return sorted(made, key=lambda run: (run.changed, run.folder))


def _found(folder: Path) -> Found:
    mark = folder / "digest"
    if not mark.is_file():
        raise ConfigError(f"{folder} holds no run of ours")
    status, error, result = state(folder, mark.read_text().strip())
    try:
        options = configuration(folder)
    except ConfigError as broken:
        status, error, options = "damaged", str(broken), {}
    files = [folder / name for name in ("result.json", "metrics.jsonl", "digest")]
    times = [path.stat().st_mtime for path in files if path.is_file()]
    return Found(folder, status, error, options, result, max(times))


def configuration(folder: Path) -> dict[str, Any]:
    """A run's configuration with its keys in one piece: method.interval -> 100."""
    return dict(_flat("", folders.options_of(folder)))


def _flat(prefix: str, node: Any) -> list[tuple[str, Any]]:
    if not isinstance(node, dict):
        return [(prefix, node)]
    return [pair for key, value in node.items() for pair in _flat(f"{prefix}.{key}" if prefix else str(key), value)]


def matching(runs: list[Found], wanted: dict[str, str]) -> list[Found]:
    """The runs whose fields are one of the values asked for: status=failed,diverged. `resumable` is a status too."""
    for key, value in wanted.items():
        values = value.split(",")
        runs = [
            run
            for run in runs
            if str(run.record()[key]) in values or (key == "status" and run.resumable and "resumable" in values)
        ]
    return runs


def show(runs: list[Found], how: str, now: float) -> str:
    """A line per run, or JSON. Ages are counted to `now`."""
    if how == "json":
        return json.dumps([run.record() for run in runs], indent=1)
    rows = [("status", "top-1 %", "train ÷ dense", "age", "folder")]
    rows += [_row(run, now) for run in runs]
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return "\n".join([aligned(rows), "", f"{len(runs)} runs{': ' if said else ''}{said}"])


def _row(run: Found, now: float) -> tuple[str, str, str, str, str]:
    record = run.record()
    status = f"{run.status}, resumable" if run.resumable else run.status
    top1 = "" if record["top1"] is None else f"{record['top1']:.2f}"
    ratio = "" if record["train_ratio"] is None else f"{record['train_ratio']:.3f}"
    return status, top1, ratio, _age(now - run.changed), str(run.folder)


def _age(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in _AGES if seconds >= u), (1, "s"))
    return f"{max(0, int(seconds / unit))} {name}"


def differences(left: Path, right: Path) -> list[tuple[str, Any, Any]]:
    """The options in which two runs differ; `(none)` where one of them has no such option."""
    ours, theirs = ({"method": _found(run).method} | configuration(run) for run in (left, right))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = [(key, ours.get(key, "(none)"), theirs.get(key, "(none)")) for key in keys]
    return [pair for pair in pairs if pair[1] != pair[2]]


def show_differences(left: Path, right: Path, how: str) -> str:
    """`key: left -> right` per line, or JSON."""
    found = differences(left, right)
    if how == "json":
        return json.dumps([{"key": key, "left": a, "right": b} for key, a, b in found], indent=1)
    width = max((len(key) for key, _, _ in found), default=0)
    return "\n".join(f"{key:<{width}}  {a} -> {b}" for key, a, b in found) or "the configurations are the same"
