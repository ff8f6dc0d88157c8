"""A finished run as a network to take away: its weights, and all that a file must say to be of use without the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bame_cli import formats
from bame_cli.errors import ConfigError
from bame_cli.runs import folder as folders

# What `result.json` knows and a file keeps.
_FIGURES = ("top1", "top5", "seed", "epochs", "digest")


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, finished or not."""
    return path.is_dir() and (path / "digest").is_file()


def demand_finished(folder: Path) -> dict[str, Any]:
    """The run's result. Raises ConfigError when there is none, or the run did not come to its end."""
    result = folders.result_of(folder)
    if result is None and not is_run(folder):
        raise ConfigError(f"{folder} is no run folder")
    status = "not finished" if result is None else result["status"]
    if result is None or status != "finished":
        raise ConfigError(f"the run in {folder} is {status}: it has no final network (its bame train command goes on)")
    return result


def read_run(folder: Path) -> formats.Saved:
    """The final network of a finished run; `about` also says how its images are read and what it scored."""
    result, saved, options = demand_finished(folder), formats.read(folder), folders.options_of(folder)
    saved.about.update({key: _text(result[key]) for key in _FIGURES if key in result})
    saved.about["dataset_options"] = json.dumps(options["dataset"])
    saved.about["eval_batch_size"] = json.dumps(options["recipe"]["eval_batch_size"])
    saved.about["channels_last"] = json.dumps(options.get("channels_last", False))
    return saved


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
