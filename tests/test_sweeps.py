"""Sweeps: known before they start, alive when a job dies, the same again when called again."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import bame

from bame_cli.runs import run

TINY = ["dataset=synthetic", "dataset.train_size=64", "dataset.val_size=20", "dataset.image_size=8"]
TINY += ["recipe.batch_size=16", "recipe.epochs=1", "method=srste"]


pytestmark = pytest.mark.usefixtures("empty_folder")


def results() -> dict[str, dict]:
    """The results of all runs, by the name of their folder."""
    return {p.parent.name: json.loads(p.read_text()) for p in sorted(Path("outputs").rglob("result.json"))}


def manifest() -> list[dict]:
    """The jobs of the last sweep, as it left them."""
    return json.loads(max(Path("outputs", "sweeps").iterdir()).joinpath("manifest.json").read_text())["jobs"]


# --- before ---


def test_a_dry_run_says_folder_state_and_bill_and_writes_nothing(capsys):
    assert bame("train", "-m", *TINY, "seed=0,1", "dry_run=true") == 0
    out = capsys.readouterr().out
    assert out.count("\nnew ") == 2
    assert "2 jobs; " in out
    assert list(Path().iterdir()) == []
    assert bame("train", *TINY, "seed=1") == 0
    done = next(iter(results()))
    capsys.readouterr()
    assert bame("train", "-m", *TINY, "seed=0,1", "dry_run=true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "outputs/synthetic" in line] == ["new", "finished"]
    assert done in lines[4]


def test_a_dry_run_shows_what_can_be_gone_on_with(capsys):
    assert bame("train", *TINY) == 0
    (result,) = Path("outputs").rglob("result.json")
    result.write_text(json.dumps(json.loads(result.read_text()) | {"status": "interrupted"}))
    capsys.readouterr()
    assert bame("train", "-m", *TINY, "seed=0,1", "dry_run=true") == 0
    assert "\nresumable " in capsys.readouterr().out


def test_a_dry_run_shows_what_would_be_refused(capsys):
    assert bame("train", "-m", *TINY, "recipe.batch_size=16,100", "dry_run=true") == 0
    assert "recipe.batch_size=100 is more than the 64 training images" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_the_bill_of_a_dry_run_is_that_of_the_runs(capsys):
    assert bame("train", "-m", *TINY, "seed=0,1", "dry_run=true") == 0
    said = capsys.readouterr().out.rpartition("2 jobs; ")[2].split()[0]
    assert bame("train", "-m", *TINY, "seed=0,1") == 0
    assert said == f"{sum(r['flops']['train'] for r in results().values()):.3e}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe.lr=0.1,abc"], "recipe.lr=abc"),
        (["method=srste,srst"], "did you mean 'srste'"),
        (["recipe.epochs=0"], "recipe.epochs=0: must be 1 or more"),
        (["~model"], "model must be given"),
        (["hydra/launcher=nope"], "launcher"),
        (["seed=0,1", "scale=smoke"], "belongs to a table"),
        (["+table=cifar"], "did you mean 'cifar10'"),
        (["+table=cifar10", "scale=big"], "paper, small, smoke"),
        (["hydra/sweeper=basic", "dry_run=true"], "no dry_run"),
        (["dry_run=maybe"], "true or false"),
    ],
)
def test_a_sweep_that_is_refused_leaves_nothing(words, says, capsys):
    assert bame("train", "-m", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert list(Path().iterdir()) == []


# --- while ---


def test_a_job_that_is_refused_does_not_take_the_others_down(capsys):
    assert bame("train", "-m", *TINY, "recipe.label_smoothing=0,2") == 1
    assert [job["status"] for job in manifest()] == ["finished", "refused"]
    err = capsys.readouterr().err
    assert "from 0 to below 1" in err
    assert "recipe.label_smoothing=2" in err


def test_a_job_that_crashes_is_named_with_its_reason_and_its_log_has_the_traceback(capsys, monkeypatch):
    train = run.train

    def broken(state, stopped):
        if state.log.path.parent.name.startswith("seed0"):
            raise RuntimeError("a wire is loose")
        train(state, stopped)

    monkeypatch.setattr(run, "train", broken)
    assert bame("train", "-m", *TINY, "seed=0,1") == 1
    assert "bame: failed: " in (err := capsys.readouterr().err)
    assert "seed=0: RuntimeError: a wire is loose" in err
    assert [job["status"] for job in manifest()] == ["failed", "finished"]
    (log,) = Path("outputs").rglob("seed0*/train.log")
    assert "Traceback" in log.read_text()


def test_a_job_that_fails_before_it_has_a_folder_leaves_its_traceback_with_the_sweep(capsys, monkeypatch):
    def unreadable(*_: object) -> None:
        raise OSError(5, "the disk hums")

    monkeypatch.setattr(run, "load_data", unreadable)
    assert bame("train", "-m", *TINY, "seed=0,1") == 1
    assert "the disk hums" in capsys.readouterr().err
    assert len(list(Path("outputs", "sweeps").rglob("jobs/*.log"))) == 2


def test_the_first_failure_ends_a_sweep_that_asks_for_it(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a wire is loose")

    monkeypatch.setattr(run, "train", broken)
    assert bame("train", "-m", *TINY, "seed=0,1,2", "sweep.fail_fast=true") == 1
    assert [job["status"] for job in manifest()] == ["failed", "not started", "not started"]
    assert len(results()) == 1


def test_a_job_that_another_process_trains_is_left_to_it(capsys):
    assert bame("train", *TINY, "recipe.epochs=2") == 0
    (result,) = Path("outputs").rglob("result.json")
    result.write_text(json.dumps(json.loads(result.read_text()) | {"status": "interrupted"}))
    with (result.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert bame("train", "-m", *TINY, "recipe.epochs=2", "seed=0,1") == 1
    assert "another process is training in" in capsys.readouterr().err
    assert [job["status"] for job in manifest()] == ["refused", "finished"]


def test_an_interrupted_sweep_starts_no_other_job_and_can_be_called_again(monkeypatch):
    from bame_cli.training.signals import Interrupted

    def interrupted(*_: object) -> None:
        raise Interrupted(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(run, "train", interrupted)
        assert bame("train", "-m", *TINY, "seed=0,1") == 130
    assert [job["status"] for job in manifest()] == ["interrupted", "not started"]
    assert bame("train", "-m", *TINY, "seed=0,1") == 0
    assert [r["status"] for r in results().values()] == ["finished", "finished"]


# --- after ---


def test_the_same_sweep_again_trains_only_what_is_left():
    assert bame("train", "-m", *TINY, "seed=0,1") == 0
    stamps = {p: p.stat().st_mtime_ns for p in Path("outputs").rglob("result.json")}
    again = next(p for p in stamps if p.parent.name.startswith("seed1"))
    again.write_text(json.dumps(json.loads(again.read_text()) | {"status": "interrupted"}))
    assert bame("train", "-m", *TINY, "seed=0,1") == 0
    assert {p.parent.name[:5] for p, s in stamps.items() if p.stat().st_mtime_ns != s} == {"seed1"}
    assert {r["status"] for r in results().values()} == {"finished"}


def test_runs_that_are_the_same_are_listed_once():
    assert bame("train", "-m", *TINY, "method=dense", "sparsity=2:4,1:4") == 0
    assert len(manifest()) == 1


def test_the_manifest_says_the_command_and_every_job():
    assert bame("train", "-m", *TINY, "sparsity=1:4", "seed=0,1") == 0
    (path,) = Path("outputs", "sweeps").rglob("manifest.json")
    said = json.loads(path.read_text())
    assert said["command"].startswith("bame train -m dataset=synthetic")
    for job in said["jobs"]:
        assert Path(job["folder"], "result.json").is_file()
        assert job["pattern"] == "1:4"
        assert "sparsity=1:4" in job["overrides"]
        assert job["top1"] is not None


@pytest.mark.slow
def test_a_table_is_run_found_finished_and_printed(capsys):
    table = "title: Two\nscales: {smoke: model=resnet20_cifar}\nrows:\n  SR-STE: method=srste sparsity=1:4\n"
    Path("two.yaml").write_text(table + "published: []\n")
    assert bame("train", "+table=two.yaml", "scale=smoke") == 0
    assert bame("table", "two.yaml", "scale=smoke", "strict=true", "format=csv", "out=a.csv") == 0
    capsys.readouterr()
    assert bame("train", "+table=two.yaml", "scale=smoke") == 0
    assert capsys.readouterr().out.count("finished already") == 2
    assert bame("table", "two.yaml", "scale=smoke", "format=csv", "out=b.csv") == 0
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()


def test_runs_kept_from_elsewhere_are_left_out_unless_another_starts_from_them(capsys):
    def table(*rows: str) -> None:
        words = " ".join(TINY[:-1])
        said = [f"title: Two\ncommon: {words}", "scales: {paper: seed=0}", "published: []", "rows:", *rows]
        Path("two.yaml").write_text("\n".join(said))

    dense, srste = "  dense: method=dense", "  SR-STE: method=srste sparsity=1:4"
    table(dense, srste)
    assert bame("train", "+table=two.yaml") == 0
    assert bame("table", "two.yaml", "format=jsonl", "out=kept.jsonl") == 0
    shutil.rmtree("outputs")
    words = ["train", "+table=two.yaml", "kept=kept.jsonl"]
    capsys.readouterr()
    assert bame(*words, "dry_run=true") == 0
    out = capsys.readouterr().out
    assert out.count("\nkept ") == 2
    assert ", of them 0.000e+00 in jobs that are not finished" in out
    assert bame(*words) == 0
    assert results() == {}
    assert capsys.readouterr().out.count("  kept ") == 2
    table(dense, srste, "  ASP: method=asp model.parent=dense sparsity=1:4")
    assert bame(*words) == 0
    assert sorted(result["method"] for result in results().values()) == ["asp", "dense"]
    assert bame("table", "two.yaml", "kept=kept.jsonl", "strict=true") == 0
    assert bame("train", *TINY, "kept=kept.jsonl") == 2
    assert "kept=kept.jsonl belongs to a sweep or a table" in capsys.readouterr().err


# --- launchers ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("hydra_submitit_launcher", ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]),
    ],
)
def test_jobs_of_other_launchers_end_as_those_of_the_basic_one(plugin, words):
    if importlib.util.find_spec("hydra_plugins") is None or not importlib.util.find_spec(f"hydra_plugins.{plugin}"):
        pytest.skip(f"{plugin} is not installed (an extra)")
    command = [sys.executable, "-m", "bame_cli", "train", "-m", *TINY, "seed=0,1", "recipe.batch_size=16,100"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1, done.stderr
    assert "more than the 64 training images" in done.stderr
    assert sorted(job["status"] for job in manifest()) == ["finished", "finished", "refused", "refused"]
    ours = {name: result["top1"] for name, result in results().items()}
    assert bame("train", "-m", *TINY, "seed=0,1", "run.root=alone") == 0
    alone = {p.parent.name: json.loads(p.read_text())["top1"] for p in Path("alone").rglob("result.json")}
    assert ours == alone


# --- a search ---


def test_a_search_that_cannot_be_listed_says_so(capsys):
    for word in ("dry_run=true", "kept=kept.jsonl"):
        assert bame("train", "-m", "search=bame", word) == 2
        assert "makes up its jobs as it goes" in capsys.readouterr().err
    assert bame("train", "search=bame", "dry_run=true") == 2
    assert "makes up its jobs as it goes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="hydra-optuna-sweeper is not installed (an extra)"
)
def test_a_search_keeps_its_best_trial_and_its_picture_and_finds_its_runs_again(capsys):
    words = [*TINY, "method=bame", "search=bame", "hydra.sweeper.n_trials=3"]
    assert bame("train", *words) == 0
    out = capsys.readouterr().out
    (sweep,) = Path("outputs", "sweeps").iterdir()
    assert "method.designate" in (sweep / "optimization_results.yaml").read_text()
    assert (sweep / "search.png").is_file()
    assert (sweep / "search.svg").is_file()
    best = max(results().values(), key=lambda result: result["top1"])["top1"]
    assert f"best: top-1 {best:.2f} %" in out
    assert f"best_value: {best}" in (sweep / "optimization_results.yaml").read_text()
    assert bame("train", *words) == 0
    assert capsys.readouterr().out.count("finished already") == 3
