"""How far a run is, as its folder says. No torch, no Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.runs import folder as folders


def state(where: Path, digest: str) -> tuple[str, str, dict[str, Any]]:
    """Status, error and result of the run of this digest in a folder."""
    mark = where / "digest"
    if not mark.is_file():
        return "missing", "", {}
    if mark.read_text().strip() != digest:
        return "missing", f"{where} holds a run of another configuration", {}
    try:
        result = folders.result_of(where)
    except ConfigError as error:
        return "damaged", str(error), {}
    if result is None:
        return "unfinished", "", {}
    return result["status"], result.get("error", ""), result
