"""Every rule of every method on blocks small enough to check by hand, or against the formula written out naively."""

from __future__ import annotations

import copy
import math
import statistics
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from training_bed import STEPS, OneLayer, adam, adamw, batch, net, sgd, start

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS
from bame_cli.methods.stages import fitted
from bame_cli.sparsity.layers import Layer, sparse_layers, survey
from bame_cli.sparsity.pattern import Pattern

ROW = [[4.0, -3.0, 2.0, 1.0]]  # 2:4 keeps the first two
ONES = [[1.0, 1.0, 1.0, 1.0]]


def make(name: str, **options):
    return METHODS[name](**options)


def close(actual, expected) -> bool:
    return torch.allclose(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-7)


def blocks_with_full_gradient(seen: torch.Tensor, m: int) -> list[int]:
    """Given gradients of ones and no decay term: the blocks in which every weight gets its gradient."""
    return (seen.view(-1, m) != 0).all(1).nonzero().flatten().tolist()


# --- SR-STE ---


def test_srste_gradient_is_g_plus_lambda_times_the_dropped_weights():
    layer = OneLayer(make("srste", decay=0.5), ROW, "2:4")
    assert close(layer.weight, [[4, -3, 0, 0]])
    assert close(layer.backward(0, ONES), [[1, 1, 1 + 0.5 * 2, 1 + 0.5 * 1]])
    assert close(layer.update(0), [[3.9, -3.1, 0, 0]])
    assert close(layer.method.master["layer"], [[3.9, -3.1, 2 - 0.1 * 2, 1 - 0.1 * 1.5]])


def test_srste_decoupled_shrinks_dropped_weights_outside_the_gradient():
    layer = OneLayer(make("srste", decay=0.5, decoupled=True), ROW, "2:4")
    assert close(layer.backward(0, ONES), ONES)
    layer.update(0)
    assert close(layer.method.master["layer"], [[3.9, -3.1, 2 * (1 - 0.1 * 0.5) - 0.1, 1 * (1 - 0.1 * 0.5) - 0.1]])


