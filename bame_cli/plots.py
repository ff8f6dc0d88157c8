"""Pictures of results. No torch, no Hydra: what is drawn comes in as rows and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by their order of lightness.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#999999")
PRODUCTS = ("forward", "grad_input", "grad_weight")
HATCHES = ("", "//", "..")


def bills(rows: Sequence[Mapping[str, Any]], curves: Mapping[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Left: the three products of each row, stacked, as shares of its dense bill. Right: FLOPs over training."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2 + 0.12 * len(rows)), layout="constrained")
    _stacked(left, rows)
    styles = ("-", "--", "-.", ":")
    for index, (name, (shares, totals)) in enumerate(curves.items()):
        right.plot(shares, totals, color=COLORS[index % len(COLORS)], linestyle=styles[index % 4], label=name)
    right.set(xlabel="share of training", ylabel="training FLOPs so far ÷ dense", xlim=(0, 1), ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    right.grid(alpha=0.3)
    _save(figure, path)


def _stacked(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = [" ".join(filter(None, (row["method"], row["pattern"]))) for row in rows]
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


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'bame-cli[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot={path}: a file that ends in .png, .svg or .pdf")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot={path}: cannot be written ({error.strerror})") from error
