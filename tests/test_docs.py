"""What the documents promise: their commands run, their figures come out, their code works."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from bame_cli import cli
from bame_cli.options import compose
from bame_cli.runs.path import run_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FLOPS = (ROOT / "docs" / "flops.md").read_text()


def commands(text: str) -> list[list[str]]:
    lines = [line for block in re.findall(r"```console\n(.*?)```", text, re.S) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("bame ")]


# The paragraph before a command says what it prints; so may the one after it.
PROMISES = [
    (before.strip().split("\n\n")[-1], shlex.split(line), after)
    for before, line, after in re.findall(r"(?s)(.*?)```console\n(bame flops[^\n]*)\n```(?=(.{0,80}))", FLOPS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "words", "after"), PROMISES, ids=range(len(PROMISES)))
def test_the_figures_of_the_flops_page_come_out(before, words, after, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*words[1:], "format=json"])
    assert left.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    times = re.search(r"([\d.]+) times", before)
    if times:
        digits = len(times[1].split(".")[1])
        assert f"{rows[0]['times_cheaper_than_srste']:.{digits}f}" == times[1]
    else:
        assert [f"{row['train_ratio']:.4f}"[1:] for row in rows] == re.findall(r"\.\d{4}", after)


@pytest.mark.parametrize("words", [w for w in commands(README) if w[1] in ("train", "flops", "layers")], ids=" ".join)
def test_every_command_of_the_readme_composes(words):
    own = ("format=", "plot=", "run=", "per_layer=", "dry_run=", "+table=", "scale=", "hydra", "search=")
    options = [w for w in words[2:] if "=" in w and not w.startswith(own)]
    assert compose.configs(options)


def test_the_library_example_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    torch.manual_seed(0)
    space: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), space)
    assert space["pattern"].check(space["model"].layer3[0].conv1.weight) is None


def test_the_page_of_methods_is_what_the_modules_say():
    spec = importlib.util.spec_from_file_location("method_cards", ROOT / "scripts" / "method_cards.py")
    cards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cards)
    assert cards.PAGE.read_text() == cards.page(), "make cards writes it anew"


def test_the_readme_names_the_folder_of_the_main_job():
    assert str(run_path(compose.composed([]))) in README
