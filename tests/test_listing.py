"""`bame runs`: what is there, in which state, and what sets two runs apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import bame, imports_of

CONFIG = "model: {name: net}\ndataset: {name: %s}\nsparsity: {n: 2, m: 4}\nseed: %d\nrecipe: {lr: %s}\n"


@pytest.fixture(autouse=True)
def three_runs(tmp_path, monkeypatch):
    """A finished run, a diverged one that can be gone on with, and one that never wrote a result."""
    monkeypatch.chdir(tmp_path)
    for seed, status in enumerate(("finished", "diverged", None)):
        place = run(seed)
        (place / "checkpoints").mkdir(parents=True)
        (place / "digest").write_text(f"0000000{seed}\n")
        (place / "config.yaml").write_text(CONFIG % ("digits", seed, 0.1 * (seed + 1)))
        if status:
            result = {"status": status, "method": "srste", "top1": 90.0, "flops": {"train_ratio": 0.8}}
            (place / "result.json").write_text(json.dumps(result))
    (run(1) / "checkpoints" / "last.pt").touch()


def run(seed: int) -> Path:
    return Path("outputs", "digits", "net", "srste", "2of4", f"seed{seed}-0000000{seed}")


def listed(capsys, *words: str) -> list[dict]:
    assert bame("runs", *words, "format=json") == 0
    return json.loads(capsys.readouterr().out)


def test_every_run_is_listed_with_its_state(capsys):
    made = {row["seed"]: row for row in listed(capsys)}
    assert [made[k]["status"] for k in range(3)] == ["finished", "diverged", "unfinished"]
    assert [made[k]["resumable"] for k in range(3)] == [False, True, False]
    assert {row["method"] for row in made.values()} == {"srste"}, "known from the folder while there is no result"
    assert bame("runs") == 0
    out = capsys.readouterr().out
    assert "diverged, resumable" in out
    assert "3 runs: 1 diverged, 1 finished, 1 unfinished" in out


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["status=diverged,unfinished"], {1, 2}),
        (["status=resumable"], {1}),
        (["seed=0"], {0}),
        (["method=srste", "pattern=2:4", "dataset=digits"], {0, 1, 2}),
        (["model=other"], set()),
    ],
)
def test_filters(words, seeds, capsys):
    assert {row["seed"] for row in listed(capsys, *words)} == seeds


def test_diff_shows_what_differs_and_nothing_else(capsys):
    assert bame("runs", "diff", str(run(0)), str(run(1))) == 0
    assert capsys.readouterr().out.splitlines() == ["seed       0 -> 1", "recipe.lr  0.1 -> 0.2"]
    assert bame("runs", "diff", str(run(0)), str(run(0))) == 0
    assert "the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["root=nowhere"], "no such folder"),
        (["stats=failed"], "did you mean 'status'"),
        (["diff", "a"], "two run folders"),
        (["diff", "a", "b"], "a holds no run"),
    ],
)
def test_wrong_words_are_one_line(words, says, capsys):
    assert bame("runs", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_damaged_result_is_a_status(capsys):
    (run(0) / "result.json").write_text("{")
    assert listed(capsys, "seed=0")[0]["status"] == "damaged"


def test_neither_torch_nor_hydra_is_needed():
    assert not {"torch", "hydra", "timm", "matplotlib"} & imports_of("runs")


def test_a_run_whose_options_are_damaged_hides_no_other(capsys):
    (run(0) / "config.yaml").write_text("model: {name: [")
    assert sorted(row["status"] for row in listed(capsys)) == ["damaged", "diverged", "unfinished"]
