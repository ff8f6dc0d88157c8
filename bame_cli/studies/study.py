"""A table as its file says it (conf/table, conf/scale), and the study that its runs make. No torch, no Hydra.

A table's rows are words of `bame train`; a sweep over them leaves a manifest, which says where each run lives. Whatever
shows a study (tables, pictures, pages) reads that manifest and the runs' own files.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bame_cli.errors import ConfigError, first_line, near_misses
from bame_cli.runs.state import state

_KEYS = {"title", "common", "scales", "rows", "published"}


@dataclass(frozen=True)
class Published:
    """A figure that somebody else published: top-1 in percent. `row` may be one that we do not run."""

    row: str
    pattern: str | None
    top1: float
    source: str
    model: str | None = None


@dataclass(frozen=True)
class Table:
    """A table at a scale. `rows`: label -> words, lists meaning products; `methods`: further words by method."""

    name: str
    scale: str
    title: str
    note: str
    comparable: bool
    rows: dict[str, list[str]]
    methods: dict[str, list[str]]
    published: list[Published]


@dataclass(frozen=True)
class Job:
    """A run of a study: what the manifest says of it, and its result as far as there is one.

    `status`: that of result.json; `unfinished` for a run without one yet, `missing` where there is no run.
    """

    row: str
    overrides: list[str]
    folder: Path
    group: str
    model: str
    dataset: str
    method: str
    pattern: str | None
    seed: int
    status: str = "missing"
    error: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def command(self) -> str:
        return shlex.join(["bame", "train", *self.overrides])

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The run's epochs: training FLOPs so far ÷ its dense bill, and top-1 in percent."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return [(bill, top1) for bill, top1 in self.result.get("curve", [])]
        rows, dense = map(json.loads, path.read_text().splitlines()), self.result["flops"]["train_dense"]
        return [(row["flops"] / dense, row["top1"]) for row in rows if row.get("top1") is not None]


@dataclass(frozen=True)
class Study:
    """A table and its runs. `command` made them."""

    table: Table
    command: str
    jobs: list[Job]


def read_table(name: str, scale: str) -> Table:
    """A table by the name of a shipped one, or by the path of one's own file. Raises ConfigError for a wrong file."""
    said, scaled = _load("table", name), _load("scale", scale)
    if unknown := set(said) - _KEYS:
        raise ConfigError(f"table {name}: no such key: {', '.join(sorted(unknown))} ({', '.join(sorted(_KEYS))})")
    try:
        if scale not in said["scales"]:
            raise ConfigError(f"table {name} has no scale={scale}: one of {', '.join(said['scales'])}")
        before = [*shlex.split(said.get("common") or ""), *shlex.split(scaled["words"])]
        before += shlex.split(said["scales"][scale] or "")
        rows = {row: [*before, *shlex.split(words)] for row, words in said["rows"].items()}
        published = [Published(pattern=entry.pop("pattern", None), **entry) for entry in said.get("published") or []]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"table {name}: {type(error).__name__} {error} (compare conf/table/cifar10.yaml)") from error
    methods = {method: shlex.split(words) for method, words in scaled["methods"].items()}
    label = Path(name).stem if name.endswith(".yaml") else name
    return Table(label, scale, said["title"], scaled["note"], scaled["comparable"], rows, methods, published)


def known(group: str) -> list[str]:
    """The shipped tables, or scales."""
    return sorted(f.name.removesuffix(".yaml") for f in files("bame_cli.conf").joinpath(group).iterdir())


def _load(group: str, name: str) -> dict[str, Any]:
    path: Traversable = files("bame_cli.conf").joinpath(group, f"{name}.yaml")
    if group == "table" and name.endswith(".yaml"):
        path = Path(name)
    elif name not in known(group):
        names = known(group)
        raise ConfigError(f"{group}={name}: no such {group}{near_misses(name, names)} ({', '.join(names)})")
    try:
        made = OmegaConf.to_container(OmegaConf.create(path.read_text()))
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{group} {name}: {first_line(error)}") from error
    if not isinstance(made, dict):
        raise ConfigError(f"{group} {name}: no table (compare conf/table/cifar10.yaml)")
    return {str(key): value for key, value in made.items()}


# --- the runs ---


def manifest_path(root: Path, name: str, scale: str) -> Path:
    """Where a sweep over a table says which runs it consists of."""
    return root / "tables" / f"{name}-{scale}.json"


def read(name: str, scale: str, root: Path, *, kept: str = "") -> Study:
    """A table with the runs that its last sweep listed. Raises ConfigError when it was never started.

    kept: a file of JSON lines (`bame table format=jsonl`) whose runs stand in for those that are not finished here.
    """
    table = read_table(name, scale)
    path = manifest_path(root, table.name, scale)
    if not path.is_file():
        raise ConfigError(f"{path} is not there: bame train +table={name} scale={scale} makes the runs of this table")
    try:
        listed = json.loads(path.read_text())
        known = read_kept(kept)
        jobs = [_job(entry, root, known) for entry in listed["jobs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); bame train +table={name} scale={scale} mends it") from error
    return Study(table, listed["command"], jobs)


def read_kept(path: str) -> dict[str, dict[str, Any]]:
    """Results of the finished runs of a file of JSON lines, by digest; none for no path. Raises ConfigError."""
    try:
        runs = map(json.loads, Path(path).read_text().splitlines()) if path else []
        return {run["digest"]: _result(run) for run in runs if run["status"] == "finished"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"kept={path}: no runs that `bame table format=jsonl` wrote ({error})") from error


def _result(run: dict[str, Any]) -> dict[str, Any]:
    """A line without what its table said of it."""
    return {key: value for key, value in run.items() if key not in ("row", "words")}


def _job(entry: dict[str, Any], root: Path, kept: dict[str, dict[str, Any]]) -> Job:
    """What a manifest says of a run, with the run's result. Its folder is relative to the root, or absolute."""
    digest, said = entry["digest"], {key: entry[key] for key in entry if key not in ("folder", "digest")}
    where = root / entry["folder"]
    status, error, result = state(where, digest)
    if status != "finished" and digest in kept:
        status, error, result = "finished", "", kept[digest]
    return Job(folder=where, status=status, error=error, result=result, **said)
