"""Power cuts, full disks, bad data, bad numbers: what a run left alone for a month meets."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from commands import TINY, bame, result, rows, same_network, stop_at, words_for
from test_training import write_pictures

from bame_cli import cli
from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS
from bame_cli.runs import folder
from bame_cli.training.checkpoint import Checkpoints

# Children of a server that has imported everything: a start takes a moment, not seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["bame_cli.runs.run", "bame_cli.options.compose", "commands", "matplotlib.figure"])


pytestmark = pytest.mark.usefixtures("empty_folder")


# --- the power is cut ---


def train_quietly(words: list[str], folder: str) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    cli.main(["train", *words])


def train_through_cuts(words: list[str], cuts: int, instants: random.Random) -> int:
    """Start the same command until it ends, killing it at `cuts` random instants; returns how many kills met it."""
    done = 0
    while True:
        process = FORKS.Process(target=train_quietly, args=(words, os.getcwd()))
        process.start()
        process.join(instants.uniform(0.1, 3.0) if done < cuts else None)
        if process.exitcode is not None:
            assert process.exitcode == 0
            return done
        process.kill()
        process.join()
        done += 1


def assert_cuts_change_nothing(method: str, cuts: int, epochs: int, seed: int) -> int:
    words = [*words_for(method), f"recipe.epochs={epochs}", "log.every=1", "checkpoint.every_steps=1"]
    met = train_through_cuts([*words, f"run.dir=cut-{seed}"], cuts, random.Random(seed))
    assert bame("train", *words, f"run.dir=whole-{seed}") == 0
    cut, whole = Path(f"cut-{seed}"), Path(f"whole-{seed}")
    assert same_network(cut, whole)
    assert rows(cut) == rows(whole), "learning rates, losses, bills and masks, row by row"
    assert result(cut)["flops"] == result(whole)["flops"]
    return met


@pytest.mark.slow
def test_five_cuts_at_random_instants_change_nothing():
    methods = ("bame", "srste", "bame_swap", "decay_mask", "dense")
    assert sum(assert_cuts_change_nothing(method, 1, 25, seed) for seed, method in enumerate(methods)) == 5


@pytest.mark.slow
@pytest.mark.stress
def test_fifty_cuts_at_random_instants_change_nothing():
    met, seed = 0, 100
    while met < 50:
        met += assert_cuts_change_nothing(list(METHODS)[seed % len(METHODS)], 7, 150, seed)
        seed += 1


@pytest.mark.parametrize("instant", ["before", "half written", "written aside", "between the names"])
def test_at_every_instant_of_writing_there_is_a_whole_checkpoint(instant, tmp_path, monkeypatch):
    """The process ends there and then; what is on the disk is what a new one finds."""
    made = Checkpoints(tmp_path)
    made.save({"step": 1})
    made.save({"step": 2})
    calls = {"save": 0, "replace": 0}
    plain = {"save": torch.save, "replace": os.replace}

    def save(state, file):
        if instant == "before":
            raise SystemExit
        if instant == "half written":
            file.write(b"PK half")
            raise SystemExit
        plain["save"](state, file)

    def replace(*names):
        calls["replace"] += 1
        if calls["replace"] > {"written aside": 0, "between the names": 1}.get(instant, 9):
            raise SystemExit
        plain["replace"](*names)

    monkeypatch.setattr("torch.save", save)
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(SystemExit):
        made.save({"step": 3})
    monkeypatch.undo()
    state, _ = Checkpoints(tmp_path).load()
    assert state == {"step": 2}


def test_damaged_checkpoints_are_never_a_fresh_start(tmp_path, monkeypatch, capsys):
    words = [*TINY, "checkpoint.every_steps=2", "run.dir=run"]
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert bame("train", *words) == 143
    last, previous = (Path(f"run/checkpoints/{name}.pt") for name in ("last", "previous"))
    last.write_bytes(last.read_bytes()[:1000])
    assert bame("train", *words) == 0
    assert "last.pt is damaged; going on from previous.pt" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert bame("train", *words, "run.overwrite=true") == 143
    for path in (last, previous):
        path.write_bytes(b"not a checkpoint")
    assert bame("train", *words) == 2
    assert "run.overwrite=true starts again" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Checkpoints(Path("run/checkpoints")).load()


def test_what_is_wrong_after_training_does_not_take_the_run_away(monkeypatch):
    """A disk that no longer gives back what was written is no fault of the options."""

    def fail(*_):
        raise ConfigError("run/model.safetensors is no safetensors file")

    with monkeypatch.context() as patch:
        patch.setattr("bame_cli.runs.run.read_weights", fail)
        assert bame("train", *TINY, "run.dir=run") == 1
    assert result("run")["status"] == "failed"
    assert result("run")["error"] == "run/model.safetensors is no safetensors file"
    assert bame("train", *TINY, "run.dir=run") == 0
    assert result("run")["status"] == "finished"


def test_options_that_are_refused_overwrite_nothing(capsys):
    assert bame("train", *TINY, "run.dir=run") == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    Path("junk.pt").write_bytes(b"junk")
    assert bame("train", *TINY, "run.dir=run", "run.overwrite=true", "model.checkpoint=junk.pt") == 2
    assert "junk.pt" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("files", [[".reserve"], ["digest.tmp"], [".lock", ".reserve", "config.yaml.tmp"]])
def test_a_folder_cut_before_its_first_file_is_nobodys(files):
    Path("run").mkdir()
    for name in files:
        (Path("run") / name).touch()
    assert not folder.demand_ours(Path("run"), "digest")


def test_a_folder_cut_while_it_is_cleared_is_still_ours(monkeypatch):
    """At every instant the same command, with overwrite, may be given again."""
    run, cuts = Path("run"), 0
    remove = Path.unlink, shutil.rmtree
    for instant in range(100):
        for name in folder.FOLDERS:
            (run / name).mkdir(parents=True, exist_ok=True)
        for name in (*folder.FILES, ".reserve", "result.json.tmp"):
            (run / name).touch()
        left = iter(range(instant))

        def cut(call, left=left):
            def instead(*args, **options):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return call(*args, **options)

            return instead

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", cut(remove[0]))
            patch.setattr(shutil, "rmtree", cut(remove[1]))
            folder.clear(run)
            break
        cuts += 1
        assert folder.demand_ours(run, "another", replace=True), instant
    assert cuts == len(folder.FOLDERS) + 2 * len(folder.FILES) + 1
    assert not list(run.iterdir())


def test_checkpoints_by_steps_and_by_minutes(monkeypatch):
    steps = []
    plain = Checkpoints.save

    def save(self, state):
        steps.append(state["progress"]["step"])
        plain(self, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    assert bame("train", *TINY, "checkpoint.every_epochs=99", "checkpoint.every_steps=5") == 0
    assert steps == [5, 10, 12]
    steps.clear()
    assert bame("train", *TINY, "checkpoint.every_epochs=99", "checkpoint.every_minutes=1e-9", "seed=1") == 0
    assert steps == list(range(1, 13))


# --- the disk is full ---


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB: room for a run's first checkpoint, not for its next."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_said_and_the_run_goes_on(small_disk, capsys):
    words = [*TINY, f"run.dir={small_disk}/run"]
    assert bame("train", *words) == 1
    assert "no space left" in result(small_disk / "run")["error"]
    assert result(small_disk / "run")["status"] == "failed"
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    assert "Traceback" in (small_disk / "run/train.log").read_text()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert bame("train", *words) == 0
    assert bame("train", *TINY, "run.dir=whole") == 0
    assert same_network(small_disk / "run", "whole")
    assert rows(small_disk / "run") == rows(Path("whole"))


# --- the data, the memory, the numbers ---


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_picture_that_cannot_be_read_is_named(workers, capsys):
    write_pictures(Path("pictures"))
    broken = Path("pictures/train/cat/3.JPEG")
    broken.write_bytes(broken.read_bytes()[:100])
    words = ["dataset=image_folder", "dataset.root=pictures", "dataset.image_size=32", f"dataset.workers={workers}"]
    assert bame("train", *words, "recipe.epochs=1", "recipe.batch_size=4", "recipe.warmup_epochs=0", "run.dir=run") == 1
    assert "pictures/train/cat/3.JPEG cannot be read as a picture" in result("run")["error"]
    assert "\n" not in result("run")["error"]
    assert "Traceback" in Path("run/train.log").read_text()


@pytest.mark.parametrize(
    "failure",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), RuntimeError("not enough memory: you tried")],
)
def test_out_of_memory_names_what_helps(failure, monkeypatch):
    def fail(*_):
        raise failure

    monkeypatch.setattr("bame_cli.training.loop.backward", fail)
    assert bame("train", *TINY, "run.dir=run") == 1
    assert result("run")["error"].startswith("out of memory; recipe.accumulate=2")


def test_a_diverged_run_keeps_its_last_good_checkpoint(monkeypatch):
    from bame_cli.training import loop

    plain = loop.backward

    def poisoned(run, batch):
        loss = plain(run, batch)
        if run.progress.step == 7:
            next(run.model.parameters()).grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(loop, "backward", poisoned)
    assert bame("train", *words_for("dense"), "run.dir=run") == 1
    assert result("run")["status"] == "diverged"
    state, _ = Checkpoints(Path("run/checkpoints")).load()
    assert state["progress"]["step"] == 4
    assert all(value.isfinite().all() for value in state["model"].values())
