"""The shape of the house: imports go one way, and each outside library has its one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bame_cli
from bame_cli.methods import METHODS

ROOT = Path(bame_cli.__file__).parent
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py")}

# A room may import the rooms to its right of the arrow, itself included.
ROOMS = {
    "sparsity": {"sparsity", "errors"},
    "methods": {"methods", "sparsity", "errors"},
    "training": {"training", "methods.base", "sparsity", "errors"},
    "config": {"methods", "sparsity", "errors"},
    "registration": {"config", "methods", "sparsity", "errors"},
    "compose": {"registration", "config", "errors"},
    "attempt": {"report", "blueprint", "training", "errors"},
    "address": {"config", "methods", "errors"},
    "folder": {"errors"},
    "words": {"errors"},
    "formats": {"formats", "sparsity", "errors"},
    "verify": {"formats", "sparsity", "errors"},
    "finished": {"folder", "formats", "errors"},
    "inference": {"finished", "formats", "compose", "blueprint", "config", "training", "errors"},
    "export": {"finished", "formats", "inference", "verify", "blueprint", "training", "errors"},
    "network": {"words", "finished", "inference", "verify", "export", "formats", "plots", "errors"},
    "blueprint": {"config", "methods", "training", "sparsity", "errors"},
    "report": {"texts", "address", "blueprint", "folder", "config", "methods", "training", "sparsity", "errors"},
    "costs": {"texts", "report", "blueprint", "folder", "config", "methods", "sparsity", "errors"},
    "plots": {"evolution", "errors"},
    "evolution": {"errors"},
    "assembly": {"address", "blueprint", "config", "training", "sparsity", "errors"},
    "run": {
        "address",
        "assembly",
        "attempt",
        "plots",
        "report",
        "blueprint",
        "folder",
        "formats",
        "verify",
        "config",
        "methods",
        "training",
        "sparsity",
        "errors",
    },
    "studies": {"folder", "errors"},
    "tables": {"studies", "errors"},
    "runs": {"texts", "studies", "folder", "errors"},
    "rendering": {"texts", "tables", "studies"},
    "page": {"pictures", "rendering", "tables", "studies"},
    "pictures": {"plots", "studies", "tables", "errors"},
    "planning": {
        "texts",
        "compose",
        "studies",
        "address",
        "report",
        "blueprint",
        "folder",
        "config",
        "methods",
        "errors",
    },
    "sweeps": {"compose", "planning", "pictures", "run", "folder", "config", "words", "errors"},
    "bench": {"bench", "assembly", "blueprint", "config", "methods", "training", "sparsity", "errors"},
}
DOORS = {
    "timm": {f"training.{room}" for room in ("models", "small_networks", "optim", "augment", "average", "precision")},
    "huggingface_hub": {"training.models"},
    "torchvision": {"training.pictures", "training.arrays"},
    "sklearn": {"training.arrays"},
    "wandb": {"training.log"},
    "tqdm": {"training.log", "compose"},
    "safetensors": {"formats.plain"},
    "matplotlib": {"plots"},
    "hydra": {"sweeps", "compose", "registration"},
    "omegaconf": {"compose", "config", "registration", "studies", "folder"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_one_way(name):
    allowed = ROOMS.get(name.split(".")[0])
    if allowed is None:
        return
    ours = {i.removeprefix("bame_cli.") for i in imports(MODULES[name]) if i.startswith("bame_cli.")}
    stray = {i for i in ours if not any(i == a or i.startswith(f"{a}.") for a in allowed)}
    stray -= {"__version__"}  # the package's own version is no room
    # `from bame_cli.methods import base` names the room and the module; both are judged, the room as its own name.
    stray -= {a.split(".")[0] for a in allowed if "." in a}
    assert not stray, f"{name} must not import {sorted(stray)}"


@pytest.mark.parametrize("library", sorted(DOORS))
def test_every_library_has_its_door(library):
    by_name = f'_needed("{library}"'  # a library that is not installed with us
    users = {
        n
        for n, path in MODULES.items()
        if any(i.split(".")[0] == library for i in imports(path)) or by_name in path.read_text()
    }
    assert users, f"nothing imports {library}: the door is stale"
    assert users <= DOORS[library]


def test_sparsity_knows_torch_only():
    for name, path in MODULES.items():
        if name.startswith("sparsity."):
            outside = {i.split(".")[0] for i in imports(path)} & {"numpy", "timm", "torchvision", "hydra", "omegaconf"}
            assert not outside, name


def test_no_method_is_named_in_training():
    for name, path in MODULES.items():
        if name.startswith("training."):
            words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not words & set(METHODS), name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_rooms_stay_small(name):
    assert len(MODULES[name].read_text().splitlines()) <= 300
