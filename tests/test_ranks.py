"""Several processes that train one network: what torchrun starts must be one run, and the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import TINY, bame, result, rows, same_network, wait_for
from safetensors.torch import load_file

# A network without batch statistics, and a validation set that no batch size and no number of ranks divides.
VIT = ["dataset=synthetic", "dataset.train_size=64", "dataset.val_size=53", "dataset.image_size=32", "log.every=1"]
VIT += ["model=vit_tiny_patch16_224", "recipe.epochs=2", "recipe.batch_size=16", "recipe.eval_batch_size=7"]
VIT += ["recipe.optimizer=adamw", "recipe.lr=1e-3", "recipe.label_smoothing=0.1", "method.interval=2"]


pytestmark = pytest.mark.usefixtures("empty_folder")


def torchrun(*words: str, ranks: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m", "bame_cli", "train"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *words], text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_two_ranks_are_one_run_and_the_same_one():
    out = finished(torchrun(*VIT, "run.dir=two"))
    assert out.count("recipe  quick") == 1, "only rank 0 speaks"
    assert "2 ranks" in out
    assert bame("train", *VIT, "run.dir=one") == 0
    assert bame("train", *VIT, "run.dir=four", "recipe.accumulate=4") == 0
    one, *others = (rows(Path(folder)) for folder in ("one", "two", "four"))
    for other in others:
        assert [row["step"] for row in one] == [row["step"] for row in other]
        for a, b in zip(one, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
            assert (a["lr"], a["flops"]) == (b["lr"], b["flops"])
    # Sums in another order round otherwise, and a near tie for the last place of a block may then fall the other way:
    # a few blocks of a million, where a wrong gradient would move many.
    one, *others = (load_file(f"{folder}/model.safetensors") for folder in ("one", "two", "four"))
    for other in others:
        apart = sum(int((~torch.isclose(weight, other[name], atol=1e-4)).sum()) for name, weight in one.items())
        assert apart <= 1e-4 * sum(weight.numel() for weight in one.values())
    # 53 images in batches of 7, on one rank and on two: every image once.
    assert result("one")["top1"] * 53 / 100 == pytest.approx(round(result("one")["top1"] * 53 / 100))
    assert result("two")["top1"] == result("one")["top1"]
    assert rows(Path("two"))[-1]["val_loss"] == pytest.approx(rows(Path("one"))[-1]["val_loss"], rel=1e-4)
    assert result("two")["compute"]["ranks"] == 2
    assert not list(Path().rglob("*rank*")), "one folder, one log"


@pytest.mark.slow
def test_ranks_that_are_stopped_go_on_as_if_they_had_not_been():
    words = [*TINY, "recipe.epochs=40", "checkpoint.every_steps=3"]
    process = torchrun(*words, "run.dir=cut")
    wait_for(Path("cut/checkpoints/last.pt"), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert result("cut")["status"] == "interrupted"
    finished(torchrun(*words, "run.dir=cut"))
    finished(torchrun(*words, "run.dir=whole"))
    assert same_network("cut", "whole")
    assert rows(Path("cut")) == rows(Path("whole"))


@pytest.mark.slow
def test_a_rank_that_dies_is_said_and_the_run_goes_on():
    words = [*TINY, "recipe.epochs=100", "run.dir=run"]
    process = torchrun(*words)
    wait_for(Path("run/checkpoints/last.pt"), process)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    follower = max(int(pid) for pid in children.stdout.split())
    os.kill(follower, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert result("run")["status"] == "failed"
    assert "another rank failed first" in result("run")["error"]
    assert "resumed at step" in finished(torchrun(*words))


@pytest.mark.slow
def test_two_runs_over_ranks_side_by_side_do_not_meet():
    both = [torchrun(*TINY, "recipe.epochs=2", f"seed={seed}", f"run.dir={seed}") for seed in (0, 1)]
    for process in both:
        finished(process)
    assert result("0")["seed"] == 0
    assert result("1")["seed"] == 1


@pytest.mark.slow
def test_what_is_refused_is_refused_once():
    process = torchrun(*TINY, "recipe.batch_size=15")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    said = [line for line in err.splitlines() if line.startswith("bame: ")]
    assert said == ["bame: recipe.batch_size=15 cannot be divided by 2 ranks x recipe.accumulate=1"]
    assert not list(Path().iterdir())
