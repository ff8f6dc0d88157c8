"""Pictures of a study: accuracy against training FLOPs and density, and training by FLOPs. No torch, no Hydra."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.plots.figure import COLORS, new_figure, save
from bame_cli.studies.lines import Line, lines
from bame_cli.studies.study import Job, Study

# A row of a table keeps its colour, marker and line style in every picture, so that one of the three is enough.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
STYLES = ("-", "--", "-.", ":")


def draw(study: Study, folder: Path) -> list[Path]:
    """Every picture that the finished runs allow, as PNG and SVG. Raises ConfigError when no run is finished."""
    shown = [line for line in lines(study) if line.mean is not None]
    if not shown:
        raise ConfigError(f"no run of {study.table.name} at scale={study.table.scale} is finished: nothing to draw")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, picture in PICTURES.items():
        drawn = picture(study, shown)
        for suffix in (".png", ".svg"):
            made.append(folder / f"{name}{suffix}")
            save(drawn, made[-1])
    return made


def flops(study: Study, shown: Sequence[Line]) -> Any:
    """Top-1 against training FLOPs ÷ dense, one panel per model; the Pareto front joined, seeds as error bars.

    A bill includes the run that the weights came from, as in ASP; a hollow marker stands where it would be without.
    """
    return _against(study, shown, lambda line: line.inherited_ratio, "training FLOPs ÷ dense", front=True)


def density(study: Study, shown: Sequence[Line]) -> Any:
    """Top-1 against the share of weights kept in sparse layers; the points of a row joined."""
    return _against(study, shown, kept, "share of weights kept in sparse layers (N ÷ M)", front=False)


def kept(line: Line) -> float:
    """N ÷ M; 1 for a dense network."""
    n, _, m = (line.pattern or "1:1").partition(":")
    return int(n) / int(m)


def _against(
    study: Study, shown: Sequence[Line], at: Callable[[Line], float | None], label: str, *, front: bool
) -> Any:
    models, looks = list(dict.fromkeys(line.model for line in shown)), _looks(shown)
    drawn = new_figure(figsize=(6.5 * len(models), 5.5))
    for model, axes in zip(models, drawn.subplots(1, len(models), squeeze=False)[0], strict=True):
        points = [line for line in shown if line.model == model]
        for row in dict.fromkeys(line.row for line in points):
            own = sorted((at(line) or 0.0, line.mean or 0.0, line.std or 0.0) for line in points if line.row == row)
            x, y, spread = zip(*own, strict=True)
            color, marker, style = looks[row]
            joined = "none" if front else style
            axes.errorbar(
                x, y, spread, color=color, marker=marker, linestyle=joined, capsize=3, elinewidth=1, label=row
            )
        if front:
            edge = pareto([(at(line) or 0.0, line.mean or 0.0) for line in points])
            costs, tops = zip(*edge, strict=True)
            axes.step(costs, tops, where="post", color="#000000", linewidth=1, label="Pareto front")
            _name_patterns(axes, points, at)
            _without_inherited(axes, points, looks)
        else:
            _density_ticks(axes, points)
        axes.set(xlabel=label, ylabel="top-1 %, mean ± std over seeds", title=model)
        axes.grid(alpha=0.3)
    _legend(drawn)
    _title(drawn, study)
    return drawn


def _without_inherited(axes: Any, points: Sequence[Line], looks: dict[str, tuple[str, str, str]]) -> None:
    for line in points:
        alone, whole = line.bill("train_ratio"), line.inherited_ratio
        if alone is not None and whole is not None and alone < whole:
            color, marker, _ = looks[line.row]
            axes.plot([alone, whole], [line.mean] * 2, ":", color=color, linewidth=1)
            label = f"{line.row}, without the run it starts from"
            axes.plot(alone, line.mean, marker, color=color, markerfacecolor="none", linestyle="none", label=label)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both cost (first) and accuracy (second), by cost."""
    best: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((cost, accuracy))
    return best


