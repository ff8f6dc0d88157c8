"""What a study's runs came to, beside published figures: the lines of its table. No torch, no Hydra."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import mean, stdev

from bame_cli.errors import ConfigError, near_misses
from bame_cli.studies.study import Job, Published, Study


@dataclass(frozen=True)
class Line:
    """The runs of one row at one pattern that differ in their seeds alone; or a published figure that nobody ran here.

    `row`: the table's word for it, with what sets it apart where a row holds several recipes. `rival`: the line that it
    is compared with.
    """

    row: str
    model: str
    pattern: str | None
    jobs: list[Job]
    published: Published | None
    comparable: bool
    rival: Line | None = None

    @property
    def finished(self) -> list[Job]:
        return [job for job in self.jobs if job.finished]

    @property
    def top1(self) -> list[float]:
        """Percent, a figure per finished run."""
        return [job.result["top1"] for job in self.finished]

    @property
    def mean(self) -> float | None:
        return mean(self.top1) if self.top1 else None

    @property
    def std(self) -> float | None:
        """The sample's standard deviation (n - 1); None for fewer than two runs."""
        return stdev(self.top1) if len(self.top1) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the published one, in points; None where the two are not of the same data and network."""
        if self.published is None or self.mean is None or not self.comparable:
            return None
        return self.mean - self.published.top1

    @property
    def leads(self) -> list[float]:
        """Points of top-1 ahead of the rival, a figure per seed that both have finished."""
        theirs = {job.seed: job.result["top1"] for job in self.rival.finished} if self.rival else {}
        return [job.result["top1"] - theirs[job.seed] for job in self.finished if job.seed in theirs]

    @property
    def lead(self) -> float | None:
        """The mean of `leads`."""
        return mean(self.leads) if self.leads else None

    @property
    def lead_error(self) -> float | None:
        """Its standard error, over seeds; None for fewer than two."""
        return stdev(self.leads) / math.sqrt(len(self.leads)) if len(self.leads) > 1 else None

    def bill(self, key: str) -> float | None:
        """The mean of a ratio of the runs' bills."""
        values = [float(job.result["flops"][key]) for job in self.finished]
        return mean(values) if values else None

    @property
    def inherited_ratio(self) -> float | None:
        """The train ratio with the bill of the run that the weights came from."""
        bills = [job.result["flops"] for job in self.finished]
        return mean((b["train"] + b["inherited"]) / b["train_dense"] for b in bills) if bills else None

    @property
    def state(self) -> str:
        """How many runs are in which state; empty when all are finished."""
        counts: dict[str, int] = {}
        for job in self.jobs:
            if not job.finished:
                counts[job.status] = counts.get(job.status, 0) + 1
        return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))


def lines(study: Study) -> list[Line]:
    """The study's cells, a network after the other, then the published figures of rows that are not run here."""
    cells: dict[tuple[str, str, str | None, str], list[Job]] = {}
    models = list(dict.fromkeys(job.model for job in study.jobs))
    for job in sorted(study.jobs, key=lambda job: models.index(job.model)):
        cells.setdefault((job.row, job.model, job.pattern, job.group), []).append(job)
    labels = _labels(cells)
    table, made = study.table, list[Line]()
    for key, jobs in cells.items():
        row, model, pattern, _ = key
        published = next((p for p in table.published if (p.row, p.pattern) == (row, pattern)), None)
        made.append(Line(labels[key], model, pattern, jobs, published, table.comparable))
    run = {(row, pattern) for row, _, pattern, _ in cells}
    others = [p for p in table.published if (p.row, p.pattern) not in run]
    return made + [Line(p.row, p.model or "", p.pattern, [], p, False) for p in others]


def against(made: list[Line], row: str) -> list[Line]:
    """The lines, each with its rival: the line of this row for the same network and pattern.

    Raises ConfigError when no line has that row.
    """
    rivals = {(line.model, line.pattern): line for line in made if line.row == row and line.jobs}
    if not rivals:
        known = list(dict.fromkeys(line.row for line in made if line.jobs))
        raise ConfigError(f"against={row}: no such row{near_misses(row, known)} ({', '.join(known)})")
    return [replace(line, rival=rivals.get((line.model, line.pattern))) if line.row != row else line for line in made]


def _labels(cells: dict[tuple[str, str, str | None, str], list[Job]]) -> dict[tuple[str, str, str | None, str], str]:
    """A row's name; where its cell holds several recipes, with the words that tell them apart."""
    labels = {}
    for key, jobs in cells.items():
        others = [group for other, group in cells.items() if other[:3] == key[:3] and other != key]
        words = set(jobs[0].overrides)
        common = words.intersection(*(group[0].overrides for group in others))
        apart = [w for w in jobs[0].overrides if others and w not in common and not w.startswith("seed=")]
        labels[key] = f"{key[0]} [{' '.join(apart) or key[3]}]" if others else key[0]
    return labels


def unfinished(study: Study) -> list[Job]:
    """The runs that do not count."""
    return [job for job in study.jobs if not job.finished]
