"""Commands as a user gives them, and what they leave: shared by the tests of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bame_cli import cli
from bame_cli.methods import METHODS

TINY = ["dataset=synthetic", "dataset.train_size=64", "dataset.val_size=20", "dataset.image_size=8"]
TINY += ["recipe.batch_size=16", "recipe.epochs=3", "method.interval=3"]
LONG = [*TINY, "recipe.epochs=400"]


def bame(*words: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    return left.value.code


def imports_of(*words: str) -> set[str]:
    """What a command has imported when it ends well, in a program of its own."""
    program = (
        "import json, sys; from bame_cli import cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit as left: assert left.code == 0\n"
        "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def words_for(method: str) -> list[str]:
    """TINY for any method: those without an interval do not take one."""
    known = {f.name for f in METHODS[method].__dataclass_fields__.values()}
    words = [w for w in TINY if w.split(".")[-1].split("=")[0] != "interval" or "interval" in known]
    extra = {"bame_swap": ["method.gradient_steps=2"], "decay_mask": ["method.start=0.2"]}
    return [*words, f"method={method}", *extra.get(method, [])]


def only_run(root="outputs") -> Path:
    (found,) = Path(root).rglob("result.json")
    return found.parent


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stop_at(monkeypatch, step: int) -> None:
    """Send this process SIGTERM when training reaches a step, once."""
    from bame_cli.training import loop

    plain = loop.train_step

    def watched(run, batch):
        plain(run, batch)
        if run.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", watched)


def start(*words: str, folder=".") -> subprocess.Popen:
    command = [str(Path(sys.executable).with_name("bame")), "train", *words]
    # One thread, as in this process: another number of threads sums in another order.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **pipes)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    for _ in range(600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} never came")


def same_network(one: str | Path, other: str | Path) -> bool:
    """Whether two runs left bit for bit the same weights."""
    a, b = (load_file(Path(folder, "model.safetensors")) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def result(folder: str | Path) -> dict:
    return json.loads(Path(folder, "result.json").read_text())