def curves(study: Study, shown: Sequence[Line]) -> Any:
    """Top-1 of every epoch against the bill so far, ÷ the run's dense bill; mean over seeds, one panel per pattern."""
    looks = _looks(shown)
    curved = [(line, *_mean_curve(line.finished)) for line in shown]
    sparse = [line for line in shown if line.pattern] or shown[:1]
    panels = list(dict.fromkeys((line.model, line.pattern) for line in sparse))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    drawn = new_figure(figsize=(5.5 * columns, 4 * rows + 1))
    grid = drawn.subplots(rows, columns, squeeze=False).ravel()
    for (model, pattern), axes in zip(panels, grid, strict=False):
        for line, x, y in curved:
            if line.model == model and line.pattern in (pattern, None):
                color, marker, style = looks[line.row]
                axes.plot(
                    x, y, color=color, linestyle=style, marker=marker, markersize=4, markevery=max(1, len(x) // 10)
                )
        axes.set(xlabel="training FLOPs so far ÷ dense training", ylabel="top-1 %", title=f"{model} {pattern or ''}")
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.remove()
    first = grid[0]
    seen = {line.row for line, x, _ in curved if x}
    for row, (color, marker, style) in looks.items():
        if row in seen:
            first.plot([], [], color=color, marker=marker, linestyle=style, label=row)
    _legend(drawn)
    _title(drawn, study)
    return drawn


def _mean_curve(jobs: Sequence[Job]) -> tuple[list[float], list[float]]:
    """Bill so far ÷ dense bill and top-1 at the end of each epoch, over the epochs that all seeds have."""
    runs = [job.curve for job in jobs]
    rows = list(zip(*runs, strict=False))
    return [_mean([x for x, _ in row]) for row in rows], [_mean([y for _, y in row]) for row in rows]


# --- a search ---


def search(trials: Sequence[tuple[Sequence[str], float]], folder: Path) -> list[Path]:
    """A search's trials, (words, top-1), as search.png and .svg: the best so far, and top-1 by each option searched."""
    said = [dict(word.partition("=")[::2] for word in words) for words, _ in trials]
    top1 = [value for _, value in trials]
    varied = [key for key in said[0] if len({trial.get(key) for trial in said}) > 1]
    columns = min(3, 1 + len(varied))
    rows = -(-(1 + len(varied)) // columns)
    drawn = new_figure(figsize=(5 * columns, 3.6 * rows))
    first, *others = drawn.subplots(rows, columns, squeeze=False).ravel()
    numbers = range(1, len(top1) + 1)
    best = top1.index(max(top1))
    first.plot(numbers, top1, "o", color=COLORS[0], markerfacecolor="none", label="a trial")
    first.plot(
        best + 1, top1[best], "X", color=COLORS[3], markersize=10, label="the best trial, here and in each panel"
    )
    first.step(numbers, [max(top1[:n]) for n in numbers], where="post", color=COLORS[3], label="the best so far")
    first.set(xlabel="finished trial", ylabel="top-1 %")
    first.legend(frameon=False, fontsize=8)
    for key, axes in zip(varied, others, strict=False):
        _by_value(axes, key, [trial.get(key, "") for trial in said], top1)
    for axes in others[len(varied) :]:
        axes.remove()
    made = [folder / f"search{suffix}" for suffix in (".png", ".svg")]
    for path in made:
        save(drawn, path)
    return made


def _by_value(axes: Any, key: str, values: list[str], top1: list[float]) -> None:
    """Top-1 against an option. What is no number is a category."""
    try:
        at: list[Any] = [float(value) for value in values]
    except ValueError:
        at = values
    best = top1.index(max(top1))
    axes.plot(at, top1, "o", color=COLORS[0], markerfacecolor="none")
    axes.plot(at[best : best + 1], top1[best : best + 1], "X", color=COLORS[3], markersize=10)
    axes.set(xlabel=key, ylabel="top-1 %")
    axes.grid(alpha=0.3)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _looks(shown: Sequence[Line]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and line style of each row."""
    rows = dict.fromkeys(line.row for line in shown)
    return {
        row: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)], STYLES[i % len(STYLES)]) for i, row in enumerate(rows)
    }


def _name_patterns(axes: Any, shown: Sequence[Line], at: Callable[[Line], float | None]) -> None:
    several = len({line.pattern for line in shown} - {None}) > 1
    for line in shown:
        if line.pattern and several:
            axes.annotate(line.pattern, (at(line), line.mean), (4, 4), textcoords="offset points", fontsize=7)


def _legend(drawn: Any) -> None:
    """Below the panels, each entry once, in as many columns as the longest label lets fit; the figure grows for it."""
    found = dict[str, Any]()
    for axes in drawn.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    width = 0.6 + 0.07 * max(map(len, found))  # inches of an entry at this size of letters
    columns = max(1, min(4, int(drawn.get_figwidth() / width)))
    drawn.set_figheight(drawn.get_figheight() + 0.17 * max(0, -(-len(found) // columns) - 3))
    drawn.legend(found.values(), found, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _density_ticks(axes: Any, shown: Sequence[Line]) -> None:
    """A logarithmic axis with a tick per density that occurs, and the patterns that have it."""
    names: dict[float, list[str]] = {}
    for line in shown:
        names.setdefault(kept(line), []).append(line.pattern or "dense")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(names), [f"{at:.4g}\n{' '.join(dict.fromkeys(said))}" for at, said in names.items()])


def _title(drawn: Any, study: Study) -> None:
    """The table, its scale, and what the scale's figures do not say; wrapped to the figure's width."""
    table, width = study.table, round(13 * drawn.get_figwidth())
    said = [f"{table.title}, scale={table.scale}", *textwrap.wrap(table.note, width)]
    drawn.suptitle("\n".join(said), fontsize=10)


PICTURES: dict[str, Callable[[Study, Sequence[Line]], Any]] = {
    "accuracy-flops": flops,
    "accuracy-density": density,
    "curves-flops": curves,
}
