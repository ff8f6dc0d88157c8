"""Runs as a user makes them: the command line, the folder it leaves, stopping and going on, several at once."""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import LONG, TINY, bame, imports_of, only_run, rows, start, stop_at, wait_for, words_for
from safetensors.torch import load_file, save_file

from bame_cli import cli
from bame_cli.methods import METHODS

pytestmark = pytest.mark.usefixtures("empty_folder")


# --- a finished run ---


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_a_folder_that_says_everything(method, capsys):
    assert bame("train", *words_for(method)) == 0
    out = capsys.readouterr().out
    for word in ("synthetic", method, "folder", "training FLOPs expected", "top-1"):
        assert word in out
    folder = only_run()
    for name in (
        "config.yaml",
        "layers.json",
        "metrics.jsonl",
        "train.log",
        "model.safetensors",
        "checkpoints/last.pt",
    ):
        assert (folder / name).is_file(), name
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["method"] == method
    assert result["pattern"] == (None if method == "dense" else "2:4")
    assert result["steps"] == 12
    assert {Path(p).name for p in Path().iterdir()} == {"outputs"}, "nothing else is left in the launch folder"


@pytest.mark.parametrize("method", METHODS)
def test_the_bill_is_the_forecast_to_the_last_digit(method, capsys):
    assert bame("train", *words_for(method)) == 0
    billed = json.loads((only_run() / "result.json").read_text())["flops"]
    capsys.readouterr()
    assert bame("flops", *words_for(method), "format=json") == 0
    (forecast,) = json.loads(capsys.readouterr().out)
    for key in ("forward", "grad_input", "grad_weight", "train", "train_dense", "train_ratio", "inference_ratio"):
        assert forecast[key] == billed[key], key
    assert rows(only_run())[-1]["flops"] == billed["train"]


def test_the_result_counts_what_the_file_holds(capsys):
    """Zeros, weights and accuracy are recounted from the saved file by other means."""
    assert bame("train", *TINY) == 0
    folder = only_run()
    result, weights = json.loads((folder / "result.json").read_text()), load_file(folder / "model.safetensors")
    layers = json.loads((folder / "layers.json").read_text())
    assert sum(row["flops"] for row in layers) == result["flops"]["forward_dense"]
    zeros = sum(int((weights[row["name"]] == 0).sum()) for row in layers)
    assert result["sparsity"]["weights_zero"] == zeros
    assert result["sparsity"]["layers_sparse"] == sum(row["sparse"] for row in layers)
    for row in layers:
        if row["sparse"]:
            w = weights[row["name"]]
            groups = w.permute(0, 2, 3, 1).reshape(-1, 4)
            assert int((groups != 0).sum(1).max()) <= 2


def test_a_run_loads_into_plain_timm_and_scores_the_same():
    import timm

    from bame_cli.tasks.images import batches as images
    from bame_cli.tasks.images import data
    from bame_cli.training.loop import evaluate

    assert bame("train", *TINY, "model=resnet18_cifar", "recipe.epochs=1") == 0
    folder = only_run()
    model = timm.create_model("resnet18_cifar", num_classes=10, in_chans=3)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    look = images.Look(8, [0.5], [0.25])
    made = data.load("synthetic", root="", look=look, train_size=64, val_size=20)
    figures = evaluate(model, made.val.eval_batches(256))
    assert figures["top1"] == json.loads((folder / "result.json").read_text())["top1"]


def test_metrics_have_a_row_per_step_asked_for_and_per_epoch():
    assert bame("train", *TINY, "log.every=1") == 0
    made = rows(only_run())
    assert [row["step"] for row in made] == list(range(1, 13))
    assert [row["step"] for row in made if "top1" in row] == [4, 8, 12]
    assert all(a["flops"] < b["flops"] for a, b in pairwise(made))


def test_soft_accuracy_stands_beside_hard_while_they_differ():
    assert bame("train", *words_for("decay_mask"), "method.stop=0.9") == 0
    first, *_, last = [row for row in rows(only_run()) if "top1" in row]
    assert "soft_top1" in first
    assert "soft_top1" not in last
    result = json.loads((only_run() / "result.json").read_text())
    assert result["best_epoch"] == 2, "no epoch that is still soft can be the best"


