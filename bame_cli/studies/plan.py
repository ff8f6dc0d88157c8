"""A sweep before it starts: its jobs, where each lives, how far it is, what it would cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bame_cli.errors import ConfigError
from bame_cli.methods import name_of
from bame_cli.options import compose
from bame_cli.options.schema import Config, from_hydra
from bame_cli.plots.columns import aligned
from bame_cli.runs import folder as folders
from bame_cli.runs.path import digest, parent, run_path
from bame_cli.runs.state import state
from bame_cli.studies.study import manifest_path, read_kept, read_table

if TYPE_CHECKING:
    from bame_cli.runs.plan import RunPlan


@dataclass
class Planned:
    """A job of a sweep. `row`: its row of a table. `error`: why it is refused. `kept`: it was run elsewhere.

    where, mark: the run's folder and digest, known with its configuration; a checkpoint's content is read for them.
    """

    row: str
    words: list[str]
    config: Config | None = None
    where: Path | None = None
    mark: str = ""
    error: str = ""
    kept: bool = False

    @property
    def able(self) -> bool:
        """Whether it can and need be started."""
        return not (self.error or self.kept)

    @property
    def said(self) -> list[str]:
        """The words as one would type them: crossing lists escapes colons."""
        return [word.replace("\\", "") for word in self.words]

    def entry(self) -> dict[str, Any]:
        """What identifies the run, for a manifest."""
        made: dict[str, Any] = {"row": self.row, "overrides": self.said}
        if self.config is None:
            return made
        made |= {"folder": str(self.where), "digest": self.mark}
        made |= {"group": digest(self.config, seed=False), "model": self.config.model.name}
        made |= {"dataset": self.config.dataset.name, "method": name_of(self.config.method)}
        target = self.config.target
        return made | {"pattern": str(target) if target else None, "seed": self.config.seed}

    def record(self, status: str) -> dict[str, Any]:
        """How a job ended that left no record: it was refused, or `lost` with its process, or `not started`."""
        status = "refused" if self.error else "kept" if self.kept else status
        reason = "its process ended without a word" if status == "lost" else self.error
        code = {"refused": 2, "lost": 1}.get(status, 0)
        return {"overrides": self.said, "code": code, "status": status, "error": reason}


class Plan:
    """The jobs of a command line: lists crossed, or the rows of a table; those that are the same run listed once."""

    def __init__(
        self, words: Sequence[str], *, table: str = "", scale: str = "paper", kept: str = "", root: Path
    ) -> None:
        self.root = root
        self.known = read_kept(kept)
        self.table = read_table(table, scale) if table else None
        self.flags, mine = compose.apart(words)
        rows = self.table.rows if self.table else {"": []}
        self.jobs = [Planned(row, job) for row, said in rows.items() for job in self._crossed([*said, *mine])]
        self.words = [job.words for job in self.jobs]
        self.merged = 0

    def _crossed(self, words: list[str]) -> list[list[str]]:
        """Every combination, with the table's words for the method of each, unless the words say otherwise."""
        jobs = compose.crossed(words)
        if self.table is None:
            return jobs
        made = []
        for job in jobs:
            said = dict(word.partition("=")[::2] for word in job)
            extra = self.table.methods.get(said.get("method", "bame"), [])
            made.append([*job, *(word for word in extra if word.partition("=")[0] not in said)])
        return made

    def look(self, nodes: Sequence[Any]) -> None:
        """Take what Hydra composed of each job; refuse what cannot be served, and drop what is listed already."""
        seen = dict[Path, str]()
        for job, node in zip(self.jobs, nodes, strict=True):
            try:
                job.config = from_hydra(node)
                job.where, job.mark = run_path(job.config), digest(job.config)
            except ConfigError as error:
                job.config, job.error = None, str(error)
        left = []
        for job in self.jobs:
            if job.where is None:  # refused, and listed as such
                left.append(job)
            elif job.where not in seen:
                left.append(job)
                seen[job.where] = job.mark
            elif seen[job.where] != job.mark:
                raise ConfigError(f"run.dir={job.where} names one folder for runs that differ: run.root is for several")
        self.merged, self.jobs = len(self.jobs) - len(left), left
        self._leave_out()

    def _leave_out(self) -> None:
        """Jobs that were run elsewhere are kept as they are, unless another one starts from their network."""
        if not self.known:
            return
        for job in self.jobs:
            job.kept = job.mark in self.known
        left = [job.config for job in self.jobs if job.config and not job.kept]
        wanted = {run_path(start) for config in left if (start := parent(config))}
        for job in self.jobs:
            job.kept = job.kept and job.where not in wanted

    def chosen(self) -> list[int]:
        """Positions, among the words, of the jobs that can start."""
        able = {id(job.words) for job in self.jobs if job.able}
        return [index for index, words in enumerate(self.words) if id(words) in able]

    def demand_some(self) -> None:
        """Raise ConfigError when there is no job to start."""
        refused = [job for job in self.jobs if job.error]
        stop = any(job.config.sweep.fail_fast for job in self.jobs if job.config)
        if len(refused) == len(self.jobs) or (refused and stop):
            raise ConfigError(f"{' '.join(refused[0].said)}: {refused[0].error}")

    def write_table(self, command: str) -> None:
        """The table's manifest, from which `bame table` knows its runs. Folders below the root are said from there."""
        if self.table is None:
            return
        listed = [job.entry() for job in self.jobs if job.config]
        for entry in listed:
            entry["folder"] = _below(Path(entry["folder"]), self.root)
        path = manifest_path(self.root, self.table.name, self.table.scale)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"table": self.table.name, "scale": self.table.scale, "command": command}
        folders.write(path, json.dumps(about | {"jobs": listed}, indent=1) + "\n")

    def text(self) -> str:
        """The jobs for the eye: state, expected bill, folder, and the words that they do not all share."""
        shared = [word for word in self.jobs[0].said if all(word in job.said for job in self.jobs)]
        rows: list[tuple[str, ...]] = [("state", "training FLOPs", "folder", "job")]
        total, left, plan = 0, 0, None
        for job in self.jobs:
            plan = _expected(job, plan)
            status = "refused" if plan is None or job.error else "kept" if job.kept else _state(job)
            bill = plan.expected.total if plan and not job.error else 0
            total, left = total + bill, left + (0 if status in ("finished", "kept") else bill)
            words = " ".join(word for word in job.said if word not in shared)
            rows.append((status, f"{bill:.3e}" if bill else "-", job.error or str(job.where), words))
        merged = f", {self.merged} more are the same runs" if self.merged else ""
        counted = f"{total:.3e} training FLOPs expected, of them {left:.3e} in jobs that are not finished"
        return f"every job: {' '.join(shared)}\n\n{aligned(rows)}\n\n{len(self.jobs)} jobs{merged}; {counted}"


def _expected(job: Planned, like: RunPlan | None) -> RunPlan | None:
    """The job's blueprint; what that refuses becomes the job's error."""
    from bame_cli.runs.plan import known_facts, run_plan

    if job.config is None:
        return like
    try:
        return run_plan(job.config, known_facts(job.config), like=like)
    except ConfigError as error:
        job.error = str(error)
        return like


def _state(job: Planned) -> str:
    assert job.where is not None
    try:
        folders.demand_ours(job.where, job.mark)
        status, error, _ = state(job.where, job.mark)
    except ConfigError as refused:
        status, error = "refused", str(refused)
    job.error = error if status in ("refused", "damaged") else ""
    return {"finished": "finished", "missing": "new", "refused": "refused", "damaged": "refused"}.get(
        status, "resumable"
    )


def _below(folder: Path, root: Path) -> str:
    """The folder as seen from the root, or its absolute path when it lies elsewhere."""
    inside = folder.absolute().is_relative_to(root.absolute())
    return str(folder.absolute().relative_to(root.absolute()) if inside else folder.absolute())
