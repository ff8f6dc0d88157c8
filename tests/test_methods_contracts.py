"""Identities between methods, bit for bit, and the contracts that every method keeps whatever its rules."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import chain

import pytest
import torch
import torch.multiprocessing as mp
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F
from training_bed import (
    CASES,
    OPTIMIZERS,
    SPARSE,
    STEPS,
    Training,
    batch,
    build,
    double,
    equal,
    net,
    start,
    train_on_a_rank,
)

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS
from bame_cli.methods.optimizers import keeps_zeros
from bame_cli.sparsity.flops import FULL, forecast, forward_cost, spans
from bame_cli.sparsity.layers import sparse_layers, survey
from bame_cli.sparsity.pattern import Pattern

both = pytest.mark.parametrize("optimizer", OPTIMIZERS)
every = pytest.mark.parametrize("case", CASES)
sparse = pytest.mark.parametrize("case", SPARSE)


def make(name: str, **options):
    return METHODS[name](**options)


def obeys(training: Training, step: int) -> None:
    """The network that step `step` sees is at the patterns that the method says it is at."""
    for name, pattern in (training.method.pattern_at(step) or {}).items():
        weight = training.model.get_parameter(name)
        assert pattern.check(weight.detach()) is None, f"{name} is not {pattern} before step {step}"


# --- identities ---


def assert_same_training(one: Training, other: Training, *, bill: bool = True) -> None:
    for step in range(one.total):
        assert one.step(step) == other.step(step), step
        assert equal(one.model, other.model), step
        if bill:
            assert dict(one.method.densities(step)) == dict(other.method.densities(step)), step


@both
def test_dense_is_a_plain_torch_loop(optimizer):
    training, model = start(make("dense"), optimizer), net()
    plain = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        images, labels = batch(step)
        plain.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        plain.step()
        assert training.step(step) == loss.item()
    assert equal(training.model, model)


@both
@sparse
def test_any_method_that_keeps_m_of_m_is_dense(case, optimizer):
    options = {"stages": None} if "stages" in case else {}
    # A pull on dropped weights has none to pull here; a mask cannot move, so the bill is full.
    training = start(build(case, **options), optimizer, pattern="4:4")
    assert_same_training(training, start(make("dense"), optimizer), bill=False)
    assert all(density == FULL for step in range(STEPS) for density in training.method.densities(step).values())


IDENTITIES = {
    "designating nothing is ASP": (("bame", {"designate": 0.0, "warmup": 0.0, "interval": 3}), ("asp", {})),
    "static by magnitude is ASP": (("static", {}), ("asp", {})),
    "never adapting is ASP": (("bame_swap", {"interval": 50}), ("asp", {})),
    "no horizon is no swap": (
        ("bame_swap", {"interval": 5, "gradient_steps": 2, "horizon": 0.0}),
        ("bame_swap", {"interval": 5, "gradient_steps": 2, "budget": 0.0}),
    ),
    "lambda 0 is STE": (("srste", {"decay": 0.0}), ("ste", {})),
    "no fading is STE": (("decay_mask", {"gradient": "ste", "start": 0.0, "stop": 0.0, "interval": 1}), ("ste", {})),
    "one stage is STE": (
        ("decay_mask", {"kind": "structure", "stages": ["2:4"], "start": 0.0, "stop": 0.0, "interval": 1}),
        ("ste", {}),
    ),
}


@both
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identities(identity, optimizer):
    (one, options), (other, others) = IDENTITIES[identity]
    assert_same_training(start(make(one, **options), optimizer), start(make(other, **others), optimizer))


ALL = {"designate": 1.0, "warmup": 0.0, "stop": 1.0, "decay": 0.02, "interval": 3}


@both
@pytest.mark.parametrize(
    "options",
    [{}, {"freeze_after": 10**6}, {"oscillation": 1.0}, {"freeze_after": 10**6, "oscillation": 1.0},
     {"warmup": 0.3}, {"warmup": 0.3, "freeze_after": 10**6}, {"freeze_after": 10**6, "pick": "gap"}],
    ids=str,
)  # fmt: skip
def test_designating_every_block_is_srste(options, optimizer):
    """With `freeze_after` the blocks go through windows, without it as a whole: the same in either way."""
    bame, srste = start(make("bame", **(ALL | options)), optimizer), start(make("srste", decay=0.02), optimizer)
    assert_same_training(bame, srste, bill=False)
    assert all(density[::2] == (0.5, 1) for density in bame.method.densities(STEPS - 1).values())


# --- contracts of every method ---


@both
@every
def test_the_pattern_holds_after_every_step_and_the_target_at_the_end(case, optimizer):
    training = start(build(case), optimizer)
    obeys(training, 0)
    for step in range(STEPS):
        training.step(step)
        obeys(training, step + 1)
        with training.method.hardened():
            for name, target in training.method.patterns.items():
                assert case == "dense" or target.check(training.model.get_parameter(name).detach()) is None
    if case != "dense":
        assert training.method.pattern_at(STEPS) == training.method.patterns
        kept = {name: mask.unflatten(1, (-1, 4)).sum(2) for name, mask in training.masks().items()}
        # A swapped-in weight starts at 0 and stays there while its gradient is 0.
        least = 0 if "swap" in case else 2
        assert all(((least <= count) & (count <= 2)).all() for count in kept.values()), "nor sparser than it says"


@pytest.mark.parametrize("pattern", ["1:4", "1:8", "3:8"])
@pytest.mark.parametrize("case", ["srste", "decay linear", "structure stepwise", "bame frozen", "swap many"])
def test_other_patterns_hold_too(case, pattern):
    training = start(build(case), pattern=pattern)
    for step in range(STEPS):
        training.step(step)
        obeys(training, step + 1)


def test_layers_may_have_patterns_of_their_own():
    for case in ("asp", "srste", "structure geometric soft", "bame", "swap"):
        model, method = net(), build(case)
        layers = sparse_layers(model, survey(model, Pattern(2, 4), overrides={"0": "1:8", "5": "4:4", "2": "dense"}))
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        method.attach(layers, optimizer, STEPS)
        training = Training(model, optimizer, method)
        assert set(training.method.patterns) == {"0.weight", "5.weight", "7.weight"}
        for step in range(STEPS):
            training.step(step)
            obeys(training, step + 1)


@both
@every
def test_nothing_is_replaced(case, optimizer):
    """State-dict keys, Parameter objects and optimizer groups are the user's, before, during and after."""
    model = net()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    training = start(build(case), optimizer, model=model)
    groups = [[id(p) for p in group["params"]] for group in training.optimizer.param_groups]
    training.run()
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert [[id(p) for p in group["params"]] for group in training.optimizer.param_groups] == groups
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())


