"""How a step is computed: autocast, the scaler, clipping, micro-batches, the average of weights, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import TINY, bame, result, rows, same_network, stop_at, words_for
from safetensors.torch import load_file
from test_training import write_pictures
from torch import nn
from training_bed import batch, build, start

from bame_cli.methods import METHODS
from bame_cli.tasks.images import data, models
from bame_cli.tasks.images.batches import Look
from bame_cli.training import loop
from bame_cli.training.average import Average
from bame_cli.training.precision import Precision, set_determinism

VIT = ["dataset=synthetic", "dataset.train_size=64", "dataset.val_size=20", "dataset.image_size=32"]
VIT += ["model=vit_tiny_patch16_224", "recipe.epochs=2", "recipe.batch_size=16", "recipe.optimizer=adamw"]
VIT += ["recipe.lr=1e-3", "method.interval=2", "log.every=1"]


pytestmark = pytest.mark.usefixtures("empty_folder")


# --- precision ---


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_half_precision_trains_to_the_pattern(amp):
    assert bame("train", *TINY, f"amp={amp}", "run.dir=run") == 0
    made = result("run")
    assert made["sparsity"]["verified"]
    assert made["compute"]["amp"] == amp
    assert {weight.dtype for weight in load_file("run/model.safetensors").values()} <= {torch.float32, torch.int64}
    assert ("skipped_steps" in rows(Path("run"))[-1]) == (amp == "float16")


def test_autocast_reaches_the_forward_pass_and_not_the_weights():
    precision, model = Precision(torch.device("cpu"), amp="bfloat16"), nn.Linear(4, 4)
    with precision.autocast():
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("case", ["dense", "static", "srste", "decay linear", "bame", "swap"])
def test_scaled_gradients_are_what_methods_see(case):
    """Scaled by a power of two and unscaled again, every gradient is the same to the last bit; so is the training."""
    plain, scaled = start(build(case)), start(build(case))
    precision = Precision(torch.device("cpu"), amp="float16")
    for step in range(8):
        plain.step(step)
        images, labels = batch(step)
        scaled.optimizer.zero_grad()
        precision.scale(nn.functional.cross_entropy(scaled.model(images), labels)).backward()
        assert precision.unscaled(scaled.model, scaled.optimizer)
        scaled.method.after_backward(step)
        precision.update(scaled.model, scaled.optimizer)
        scaled.method.after_update(step)
        precision.end_step()
    for a, b in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_the_scaler_skips_calls_no_hook_and_is_billed(method, monkeypatch):
    """Gradients overflow once; the step leaves weights, masks and state alone, and the bill grows."""
    words = [*words_for(method), "amp=float16", "run.dir=run"]
    plain_backward, plain_step, seen = loop.backward, loop.train_step, []

    def overflowing(run, batch):
        loss = plain_backward(run, batch)
        if run.progress.step == 5:
            next(run.model.parameters()).grad[0] = float("inf")
        return loss

    def watched(run, batch):
        before = {name: value.clone() for name, value in run.model.named_parameters()}
        images, step = run.bill.images, run.progress.step
        plain_step(run, batch)
        same = all(torch.equal(before[name], value) for name, value in run.model.named_parameters())
        seen.append((step, same, run.bill.images - images, run.progress.skipped))

    monkeypatch.setattr(loop, "backward", overflowing)
    monkeypatch.setattr(loop, "train_step", watched)
    assert bame("train", *words) == 0
    first, *after = [entry for entry in seen if entry[0] >= 5]
    assert first == (5, True, 16, 1)
    assert all(not same for _, same, _, _ in after[:-1]), "training goes on"
    assert rows(Path("run"))[-1]["skipped_steps"] == 1
    assert result("run")["flops"]["images"] == 12 * 16


def test_a_network_that_is_a_skipped_step_behind_is_not_the_best(monkeypatch):
    plain = loop.backward

    def overflowing(run, batch):
        loss = plain(run, batch)
        if run.progress.step == 3:
            next(run.model.parameters()).grad[0] = float("inf")
        return loss

    monkeypatch.setattr(loop, "backward", overflowing)
    assert bame("train", *TINY, "amp=float16", "recipe.epochs=2", "run.dir=run") == 0
    assert result("run")["best_epoch"] == 1


def test_gradients_that_overflow_at_every_scale_end_the_run(monkeypatch):
    plain = loop.backward

    def overflowing(run, batch):
        loss = plain(run, batch)
        next(run.model.parameters()).grad[0] = float("inf")
        return loss

    monkeypatch.setattr(loop, "backward", overflowing)
    assert bame("train", *TINY, "amp=float16", "recipe.epochs=10", "run.dir=run") == 1
    assert result("run")["status"] == "diverged"
    assert "amp=bfloat16" in result("run")["error"]


@pytest.mark.parametrize("mode", ["norm", "value"])
def test_clipping_comes_after_the_method_and_bounds_what_the_optimizer_sees(mode):
    training = start(build("srste"))
    precision = Precision(torch.device("cpu"), clip_grad=1e-3, clip_mode=mode)
    training.backward(0)
    training.method.after_backward(0)
    precision.update(training.model, training.optimizer)
    grads = [p.grad for p in training.model.parameters()]
    size = torch.cat([g.flatten() for g in grads])
    assert (size.norm() if mode == "norm" else size.abs().max()) <= 1e-3 * 1.0001


def test_clipping_changes_a_run():
    for words in ([], ["recipe.clip_grad=0.01"], ["recipe.clip_grad=0.01", "recipe.clip_mode=agc"]):
        assert bame("train", *TINY, *words, f"run.dir=run{len(words)}") == 0
    assert not same_network("run0", "run1")
    assert not same_network("run1", "run2")


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one_to_rounding():
    assert bame("train", *TINY, "recipe.epochs=1", "run.dir=plain") == 0
    assert bame("train", *TINY, "recipe.epochs=1", "compile=true", "run.dir=compiled") == 0
    plain, compiled = (load_file(f"{folder}/model.safetensors") for folder in ("plain", "compiled"))
    assert plain.keys() == compiled.keys(), "no prefix of the compiler's in the names"
    assert all(torch.allclose(plain[name].float(), compiled[name].float(), atol=1e-3) for name in plain)


def test_channels_last_is_the_same_training_to_rounding():
    assert bame("train", *TINY, "recipe.epochs=1", "run.dir=plain") == 0
    assert bame("train", *TINY, "recipe.epochs=1", "channels_last=true", "run.dir=last") == 0
    plain, last = (load_file(f"{folder}/model.safetensors") for folder in ("plain", "last"))
    assert all(torch.allclose(plain[name].float(), last[name].float(), atol=1e-3) for name in plain)


def test_determinism_is_asked_of_torch_and_taken_back():
    set_determinism(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_deterministic_runs_are_bit_equal():
    for folder in ("one", "two"):
        assert bame("train", *TINY, "deterministic=true", f"run.dir={folder}") == 0
    assert same_network("one", "two")


# --- micro-batches, mixing, dropping ---


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 16])
def test_micro_batches_are_one_batch_and_one_step(parts):
    assert bame("train", *VIT, "recipe.epochs=1", "run.dir=one") == 0
    assert bame("train", *VIT, "recipe.epochs=1", f"recipe.accumulate={parts}", "run.dir=parts") == 0
    one, made = rows(Path("one")), rows(Path("parts"))
    assert [row["step"] for row in one] == [row["step"] for row in made] == [1, 2, 3, 4]
    for a, b in zip(one, made, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["flops"] == b["flops"]


@pytest.mark.slow
def test_everything_that_draws_goes_on_after_a_cut_as_if_there_had_been_none(monkeypatch):
    """Drop path, mixup, cutmix, erasing, the scaler and the average, in micro-batches, cut within an epoch."""
    words = [*VIT, "recipe.drop_path=0.2", "recipe.mixup=0.8", "recipe.cutmix=1", "recipe.erasing=0.25"]
    words += [
        "recipe.accumulate=2",
        "amp=float16",
        "recipe.ema=0.9",
        "recipe.clip_grad=1",
        "recipe.label_smoothing=0.1",
    ]
    words += ["+recipe.optimizer_args.fused=true"]
    assert bame("train", *words, "run.dir=whole") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert bame("train", *words, "run.dir=cut") == 143
    assert bame("train", *words, "run.dir=cut") == 0
    assert same_network("whole", "cut")
    assert rows(Path("whole")) == rows(Path("cut"))
    last = [torch.load(f"{d}/checkpoints/last.pt", weights_only=True)["average"] for d in ("whole", "cut")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_mixing_changes_training_and_not_validation():
    for alpha in (0, 0.8):
        assert bame("train", *TINY, f"recipe.mixup={alpha}", f"run.dir=run{alpha}") == 0
    assert not same_network("run0", "run0.8")
    assert rows(Path("run0.8"))[-1]["val_loss"] != rows(Path("run0"))[-1]["val_loss"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe.accumulate=3"], "cannot be divided by 1 ranks x recipe.accumulate=3"),
        (["recipe.accumulate=16", "recipe.mixup=0.1"], "odd"),
        (["recipe.drop_path=0.1"], "drop_path_rate"),
        (["recipe.auto_augment=rand-m9"], "imagenet and image_folder"),
        (["sync_batchnorm=true"], "GPUs only"),
        (["amp=fp16"], "none, bfloat16, float16"),
        (["recipe.clip_grad=0"], "more than 0"),
        (["recipe.ema=1"], "from 0 to below 1"),
        (["recipe.clip_mode=hard"], "norm, value, agc"),
        (["checkpoint.every_minutes=0"], "more than 0"),
        (["checkpoint.every_steps=0"], "1 or more"),
    ],
)
def test_what_cannot_be_is_one_line(words, says, capsys):
    assert bame("train", *TINY, *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not list(Path().iterdir())


def test_an_unknown_policy_is_one_line(capsys):
    write_pictures(Path("pictures"))
    words = ["dataset=image_folder", "dataset.root=pictures", "dataset.image_size=32", "recipe.batch_size=4"]
    assert bame("train", *words, "recipe.auto_augment=rond-m9") == 2
    assert "no policy of timm's" in capsys.readouterr().err


# --- the average of weights ---


def test_the_average_is_the_formula():
    model = nn.Linear(4, 2, bias=False)
    average, weights = Average(model, 0.9, {}), []
    expected = model.weight.detach().clone()
    for step in range(6):
        with torch.no_grad():
            model.weight.normal_()
        average.update(model, step)
        weights.append(model.weight.detach().clone())
        decay = min(0.9, 1 - (step + 1) ** (-2 / 3))
        expected = decay * expected + (1 - decay) * weights[-1]
        assert torch.allclose(average.network().weight, expected, atol=1e-6)


@pytest.mark.parametrize("case", ["static", "srste", "bame", "swap", "decay linear", "structure stepwise"])
def test_the_averaged_network_is_exactly_at_the_pattern(case):
    training = start(build(case))
    average = Average(training.model, 0.9, training.method.patterns)
    for step in range(training.total):
        training.step(step)
        average.update(training.model, step)
        network = average.network()
        for name, pattern in training.method.patterns.items():
            assert pattern.check(network.get_parameter(name)) is None
    raw = average.ema.module.get_parameter(next(iter(training.method.patterns)))
    assert case == "static" or next(iter(training.method.patterns.values())).check(raw) is not None


def test_a_run_with_an_average_is_judged_by_it_and_leaves_it():
    assert bame("train", *TINY, "recipe.ema=0.9", "run.dir=run") == 0
    made, row = result("run"), rows(Path("run"))[-1]
    assert made["sparsity"]["verified"]
    assert made["ema"] == 0.9
    assert made["top1"] == row["top1"]
    assert "raw_top1" in row
    state = torch.load("run/checkpoints/last.pt", weights_only=True)
    left = load_file("run/model.safetensors")
    assert not all(torch.equal(left[name], state["model"][name]) for name in left)
    model = models.create("resnet20_cifar", num_classes=10, image_shape=(3, 8, 8), width=16)
    model.load_state_dict(left)
    held = data.load("synthetic", root="", look=Look(8, [0.5], [0.25]), train_size=64, val_size=20)
    assert loop.evaluate(model, held.val.eval_batches(256))["top1"] == made["top1"]