@pytest.mark.parametrize("decoupled", [False, True])
def test_srste_public_code_multiplies_lambda_by_the_gpus(decoupled):
    public = OneLayer(make("srste", decay=0.25, public_code_gpus=4, decoupled=decoupled), ROW, "2:4")
    plain = OneLayer(make("srste", decay=1.0, decoupled=decoupled), ROW, "2:4")
    assert torch.equal(public.step(0, ONES), plain.step(0, ONES))
    assert torch.equal(public.method.master["layer"], plain.method.master["layer"])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_srste_lambda_enters_once_whatever_accumulates(parts):
    """A module used twice, and micro-batches: autograd adds gradients up, the decay term must not be added up."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 8, bias=False)
    method, optimizer = make("srste", decay=0.5), torch.optim.SGD(linear.parameters(), lr=0.1)
    dropped = torch.where(Pattern(2, 4).project(linear.weight), 0, linear.weight.detach())
    method.attach({"weight": (linear.weight, Pattern(2, 4))}, optimizer, 10)
    for x in torch.randn(4, 8).chunk(parts):
        (linear(linear(x).relu()).square().sum() / parts).backward()
    g = linear.weight.grad.clone()
    method.after_backward(0)
    assert close(linear.weight.grad, g + 0.5 * dropped)


@pytest.mark.parametrize("name", ["ste", "srste", "decay_mask", "bame"])
def test_a_dropped_weight_pushed_above_the_survivor_re_enters(name):
    options = {"decay_mask": {"start": 0.0, "stop": 0.0, "interval": 1}, "bame": {"designate": 1.0}}.get(name, {})
    layer = OneLayer(make(name, **options), ROW, "2:4")
    layer.step(0, [[0, 0, 0, -100.0]])
    assert layer.mask.tolist() == [[True, False, False, True]]


# --- ASP and static ---

RESTING = {"sgd": sgd(momentum=0.9, weight_decay=0.1), "adam": adam(weight_decay=0.1), "adamw": adamw(weight_decay=0.1)}


@pytest.mark.parametrize("optimizer", RESTING)
def test_asp_zeros_stay_exactly_zero(optimizer):
    layer = OneLayer(make("asp"), ROW, "2:4", optimizer=RESTING[optimizer])
    for step in range(10):
        assert layer.step(step, ONES)[0, 2:].tolist() == [0, 0]
    assert (layer.weight[0, :2] != torch.tensor([4.0, -3.0])).all()


@pytest.mark.parametrize("optimizer", RESTING)
@pytest.mark.parametrize("name", ["asp", "static", "bame", "bame_swap"])
def test_a_dense_warm_start_leaves_no_trace_in_dropped_weights(name, optimizer):
    """Dense steps of the same optimizer in the same process fill its state; momentum would move zeros."""
    options = {"bame": {"designate": 0.0, "warmup": 0.0}}.get(name, {})
    p = nn.Parameter(torch.tensor(ROW))
    made = RESTING[optimizer]([p])
    for _ in range(5):
        p.grad = torch.tensor(ONES)
        made.step()
    method = make(name, **options)
    method.attach({"layer": (p, Pattern(2, 4))}, made, 10)
    for step in range(10):
        p.grad = torch.tensor(ONES)
        method.after_backward(step)
        made.step()
        method.after_update(step)
        assert p.detach()[0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shape", "sparse"), [((8, 16), True), ((16, 32, 3, 3), True), ((12, 16), False), ((8, 24), False), ((8, 8), False)]
)
def test_asp_shape_rule_wants_8_outputs_and_16_inputs(shape, sparse):
    row = Layer("layer.weight", shape, Pattern(2, 4))
    assert make("asp").review(row) == row
    reviewed = make("asp", shape_rule=True).review(row)
    assert (reviewed.pattern is not None) == sparse
    assert sparse or "shape rule" in reviewed.reason


def test_static_random_depends_on_seed_and_name_only():
    def mask(seed: int = 0, name: str = "layer", fill: int = 0):
        torch.manual_seed(fill)
        return OneLayer(make("static", choose="random", seed=seed), torch.randn(8, 32), "2:4", name=name).mask

    first = mask()
    assert torch.equal(first, mask(fill=1)), "neither the weights nor torch's own generator may matter"
    assert not torch.equal(first, mask(seed=1))
    assert not torch.equal(first, mask(name="other"))
    assert (first.view(-1, 4).sum(1) == 2).all()


def test_static_magnitude_keeps_the_largest():
    assert OneLayer(make("static"), [[0.1, -3.0, 2.0, -2.0]], "2:4").mask.tolist() == [[False, True, True, False]]


# --- mask decay and structure decay ---


def decay(**options):
    """Ten steps of fading, 2 to 12, in intervals of 2, of 20 steps in all."""
    return make("decay_mask", **({"start": 0.1, "stop": 0.6, "interval": 2} | options))


def planned(method, total: int = 20, shape=(4, 16), pattern: str = "2:4"):
    method.plan({"layer": (torch.Size(shape), Pattern.parse(pattern))}, total)
    return method


DELTAS = {
    "linear": ({}, lambda k: max(0, 1 - k / 5)),
    "linear, beta": ({"beta": 0.3}, lambda k: max(0, 1 - 0.3 * k)),
    "linear, small beta": ({"beta": 0.01}, lambda k: 1 - 0.01 * k),
    "exponential": ({"shape": "exponential"}, lambda k: 0.01 ** (k / 5)),
    "exponential, beta": ({"shape": "exponential", "beta": 0.1}, lambda k: math.exp(-0.1 * k)),
}


@pytest.mark.parametrize("case", DELTAS)
def test_delta_follows_its_formula_between_start_and_stop(case):
    options, formula = DELTAS[case]
    method = planned(decay(**options))
    expected = [1.0] * 2 + [formula((step - 2) // 2) for step in range(2, 12)] + [0.0] * 8
    assert [method.delta(step) for step in range(20)] == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize("beta", [None, 0.0, 1e-3, 0.7])
@pytest.mark.parametrize("interval", [1, 3, 7, 100])
def test_delta_is_exactly_zero_from_stop(shape, beta, interval):
    method = planned(decay(shape=shape, beta=beta, interval=interval))
    assert all(method.delta(step) == 0 for step in range(12, 25))
    assert method.pattern_at(12) == {"layer": Pattern(2, 4)}


@pytest.mark.parametrize("gradient", ["soft", "ste"])
def test_decay_weights_and_gradients_follow_the_formula(gradient):
    """Delta is 1, 1, .5, .5, 0: effective W (m + (1 - m) delta), and the same factor on the gradient when `soft`."""
    layer = OneLayer(decay(start=0.0, beta=0.5, gradient=gradient), ROW, "2:4", total=20)
    for step, delta in enumerate([1, 1, 0.5, 0.5, 0]):
        assert close(layer.weight, [[4, -3, 2 * delta, delta]])
        assert close(layer.backward(step, ONES), [[1, 1, delta, delta]] if gradient == "soft" else ONES)
        layer.p.grad.zero_()
        layer.update(step)


@pytest.mark.parametrize("refresh", [True, False])
def test_refresh_after_stop_says_whether_the_mask_goes_on_moving(refresh):
    layer = OneLayer(decay(refresh_after_stop=refresh), ROW, "2:4", total=20)
    for step in range(13):
        layer.step(step, [[0.0] * 4])
    assert layer.mask.tolist() == [[True, True, False, False]]
    for step in range(13, 16):
        layer.step(step, [[0, 0, 0, -50.0]])
    assert layer.mask.tolist() == [[True, not refresh, False, refresh]]


def test_between_intervals_the_mask_is_not_refreshed():
    layer = OneLayer(decay(start=0.0, stop=0.0, interval=5), ROW, "2:4", total=20)
    for step in range(4):
        assert layer.step(step, [[0, 0, 0, -50.0]])[0, 3] == 0
    assert layer.step(4, [[0.0] * 4])[0, 3] == 21


def test_hardened_is_exactly_the_target_while_weights_fade_and_goes_back_bit_for_bit():
    for options in ({}, {"shape": "exponential"}, {"kind": "structure"}, {"kind": "structure", "shape": "geometric"}):
        layer = OneLayer(decay(**options), torch.randn(4, 32, generator=torch.manual_seed(0)), "2:4", total=20)
        for step in range(20):
            layer.step(step, torch.randn(4, 32))
            before = layer.weight
            with layer.method.hardened():
                inside = layer.weight
                assert ((inside.view(-1, 4) != 0).sum(1) == 2).all()
                assert (inside[inside != 0] == layer.method.master["layer"][inside != 0]).all()
            assert torch.equal(layer.weight, before)


STEPWISE = {
    "1:16": [16, 15, 8, 4, 2, 1],
    "2:4": [4, 3, 2],
    "3:7": [7, 6, 3],
    "3:4": [4, 3],
    "1:2": [2, 1],
    "4:4": [4],
    "5:16": [16, 15, 8, 5],
}


@pytest.mark.parametrize("target", STEPWISE)
def test_stepwise_stages_halve_down_to_the_target(target):
    pattern = Pattern.parse(target)
    stages = decay(kind="structure").stages_of(pattern)
    assert stages == [Pattern(n, pattern.m) for n in STEPWISE[target]]


@pytest.mark.parametrize(
    ("inputs", "blocks"), [(64, [32, 16, 8, 4]), (32, [32, 16, 8, 4]), (16, [16, 16, 8, 4]), (12, [4, 4, 4, 4])]
)
def test_geometric_stages_start_at_the_largest_block_that_fits(inputs, blocks):
    method = decay(kind="structure", shape="geometric")
    assert fitted(method.stages_of(Pattern(1, 4)), (8, inputs)) == [Pattern(m // 4, m) for m in blocks]
    row = method.review(Layer("layer.weight", (8, inputs), Pattern(1, 4)))
    assert bool(row.reason) == (inputs < 32), "the layer report says where a stage does not fit"
    assert row.pattern == Pattern(1, 4)


def test_stages_hold_for_equal_ranges_and_the_target_from_stop():
    method = planned(decay(kind="structure", start=0.1, stop=0.7), pattern="1:4")  # 4:4, 3:4, 2:4 over 12 steps
    kept = [method.pattern_at(step)["layer"].n for step in range(20)]
    assert kept == [4] * 2 + [4] * 4 + [3] * 4 + [2] * 4 + [1] * 6


@pytest.mark.parametrize(
    "stages", [["2:4", "3:4"], ["4:4", "3:4"], ["4:4", "2:8", "2:4"], [], ["3:4", "4:4", "2:4"], ["nonsense", "2:4"]]
)
def test_explicit_stages_must_fall_and_end_in_the_target(stages):
    with pytest.raises(ConfigError):
        planned(decay(kind="structure", stages=stages))


def test_stages_that_do_not_fit_a_layer_leave_a_falling_list():
    method = decay(kind="structure", stages=["16:16", "8:16", "4:12", "1:4"])
    stages = fitted(method.stages_of(Pattern(1, 4)), (8, 16))
    assert stages[0] == Pattern(16, 16)
    assert all(a.density >= b.density for a, b in pairwise(stages)), stages


def test_a_structure_schedule_shorter_than_its_stages_is_an_error():
    with pytest.raises(ConfigError, match="stages"):
        planned(decay(kind="structure", start=0.1, stop=0.2), pattern="1:16")


# --- BAME, live ---


def live(**options):
    """No decay term, no warm-up, windows of two steps, half of the blocks."""
    return make("bame", **({"designate": 0.5, "interval": 2, "warmup": 0.0, "decay": 0.0} | options))


# Four blocks of 1:4: kept 4, 1, 3, 2; largest dropped .1, .9, 2.8, .2; so gaps of 3.9, .1, .2, 1.8.
FOUR = [[4.0, 0.1, 0, 0.05], [0.9, 1.0, 0.3, 0.2], [0.1, 2.8, 3.0, 0.2], [0.1, 0.2, 0.1, 2.0]]
ALIVE = torch.ones(4, 4)


@pytest.mark.parametrize(("pick", "chosen"), [("small", [1, 3]), ("gap", [1, 2])])
def test_designated_are_the_blocks_that_lose_least(pick, chosen):
    layer = OneLayer(live(pick=pick), FOUR, "1:4")
    assert blocks_with_full_gradient(layer.backward(0, ALIVE), 4) == chosen


def test_random_designation_is_reproducible_and_depends_on_the_seed():
    def history(seed: int) -> list[list[int]]:
        layer = OneLayer(live(pick="random", seed=seed, interval=1), torch.randn(16, 4), "1:4", total=20)
        seen = []
        for step in range(8):
            seen.append(blocks_with_full_gradient(layer.backward(step, torch.ones(16, 4)), 4))
            layer.update(step)
        return seen

    first = history(0)
    assert first == history(0)
    assert first != history(1)
    assert all(len(blocks) == 8 for blocks in first)
    assert len({tuple(blocks) for blocks in first}) > 1, "another draw for every window"


def test_flips_raise_the_price_of_a_block():
    """Blocks 0 and 1 tie at first but for .1; block 0 flips once and then costs 1 * (1 + 1 / oscillation)."""
    rows = [[1.0, 0.9, 0, 0], [1.1, 0, 0, 0]]
    grads = torch.tensor([[0, -1.0, 0, 0], [0, 0, 0, 0]])  # block 0: .9 grows to 1.0 + .1, and the mask flips
    for oscillation, chosen in ((None, [0]), (100.0, [0]), (2.0, [1])):
        layer = OneLayer(live(oscillation=oscillation, interval=1), rows, "1:4")
        layer.step(0, 2 * grads)
        assert layer.method.flips["layer"].tolist() == [1, 0]
        layer.method.master["layer"][0, 1] = layer.p.data[0, 1] = 1.05  # costs now: 1.05 (one flip) against 1.1
        layer.method.windows["layer"].live[0, 1] = 1.05
        assert blocks_with_full_gradient(layer.backward(1, torch.ones(2, 4)), 4) == chosen


def test_flips_count_the_steps_on_which_a_mask_changed():
    layer = OneLayer(live(designate=1.0, freeze_after=100, interval=5), [[1.0, 0.9, 0, 0]], "1:4")
    layer.step(0, [[0, -2.0, 0, 0]])  # .9 -> 1.1 overtakes: one change, although two entries change
    layer.step(1, [[0, 0, 0, 0]])  # nothing
    layer.step(2, [[-2.0, 0, 0, 0]])  # and back
    assert layer.method.flips["layer"].tolist() == [2]
    assert layer.method.metrics()["mask_changes"] == 4


def test_a_step_on_which_n_falls_too_is_one_flip():
    training = start(make("bame", ramp=0.5, designate=0.9, interval=1, warmup=0.0), pattern="1:8")
    blocks, changed = Pattern(1, 8).blocks, 0
    for step in range(STEPS):
        before = training.masks()["0.weight"]
        training.step(step)
        changed += blocks(before ^ training.masks()["0.weight"]).any(2).flatten().int()
    assert training.method.flips["0.weight"].tolist() == changed.tolist()


def test_a_frozen_block_is_never_designated_again():
    """Block 0 always is the cheapest, and flips at every step; with freeze_after=2 it has two windows, no more."""
    rows = [[1.0, 0.9, 0, 0], [5.0, 0, 0, 0]]
    layer = OneLayer(live(freeze_after=2, interval=1), rows, "1:4")
    chosen = []
    for step in range(6):
        weak = 1 if layer.mask[0, 0] else 0
        chosen.append(blocks_with_full_gradient(layer.backward(step, torch.ones(2, 4)), 4))
        layer.p.grad.zero_()[0, weak] = -3.0 if chosen[-1] == [0] else 0.0
        layer.update(step)
    assert chosen == [[0], [0], [1], [1], [1], [1]]
    assert layer.method.metrics()["frozen_share"] == 0.5


def test_freezing_holds_when_every_block_is_designated_after_a_warmup():
    """All blocks are free during warm-up; those that flipped there must not stay free after it."""
    layer = OneLayer(live(designate=1.0, warmup=0.2, freeze_after=1), [[1.0, 0.9, 0, 0], [5.0, 0, 0, 0]], "1:4")
    layer.step(0, torch.tensor([[0, -2.0, 0, 0], [0, 0, 0, 0]]))
    layer.step(1, torch.zeros(2, 4))
    assert layer.method.flips["layer"].tolist() == [1, 0]
    assert blocks_with_full_gradient(layer.backward(2, torch.ones(2, 4)), 4) == [1]


def test_the_bill_of_frozen_blocks_is_what_was_designated():
    layer = OneLayer(live(designate=1.0, freeze_after=1, interval=1), [[1.0, 0.9, 0, 0], [5.0, 0, 0, 0]], "1:4")
    layer.step(0, torch.tensor([[0, -2.0, 0, 0], [0, 0, 0, 0]]))
    assert layer.method.densities(0)["layer"].grad_weight == 1
    layer.step(1, torch.zeros(2, 4))
    assert layer.method.densities(1)["layer"].grad_weight == 0.25 + 0.5 * 0.75


@pytest.mark.parametrize("optimizer", RESTING)
def test_dropped_weights_of_other_blocks_hold_their_value(optimizer):
    """No gradient, no weight decay, no optimizer state, until their block is designated."""
    layer = OneLayer(live(stop=0.5), FOUR, "1:4", optimizer=RESTING[optimizer])
    for step in range(5):
        layer.step(step, ALIVE)
    layer.backward(5, ALIVE)  # from stop on: windows are closed, master weights are whole again
    held = ~Pattern(1, 4).project(torch.tensor(FOUR))
    held[[1, 3]] = False
    assert torch.equal(layer.method.master["layer"][held], torch.tensor(FOUR)[held])
    assert not torch.equal(layer.method.master["layer"][[1, 3]], torch.tensor(FOUR)[[1, 3]])
    layer.update(5)
    for value in layer.optimizer.state[layer.p].values():
        if value.shape == layer.p.shape:
            assert (value[~layer.mask] == 0).all(), "after stop no dropped weight has a state"
            assert (value[layer.mask] != 0).all()


def test_designated_blocks_train_dropped_weights_with_g_plus_lambda_w():
    layer = OneLayer(live(decay=0.5), FOUR, "1:4")
    seen = layer.backward(0, ALIVE)
    expected = torch.zeros(4, 4)
    expected[0, 0] = expected[2, 2] = 1.0
    expected[1] = torch.tensor([1 + 0.5 * 0.9, 1, 1 + 0.5 * 0.3, 1 + 0.5 * 0.2])
    expected[3] = torch.tensor([1 + 0.5 * 0.1, 1 + 0.5 * 0.2, 1 + 0.5 * 0.1, 1])
    assert close(seen, expected)


def test_in_a_designated_block_the_largest_enters_and_elsewhere_it_does_not():
    layer = OneLayer(live(), FOUR, "1:4")
    after = layer.step(0, torch.full((4, 4), -50.0).triu())  # dropped weights grow by 5 wherever they are trained
    kept = [row.nonzero().flatten().tolist() for row in after]
    assert kept[0] == [0]
    assert kept[2] == [2]
    assert kept[1] == [1], "1 + 5 stays ahead of .3 + 5"
    trained = torch.tensor(FOUR) + 0.1 * torch.full((4, 4), 50.0).triu()
    assert after[3].tolist() == pytest.approx([0, 0, 0, trained[3, 3].item()])


def test_a_layer_without_gradient_keeps_its_trained_dropped_weights():
    """A layer that a step does not use has no gradient; the optimizer skips it, and nothing of it may change."""
    layer = OneLayer(live(stop=0.5, interval=10), FOUR, "1:4")
    layer.step(0, ALIVE)
    before = layer.weight
    layer.p.grad = None
    layer.method.after_backward(1)
    layer.optimizer.step()
    layer.method.after_update(1)
    assert torch.equal(layer.weight, before)
    layer.backward(5, ALIVE)
    trained = torch.tensor(FOUR)
    trained[[1, 3]] -= 0.1
    trained[0, 0] -= 0.1
    trained[2, 2] -= 0.1
    assert close(layer.method.master["layer"], trained)


def naive_live(weight, grads, *, n, share, taper, interval, decay, lr, stop, warm, oscillation, freeze_after):
    """The rule as METHODS words it, block by block and weight by weight; yields the effective rows after each step."""
    rows = [row[:] for row in weight]
    keep = [sorted(range(len(r)), key=lambda i, r=r: (-abs(r[i]), i))[:n] for r in rows]
    flips, chosen = [0] * len(rows), set()
    for step, grad in enumerate(grads):
        if step < warm:
            chosen = set(range(len(rows)))
        elif step >= stop:
            chosen = set()
        elif (step - warm) % interval == 0:
            price = {b: min(abs(r[i]) for i in keep[b]) * (1 + flips[b] / oscillation) for b, r in enumerate(rows)}
            able = [b for b in sorted(price, key=price.get) if flips[b] < freeze_after]
            left = (stop - step) / (stop - warm)
            chosen = set(able[: round(share * left**taper * len(rows))])
        for b, row in enumerate(rows):
            for i in range(len(row)):
                if i in keep[b]:
                    row[i] -= lr * grad[b][i]
                elif b in chosen:
                    row[i] -= lr * (grad[b][i] + decay * row[i])
            if b in chosen:
                new = sorted(range(len(row)), key=lambda i, r=row: (-abs(r[i]), i))[:n]
                flips[b] += set(new) != set(keep[b])
                keep[b] = new
        yield [[w if i in keep[b] else 0.0 for i, w in enumerate(row)] for b, row in enumerate(rows)], flips


@pytest.mark.parametrize("pattern", ["1:4", "2:4"])
@pytest.mark.parametrize("warm", [0, 6])
@pytest.mark.parametrize(("share", "taper"), [(0.4, 0.0), (1.0, 1.5)])
@pytest.mark.parametrize(("oscillation", "freeze_after"), [(math.inf, 10**6), (2.0, 10**6), (math.inf, 3)])
def test_live_against_a_naive_rewriting(pattern, warm, share, taper, oscillation, freeze_after):
    torch.manual_seed(1)
    weight, grads = torch.randn(10, 4, dtype=torch.float64), 2 * torch.randn(30, 10, 4, dtype=torch.float64)
    options = {"designate": share, "taper": taper, "interval": 4, "decay": 0.1, "stop": 0.8, "warmup": warm / 30}
    options["oscillation"] = None if math.isinf(oscillation) else oscillation
    layer = OneLayer(make("bame", freeze_after=freeze_after, **options), weight, pattern, total=30)
    reference = naive_live(
        weight.tolist(), grads.tolist(), n=int(pattern[0]), share=share, taper=taper, interval=4, decay=0.1, lr=0.1,
        stop=24, warm=warm, oscillation=oscillation, freeze_after=freeze_after,
    )  # fmt: skip
    for step, (expected, flips) in enumerate(reference):
        assert torch.allclose(layer.step(step, grads[step]), torch.tensor(expected, dtype=torch.float64)), step
        assert layer.method.flips["layer"].tolist() == flips, step
    assert sum(flips) > 10, "an exercise in which nothing flips proves nothing"


def test_after_stop_masks_never_change():
    training = start(make("bame", interval=2, stop=0.5, designate=0.5), total=20)
    training.run(range(10))
    before, moved = training.masks(), training.method.metrics()["mask_changes"]
    training.run(range(10, 20))
    assert moved > 0
    assert all(torch.equal(mask, before[name]) for name, mask in training.masks().items())
    assert training.method.metrics()["mask_changes"] == 0


@pytest.mark.parametrize("name", ["bame", "bame_swap"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_warmup_is_srste_bit_for_bit(name, optimizer):
    warm = start(make(name, warmup=0.5, decay=0.02, interval=5, **({"gradient_steps": 2} if "swap" in name else {})),
                 optimizer)  # fmt: skip
    plain = start(make("srste", decay=0.02), optimizer)
    for step in range(10):
        assert warm.step(step) == plain.step(step)
        assert all(torch.equal(a, b) for a, b in zip(warm.model.parameters(), plain.model.parameters(), strict=True))
        assert warm.method.densities(step)["0.weight"].grad_weight == 1


# --- BAME, swap ---


def swap(**options):
    """Adapts at every step, from one gradient, without a noise term: kappa * eta = 100 * .01 = 1."""
    return make("bame_swap", **({"interval": 1, "gradient_steps": 1, "confidence": 0.0, "stop": 1.0} | options))


SLOW = sgd(lr=0.01)


@pytest.mark.parametrize(("kept", "swaps"), [(0.5, True), (0.59, True), (0.61, False), (0.9, False)])
def test_swap_when_the_strongest_gradient_outweighs_the_weakest_weight(kept, swaps):
    """kappa * eta * |g_r| > |w_p|: with kappa * eta = 1 and g_r = -.6 the weight must be below .6."""
    layer = OneLayer(swap(), [[0, kept, 0, 0]], "1:4", optimizer=SLOW)
    seen = layer.backward(0, [[0.3, 0.2, -0.6, 0.1]])
    assert layer.mask.tolist() == [[False, not swaps, False, False]], "a grown weight starts at 0"
    assert close(seen, [[0, 0, -0.6, 0]] if swaps else [[0, 0.2, 0, 0]])
    assert layer.update(0).tolist()[0] == pytest.approx([0, 0, 0.006, 0] if swaps else [0, kept - 0.002, 0, 0])
    change = kept**2 / (2 * 1) - 1 * 0.6**2 / 2
    assert layer.method.metrics()["expected_loss_change"] == pytest.approx(change if swaps else 0, abs=1e-6)


def test_swap_size_counts_horizon_and_the_learning_rate_now():
    """kappa * eta = 50 * .01: the weight must now be below .3; and half the rate halves it again."""
    for kept, lr, swaps in ((0.29, 0.01, True), (0.31, 0.01, False), (0.16, 0.005, False), (0.14, 0.005, True)):
        layer = OneLayer(swap(horizon=50.0), [[kept, 0, 0, 0]], "1:4", optimizer=SLOW)
        layer.optimizer.param_groups[0]["lr"] = lr
        assert (layer.step(0, [[0, 0, -0.6, 0.1]])[0, 2] != 0) == swaps


def test_no_learning_rate_no_adaptation():
    layer = OneLayer(swap(), [[1e-3, 0, 0, 0]], "1:4", optimizer=SLOW)
    layer.optimizer.param_groups[0]["lr"] = 0.0
    assert layer.step(0, [[0, 9.0, 0, 0]])[0, 0] != 0
    layer.optimizer.param_groups[0]["lr"] = 0.01
    assert layer.step(1, [[0, 9.0, 0, 0]])[0, 1] != 0


def naive_judgement(weights, grads, kept, size, confidence):
    """(Delta L, p, r) of one block from the gradients of its window."""
    cost = {p: weights[p] ** 2 / (2 * size) for p in kept}
    gain = {}
    for r in set(range(len(weights))) - set(kept):
        series = [g[r] for g in grads]
        noise = statistics.variance(series) / len(series)
        gain[r] = size * max(0.0, statistics.fmean(series) ** 2 - confidence * noise) / 2
    p, r = min(cost, key=cost.get), max(gain, key=gain.get)
    return cost[p] - gain[r], p, r


@pytest.mark.parametrize("confidence", [0.0, 1.0, 4.0])
def test_noise_is_the_variance_of_the_mean_over_the_window(confidence):
    """Input 1 has the larger mean but is noisy, input 2 a smaller and steady one: c decides which of them grows."""
    weights = [0.3, 0.0, 0.0, 0.0]
    grads = [[0.1, 1.9, -0.40, 0.0], [0.1, -0.7, -0.44, 0.0], [0.1, 0.6, -0.48, 0.0]]
    layer = OneLayer(swap(interval=3, gradient_steps=3, confidence=confidence), [weights], "1:4", optimizer=SLOW)
    for step in range(2):
        layer.backward(step, [grads[step]])  # the weights stay put, so that the window is all that matters
        layer.method.after_update(step)
    layer.backward(2, [grads[2]])
    change, _, grown = naive_judgement(weights, grads, [0], 1.0, confidence)
    assert change < 0
    assert grown == (1 if confidence == 0 else 2)
    layer.update(2)
    assert layer.mask.flatten().nonzero().item() == grown
    assert layer.method.metrics()["expected_loss_change"] == pytest.approx(change, rel=1e-5)


def test_gradients_outside_the_window_do_not_count():
    layer = OneLayer(swap(interval=4, gradient_steps=2), [[0.5, 0, 0, 0]], "1:4", optimizer=SLOW)
    for step, grad in enumerate([9.0, 9.0, 0.0, 0.8]):  # the mean over the window is .4, below .5
        layer.step(step, [[0, 0, grad, 0]])
    assert layer.mask.flatten().tolist() == [True, False, False, False]


@pytest.mark.parametrize("skipped", [True, False])
def test_a_missed_adaptation_does_not_mix_two_windows(skipped):
    """A scaler skipped the step of the adaptation, or the layer had no gradient there: what was gathered is void."""
    layer = OneLayer(swap(interval=2, gradient_steps=2), [[0.5, 0, 0, 0]], "1:4", optimizer=SLOW)
    layer.step(0, [[0, 0, 1.0, 0]])
    if not skipped:
        layer.p.grad = None
        layer.method.after_backward(1)
        layer.method.after_update(1)
    for step in (2, 3):  # a mean of .3, below the weight
        layer.step(step, [[0, 0, 0.3, 0]])
    assert layer.mask.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("optimizer", [adam, adamw])
def test_adam_measures_a_step_by_its_second_moments(optimizer):
    """s = 1 / (RMS over kept weights of sqrt(v hat), + eps); the swap decides at kappa * eta * s * |g_r|."""
    beta, grads = 0.9, [[0.3, 0.0, -0.6, 0.0], [0.5, 0.0, -0.6, 0.0], [0.2, 0.0, -0.6, 0.0]]
    v = 0.0
    for g in grads[:2]:
        v = beta * v + (1 - beta) * g[0] ** 2
    s = 1 / (math.sqrt(v / (1 - beta**2)) + 1e-8)
    edge = 100 * 1e-4 * s * 0.6
    for kept, swaps in ((edge * 0.999, True), (edge * 1.001, False)):
        made = optimizer(lr=1e-4, betas=(0.8, beta), eps=1e-8, weight_decay=0.0)
        layer = OneLayer(swap(interval=3), [[1.0, 0, 0, 0]], "1:4", optimizer=made)
        for step in range(2):
            layer.step(step, [grads[step]])
        assert layer.method.step_scale("layer") == pytest.approx(s, rel=1e-5)
        layer.p.data[0, 0] = kept
        layer.backward(2, [grads[2]])
        assert (layer.weight[0, 0] == 0) == swaps


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_swaps_really_happen(optimizer):
    training = start(make("bame_swap", interval=4, gradient_steps=2, confidence=0.5), optimizer)
    training.run()
    assert training.method.metrics()["mask_changes"] > 0


@pytest.mark.parametrize(("kept", "grad", "swaps"), [(0.5, 0.7, True), (0.5, 0.73, False), (2.0, 0.1, True)])
def test_taylor_weighs_g_times_w_against_the_squared_gradient(kept, grad, swaps):
    """C = |g_p w_p| against G = kappa eta g_r^2 = .36."""
    layer = OneLayer(swap(criterion="taylor"), [[kept, 0, 0, 0]], "1:4", optimizer=SLOW)
    layer.backward(0, [[grad, 0, -0.6, 0]])
    assert (layer.weight[0, 0] == 0) == swaps


def test_magnitude_gradient_takes_the_best_blocks_within_its_budget():
    """Smallest |w| out, largest |g| in, whatever the loss says; half a budget takes the larger |g|."""
    layer = OneLayer(swap(criterion="magnitude_gradient", budget=0.5), [[9.0, 8.0, 0, 0], [9.0, 7.0, 0, 0]], "2:4",
                     optimizer=SLOW, total=1000)  # fmt: skip
    layer.step(0, [[9, 9, 0.1, 0.2], [9, 9, -0.3, 0.1]])
    assert layer.mask.tolist() == [[True, True, False, False], [True, False, True, False]]


def test_first_order_adds_what_the_gradient_of_the_dropped_weight_says():
    """C = w^2 / 2 - g w: with w = .5, g = -.2 it is .225, above G = .18; without the first order it is .125."""
    for first_order, swaps in ((False, True), (True, False)):
        layer = OneLayer(swap(first_order=first_order), [[0.5, 0, 0, 0]], "1:4", optimizer=SLOW)
        layer.backward(0, [[-0.2, 0, -0.6, 0]])
        assert (layer.weight[0, 0] == 0) == swaps


@pytest.mark.parametrize(("regrow", "value"), [("zero", 0.0), ("step", 0.6)])
def test_a_grown_weight_starts_at_zero_or_at_the_step_the_gradient_asks_for(regrow, value):
    layer = OneLayer(swap(regrow=regrow), [[0.5, 0, 0, 0]], "1:4", optimizer=SLOW)
    layer.backward(0, [[0, 0, -0.6, 0]])
    assert close(layer.weight, [[0, 0, value, 0]])
    assert close(layer.update(0), [[0, 0, value + 0.006, 0]])


def test_the_kth_cheapest_weight_meets_the_kth_strongest_gradient():
    """C: .3 -> .045, .5 -> .125; G: .6 -> .18, .35 -> .06. Only the first pair wins; crossed, both would."""
    layer = OneLayer(swap(swaps=2), [[0.5, 0.3, 0, 0]], "2:4", optimizer=SLOW)
    layer.step(0, [[0, 0, 0.35, 0.6]])
    assert layer.mask.tolist() == [[True, False, False, True]]
    layer = OneLayer(swap(swaps=2), [[0.5, 0.3, 0, 0]], "2:4", optimizer=SLOW)
    layer.step(0, [[0, 0, 0.55, 0.6]])
    assert layer.mask.tolist() == [[False, False, True, True]]


def test_budget_falls_as_a_cosine_and_limits_the_blocks():
    """Forty blocks that all want to swap at every step."""
    method = swap(budget=0.5, stop=0.8, start=0.1)
    layer = OneLayer(method, torch.eye(4)[[0] * 40] * 1e-6, "1:4", optimizer=SLOW)
    for step in range(10):
        before = layer.mask
        layer.p.data[layer.mask] = 1e-6
        layer.backward(step, 1 + torch.arange(160.0).view(40, 4) / 160)
        share = 0.5 * (1 + math.cos(math.pi * (step - 1) / 7)) / 2 if 1 <= step < 8 else 0.0
        layer.update(step)
        assert (layer.mask != before).any(1).sum() == round(40 * share), step


def test_candidates_are_ranked_by_what_they_win_over_one_plus_their_flips():
    """Two blocks, room for one. Block 0 wins a little more, but has flipped before: then block 1 goes first."""
    layer = OneLayer(swap(budget=0.5), [[0.01, 0, 0, 0], [0.01, 0, 0, 0]], "1:4", optimizer=SLOW, total=1000)
    grads = torch.tensor([[0, 0.6, 0, 0], [0, 0.5, 0, 0]])
    layer.step(0, grads)
    assert layer.method.flips["layer"].flatten().tolist() == [1, 0]
    layer.step(1, grads.flip(1))  # -Delta L is about .18 / 2 against .125
    assert layer.method.flips["layer"].flatten().tolist() == [1, 1]


def test_a_frozen_block_keeps_its_mask_but_trains_on():
    layer = OneLayer(swap(freeze_after=1), [[0.01, 0, 0, 0]], "1:4", optimizer=SLOW)
    layer.step(0, [[0, 0.6, 0, 0]])
    before = layer.step(1, [[9.0, 0.5, 0, 0]])
    assert before.nonzero().tolist() == [[0, 1]]
    assert before[0, 1] == pytest.approx(-0.011)
    assert layer.method.metrics()["frozen_share"] == 1


@pytest.mark.parametrize("optimizer", [sgd(lr=0.01, momentum=0.9), adam(lr=0.01), adamw(lr=0.01)])
def test_a_swap_forgets_the_optimizer_state_of_what_left_and_what_came(optimizer):
    layer = OneLayer(swap(interval=3, horizon=1e4), [[0.5, 0.4, 0, 0]], "2:4", optimizer=optimizer)
    for step in range(2):
        layer.step(step, [[1.0, 1.0, 1.0, 1.0]])
    layer.backward(2, [[1.0, 1.0, 1.0, 9.0]])
    states = [value for value in layer.optimizer.state[layer.p].values() if value.shape == layer.p.shape]
    assert states
    for value in states:
        assert (value != 0).tolist() == [[True, False, False, False]]
    assert layer.update(2).nonzero()[:, 1].tolist() == [0, 3]
    assert layer.step(3, [[1.0] * 4])[0, 1:3].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({"interval": 5, "gradient_steps": 2, "stop": 0.8}, {3, 4, 8, 9, 13, 14}),
        ({"interval": 5, "gradient_steps": 5, "stop": 0.5}, set(range(10))),
        ({"interval": 5, "gradient_steps": 1, "confidence": 0.0, "start": 0.3, "stop": 1.0}, {9, 14, 19}),
        ({"interval": 5, "gradient_steps": 3, "warmup": 0.15, "stop": 0.6}, {0, 1, 2, 7, 8, 9}),
        ({"interval": 5, "gradient_steps": 3, "warmup": 0.1, "stop": 0.6}, {0, 1, 2, 3, 4, 7, 8, 9}),
        ({"interval": 30, "gradient_steps": 10}, set()),
    ],
)
def test_only_windows_that_end_in_an_adaptation_are_billed(options, dense):
    method = planned(make("bame_swap", **options))
    assert {s for s in range(20) if method.densities(s)["layer"].grad_weight == 1} == dense
    assert all(method.densities(s)["layer"][:2] == (0.5, 0.5) for s in range(20))
    assert {method.densities(s)["layer"].grad_weight for s in set(range(20)) - dense} <= {0.5}
    assert bool(method.warnings()) == (options["interval"] == 30)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_swap_ends_its_warmup_with_clean_zeros_and_lets_the_memory_go(optimizer):
    training = start(make("bame_swap", warmup=0.5, interval=100, gradient_steps=2), optimizer)
    training.run(range(10))
    assert training.method.master
    training.run(range(10, 14))
    assert not training.method.master
    for name in training.method.patterns:
        p = training.model.get_parameter(name)
        assert ((p.unflatten(1, (-1, 4)) != 0).sum(2) == 2).all()
        for value in training.optimizer.state[p].values():
            assert value.shape != p.shape or (value[p == 0] == 0).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("static", {"choose": "largest"}),
        ("srste", {"decay": -1e-4}),
        ("srste", {"public_code_gpus": 0}),
        ("decay_mask", {"kind": "mask", "shape": "stepwise"}),
        ("decay_mask", {"kind": "structure", "shape": "linear"}),
        ("decay_mask", {"kind": "structure", "beta": 0.1}),
        ("decay_mask", {"stages": ["2:4"]}),
        ("decay_mask", {"start": 0.7, "stop": 0.3}),
        ("decay_mask", {"stop": 1.1}),
        ("decay_mask", {"interval": 0}),
        ("bame", {"designate": 1.5}),
        ("bame", {"taper": -1.0}),
        ("bame", {"pick": "best"}),
        ("bame", {"decay": math.nan}),
        ("bame", {"freeze_after": 0}),
        ("bame", {"oscillation": 0.0}),
        ("bame_swap", {"gradient_steps": 60}),
        ("bame_swap", {"gradient_steps": 1}),
        ("bame_swap", {"criterion": "magnitude_gradient"}),
        ("bame_swap", {"regrow": "half"}),
    ],
)
def test_options_without_meaning_are_refused(name, options):
    with pytest.raises(ConfigError):
        planned(make(name, **options))


# --- the mask itself ---


def test_first_masks_are_by_magnitude_per_input_block():
    """On a convolution: along its input channels at one fixed (output, row, column), not along its memory."""
    model = net()
    rows = survey(model, Pattern(2, 4))
    assert all(row.pattern for row in rows)
    weight = copy.deepcopy(model[2].weight.detach())
    training = start(make("asp"), model=model)
    kept = training.masks()["2.weight"]
    for out, block, i, j in [(0, 0, 0, 0), (5, 1, 2, 1), (15, 1, 2, 2)]:
        values = weight[out, 4 * block : 4 * block + 4, i, j].abs()
        assert kept[out, 4 * block : 4 * block + 4, i, j].nonzero().flatten().tolist() == sorted(
            values.topk(2).indices.tolist()
        )


def test_gradients_are_taken_at_the_effective_weights():
    """The loss that a step sees is that of the masked network, and so are its gradients (SR-STE's equation 9)."""
    training, plain = start(make("ste")), net()
    masks = training.masks()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.mul_(masks.get(name, torch.ones_like(p)))
    images, labels = batch(0)
    loss = F.cross_entropy(plain(images), labels)
    loss.backward()
    assert training.backward(0) == loss.item()
    training.method.after_backward(0)
    for p, q in zip(training.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


# --- what is reported of masks ---


def test_an_entry_that_comes_back_is_counted_once_per_return():
    """Changes are counted step by step, returns from where each entry began: k changes are k // 2 returns."""
    training = start(make("srste", decay=0.0))
    layers = {name: mask.clone() for name, mask in training.method.current_masks().items()}
    flips = {name: torch.zeros_like(mask, dtype=torch.int64) for name, mask in layers.items()}
    for step in range(STEPS):
        training.backward(step)
        training.update(step)
        for name, mask in training.method.current_masks().items():
            flips[name] += mask ^ layers[name]
            layers[name] = mask.clone()
    made = training.method.metrics(per_layer=True)
    for name, times in flips.items():
        assert made["layers"][name] == {"mask_changes": int(times.sum()), "mask_flip_backs": int((times // 2).sum())}
    assert made["mask_flip_backs"] == sum(row["mask_flip_backs"] for row in made["layers"].values()) > 0
    assert training.method.metrics()["mask_changes"] == 0, "a second call starts a new count"


def test_the_masks_of_open_windows_are_those_of_the_network():
    training = start(make("bame", interval=3, warmup=0.0, designate=0.5))
    for step in range(5):
        training.backward(step)
        training.update(step)
        assert training.method.windows
        for name, mask in training.method.current_masks().items():
            assert not training.model.get_parameter(name)[~mask].any()
            assert (training.method.patterns[name].blocks(mask).sum(2) == training.method.patterns[name].n).all()


def test_a_wrapper_with_weights_of_its_own_is_refused_by_name():
    from timm.optim import Lookahead

    model = net()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1))
    layers = sparse_layers(model, survey(model, Pattern(2, 4)))
    with pytest.raises(ConfigError, match="Lookahead"):
        make("asp").attach(layers, optimizer, STEPS)


def test_n_falls_in_stages_and_the_bill_with_it():
    training = start(make("srste", ramp=0.5))
    seen = [training.method.pattern_at(step)["0.weight"].n for step in range(STEPS + 1)]
    assert seen == [4] * 5 + [3] * 5 + [2] * 11
    forward = [training.method.densities(step)["0.weight"].forward for step in range(STEPS)]
    assert forward == [Fraction(n, 4) for n in seen[:-1]]


def test_a_ramp_too_short_for_its_stages_is_refused():
    with pytest.raises(ConfigError, match="stages"):
        start(make("srste", ramp=0.05), pattern="1:16")
