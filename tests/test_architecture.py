"""The shape of the house: imports go one way, and each outside library has its one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bame_cli
from bame_cli.methods import METHODS

ROOT = Path(bame_cli.__file__).parent
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py")}

# The floors of the house, the highest first: a room imports rooms of lower floors, and its own modules.
FLOORS = (
    {"cli"},
    {"help"},
    {"networks", "bench", "studies"},
    {"runs"},
    {"tasks"},
    {"training", "options"},
    {"methods", "formats"},
    {"sparsity", "plots"},
    {"errors"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# A room at its door: these modules, and no others, may be imported from the floor above.
UPWARD = {"training": {"tasks.task", "tasks.images"}}  # tasks.images: until the loop asks its task
# Rooms that know less than their floor would allow.
KNOWS = {
    "training": {"tasks", "methods.base", "sparsity", "errors"},
    "methods": {"sparsity", "errors"},
    "sparsity": {"errors"},
}
DOORS = {
    "timm": {f"tasks.images.{module}" for module in ("models", "small_networks", "augment")}
    | {f"training.{module}" for module in ("optim", "average", "precision")},
    "huggingface_hub": {"tasks.images.models"},
    "torchvision": {"tasks.images.files", "tasks.images.arrays"},
    "sklearn": {"tasks.images.arrays"},
    "wandb": {"training.log"},
    "tqdm": {"training.log", "options.compose"},
    "safetensors": {"formats.plain"},
    "matplotlib": {"plots.figure"},
    "hydra": {"studies.sweep", "options.compose", "options.registration"},
    "omegaconf": {"options.compose", "options.schema", "options.registration", "studies.study", "runs.folder"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name):
    own = room(name)
    if own in ("__init__", "__main__"):
        return
    ours = {i.removeprefix("bame_cli.") for i in imports(MODULES[name]) if i.startswith("bame_cli.")}
    others = {i for i in ours if room(i) in FLOOR and room(i) != own}
    # `from bame_cli.tasks import task` names the room and the module; the module is judged.
    others -= {i for i in others if any(other.startswith(f"{i}.") for other in others)}
    others -= {i for i in others if any(i == door or i.startswith(f"{door}.") for door in UPWARD.get(own, ()))}
    assert not {i for i in others if FLOOR[room(i)] <= FLOOR[own]}, f"{name} looks up"
    if own in KNOWS:
        assert not {i for i in others if not any(f"{i}.".startswith(f"{k}.") for k in KNOWS[own])}, name


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
