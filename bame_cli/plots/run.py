"""Pictures of runs: their curves, their training FLOPs, their weights. No torch: what is drawn comes in as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bame_cli.plots.figure import COLORS, new_figure, save

PRODUCTS = ("forward", "grad_input", "grad_weight")
HATCHES = ("", "//", "..")


def bills(rows: Sequence[Mapping[str, Any]], curves: Sequence[tuple[list[float], list[float]]], path: Path) -> None:
    """Left: the three products of each row, stacked, as shares of its dense bill. Right: its FLOPs over training."""
    figure = new_figure(figsize=(12, 4.2 + 0.12 * len(rows)))
    left, right = figure.subplots(1, 2)
    labels = [" ".join(filter(None, (row["method"], row["pattern"], row["options"]))) for row in rows]
    _stacked(left, rows, labels)
    styles = ("-", "--", "-.", ":")
    for index, (name, (shares, totals)) in enumerate(zip(labels, curves, strict=True)):
        right.plot(shares, totals, color=COLORS[index % len(COLORS)], linestyle=styles[index % 4], label=name)
    right.set(xlabel="share of training", ylabel="training FLOPs so far ÷ dense", xlim=(0, 1), ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    right.grid(alpha=0.3)
    save(figure, path)


def _stacked(axes: Any, rows: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    start = [0.0] * len(rows)
    for product, color, hatch in zip(PRODUCTS, COLORS, HATCHES, strict=False):
        widths = [row[product] / row["train_dense"] for row in rows]
        axes.barh(labels, widths, left=start, color=color, hatch=hatch, edgecolor="white", label=product)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for label, total in zip(labels, start, strict=True):
        axes.text(total + 0.01, label, f"{total:.3f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="training FLOPs ÷ dense", xlim=(0, 1.12))
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A run's rows against epochs: losses; top-1, with training FLOPs on a second axis; learning rate and density."""
    epochs = [row for row in rows if "top1" in row]
    if not epochs:
        return
    figure = new_figure(figsize=(15, 4))
    left, middle, right = figure.subplots(1, 3)
    at = [row["epoch"] + 1 for row in epochs]
    left.plot(at, [row["loss"] for row in epochs], color=COLORS[0], label="training, mean of the epoch")
    left.plot(at, [row["val_loss"] for row in epochs], color=COLORS[3], linestyle="--", label="validation")
    left.set(xlabel="epoch", title="loss")
    middle.plot(at, [row["top1"] for row in epochs], color=COLORS[0], label="at the target pattern")
    others = {"soft_top1": ("with the soft mask", "--"), "raw_top1": ("without averaging", ":")}
    for (key, (label, style)), color in zip(others.items(), COLORS[2:], strict=False):
        if seen := [(row["epoch"] + 1, row[key]) for row in epochs if key in row]:
            middle.plot(*zip(*seen, strict=True), color=color, linestyle=style, label=label)
    middle.set(xlabel="epoch", title="top-1, %")
    _flops_axis(middle, at, [row["flops"] for row in epochs])
    _schedule(right, rows, rows[-1]["step"] / at[-1])
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    save(figure, path)


def _flops_axis(axes: Any, epochs: list[int], flops: list[int]) -> None:
    """The bill so far, above the epochs."""
    above = axes.secondary_xaxis("top")
    ticks = sorted({epochs[round(share * (len(epochs) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)})
    bills = dict(zip(epochs, flops, strict=True))
    above.set_xticks(ticks, [f"{bills[epoch]:.1e}" for epoch in ticks], fontsize=7)
    above.set_xlabel("training FLOPs", fontsize=8)


def _schedule(axes: Any, rows: Sequence[Mapping[str, Any]], steps_per_epoch: float) -> None:
    """Learning rate, density and how many mask entries change, as shares of their largest values."""
    lines = {"lr": "learning rate", "density": "density", "mask_flip_rate": "mask changes per epoch"}
    for (key, label), color, style in zip(lines.items(), COLORS, ("-", "--", ":"), strict=False):
        seen = [(row["step"] / steps_per_epoch, row[key]) for row in rows if key in row]
        most = max((value for _, value in seen), default=0)
        if most:
            at, values = zip(*seen, strict=True)
            axes.plot(at, [v / most for v in values], color=color, linestyle=style, label=f"{label} (of {most:.3g})")
    axes.set(xlabel="epoch", title="schedule", ylim=(0, 1.05))


# So many outputs and inputs of a large weight are drawn: entries that the eye still tells apart.
_OUTPUTS, _INPUTS = 32, 64


def weights(values: Any, path: Path, *, name: str, pattern: tuple[int, int]) -> None:
    """The corner of one weight (output, input, kernel...), at the kernel's centre: zeros empty, blocks framed."""
    (n, m), kernel = pattern, values.shape[2:]
    matrix = values[(slice(None), slice(None), *(size // 2 for size in kernel))]
    corner = matrix[:_OUTPUTS, : max(m, _INPUTS // m * m)]
    outputs, inputs = corner.shape
    figure = new_figure(figsize=(2.5 + inputs / 6, 1.6 + outputs / 6))
    axes = figure.subplots()
    axes.set_facecolor("#d0d0d0")
    limit = float(abs(corner).max()) or 1.0
    drawn = corner.astype(float)
    drawn[corner == 0] = float("nan")
    image = axes.pcolormesh(drawn, cmap="RdBu_r", vmin=-limit, vmax=limit, edgecolors="white", linewidth=0.3)
    axes.vlines(range(0, inputs + 1, m), 0, outputs, color="black", linewidth=0.8)
    axes.set(xlabel=f"input, blocks of {m} (grey: dropped)", ylabel="output", xlim=(0, inputs), ylim=(outputs, 0))
    axes.set_title(_portrait(name, values, corner, kernel, f"{n}:{m}"), fontsize=9)
    figure.colorbar(image, ax=axes, label="weight")
    save(figure, path)


def _portrait(name: str, values: Any, corner: Any, kernel: tuple[int, ...], pattern: str) -> str:
    density = (values != 0).sum() / values.size
    at = (
        f", at ({', '.join(str(size // 2) for size in kernel)}) of its {'x'.join(map(str, kernel))} kernel"
        if kernel
        else ""
    )
    shown = f"{corner.shape[0]} of {values.shape[0]} outputs, {corner.shape[1]} of {values.shape[1]} inputs{at}"
    return f"{name}, {pattern}, density {density:.4f}\n{shown}"