CUTS = (1, 6, 11, 17)  # inside windows of 3 and 4 steps, where a warm-up ends, before and after the last new mask


def assert_resumes(fresh: Callable[[int], Training], cuts: Iterable[int]) -> None:
    """Train once, saving at every cut; what goes on from there in fresh objects ends bit for bit the same."""
    whole, losses, saved = fresh(0), [], {}
    for step in range(STEPS):
        if step in cuts:
            saved[step] = whole.save()
        losses.append(whole.step(step))
    metrics = whole.method.metrics()
    for cut, state in saved.items():
        after = fresh(1)
        after.load(state)
        assert after.run(range(cut, STEPS)) == losses[cut:], cut
        assert equal(after.model, whole.model), cut
        assert after.method.metrics() == metrics, cut
        assert dict(after.method.densities(STEPS - 1)) == dict(whole.method.densities(STEPS - 1)), cut


@both
@every
def test_a_run_cut_and_resumed_is_the_uncut_run(case, optimizer):
    assert_resumes(lambda seed: start(build(case), optimizer, model=net(seed)), CUTS)


@pytest.mark.parametrize("case", ["decay linear", "bame", "bame frozen", "swap", "swap warmed up"])
def test_a_channels_last_run_resumes_too(case):
    assert_resumes(lambda seed: start(build(case), model=net(seed).to(memory_format=torch.channels_last)), (7, 11))


@every
def test_micro_batches_agree_with_one_batch(case):
    one, four = start(build(case), model=double()), start(build(case), model=double())
    assert four.run(parts=4) == pytest.approx(one.run(), rel=1e-9)
    for p, q in zip(one.model.parameters(), four.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(mask, four.masks()[name]) for name, mask in one.masks().items())


@every
def test_channels_last_changes_nothing_but_the_layout(case):
    plain = start(build(case), model=double())
    last = start(build(case), model=double().to(memory_format=torch.channels_last))
    for step in range(STEPS):
        assert last.step(step) == pytest.approx(plain.step(step), rel=1e-9), step
        obeys(last, step + 1)
    assert all(torch.equal(mask, last.masks()[name]) for name, mask in plain.masks().items())


