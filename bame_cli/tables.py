"""`bame table`: what a study's runs came to, beside published figures. Reads result.json files. No torch, no Hydra."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from bame_cli.studies import Job, Published, Study

FORMATS = ("text", "md", "latex", "csv", "json")


@dataclass(frozen=True)
class Line:
    """The runs of one row at one pattern that differ in their seeds alone; or a published figure that nobody ran here.

    `row`: the table's word for it, with what sets it apart where a row holds several recipes.
    """

    row: str
    model: str
    pattern: str | None
    jobs: list[Job]
    published: Published | None
    comparable: bool

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
    """The study's cells in the order of its file, then the published figures of rows that are not run here."""
    cells: dict[tuple[str, str, str | None, str], list[Job]] = {}
    for job in study.jobs:
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


# --- as text ---


def show(study: Study, how: str) -> str:
    """The table as text, md, latex, csv or json; the same bytes for the same runs. CSV and JSON do not round."""
    made = lines(study)
    if how == "json":
        return json.dumps(_document(study, made), indent=1, ensure_ascii=False)
    if how == "csv":
        return _csv([_record(line) for line in made])
    head, *rows = cells(made)
    sources = _sources(made)
    if how == "latex":
        return _latex(study, head, rows, sources)
    notes = [study.table.note, *sources, *(_plain(job) for job in unfinished(study))]
    if how == "md":
        escaped = [*map(_md, filter(None, notes))]
        table = "\n".join([_md_row(head), f"|{'---|' * len(head)}", *map(_md_row, rows)])
        parts = [f"**{_md(study.table.title)}**, scale={study.table.scale}: `{study.command}`", table]
        return "\n\n".join([*parts, *(["\n".join(f"- {note}" for note in escaped)] if escaped else [])])
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    body = "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows))
    return "\n\n".join(
        [f"{study.table.title}, scale={study.table.scale}: {study.command}", body, "\n".join(filter(None, notes))]
    ).rstrip()


def cells(made: list[Line]) -> list[list[str]]:
    """Head and rows of the table for the eye. A column that would be empty throughout is left out."""
    numbers = _numbered(made)
    columns = {
        "model": [line.model for line in made],
        "method": [line.row for line in made],
        "pattern": [line.pattern or "" for line in made],
        "top-1 %": [_accuracy(line) for line in made],
        "train ÷ dense": [_ratio(line.bill("train_ratio")) for line in made],
        "with dense grad_input": [_ratio(line.bill("train_ratio_dense_grad_input")) for line in made],
        "with inherited": [_ratio(line.inherited_ratio) for line in made]
        if any(line.inherited_ratio != line.bill("train_ratio") for line in made)
        else [],
        "inference ÷ dense": [_ratio(line.bill("inference_ratio")) for line in made],
        "published": [
            f"{line.published.top1:.2f} [{numbers[line.published.source]}]" if line.published else "" for line in made
        ],
        "difference": ["" if line.difference is None else f"{line.difference:+.2f}" for line in made],
        "not finished": [line.state for line in made],
    }
    kept = {name: values for name, values in columns.items() if any(values)}
    return [list(kept), *(list(row) for row in zip(*kept.values(), strict=True))]


def _accuracy(line: Line) -> str:
    if not line.jobs:
        return ""
    if line.mean is None:
        return f"- (0 of {len(line.jobs)})"
    spread = "" if line.std is None else f" ± {line.std:.2f}"
    all_of = len(line.finished) == len(line.jobs)
    return f"{line.mean:.2f}{spread} ({len(line.finished)}{'' if all_of else f' of {len(line.jobs)}'})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _numbered(made: Iterable[Line]) -> dict[str, int]:
    sources = dict.fromkeys(line.published.source for line in made if line.published)
    return {source: number for number, source in enumerate(sources, 1)}


def _sources(made: Iterable[Line]) -> list[str]:
    return [f"[{number}] {source}" for source, number in _numbered(made).items()]


def _plain(job: Job) -> str:
    reason = f": {job.error}" if job.error else ""
    return f"{job.status}: {job.row}: {job.command}{reason}"


# --- formats ---


def _md_row(row: list[str]) -> str:
    return f"| {' | '.join(map(_md, row))} |"


def _md(text: str) -> str:
    for mark in "\\`*_{}[]<>|#~":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "÷": r"$\div$",
    "<": r"$<$",
    ">": r"$>$",
}


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text).replace("\n", " ")


def _latex(study: Study, head: list[str], rows: list[list[str]], sources: list[str]) -> str:
    """A tabular for booktabs; sources and runs that do not count follow as comments' opposite: a visible note."""
    notes = [study.table.note, *sources, *(_plain(job) for job in unfinished(study))]
    body = [f"  {' & '.join(map(_tex, row))} \\\\" for row in rows]
    return "\n".join(
        [
            f"% {study.table.title}, scale={study.table.scale}: {study.command}",
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{'l' * len(head)}}}",
            r"  \toprule",
            f"  {' & '.join(map(_tex, head))} \\\\",
            r"  \midrule",
            *body,
            r"  \bottomrule",
            r"\end{tabular}",
            *(rf"\par {_tex(note)}" for note in notes if note),
        ]
    )


def _record(line: Line) -> dict[str, Any]:
    published = line.published
    return {
        "model": line.model or None,
        "method": line.row,
        "pattern": line.pattern,
        "top1_mean": line.mean,
        "top1_std": line.std,
        "finished": len(line.finished),
        "runs": len(line.jobs),
        "train_ratio": line.bill("train_ratio"),
        "train_ratio_dense_grad_input": line.bill("train_ratio_dense_grad_input"),
        "train_ratio_inherited": line.inherited_ratio,
        "inference_ratio": line.bill("inference_ratio"),
        "published_top1": published.top1 if published else None,
        "published_source": published.source if published else None,
        "difference": line.difference,
        "not_finished": line.state or None,
    }


def _csv(records: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().rstrip("\n")


def _document(study: Study, made: list[Line]) -> dict[str, Any]:
    table = study.table
    return {
        "table": table.name,
        "scale": table.scale,
        "title": table.title,
        "note": table.note or None,
        "command": study.command,
        "rows": [
            _record(line)
            | {"group": line.jobs[0].group if line.jobs else None}
            | {"seeds": [job.seed for job in line.finished], "top1": line.top1}
            for line in made
        ],
        "not_finished": [
            {
                "row": job.row,
                "status": job.status,
                "error": job.error,
                "command": job.command,
                "folder": str(job.folder),
            }
            for job in unfinished(study)
        ],
    }
