"""What every picture shares: the palette, a figure of its own, and how it becomes a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError

# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by their order of lightness.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#999999")


def new_figure(**options: Any) -> Any:
    """A figure of its own: pyplot would keep every one that a sweep draws."""
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **options)


def save(figure: Any, path: Path) -> None:
    """Write a figure as its file's name says: .png, .svg or .pdf. Raises ConfigError for another, or when it cannot."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: a picture is a file that ends in .png, .svg or .pdf")
    from matplotlib import rc_context

    about = {"Date": None} if path.suffix == ".svg" else None  # the same picture twice is the same bytes
    try:
        with rc_context({"svg.hashsalt": "bame"}):
            figure.savefig(path, dpi=150, metadata=about)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
