"""`bame train`: one run, a sweep, or a table's runs. Every job is known, and recorded, before the first one starts."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from bame_cli.errors import ConfigError, follows
from bame_cli.options import compose
from bame_cli.options.words import split, yes
from bame_cli.runs import folder as folders
from bame_cli.studies.plan import Plan, Planned

Record = dict[str, Any]


def train(words: list[str]) -> int:
    """Hand the words to Hydra, which composes each job and calls `_job`."""
    own, rest = split(words, {"+table": "", "table": "", "scale": "", "kept": "", "dry_run": "false"})
    table, dry = own["+table"] or own["table"], yes("dry_run", own["dry_run"])
    compose.demand_assignments(rest)
    if own["scale"] and not table:
        raise ConfigError(f"scale={own['scale']} belongs to a table: +table=cifar10 scale={own['scale']}")
    multirun = bool(table) or any(word in ("-m", "--multirun") for word in rest)
    if own["kept"] and not multirun:
        raise ConfigError(f"kept={own['kept']} belongs to a sweep or a table: leave it out, or say -m or +table=")
    if multirun and any(word in ("--cfg", "-c") for word in rest):
        raise ConfigError("--cfg shows the configuration of one job: leave out -m, and name one value for each key")
    root = next((word.partition("=")[2] for word in reversed(rest) if word.startswith("run.root=")), "outputs")
    sweep = Path(root, "sweeps", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}").absolute()
    os.environ["BAME_SWEEP"] = str(sweep)
    _outcomes.clear()
    if follows():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 for as long as the process lives
    if not (multirun or dry or _searches(rest)):
        compose.run_jobs(rest, _job)
        return max((outcome["code"] for outcome in _outcomes), default=0)
    if _searches(rest):
        return _search(rest, sweep, refuse=bool(table or own["kept"]) or dry)
    plan = Plan(rest, table=table, scale=own["scale"] or "paper", kept=own["kept"], root=Path(root))
    return _dry(plan) if dry else _sweep(plan, sweep, words)


def _dry(plan: Plan) -> int:
    """Say what the jobs are, where they would live, how far they are, and what they would cost; write nothing."""

    def begin(nodes: list[Any]) -> list[int]:
        plan.look(nodes)
        return []

    compose.run_listed(plan.flags, _job, plan.words, begin)
    print(plan.text())
    return 2 if all(job.error for job in plan.jobs) else 0


def _sweep(plan: Plan, sweep: Path, words: Sequence[str]) -> int:
    """Every job that is not refused, by Hydra's launcher; then how each ended. 1 when any failed."""
    command = shlex.join(["bame", "train", *words])
    started: list[Planned] = []

    def begin(nodes: list[Any]) -> list[int]:
        plan.look(nodes)
        plan.demand_some()
        started[:] = [job for job in plan.jobs if job.able]
        if not follows():
            _write_manifest(sweep, command, plan.jobs, [job.record("not started") for job in plan.jobs])
            plan.write_table(command)
        return plan.chosen()

    ended = "not started"  # the sweep was interrupted
    try:
        compose.run_listed(plan.flags, _job, plan.words, begin)
        ended = "lost"
    finally:
        made = dict(zip(map(id, started), _records(sweep, len(started)), strict=True))
        records = [made.get(id(job)) or job.record(ended) for job in plan.jobs]
        if started and not follows():
            _write_manifest(sweep, command, plan.jobs, records)
    if follows():
        return max((outcome["code"] for outcome in _outcomes), default=0)
    return _summary(records, sweep)


def _searches(words: Sequence[str]) -> bool:
    return any(word.startswith(("hydra/sweeper=", "search=", "+search=")) for word in words)


def _search(words: list[str], sweep: Path, *, refuse: bool) -> int:
    """A sweep whose jobs a sweeper of Hydra's makes up as it goes; its picture is kept beside its records."""
    if refuse:
        raise ConfigError(
            "a search makes up its jobs as it goes: there is no table and no dry_run of them, and none is kept"
        )
    compose.run_jobs(words, _job)
    if follows():
        return max((outcome["code"] for outcome in _outcomes), default=0)
    made = [_load(path) for path in sorted(sweep.glob("jobs/*.json"))]
    code = _summary(made, sweep)
    finished = [record for record in made if record["status"] == "finished"]
    if finished:
        from bame_cli.studies import plots

        best = max(finished, key=lambda record: record["top1"])
        print(f"best: top-1 {best['top1']:.2f} %: {' '.join(best['overrides'])}")
        print(*plots.search([(record["overrides"], record["top1"]) for record in finished], sweep), sep="\n")
    return code