@every
def test_densities_are_shares_and_the_forecast_is_what_a_run_reports(case):
    """A schedule needs shapes alone; frozen blocks are the one thing that it cannot know."""
    training, planned, model = start(build(case)), build(case), net().to("meta")
    layers = sparse_layers(model, survey(model, Pattern(2, 4)))
    planned.plan({name: (p.shape, pattern) for name, (p, pattern) in layers.items()}, STEPS)
    cost, counted = forward_cost(net(), (16, 4, 4)), 0
    for step in range(STEPS):
        training.step(step)
        now = training.method.densities(step)
        assert all(0 < share <= 1 for share in chain.from_iterable(now.values()))
        assert case == "bame frozen" or dict(planned.densities(step)) == dict(now), step
        assert planned.pattern_at(step) == training.method.pattern_at(step)
        counted += sum(f * sum(now.get(name, FULL)) for name, f in cost.layers.items())
    if case != "bame frozen":
        assert forecast(cost, planned, images_per_step=8).total == 8 * counted


TURNS = [(case, {}) for case in CASES] + [
    ("bame", {"taper": 1.0, "interval": 7, "start": 0.2, "stop": 0.85}),
    ("decay linear", {"beta": 0.3}),
    ("decay exponential soft", {"interval": 3, "start": 0.0}),
    ("swap", {"interval": 13, "gradient_steps": 13}),
    ("swap warmed up", {"warmup": 0.33, "interval": 9}),
    ("structure stepwise", {"start": 0.13, "stop": 0.87}),
]


@pytest.mark.parametrize("total", [20, 97, 1000])
@pytest.mark.parametrize(("case", "options"), TURNS, ids=str)
def test_densities_change_at_turns_only(case, options, total):
    """A forecast looks at those steps alone: at ImageNet's length asking every step takes seconds."""
    method, model = build(case, **options), net().to("meta")
    layers = sparse_layers(model, survey(model, Pattern(2, 4)))
    method.plan({name: (p.shape, pattern) for name, (p, pattern) in layers.items()}, total)
    found = list(chain.from_iterable([densities] * length for densities, length in spans(method)))
    assert len(found) == total
    assert all(found[step] is method.densities(step) for step in range(total))


HALF, ONE = Fraction(1, 2), Fraction(1)
BILLS = {
    "static": [(HALF, HALF, HALF)] * 20,
    "asp": [(HALF, HALF, HALF)] * 20,
    "ste": [(HALF, ONE, ONE)] * 20,
    "srste": [(HALF, ONE, ONE)] * 20,
    "decay linear": [(ONE, ONE, ONE)] * 14 + [(HALF, ONE, ONE)] * 6,
    "decay exponential soft": [(ONE, ONE, ONE)] * 14 + [(HALF, ONE, HALF)] * 6,
    "structure stepwise": [(ONE, ONE, ONE)] * 7 + [(Fraction(3, 4), ONE, ONE)] * 5 + [(HALF, ONE, ONE)] * 8,
    "structure geometric soft": [(HALF, ONE, HALF)] * 20,
    "bame random": [(HALF, HALF, ONE)] * 4 + [(HALF, HALF, HALF + Fraction(115, 576) * HALF)] * 16,
    "swap": [(HALF, HALF, ONE if step in (2, 3, 6, 7, 10, 11, 14, 15) else HALF) for step in range(20)],
    "swap warmed up": [(HALF, HALF, ONE if step < 8 or step in (10, 11, 14, 15) else HALF) for step in range(20)],
}


@pytest.mark.parametrize("case", BILLS)
def test_the_bill_by_hand(case):
    """The table of what each step costs, for the first convolution: 16 x 16 x 9 weights, 576 blocks of 4."""
    method = start(build(case)).method
    assert [tuple(method.densities(step)["0.weight"]) for step in range(STEPS)] == BILLS[case]


@pytest.mark.parametrize("case", ["bame", "swap warmed up"])
def test_warmup_may_be_billed_as_srste_is(case):
    method, srste = start(build(case, warmup_grad_input="dense")).method, start(build("srste")).method
    assert method.densities(0) == srste.densities(0)
    assert method.densities(STEPS - 1)["0.weight"].grad_input == HALF


@every
@pytest.mark.parametrize("steps", [{0, 1, 6, 11, 12, 13}, {3, 4, 14, 18}], ids=str)
def test_a_step_that_a_scaler_skips_breaks_nothing(case, steps):
    """Schedules follow the step: what was due on a skipped step is due on the next one."""
    training = start(build(case))
    for step in range(STEPS):
        training.backward(step)
        if step not in steps:  # no hook, no update; the step counts all the same
            training.update(step)
            obeys(training, step + 1)
    for name, target in training.method.patterns.items():
        assert case == "dense" or target.check(training.model.get_parameter(name).detach()) is None


