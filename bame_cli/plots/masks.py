"""How masks evolved: what a run that recorded them (`log.masks_every`) lets us see. No torch, no Hydra."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bame_cli.errors import ConfigError
from bame_cli.plots.figure import COLORS, new_figure, save

Blocks = NDArray[np.bool_]


@dataclass(frozen=True)
class Evolution:
    """Which blocks changed from one record to the next, by layer: (records - 1, blocks); the records' `steps`."""

    steps: list[int]
    changed: dict[str, Blocks]

    def share_changed(self) -> tuple[list[str], NDArray[np.float64]]:
        """Layers, and the share of each one's blocks that changed up to each record: (layers, records - 1)."""
        return list(self.changed), np.array([layer.mean(1) for layer in self.changed.values()])

    def oscillation(self) -> NDArray[np.int64]:
        """How often each block of the network changed, all layers together."""
        return np.concatenate([layer.sum(0) for layer in self.changed.values()])


def read(run: Path) -> Evolution:
    """The records of a run. Raises ConfigError when it has fewer than two."""
    files = sorted((run / "masks").glob("*.npz"))
    if len(files) < 2:
        raise ConfigError(f"{run} recorded no masks: train with log.masks_every=<steps>")
    layers: list[dict[str, Any]] = [r for r in json.loads((run / "layers.json").read_text()) if r["sparse"]]
    records = [_record(file, layers) for file in files]
    changed = {}
    for row in layers:
        masks = np.stack([record[row["name"]] for record in records])
        changed[row["name"]] = (masks[1:] != masks[:-1]).any(2)
    return Evolution([int(file.stem) for file in files], changed)


def _record(file: Path, layers: list[dict[str, Any]]) -> dict[str, Blocks]:
    """The masks of one record as rows of blocks, (blocks, M)."""
    with np.load(file) as packed:
        return {row["name"]: _blocks(packed[row["name"]], row) for row in layers}


def _blocks(packed: NDArray[np.uint8], row: dict[str, Any]) -> Blocks:
    out, inputs, *kernel = row["shape"]
    m = int(row["pattern"].split(":")[1])
    mask = np.unpackbits(packed, count=int(np.prod(row["shape"]))).astype(bool)
    blocks = mask.reshape(out, inputs // m, m, *kernel)
    return np.moveaxis(blocks, 2, -1).reshape(-1, m)


# --- the picture ---


def draw(evolution: Evolution, path: Path) -> None:
    """How a run's masks evolved: share of blocks changed per record and layer, oscillation, and where blocks froze."""
    layers, shares = evolution.share_changed()
    figure = new_figure(figsize=(10, 9 + 0.12 * len(layers)))
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[3 + 0.1 * len(layers), 2, 3])
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
    save(figure, path)


def _heat(axes: Any, figure: Any, evolution: Evolution) -> None:
    """The layer that moved most: its most restless blocks against time; dark from some point on is frozen."""
    name = max(evolution.changed, key=lambda layer: evolution.changed[layer].mean())
    changed = evolution.changed[name]
    order = (-changed.sum(0)).argsort(kind="stable")[:400]
    image = axes.pcolormesh(evolution.steps, range(len(order) + 1), changed[:, order].T, cmap="cividis", vmin=0, vmax=1)
    axes.set(xlabel="step", ylabel="block", title=f"{name}: its {len(order)} most restless blocks (bright: changed)")
    axes.invert_yaxis()
    figure.colorbar(image, ax=axes)