# --- a job ---

_outcomes: list[Record] = []


def _job(node: Any) -> float:
    """One training run, in whatever process the launcher runs it; returns what a search maximizes."""
    hydra = HydraConfig.get()
    alone = hydra.mode == RunMode.RUN
    record: Record = {"overrides": [word.replace("\\", "") for word in hydra.overrides.task], "code": 0, "error": ""}
    sweep = Path(hydra.sweep.dir)
    if not alone and node.sweep.fail_fast and any(r["code"] for r in map(_load, sweep.glob("jobs/*.json"))):
        record |= {"status": "not started", "error": "another job failed first (sweep.fail_fast=true)"}
    else:
        record |= _trained(node, None if alone else sweep / "jobs" / f"{hydra.job.num:04d}.log")
    if alone or follows():
        _outcomes.append(record)
        if record["status"] in ("failed", "diverged"):
            print(f"bame: {record['status']}: {record['error']}", file=sys.stderr)
    else:
        (sweep / "jobs").mkdir(parents=True, exist_ok=True)
        folders.write(sweep / "jobs" / f"{hydra.job.num:04d}.json", json.dumps(record))
    if record["code"] > 2:  # interrupted: whatever else the sweep would start must not start
        raise SystemExit(record["code"])
    return float(record.get("top1") or 0.0)


def _trained(node: Any, log: Path | None) -> Record:
    """Train, and say how it ended. log: where a traceback goes that no run could log; None lets it pass."""
    try:
        from bame_cli.options.schema import from_hydra, to_yaml
        from bame_cli.runs import run

        outcome = run.run(from_hydra(node), to_yaml(node))
    except ConfigError as error:
        if not follows():
            print(f"bame: {error}", file=sys.stderr)
        return {"code": 2, "status": "refused", "error": str(error)}
    except Exception as error:
        if log is None and isinstance(error, OSError):  # a full disk is no wrong command
            return {"code": 1 if error.errno == errno.ENOSPC else 2, "status": "failed", "error": str(error)}
        if log is None:
            raise
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        return {"code": 1, "status": "failed", "error": f"{type(error).__name__}: {error} ({log})".replace("\n", " ")}
    ended = {"code": outcome.code, "folder": str(outcome.folder), "status": outcome.result["status"]}
    return ended | {"error": outcome.result.get("error", ""), "top1": outcome.result.get("top1")}


# --- what is known of a sweep ---


def _load(path: Path) -> Record:
    return json.loads(path.read_text())


def _records(sweep: Path, count: int) -> list[Record | None]:
    """The jobs' own records; None for one that left none."""
    paths = [sweep / "jobs" / f"{number:04d}.json" for number in range(count)]
    return [_load(path) if path.is_file() else None for path in paths]


def _write_manifest(sweep: Path, command: str, jobs: Sequence[Planned], records: Sequence[Record]) -> None:
    """What the sweep consists of, and how far each job is."""
    rows = [job.entry() | record for job, record in zip(jobs, records, strict=True)]
    sweep.mkdir(parents=True, exist_ok=True)
    folders.write(sweep / "manifest.json", json.dumps({"command": command, "jobs": rows}, indent=1) + "\n")


def _summary(records: list[Record], sweep: Path) -> int:
    """A line per job; 1 when any failed."""
    print(f"sweep of {len(records)} jobs ({sweep}):")
    for record in records:
        top1 = f"top-1 {record['top1']:6.2f} %" if record.get("top1") is not None else " " * 14
        print(f"  {record['status']:<12}{top1}  {' '.join(record['overrides'])}  {record['error']}".rstrip())
    failed = [record for record in records if record["code"]]
    for record in failed:
        print(f"bame: {record['status']}: {' '.join(record['overrides'])}: {record['error']}", file=sys.stderr)
    return 1 if failed else 0