@pytest.mark.parametrize(
    ("name", "options"),
    [("decay_mask", {"stop": 1.0}), ("decay_mask", {"kind": "structure", "stop": 1.0}), ("srste", {"ramp": 1.0})],
    ids=str,
)
def test_a_last_step_that_is_skipped_still_leaves_the_target(name, options):
    """Only that step would have brought the network there; what is kept of a run is read while it is hardened."""
    training = start(make(name, **options))
    training.run(range(STEPS - 1))
    weight = training.model.get_parameter("0.weight").detach()
    assert Pattern(2, 4).check(weight) is not None
    with training.method.hardened():
        assert Pattern(2, 4).check(weight) is None


@pytest.mark.parametrize("steps", [{0}, {0, 1}, {4}], ids=str)
def test_a_skipped_first_or_last_step_of_warmup_moves_it_by_no_more(steps):
    """Steps 0 to 3 are warm-up, step 4 opens the first window: SR-STE, then a share of the blocks."""
    options = {"warmup": 0.2, "interval": 5, "decay": 0.02, "designate": 0.25}
    training = start(make("bame", **options))
    for step in range(STEPS):
        training.backward(step)
        if step not in steps:
            training.update(step)
            expected = 1.0 if step < 4 else 0.25 if step < 18 else 0.0
            assert training.method.metrics()["designated_share"] == pytest.approx(expected, abs=0.02), step


def test_masks_rest_after_stop_even_if_the_step_at_stop_was_skipped():
    training = start(make("bame", interval=5, stop=0.5, warmup=0.0, designate=0.5))
    for step in range(STEPS):
        training.backward(step)
        if step == 12:
            before = training.masks()
        if step != 10:
            training.update(step)
    assert all(torch.equal(mask, before[name]) for name, mask in training.masks().items())


# --- optimizers ---


def timm(name: str, model: nn.Module):
    return create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [("sgd", True), ("adam", True), ("adamw", True), ("lion", True), ("lamb", True), ("adafactor", True),
     ("muon", False)],
)  # fmt: skip
def test_whether_an_optimizer_keeps_zeros_is_tried(name, keeps):
    model = net()
    before = copy.deepcopy(model)
    optimizer = timm(name, model)
    assert keeps_zeros(optimizer) == keeps
    assert equal(model, before)
    assert not optimizer.state


@pytest.mark.parametrize("name", ["lion", "lamb", "adafactor", "muon"])
@pytest.mark.parametrize("case", ["static", "asp", "srste", "structure stepwise", "bame", "swap"])
def test_patterns_hold_under_other_optimizers_or_are_refused(case, name):
    model = net()
    if name == "muon" and case in ("bame", "swap"):
        with pytest.raises(ConfigError, match="Muon"):
            start(build(case), lambda _: timm(name, model), model=model)
        return
    training = start(build(case), lambda _: timm(name, model), model=model)
    for step in range(STEPS):
        training.step(step)
        obeys(training, step + 1)


def test_trying_an_optimizer_leaves_it_alone_behind_a_scheduler():
    """torch's schedulers put a wrapper on the optimizer that steps the real one; and gradients may lie ready."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(model)
    assert keeps_zeros(optimizer)
    assert equal(model, before)
    assert not optimizer.state


def test_an_optimizer_behind_a_scheduler_is_still_tried():
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert not keeps_zeros(optimizer)


def test_a_sparse_method_without_a_sparse_layer_is_an_error():
    with pytest.raises(ConfigError):
        make("asp").attach({}, OPTIMIZERS["sgd"](net().parameters()), STEPS)


# --- two ranks ---


@pytest.mark.slow
def test_two_ranks_have_equal_masks_and_agree_with_one_batch(tmp_path):
    mp.spawn(train_on_a_rank, (str(tmp_path), SPARSE), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1))
    for case in SPARSE:
        alone = start(build(case), model=double())
        alone.run()
        for name, p in alone.model.state_dict().items():
            assert torch.equal(first[case][name], second[case][name]), f"{case}: ranks differ in {name}"
            assert torch.equal(first[case][name] != 0, p != 0), f"{case}: another mask than one batch in {name}"
            assert torch.allclose(first[case][name], p, rtol=1e-9, atol=1e-12), case


# --- a compiled model ---


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a compiler")
def test_a_compiled_model_has_the_masks_of_an_eager_one():
    """One compiled network for all: a method that moves weights between buffers must not trip it."""
    model = double()
    compiled, weights = torch.compile(model), copy.deepcopy(model.state_dict())
    for case in ("static", "srste", "decay linear", "bame", "swap"):
        model.load_state_dict(weights)
        eager, other = start(build(case), model=double()), start(build(case), model=model)
        for step in range(10):
            assert other.step(step, model=compiled) == pytest.approx(eager.step(step), rel=1e-9), (case, step)
            assert all(torch.equal(mask, other.masks()[name]) for name, mask in eager.masks().items()), (case, step)
