"""What is installed is whole: the wheel carries every YAML and runs in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left in them."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("bame_cli", "conf"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(copy),
    ]
    subprocess.run(command, check=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_every_configuration_file(wheel):
    inside = {name.removeprefix("bame_cli/") for name in zipfile.ZipFile(wheel).namelist()}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    assert ours <= inside


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(site)}
    words = ["train", "dataset=synthetic", "dataset.train_size=32", "recipe.batch_size=16", "recipe.epochs=1"]
    where = subprocess.run(
        [sys.executable, "-c", "import bame_cli; print(bame_cli.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(site))
    made = subprocess.run(
        [sys.executable, "-m", "bame_cli", *words],
        cwd=empty,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert [path.name for path in empty.iterdir()] == ["outputs"]
