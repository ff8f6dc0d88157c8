"""Options: shipped YAML composes into objects, bad values are one line, a run's address follows its options."""

from __future__ import annotations

import dataclasses
from importlib.resources import files

import pytest

from bame_cli.errors import ConfigError
from bame_cli.methods import METHODS, name_of
from bame_cli.options import compose, schema
from bame_cli.runs import path as paths

CONF = files("bame_cli.conf")
SHIPPED = [
    (group.name, option.name.removesuffix(".yaml"))
    for group in CONF.iterdir()
    if group.is_dir() and group.name[0] != "_" and group.name not in ("table", "scale", "search")  # see test_tables.py
    for option in group.iterdir()
    if option.name.endswith(".yaml")
]


def composed(*words: str) -> schema.Config:
    return compose.composed(list(words))


@pytest.mark.parametrize(("group", "option"), SHIPPED)
def test_every_shipped_file_composes_into_objects(group, option):
    extra = ["dataset.root=somewhere"] if option == "image_folder" else []
    made = composed(f"{group}={option}", *extra)
    if group == "experiment":
        assert made.recipe.name != "quick" or option == "digits_resnet20"
        return
    chosen = getattr(made, group)
    if option == "vit_micro":  # one of timm's by its own name, with other numbers
        assert (chosen.name, chosen.args["depth"]) == ("vit_tiny_patch16_224", 2)
        return
    assert name_of(chosen) == option if group == "method" else chosen.name == option


@pytest.mark.parametrize("option", [option for group, option in SHIPPED if group == "experiment"])
def test_the_command_line_wins_over_an_experiment(option):
    made = composed("model=resnet18", "recipe.lr=0.5", f"experiment={option}", "dataset=synthetic", "recipe=small")
    assert (made.model.name, made.recipe.lr, made.dataset.name, made.recipe.name) == (
        "resnet18",
        0.5,
        "synthetic",
        "small",
    )


def test_an_option_that_is_off_does_not_move_a_run(monkeypatch):
    """So that one added later, off by default, leaves finished runs where they are."""
    made = composed()
    before = paths.digest(made)
    plain = dataclasses.asdict

    def with_more(value):
        options = plain(value)
        options["recipe"] |= {"new": None, "names": [], "on": {"deeper": False}}
        return options

    monkeypatch.setattr(paths.dataclasses, "asdict", with_more)
    assert paths.digest(made) == before
    made.recipe.min_lr = 0.1
    assert paths.digest(made) != before


def test_every_method_has_its_file_and_its_defaults():
    """A YAML that forgets a field, or says another default than the class, would make the library and `bame` differ."""
    for name, kind in METHODS.items():
        assert composed(f"method={name}").method == kind()


def test_any_pattern_and_any_timm_name_are_options():
    made = composed("sparsity=3:7", "model=resnet18.a1_in1k")
    assert str(made.pattern) == "3:7"
    assert made.model.name == "resnet18.a1_in1k"


@pytest.mark.parametrize("text", ["1e-3", ".001", "0.001"])
def test_numbers_are_numbers_however_written(text):
    assert composed(f"recipe.lr={text}").recipe.lr == 0.001


def test_a_data_set_brings_its_recipe_unless_one_is_named():
    assert composed("dataset=imagenet").recipe.name == "imagenet"
    assert composed("dataset=imagenet", "recipe=quick").recipe.name == "quick"
    assert composed("recipe=quick", "dataset=imagenet", "recipe.epochs=3").recipe.epochs == 3


def test_patterns_of_single_layers_come_from_the_command_line():
    made = composed("+sparsity.overrides={*.conv2:1:4,fc:dense}", "sparsity.exclude=[layer1.*]")
    assert made.sparsity.overrides == {"*.conv2": "1:4", "fc": "dense"}
    assert made.sparsity.exclude == ["layer1.*"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sparsity=4:2"], "1 <= N <= M"),
        (["sparsity=0:4"], "1 <= N <= M"),
        (["sparsity=abc"], "for example 2:4"),
        (["sparsty=1:4"], "did you mean 'sparsity'"),
        (["method.intervall=3"], "did you mean 'method.interval'"),
        (["method=bam"], "did you mean 'bame'"),
        (["dataset=digit"], "did you mean 'digits'"),
        (["recipe.lr=abc"], "recipe.lr=abc: Value 'abc'"),
        (["recipe.epochs=0"], "recipe.epochs=0: must be 1 or more"),
        (["recipe.label_smoothing=1"], "from 0 to below 1"),
        (["method.designate=2"], "from 0 to 1"),
        (["method.pick=best"], "one of small, gap, random"),
        (["run.resume=maybe"], "one of auto, never"),
        (["model.args.depth=3"], "+model.args.depth=3"),
        (["sparsity=1:4,1:8"], "add -m"),
        (["seed=${nope}"], "nope"),
        (["dataset=image_folder"], "dataset.root"),
        (["recipe.epochs"], "recipe.epochs"),
    ],
)
def test_a_wrong_value_is_one_line_that_mends_it(words, says):
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_address_follows_what_can_change_the_result():
    base = composed()
    for same in ("run.root=elsewhere", "log.every=7", "dataset.root=x", "device=cpu", "logger=wandb"):
        assert paths.digest(composed(same)) == paths.digest(base), same
    for other in ("seed=1", "recipe.lr=0.2", "method.interval=3", "sparsity=1:4", "sparsity.exclude=[fc]"):
        assert paths.digest(composed(other)) != paths.digest(base), other


def test_dense_has_one_address_whatever_the_pattern():
    places = {paths.run_path(composed("method=dense", f"sparsity={p}")) for p in ("2:4", "1:16")}
    assert len(places) == 1
    assert "of" not in places.pop().parts[-2]


def test_seeds_of_one_setting_share_a_group():
    groups = {paths.digest(composed("method=static", f"seed={k}"), seed=False) for k in range(3)}
    assert len(groups) == 1
    assert paths.digest(composed("method=asp"), seed=False) not in groups


def test_no_path_needs_quoting():
    path = str(paths.run_path(composed("sparsity=1:16", "model=resnet18.a1_in1k")))
    assert not set(path) & set(":=\\ ,[]{}")


def test_a_saved_configuration_loads_again(tmp_path):
    from omegaconf import OmegaConf

    text = compose.composed(["method=static", "seed=3"], plain=True)
    again = OmegaConf.create(text)
    assert again.method.seed == 3, "references are resolved"
    assert again.sparsity.n == 2
