"""`bame table`: a table as text, Markdown, LaTeX, CSV or JSON, its runs as JSON lines. No torch, no Hydra."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from bame_cli.plots.columns import aligned
from bame_cli.studies.lines import Line, against, lines, unfinished
from bame_cli.studies.study import Job, Study


def show(study: Study, how: str, *, rival: str = "") -> str:
    """The table in one of FORMATS; the same bytes for the same runs. CSV and JSON do not round.

    rival: a row that all others are compared with, seed by seed.
    """
    made = lines(study)
    return _WRITERS[how](study, against(made, rival) if rival else made)


def _text(study: Study, made: list[Line]) -> str:
    head = f"{study.table.title}, scale={study.table.scale}: {study.command}"
    return "\n".join([head, "", aligned(cells(made)), "", *_notes(study, made)]).rstrip()


def _notes(study: Study, made: list[Line]) -> list[str]:
    """What stands below a table: what its scale says of it, how it compares, sources, runs that do not count."""
    compared = "ahead of: mean of the differences seed by seed, ± their standard error" if any(map(_lead, made)) else ""
    return [*filter(None, [study.table.note, compared]), *sources(made), *map(plain, unfinished(study))]


def cells(made: list[Line]) -> list[list[str]]:
    """Head and rows of the table for the eye. A column that would be empty throughout is left out."""
    numbers = _numbered(made)
    columns = {
        "model": [line.model for line in made],
        "method": [line.row for line in made],
        "pattern": [line.pattern or "" for line in made],
        "top-1 %": [_accuracy(line) for line in made],
        f"ahead of {next((line.rival.row for line in made if line.rival), '')}": [_lead(line) for line in made],
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
    all_of = len(line.finished) == len(line.jobs)
    return f"{line.mean:.2f}{_spread(line.std)} ({len(line.finished)}{'' if all_of else f' of {len(line.jobs)}'})"


def _lead(line: Line) -> str:
    if line.lead is None:
        return ""
    return f"{line.lead:+.2f}{_spread(line.lead_error)}"


def _spread(value: float | None) -> str:
    return "" if value is None else f" ± {value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _numbered(made: Iterable[Line]) -> dict[str, int]:
    sources = dict.fromkeys(line.published.source for line in made if line.published)
    return {source: number for number, source in enumerate(sources, 1)}


def sources(made: Iterable[Line]) -> list[str]:
    """Where the published figures are from, by number."""
    return [f"[{number}] {source}" for source, number in _numbered(made).items()]


def plain(job: Job) -> str:
    """A run that does not count: its state, its command, and the reason where one is known."""
    reason = f": {job.error}" if job.error else ""
    return f"{job.status}: {job.row}: {job.command}{reason}"


def _markdown(study: Study, made: list[Line]) -> str:
    head, *rows = cells(made)
    said = f"**{_md(study.table.title)}**, scale={study.table.scale}: `{study.command}`"
    notes = [f"- {_md(note)}" for note in _notes(study, made)]
    table = [_md_row(head), f"|{'---|' * len(head)}", *map(_md_row, rows)]
    return "\n".join([said, "", *table, "", *notes]).rstrip()


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


def _latex(study: Study, made: list[Line]) -> str:
    """A tabular for booktabs, and its notes as paragraphs."""
    head, *rows = (f"  {' & '.join(map(_tex, row))} \\\\" for row in cells(made))
    return "\n".join(
        [
            f"% {study.table.title}, scale={study.table.scale}: {study.command}",
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{'l' * len(cells(made)[0])}}}",
            r"  \toprule",
            head,
            r"  \midrule",
            *rows,
            r"  \bottomrule",
            r"\end{tabular}",
            *(rf"\par {_tex(note)}" for note in _notes(study, made)),
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
        "ahead_of": line.rival.row if line.rival else None,
        "lead": line.lead,
        "lead_error": line.lead_error,
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


def _csv(study: Study, made: list[Line]) -> str:
    records = list(map(_record, made))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().rstrip("\n")


def _json(study: Study, made: list[Line]) -> str:
    return json.dumps(_document(study, made), indent=1, ensure_ascii=False)


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


def _jsonl(study: Study, made: list[Line]) -> str:
    """A line per run: its row, its words, its state, and all that its result says. To be kept, and computed with."""
    said = (
        {"row": job.row, "words": job.overrides, "status": job.status}
        | job.result
        | ({"curve": job.curve} if job.finished else {})
        for job in study.jobs
    )
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in said)


_WRITERS = {"text": _text, "md": _markdown, "latex": _latex, "csv": _csv, "json": _json, "jsonl": _jsonl}
FORMATS = tuple(_WRITERS)
