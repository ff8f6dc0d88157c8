"""Pictures of results. No torch, no Hydra: what is drawn comes in as rows and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.evolution import Evolution

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


def masks(evolution: Evolution, path: Path) -> None:
    """How a run's masks evolved: share of blocks changed per record and layer, oscillation, and where blocks froze."""
    plt = _pyplot()
    layers, shares = evolution.share_changed()
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(10, 9 + 0.12 * len(layers)), layout="constrained", height_ratios=[3 + 0.1 * len(layers), 2, 3]
    )
    edges = evolution.steps
    image = top.pcolormesh(edges, range(len(layers) + 1), 100 * shares, cmap="viridis", vmin=0)
    top.set(xlabel="step", title="blocks whose mask changed since the record before, %")
    top.set_yticks([i + 0.5 for i in range(len(layers))], layers, fontsize=6)
    top.invert_yaxis()
    figure.colorbar(image, ax=top)
    counts = evolution.oscillation()
    middle.hist(counts, bins=range(int(counts.max()) + 2), align="left", color=COLORS[0], edgecolor="white")
    middle.xaxis.get_major_locator().set_params(integer=True)
    middle.set(yscale="log", xlabel="records in which a block changed", ylabel="blocks", title="oscillation")
    _heat(bottom, figure, evolution)
    _save(figure, path)


def _heat(axes: Any, figure: Any, evolution: Evolution) -> None:
    """The layer that moved most: its most restless blocks against time; dark from some point on is frozen."""
    name = max(evolution.changed, key=lambda layer: evolution.changed[layer].mean())
    changed = evolution.changed[name]
    order = (-changed.sum(0)).argsort(kind="stable")[:400]
    image = axes.pcolormesh(evolution.steps, range(len(order) + 1), changed[:, order].T, cmap="cividis", vmin=0, vmax=1)
    axes.set(xlabel="step", ylabel="block", title=f"{name}: its {len(order)} most restless blocks (bright: changed)")
    axes.invert_yaxis()
    figure.colorbar(image, ax=axes)


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
