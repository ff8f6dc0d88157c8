"""Every optimizer of timm's factory keeps the pattern or is refused by name; bfloat16 moves few masks."""

from __future__ import annotations

import pytest
import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch.nn import functional as F
from training_bed import batch, build, net, start

from bame_cli.errors import ConfigError
from bame_cli.methods.optimizers import keeps_zeros

STEPS = 6
OWN_STEP = ("adahessian",)  # wants second-order gradients from its own backward pass


def made(name: str):
    def build_one(parameters):
        # As the recipe builds it: two groups, the matrices with weight decay.
        return create_optimizer_v2(list(parameters), opt=name, lr=1e-2, weight_decay=1e-2)

    return build_one


def buildable() -> list[str]:
    names = []
    for name in map(str, list_optimizers()):
        try:
            made(name)(net().parameters())
        except Exception:  # needs a package or a device that is not here (bitsandbytes, apex)
            continue
        if name not in OWN_STEP:
            names.append(name)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("case", ["asp", "bame"])
@pytest.mark.parametrize("name", buildable())
def test_the_pattern_holds_under_every_optimizer_of_timm(name, case):
    if case == "bame" and not keeps_zeros(made(name)(net().parameters())):
        with pytest.raises(ConfigError, match="moves weights whose gradient is 0"):
            start(build(case), made(name), total=STEPS)
        return
    training = start(build(case), made(name), total=STEPS)
    for step in range(STEPS):
        training.backward(step)
        training.update(step)
        for key, pattern in training.method.pattern_at(step + 1).items():
            assert pattern.check(training.model.get_parameter(key).detach()) is None, step


def test_element_wise_optimizers_are_not_refused():
    """The probe must not cost anybody an optimizer that works."""
    for name in ("sgd", "momentum", "adam", "adamw", "nadamw", "lamb", "lion", "rmsprop", "adafactor", "adopt"):
        start(build("bame"), made(name), total=STEPS)


@pytest.mark.parametrize("name", ["rmsprop", "rmsproptf", "adan", "adopt", "adabelief", "adafactor", "lion", "lamb"])
def test_an_exchange_says_that_it_does_not_know_the_size_of_a_step(name):
    """It would weigh gains against losses by a wrong step, and hardly exchange anything."""
    (note,) = start(build("swap"), made(name), total=STEPS).method.warnings()
    assert "the size of" in note
    assert not start(build("swap magnitude"), made(name), total=STEPS).method.warnings()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "nadamw", "radam"])
def test_an_exchange_knows_the_steps_of_sgd_and_adam(name):
    assert not start(build("swap"), made(name), total=STEPS).method.warnings()


def test_bfloat16_moves_few_masks():
    """Autocast rounds gradients to 8 bits; a mask differs only where two weights of a block are that close."""
    masks = []
    for on in (False, True):
        training = start(build("srste"))
        for step in range(STEPS):
            images, labels = batch(step)
            training.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                loss = F.cross_entropy(training.model(images), labels)
            loss.backward()
            training.update(step)
        masks.append(training.method.current_masks())
    differing = sum(int((masks[0][name] ^ masks[1][name]).sum()) for name in masks[0])
    assert 0 <= differing <= 0.01 * sum(mask.numel() for mask in masks[0].values())
