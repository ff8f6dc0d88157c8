"""`bame report`: a study as one HTML page that needs nothing else. No torch, no Hydra.

The page holds the table (a click on a head sorts it, and so does `#sort=<column>`, with a minus sign downwards), the
pictures as SVG, and of every run its configuration, its accuracy by epoch and where it was computed.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from bame_cli.studies import plots
from bame_cli.studies.lines import Line, lines, unfinished
from bame_cli.studies.study import Job, Study
from bame_cli.studies.table import cells, plain, sources

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 14px; white-space: nowrap; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
thead th { cursor: pointer; border-bottom: 2px solid #1a1a1a; white-space: nowrap; }
th[aria-sort=ascending]::after { content: " \\25b2"; } th[aria-sort=descending]::after { content: " \\25bc"; }
svg { max-width: 100%; height: auto; } pre { overflow-x: auto; background: #f5f5f5; padding: .7rem; font-size: 13px; }
.note { border-left: 4px solid #E69F00; padding: .3rem .8rem; background: #fdf6e8; }
summary { cursor: pointer; } details { margin: .3rem 0; }
"""

# Empty cells go last in either direction; what begins with a number is compared as one, N:M by its density.
_SCRIPT = """
const value = cell => {
  const text = cell.textContent.trim(), ratio = /^(\\d+):(\\d+)$/.exec(text), number = parseFloat(text);
  return text === "" ? null : ratio ? ratio[1] / ratio[2] : Number.isNaN(number) ? text : number;
};
const compare = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
function sort(head, direction) {
  const table = head.closest("table"), column = head.cellIndex, body = table.tBodies[0];
  const rows = [...body.rows].map(row => [value(row.cells[column]), row]);
  rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : direction * compare(a, b));
  body.append(...rows.map(([, row]) => row));
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
}
for (const head of document.querySelectorAll("table.sortable thead th"))
  head.addEventListener("click", () => sort(head, head.getAttribute("aria-sort") === "ascending" ? -1 : 1));
const asked = /^#sort=(-?)(\\d+)$/.exec(location.hash);
if (asked) {
  const head = document.querySelectorAll("table.sortable thead th")[asked[2] - 1];
  if (head) sort(head, asked[1] ? -1 : 1);
}
"""


def page(study: Study, folder: Path) -> str:
    """The study's page. folder: where its pictures are drawn, to be put into the page."""
    made, table = lines(study), study.table
    title = f"{table.title}, scale={table.scale}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p><code>{escape(study.command)}</code></p>",
        f'<p class="note">{escape(table.note)}</p>' if table.note else "",
        _table(made),
        _sources(made),
        _unfinished(study),
        *_pictures(study, made, folder),
        "<h2>Runs</h2>",
        *map(_run, study.jobs),
        "<h2>Environment</h2>",
        _environment(study.jobs),
    ]
    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body>
{body}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _table(made: list[Line]) -> str:
    head, *rows = cells(made)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _sources(made: list[Line]) -> str:
    return "".join(f"<p>{escape(source)}</p>" for source in sources(made))


def _unfinished(study: Study) -> str:
    jobs = unfinished(study)
    items = "\n".join(f"<li>{escape(plain(job))}</li>" for job in jobs)
    return f"<h2>Not finished</h2><ul>{items}</ul>" if jobs else ""


def _pictures(study: Study, made: list[Line], folder: Path) -> list[str]:
    """The pictures' SVG, each with ids of its own: in one page they share a name space."""
    if not any(line.finished for line in made):
        return []
    drawn = [path for path in plots.draw(study, folder) if path.suffix == ".svg"]
    return ["<h2>Pictures</h2>", *(f"<figure>{_inline(path)}</figure>" for path in drawn)]


def _inline(path: Path) -> str:
    text = path.read_text()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{path.stem}-", text)


# --- a run ---


def _run(job: Job) -> str:
    """One run, folded: its command, its curve, its result, its configuration."""
    top1 = f", top-1 {job.result['top1']:.2f} %" if job.result.get("top1") is not None else ""
    what = " ".join(filter(None, (job.row, job.pattern, job.model)))
    said = {key: value for key, value in job.result.items() if key not in ("versions", "git", "compute", "weights")}
    config = job.folder / "config.yaml"
    parts = [
        f"<summary>{escape(f'{what}, seed {job.seed}: {job.status}{top1}')}</summary>",
        f"<p><code>{escape(job.command)}</code><br>{escape(str(job.folder))}</p>",
        _curve(job) if job.result.get("flops") else "",
        f"<pre>{escape(json.dumps(said, indent=1))}</pre>" if said else "",
        f"<pre>{escape(config.read_text())}</pre>" if config.is_file() else "",
    ]
    return f"<details>{''.join(parts)}</details>"


def _curve(job: Job, width: int = 420, height: int = 140) -> str:
    """Top-1 by epoch, its axis labelled with its extremes; against the bill so far."""
    points = job.curve
    if not points:
        return ""
    most, low, high = max(x for x, _ in points), min(y for _, y in points), max(y for _, y in points)
    spread = (high - low) or 1.0
    at = [(50 + (width - 60) * x / most, 10 + (height - 40) * (high - y) / spread) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#0072B2"/>' for x, y in at)
    return (
        f'<svg width="{width}" height="{height}" font-size="11" role="img" aria-label="top-1 against training FLOPs">'
        f'<polyline points="{line}" fill="none" stroke="#0072B2"/>{dots}'
        f'<text x="2" y="14">{high:.2f} %</text><text x="2" y="{height - 30}">{low:.2f} %</text>'
        f'<text x="50" y="{height - 6}">top-1 by epoch, to {most:.3f} of dense training FLOPs</text></svg>'
    )


def _environment(jobs: list[Job]) -> str:
    """Versions, commit and device; a row for each combination that occurs, with the number of its runs."""
    counts: dict[str, int] = {}
    for job in jobs:
        if job.result:
            counts[_where(job.result)] = counts.get(_where(job.result), 0) + 1
    rows = "".join(f"<tr><td>{count}</td><td>{escape(where)}</td></tr>" for where, count in counts.items())
    return f"<table><thead><tr><th>runs</th><th>computed with</th></tr></thead><tbody>{rows}</tbody></table>"


def _where(result: dict[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in result.get("versions", {}).items()]
    git = result.get("git") or {}
    if git.get("commit"):
        parts.append(f"commit {git['commit'][:12]}{' with changes' if git.get('dirty') else ''}")
    compute = result.get("compute") or {}
    parts += [f"{key} {value}" for key, value in compute.items() if value not in (None, False)]
    return ", ".join(parts) or "not recorded"
