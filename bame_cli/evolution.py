"""How masks evolved: what a run that recorded them (`log.masks_every`) lets us see. No torch, no Hydra."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bame_cli.errors import ConfigError

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