def test_the_same_command_again_is_finished(capsys):
    assert bame("train", *TINY) == 0
    stamp = (only_run() / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert bame("train", *TINY) == 0
    assert capsys.readouterr().out.startswith("finished already: top-1")
    assert (only_run() / "result.json").stat().st_mtime_ns == stamp
    assert bame("train", *TINY, "run.overwrite=true") == 0
    assert (only_run() / "result.json").stat().st_mtime_ns != stamp


def test_asp_inherits_the_bill_of_its_parent():
    assert bame("train", *words_for("dense"), "run.dir=parent") == 0
    assert bame("train", *words_for("asp"), "model.checkpoint=parent", "run.dir=child") == 0
    parent, child = (json.loads(Path(d, "result.json").read_text()) for d in ("parent", "child"))
    assert child["flops"]["inherited"] == parent["flops"]["train"]
    assert len(child["weights"]["sha256"]) == 64
    assert bame("train", *words_for("asp"), "model.checkpoint=child", "run.dir=grandchild") == 0
    grandchild = json.loads(Path("grandchild", "result.json").read_text())
    assert grandchild["flops"]["inherited"] == parent["flops"]["train"] + child["flops"]["train"]
    assert bame("train", *words_for("asp"), "model.checkpoint=parent/checkpoints/best.pt", "run.dir=best") == 0
    assert json.loads(Path("best", "result.json").read_text())["flops"]["inherited"] == parent["flops"]["train"]


def test_a_parent_is_the_same_run_by_another_method(capsys):
    asp = ["train", *words_for("asp"), "model.parent=dense", "run.dir=child"]
    assert bame(*asp) == 2
    said = capsys.readouterr().err
    assert "model.parent=dense: outputs/synthetic/resnet20_cifar/dense/seed0-" in said
    assert not Path("child").exists()
    assert bame("train", *words_for("dense")) == 0
    dense = json.loads((only_run() / "result.json").read_text())
    assert bame(*asp) == 0
    child = json.loads(Path("child", "result.json").read_text())
    assert child["flops"]["inherited"] == dense["flops"]["train"]
    assert "warning: asp" not in capsys.readouterr().out
    assert bame("train", *words_for("asp"), f"model.checkpoint={only_run()}", "run.dir=by_file") == 0
    by_file = json.loads(Path("by_file", "result.json").read_text())
    assert by_file["top1"] == child["top1"]
    assert by_file["digest"] != child["digest"]


def test_asp_without_weights_says_so_loudly(capsys):
    assert bame("train", *words_for("asp")) == 0
    assert "warning: asp prunes dense-trained weights" in capsys.readouterr().out


# --- sweeps ---


def test_a_sweep_survives_a_job_that_fails(capsys):
    code = bame("train", "-m", *TINY, "model=resnet20_cifar,vit_tiny_patch16_224", "recipe.epochs=1")
    assert code == 1
    said = capsys.readouterr()
    assert "vit_tiny_patch16_224" in said.err
    assert "sweep of 2 jobs" in said.out
    assert json.loads((only_run() / "result.json").read_text())["status"] == "finished"


def test_a_job_of_a_sweep_equals_the_same_run_alone():
    assert bame("train", "-m", *TINY, "seed=0,1") == 0
    in_sweep = {p.parent.name: rows(p.parent) for p in Path("outputs").rglob("result.json")}
    assert bame("train", *TINY, "seed=1", "run.root=alone") == 0
    alone = only_run("alone")
    assert rows(alone) == in_sweep[alone.name]


def test_a_list_without_m_names_the_flag(capsys):
    assert bame("train", "sparsity=1:4,1:8") == 2
    assert "-m" in capsys.readouterr().err


# --- bad input ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "sparsity=4:2"], "1 <= N <= M"),
        (["train", "model=resnt50"], "did you mean 'resnet50'"),
        (["train", "model=vit_tiny_patch16_224"], "do not fit"),
        (["train", "sparsity=1:48"], "nothing in this model can be sparse"),
        (["train", "sparsity.exclude=[nope]"], "no layer is named 'nope'"),
        (["train", "recipe.batch_size=5000"], "more than the 1437 training images"),
        (["train", "recipe.warmup_epochs=100"], "recipe.warmup_epochs"),
        (["train", "recipe.optimizer=muon"], "BAME needs dropped weights to rest"),
        (["train", "model.checkpoint=none.pt"], "no such file"),
        (["train", "model.parent=asap"], "one of dense, static"),
        (["train", f"model.checkpoint={__file__}"], "no checkpoint we can read"),
        (["train", "device=cuda:77"], "device=cuda:77"),
        (["train", "digits"], "not key=value"),
        (["train", "=3"], "no key before its ="),
        (["train", "--recipe.epochs=1"], "options have no dashes"),
        (["train", "--cfg"], "expected one argument"),
        (["train", "+sparsity.exclud=[layer1]"], "no such option: sparsity.exclud; did you mean 'sparsity.exclude'"),
        (["train", "++recipe.epoch=3"], "did you mean 'recipe.epochs'"),
        (["train", "+foo=3"], "no such option: foo"),
        (["train", "+method.intervall=3"], "did you mean 'method.interval'"),
        (["train", "recipe.warmup_epochs=inf"], "recipe.warmup_epochs=inf: a finite number"),
        (["train", "dataset.mean=[.485,.456,.406]"], "dataset.mean has 3 values, and the images have 1 channels"),
        (["train", "dataset.std=[0]"], "above 0"),
        (["train", "-m", "seed=0,1", "run.dir=x"], "run.dir=x names one folder for runs that differ"),
        (["flops", "dataset.train_size=9999"], "the split has 1437 images"),
        (["flops", "dataset.holdout=2000"], "from 1 to 1436"),
        (["trian"], "did you mean 'train'"),
        (["train", "~seed"], "method.seed"),
        (["train", "-m", "seed=0,1", "--cfg", "job"], "leave out -m"),
        (["layers", "format=xml"], "text or json"),
        (["verify", "nothing.safetensors"], "no such file"),
        (["verify"], "one run folder or file"),
        (["flops", "run=nowhere"], "no result.json"),
        (["bench", "batch=0"], "a whole number from 1"),
        (["bench", "parts=stepps"], "steps, method, projection, checkpoint, loop, memory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, says, capsys):
    assert bame(*words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("bame: ")
    assert said.count("\n") == 1
    assert not list(Path().iterdir())


def test_options_are_shown_without_what_trains():
    assert not {"timm", "torchvision", "matplotlib"} & imports_of("train", "--cfg", "job")


def test_the_configuration_of_a_run_can_be_loaded_again(capsys):
    assert bame("train", *words_for("srste"), "method.decay=.5", "run.dir=run") == 0
    capsys.readouterr()
    assert bame("train", "--config-dir", "run", "--config-name", "config") == 0
    assert "finished already" in capsys.readouterr().out
    assert bame("train", "--config-dir", "run", "--config-name", "config", "seed=1", "run.dir=other") == 0
    assert "decay: 0.5" in Path("other/config.yaml").read_text()
    Path("bare.yaml").write_text("seed: 3\n")
    assert bame("train", "--config-dir", ".", "--config-name", "bare") == 2
    assert "defaults: [train, _self_]" in capsys.readouterr().err


def test_a_folder_with_another_configuration_is_left_alone(capsys):
    assert bame("train", *TINY, "run.dir=here") == 0
    before = {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()}
    assert bame("train", *TINY, "run.dir=here", "seed=1") == 2
    assert "another configuration" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()} == before


def test_a_folder_that_is_not_ours_is_never_cleared(capsys):
    Path("mine/checkpoints").mkdir(parents=True)
    Path("mine/checkpoints/treasure").write_text("gold")
    assert bame("train", *TINY, "run.dir=mine", "run.overwrite=true") == 2
    assert Path("mine/checkpoints/treasure").read_text() == "gold"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_one_line(capsys):
    Path("locked").mkdir(mode=0o500)
    assert bame("train", *TINY, "run.dir=locked/run") == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_sweep_that_cannot_be_written_is_one_line(capsys):
    Path("file").write_text("")
    assert bame("train", "-m", *TINY, "seed=0,1", "run.root=file") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_in_the_way_is_one_line(capsys):
    Path("outputs").write_text("")
    assert bame("train", *TINY) == 2
    assert "outputs" in capsys.readouterr().err


# --- other verbs ---


def test_layers_prints_what_the_run_will_do(capsys):
    assert bame("layers", "model=resnet18", "dataset=imagenet", "sparsity=1:16,2:4", "format=json") == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["layers_sparse"], one["layers_total"]) == (19, 21)
    dense = {row["name"]: row["reason"] for row in one["layers"] if not row["sparse"]}
    assert "3 inputs per output" in dense["conv1.weight"]
    assert dense["fc.weight"] == "classifier"
    sparse = sum(row["shape"][0] * row["shape"][1] * row["shape"][2] ** 2 for row in one["layers"] if row["sparse"])
    assert one["parameters_nonzero"] == one["parameters"] - sparse * 15 // 16
    assert two["parameters_nonzero"] == two["parameters"] - sparse // 2


def test_verify_finds_the_block_that_breaks(capsys):
    assert bame("train", *TINY, "run.dir=run") == 0
    assert bame("verify", "run") == 0
    weights = load_file("run/model.safetensors")
    weights["layer1.0.conv1.weight"][3, 4:8, 1, 2] = 1.0
    save_file(weights, "broken.safetensors")
    capsys.readouterr()
    assert bame("verify", "broken.safetensors", "pattern=2:4") == 1
    assert "(3, 1, 1, 2), has 4 non-zeros" in capsys.readouterr().out
    assert bame("verify", "broken.safetensors") == 2, "a foreign file says no pattern"


def test_verify_opens_no_pickle(capsys):
    torch.save({"w": torch.ones(4, 4)}, "weights.pt")
    assert bame("verify", "weights.pt", "pattern=2:4") == 2
    assert "no safetensors file" in capsys.readouterr().err


def test_flops_recharges_a_finished_run(capsys):
    assert bame("train", *TINY, "run.dir=run") == 0
    billed = json.loads(Path("run/result.json").read_text())["flops"]
    capsys.readouterr()
    assert bame("flops", "run=run", "format=json") == 0
    made = {row["convention"]: row for row in json.loads(capsys.readouterr().out)}
    assert made["as billed"]["train"] == billed["train"]
    assert made["grad_input dense"]["train_ratio"] == billed["train_ratio_dense_grad_input"]
    assert len(made) == 3
    assert bame("train", *TINY, "run.dir=skips", "flops.skip_first=true") == 0
    capsys.readouterr()
    assert bame("flops", "run=skips", "format=json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2, "its sums do not tell the first layer's density"


def test_flops_per_layer_adds_up(capsys):
    words = ["model=deit_tiny_patch16_224", "dataset=imagenet", "sparsity=2:4", "method=srste", "format=json"]
    assert bame("flops", *words, "per_layer=true") == 0
    layers = json.loads(capsys.readouterr().out)
    assert bame("flops", *words) == 0
    (whole,) = json.loads(capsys.readouterr().out)
    for key in ("forward", "grad_input", "grad_weight", "train"):
        assert sum(row[key] for row in layers) == whole[key]
    assert sum(row["forward_one_image"] for row in layers) == whole["forward_dense"]


def test_flops_takes_lists_of_any_option(capsys):
    words = ["flops", "model=resnet20_cifar,resnet8_cifar", "recipe.epochs=1,2", "sparsity=2:4,1:4", "method=bame"]
    assert bame(*words, "format=json", "plot=bills.png") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["options"] for row in rows} == {
        f"model={model} recipe.epochs={epochs}" for model in ("resnet20_cifar", "resnet8_cifar") for epochs in (1, 2)
    }
    for row in rows:
        of_this = [*row["options"].split(), f"sparsity={row['pattern']}"]
        assert bame("flops", *of_this, "method=srste", "format=json") == 0
        (srste,) = json.loads(capsys.readouterr().out)
        assert row["times_cheaper_than_srste"] == srste["train"] / row["train"]


@pytest.mark.parametrize("how", ["text", "md", "csv"])
def test_flops_sets_all_methods_side_by_side(how, capsys):
    assert bame("flops", "recipe.epochs=1", f"format={how}") == 0
    out = capsys.readouterr().out
    assert all(method in out for method in METHODS)


def test_flops_draws(capsys):
    assert bame("flops", "recipe.epochs=1", "plot=bills.png") == 0
    assert Path("bills.png").read_bytes().startswith(b"\x89PNG")
    assert bame("flops", "recipe.epochs=1", "plot=bills.gif") == 2


@pytest.mark.slow
def test_bench_gives_ratios(capsys):
    assert bame("bench", "size=32", "batch=4", "rounds=2", "methods=static,bame", "format=json") == 0
    made = {(row["method"], row["metric"]): row for row in json.loads(capsys.readouterr().out)}
    assert made["static", "bytes_per_sparse_weight"]["value"] == pytest.approx(1, abs=0.01)
    assert {"step", "method", "optimizer"} <= {metric for method, metric in made if method == "bame"}
    assert ("projection", "time_against_sort") in made
    shares = [made["dense", phase]["ratio"] for phase in ("forward", "backward", "method", "optimizer")]
    assert sum(shares) == pytest.approx(1, abs=0.3)
    words = ["size=32", "batch=4", "rounds=1", "methods=srste", "dataset=synthetic", "dataset.train_size=64"]
    assert bame("bench", *words, "parts=checkpoint,loop,memory", "amp=bfloat16", "format=json") == 0
    made = {(row["method"], row["metric"]): row for row in json.loads(capsys.readouterr().out)}
    assert made["srste", "checkpoint_save"]["ratio"] > 0
    assert made["loop", "reading_of_bare_epoch"]["ratio"] < 1
    assert made["srste", "peak_memory"]["bytes"] > 0


def test_help_is_worth_reading(capsys):
    for words in (["--help"], *([verb, "--help"] for verb in cli.VERBS)):
        assert bame(*words) == 0
        assert "bame" in capsys.readouterr().out
    assert bame("train", "--help") == 0
    out = capsys.readouterr().out
    for word in ("sparsity", "any N:M", "bame_swap", "batch_size", "checkpoint"):
        assert word in out


# --- stopping and going on ---


@pytest.mark.parametrize("method", METHODS)
def test_a_run_cut_in_the_middle_of_an_epoch_ends_as_the_uncut_one(method, monkeypatch, capsys):
    words = [*words_for(method), "log.every=1"]
    assert bame("train", *words, "run.dir=whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert bame("train", *words, "run.dir=cut") == 143
    assert json.loads(Path("cut/result.json").read_text())["status"] == "interrupted"
    capsys.readouterr()
    assert bame("train", *words, "run.dir=cut") == 0
    assert "resumed at step 6 of 12" in capsys.readouterr().out
    whole, cut = (load_file(f"{d}/model.safetensors") for d in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert rows(Path("whole")) == rows(Path("cut"))
    bills = [json.loads(Path(d, "result.json").read_text())["flops"] for d in ("whole", "cut")]
    assert bills[0] == bills[1]


def test_rows_from_before_the_first_checkpoint_are_made_once(monkeypatch):
    """Power pulled in the first epoch: rows are there, a checkpoint is not."""
    words = [*TINY, "log.every=1", "run.dir=run"]
    with monkeypatch.context() as patch:
        patch.setattr("bame_cli.training.loop.end_epoch", lambda run: sys.exit(9))
        assert bame("train", *words) == 9
    assert len(rows(Path("run"))) == 3
    assert bame("train", *words) == 0
    assert [row["step"] for row in rows(Path("run"))] == list(range(1, 13))


def test_resume_never_stops_at_an_unfinished_run(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert bame("train", *TINY) == 143
    assert bame("train", *TINY, "run.resume=never") == 2
    assert "unfinished" in capsys.readouterr().err


def test_an_interrupted_sweep_starts_no_further_job(monkeypatch):
    stop_at(monkeypatch, 6)
    assert bame("train", "-m", *TINY, "seed=0,1") == 143
    assert len(list(Path("outputs").rglob("result.json"))) == 1


def test_a_loss_that_is_no_number_is_said(capsys):
    assert bame("train", *TINY, "recipe.lr=1e30", "recipe.warmup_epochs=0") == 1
    result = json.loads((only_run() / "result.json").read_text())
    assert result["status"] == "diverged"
    assert "step" in result["error"] or "NaN" in result["error"]
    assert "diverged" in capsys.readouterr().out


def test_a_failure_keeps_its_traceback_in_the_log(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("bame_cli.training.loop.evaluate", fail)
    assert bame("train", *TINY) == 1
    assert json.loads((only_run() / "result.json").read_text())["error"] == "RuntimeError: out of luck"
    assert "Traceback" in (only_run() / "train.log").read_text()
    assert "Traceback" not in capsys.readouterr().out


def test_every_line_is_said_once(capsys):
    assert bame("train", "-m", *TINY, "recipe.epochs=1", "seed=0,1,2") == 0
    out = capsys.readouterr().out
    assert out.count("recipe  quick") == 3
    for log in Path("outputs").rglob("train.log"):
        assert log.read_text().count("recipe  quick") == 1


# --- masks on record ---


def test_masks_are_recorded_and_drawn(capsys):
    from bame_cli.plots import masks

    assert bame("train", *TINY, "log.masks_every=2", "log.per_layer=true", "run.dir=run") == 0
    assert bame("plot", "masks", "run=run") == 0
    assert Path("run/plots/masks.png").read_bytes().startswith(b"\x89PNG")
    seen = masks.read(Path("run"))
    assert seen.steps == [0, 2, 4, 6, 8, 10, 12]
    last = np.load("run/masks/00000012.npz")
    for name, weight in load_file("run/model.safetensors").items():
        if name in last:
            mask = np.unpackbits(last[name], count=weight.numel()).astype(bool).reshape(weight.shape)
            assert not weight.numpy()[~mask].any(), "the last record is the mask of the final network"
    layers = rows(Path("run"))[-1]["layers"]
    assert set(layers) == set(seen.changed)


def test_a_run_without_records_says_how_to_make_them(capsys):
    assert bame("train", *TINY, "run.dir=run", "recipe.epochs=1") == 0
    assert bame("plot", "masks", "run=run") == 2
    assert "log.masks_every" in capsys.readouterr().err


def test_a_ramp_is_an_option_of_the_pattern(capsys):
    assert bame("train", *TINY, "sparsity.ramp=0.5") == 0
    assert bame("train", *words_for("asp"), "sparsity.ramp=0.5") == 2
    assert "ste, srste, bame" in capsys.readouterr().err


# --- trackers ---


def test_a_tracker_that_fails_stops_nothing(monkeypatch, capsys):
    monkeypatch.setattr("bame_cli.training.log.TensorBoardTracker", lambda *_: 1 / 0)
    assert bame("train", *TINY, "logger=tensorboard") == 0
    assert capsys.readouterr().out.count("the tracker failed") == 1
    assert len(rows(only_run())) == 3


def test_a_tracker_that_is_not_installed_stops_nothing_and_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert bame("train", *TINY, "logger=wandb") == 0
    assert "pip install 'bame-cli[wandb]'" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_goes_on_in_the_same_run_and_has_the_whole_configuration(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = [*TINY, "logger=wandb", "logger.mode=offline", "run.dir=run"]
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert bame("train", *words) == 143
    assert bame("train", *words) == 0
    parts = [path.name for path in Path("run/wandb").glob("offline-run-*")]
    assert len({name.split("-")[-1] for name in parts}) == 1
    assert len(parts) == 2
    assert bame("train", *words, "run.overwrite=true") == 0
    assert Path("run/wandb/run-id").read_text() != parts[0].split("-")[-1], "a run that is made anew is another one"


def test_tensorboard_has_a_scalar_per_figure():
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert bame("train", *TINY, "logger=tensorboard", "run.dir=run") == 0
    seen = events.EventAccumulator("run/tensorboard")
    seen.Reload()
    assert [e.step for e in seen.Scalars("top1")] == [4, 8, 12]
    assert seen.Scalars("top1")[-1].value == pytest.approx(rows(Path("run"))[-1]["top1"])


def test_curves_are_drawn_and_a_picture_that_fails_ends_nothing(monkeypatch, capsys):
    assert bame("train", *words_for("decay_mask"), "recipe.ema=0.9", "run.dir=run") == 0
    assert Path("run/plots/curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("bame_cli.runs.run.curves", lambda *_: 1 / 0)
    assert bame("train", *TINY, "run.dir=other") == 0
    assert "curves.png was not drawn" in capsys.readouterr().out


def test_the_bar_says_how_the_run_stands(monkeypatch, capsys):
    from bame_cli.training import loop

    said = []

    class Bar(loop.progress_bar(1, 0, False).__class__):
        def set_postfix_str(self, s="", refresh=True):
            said.append(s)

    monkeypatch.setattr(loop, "progress_bar", lambda total, done, leads: Bar(total=total, initial=done, mininterval=0))
    assert bame("train", *TINY) == 0
    assert all(word in said[-1] for word in ("loss", "top-1", "density 0.5", "FLOPs"))


# --- other processes ---


@pytest.mark.slow
def test_killed_at_any_instant_it_goes_on(tmp_path):
    """The installed command, in another folder, with the power pulled; then the same command again."""
    process = start(*LONG, "recipe.epochs=60", "run.dir=run")
    wait_for(tmp_path / "run/checkpoints/last.pt", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run/result.json").exists()
    assert bame("train", *LONG, "recipe.epochs=60", "run.dir=run") == 0
    assert bame("train", *LONG, "recipe.epochs=60", "run.dir=whole") == 0
    run, whole = (load_file(f"{d}/model.safetensors") for d in ("run", "whole"))
    assert all(torch.equal(run[name], whole[name]) for name in whole)
    assert rows(Path("run")) == rows(Path("whole"))


@pytest.mark.slow
def test_two_processes_never_share_a_folder(tmp_path, capsys):
    process = start(*LONG, "run.dir=run")
    wait_for(tmp_path / "run/checkpoints/last.pt", process)
    assert bame("train", *LONG, "run.dir=run") == 2
    assert "another process is training" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "interrupted"
