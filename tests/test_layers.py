"""Which weights become sparse: what a layer can be, what the user asked for, and the reasons in the report."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bame_cli.errors import ConfigError
from bame_cli.sparsity.layers import Layer, demand_sparse, sparse_layers, survey
from bame_cli.sparsity.pattern import Pattern
from bame_cli.tasks.images import models

TWO_FOUR = Pattern(2, 4)


def report(model: nn.Module, pattern: Pattern = TWO_FOUR, **options: object) -> dict[str, Layer]:
    rows = survey(model, pattern, **options)
    named = {row.name: row for row in rows}
    assert len(named) == len(rows), "a weight is listed twice"
    for row in rows:
        assert (row.pattern is None) == bool(row.reason), "sparse, or dense with a reason"
    return named


def sparse(rows: dict[str, Layer]) -> set[str]:
    return {name for name, row in rows.items() if row.pattern}


def timm_report(name: str, pattern: Pattern = TWO_FOUR, **options: object) -> dict[str, Layer]:
    with torch.device("meta"):
        model = timm.create_model(name)
    return report(model, pattern, keep_dense=models.always_dense(model), **options)


# --- what is sparse by default ---


def test_a_plain_network(small_net):
    """Every Linear and Conv2d whose inputs per output are a multiple of M, in the order of the modules."""
    rows = survey(small_net, Pattern(1, 16))
    assert [(row.name, row.shape) for row in rows] == [
        ("0.weight", (32, 16, 3, 3)),
        ("2.weight", (32, 16, 3, 3)),
        ("5.weight", (32, 512)),
        ("7.weight", (4, 32)),
    ]
    assert all(row.pattern == Pattern(1, 16) for row in rows)
    assert rows[0].numel == 32 * 16 * 9


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "convnext_tiny", "regnety_032", "swin_tiny_patch4_window7_224"]
)
def test_stem_and_classifier_stay_dense(name):
    """The stem also where its inputs would fit: at 1:1 nothing but the default keeps it dense."""
    with torch.device("meta"):
        config = timm.create_model(name).pretrained_cfg
    rows = timm_report(name, Pattern(1, 1))
    assert rows[f"{config['first_conv']}.weight"].reason == "stem"
    assert rows[f"{config['classifier']}.weight"].reason == "classifier"
    assert {row.reason for row in rows.values()} <= {"", "stem", "classifier", "depthwise"}


def test_every_sparse_layer_of_a_resnet_fits():
    rows = timm_report("resnet50", Pattern(1, 16))
    assert {name for name, row in rows.items() if not row.pattern} == {"conv1.weight", "fc.weight"}
    assert all(row.shape[1] % 16 == 0 for row in rows.values() if row.pattern)


def test_vit():
    rows = timm_report("deit_tiny_patch16_224")
    parts = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert sparse(rows) == {f"blocks.{i}.{part}.weight" for i in range(12) for part in parts}
    assert set(rows) - sparse(rows) == {"patch_embed.proj.weight", "head.weight"}
    assert rows["head.weight"].reason == "classifier"


def test_keep_dense_names_modules_not_prefixes_of_names():
    """`head` keeps `head` and `head.fc`, not `head_norm` or `heads`."""
    model = nn.ModuleDict(
        {
            "head": nn.Sequential(nn.Linear(8, 8)),
            "heads": nn.Linear(8, 8),
            "head_norm": nn.Linear(8, 8),
        }
    )
    rows = report(model, keep_dense={"head": "classifier"})
    assert rows["head.0.weight"].reason == "classifier"
    assert sparse(rows) == {"heads.weight", "head_norm.weight"}


def test_names_are_those_of_the_state_dict(small_net):
    """Bill and checkpoint look a layer up by this name; a model that is one layer has no module name."""
    for model in (small_net, nn.Linear(8, 8), nn.Conv2d(8, 8, 3)):
        assert set(report(model)) <= set(model.state_dict())


def test_attach_gets_the_parameters_themselves(small_net):
    rows = survey(small_net, TWO_FOUR, overrides={"7": "1:16"}, exclude=["2"])
    layers = sparse_layers(small_net, rows)
    assert {name: pattern for name, (_, pattern) in layers.items()} == {
        "0.weight": TWO_FOUR,
        "5.weight": TWO_FOUR,
        "7.weight": Pattern(1, 16),
    }
    assert layers["5.weight"][0] is small_net[5].weight


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "deit_tiny_patch16_224"])
def test_meta_device_decides_alike(name):
    """`bame layers` needs no memory for weights, and training must see the same report."""
    real = timm.create_model(name)
    assert survey(real, TWO_FOUR, keep_dense=models.always_dense(real)) == list(timm_report(name).values())


# --- what the user asks for ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": ["2"]}, {"0", "5", "7"}),
        ({"exclude": ["2.weight"]}, {"0", "5", "7"}),
        ({"exclude": ["*"], "include": ["5"]}, {"5"}),
        ({"exclude": ["5"], "include": ["*"]}, {"0", "2", "5", "7"}),
        ({"keep_dense": {"0": "stem", "7": "classifier"}}, {"2", "5"}),
        ({"keep_dense": {"0": "stem", "7": "classifier"}, "include": ["7"]}, {"2", "5", "7"}),
        ({"keep_dense": {"0": "stem", "7": "classifier"}, "exclude": ["5"]}, {"2"}),
        ({"exclude": ["[05]"]}, {"2", "7"}),
        ({"overrides": {"0": "dense"}, "include": ["0"]}, {"2", "5", "7"}),
        ({"overrides": {"0": "1:4"}, "exclude": ["*"]}, {"0"}),
        ({"overrides": {"0": "1:4"}, "keep_dense": {"0": "stem"}}, {"0", "2", "5", "7"}),
        ({"overrides": {"*": "dense", "7": "1:4"}}, {"7"}),
        ({"overrides": {"7": "1:4", "*": "dense"}}, set()),
    ],
)
def test_selection(small_net, options, expected):
    """Overrides win over include, include over exclude, both over the default; of overrides the last match."""
    assert sparse(report(small_net, **options)) == {f"{name}.weight" for name in expected}


def test_the_reason_says_who_decided(small_net):
    rows = report(small_net, keep_dense={"0": "stem"}, exclude=["2"], overrides={"5": "dense"})
    assert [row.reason for row in rows.values()] == ["stem", "excluded", "overrides: 5", ""]


def test_overrides_set_a_pattern_of_their_own(small_net):
    rows = report(small_net, overrides={"*": "1:8", "7": "1:32"})
    assert [str(row.pattern) for row in rows.values()] == ["1:8", "1:8", "1:8", "1:32"]


def test_asking_cannot_make_the_impossible_possible():
    rows = timm_report("resnet18", include=["*"])
    assert not rows["conv1.weight"].pattern
    assert "3 inputs" in rows["conv1.weight"].reason
    assert rows["fc.weight"].pattern == TWO_FOUR


def test_an_override_is_judged_by_its_own_pattern():
    rows = report(nn.Sequential(nn.Linear(6, 4), nn.Linear(8, 4)), overrides={"0": "1:3", "1": "1:16"})
    assert rows["0.weight"].pattern == Pattern(1, 3)
    assert rows["1.weight"].reason == "8 inputs per output are not a multiple of 16"


@pytest.mark.parametrize("option", ["include", "exclude", "overrides"])
def test_a_name_that_matches_nothing_is_an_error(option):
    text = "layer4.0.conv3"  # resnet18 has conv1 and conv2
    with pytest.raises(ConfigError, match=r"layer4\.0\.conv3.*did you mean 'layer4\.0\.conv"):
        timm_report("resnet18", **{option: {text: "dense"} if option == "overrides" else [text]})


def test_a_pattern_far_from_every_name_is_an_error(small_net):
    with pytest.raises(ConfigError, match="no layer is named 'layer4"):
        survey(small_net, TWO_FOUR, exclude=["0", "layer4.*"])


@pytest.mark.parametrize("asked", ["4:2", "sparse", ""])
def test_a_wrong_override_is_an_error(small_net, asked):
    with pytest.raises(ConfigError, match="1 <= N <= M"):
        survey(small_net, TWO_FOUR, overrides={"0": asked})


def test_every_listed_name_can_be_excluded():
    """The report is where a user copies names from."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Embedding(4, 8), nn.Linear(8, 8))
    for row in survey(model, TWO_FOUR):
        survey(model, TWO_FOUR, exclude=[row.name])


# --- what a layer can be ---


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(6, 8), "6 inputs per output are not a multiple of 4"),
        (nn.Conv2d(3, 8, 7), "3 inputs per output are not a multiple of 4"),
        # The inputs of one output count, not the channels of the layer.
        (nn.Conv2d(8, 8, 3, groups=4), "2 inputs per output are not a multiple of 4"),
        (nn.Conv2d(8, 8, 3, groups=8), "depthwise"),
        (nn.Conv2d(8, 16, 3, groups=8), "depthwise"),
        (nn.Embedding(8, 8), "Embedding is not a Linear or Conv2d layer"),
        (nn.Conv1d(8, 8, 3), "Conv1d is not a Linear or Conv2d layer"),
        (nn.ConvTranspose2d(8, 8, 3), "ConvTranspose2d is not a Linear or Conv2d layer"),
    ],
    ids=str,
)
def test_reasons(layer, reason):
    assert [row.reason for row in survey(nn.Sequential(layer), TWO_FOUR)] == [reason]


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(4, 8, 1), nn.Linear(4, 1)], ids=str)
def test_just_large_enough(layer):
    assert report(nn.Sequential(layer))["0.weight"].pattern == TWO_FOUR


def test_depthwise_never_qualifies():
    """At 1:1 a depthwise weight would fit, and would be called sparse."""
    assert report(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)), Pattern(1, 1))["0.weight"].reason == "depthwise"
    one_input = nn.Sequential(nn.Conv2d(1, 8, 3))  # one channel, but no groups: a stem for grey images
    assert report(one_input, Pattern(1, 1))["0.weight"].pattern


def test_weights_of_one_dimension_are_no_layers():
    assert survey(nn.Sequential(nn.BatchNorm2d(8), nn.LayerNorm(8), nn.PReLU(8)), TWO_FOUR) == []


class InnerHook(nn.Conv2d):
    """Transforms the weight without a forward of its own."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, nn.functional.normalize(weight), bias)


class Centered(nn.Linear):
    """Linear in its weight, and yet a zero in the weight is no zero in the product."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight), self.bias)


@pytest.mark.parametrize(
    "layer",
    [
        StdConv2d(8, 8, 3),
        StdConv2dSame(8, 8, 3),
        ScaledStdConv2d(8, 8, 3),
        ScaledStdConv2dSame(8, 8, 3),
        Normalized(8, 8),
        Centered(8, 8),
        InnerHook(8, 8, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_transformed_weight_cannot_be_sparse(layer):
    """Zeros in the parameter would not be zeros in the product."""
    assert report(nn.Sequential(layer))["0.weight"].reason == "its layer transforms the weight before using it"


class LowRankAdapter(nn.Linear):
    """A layer that adds something of its own: the weight is used as it is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(inputs, 2)), nn.Parameter(torch.randn(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a @ self.b


@pytest.mark.parametrize(
    "layer",
    [
        Conv2dSame(8, 8, 3, stride=2),
        Conv2dSame(8, 8, 5, dilation=2, groups=2, bias=False),
        LowRankAdapter(8, 8),
        nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_subclasses_that_use_the_weight_as_it_is(layer, device):
    assert report(nn.Sequential(layer).to(device))["0.weight"].pattern == TWO_FOUR


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * super().forward(x)


class Heads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 7, self.out_features)


@pytest.mark.parametrize("layer", [Scaled(8, 8), Heads(8, 8)], ids=lambda layer: type(layer).__name__)
def test_a_layer_that_cannot_be_tried_stays_dense(layer):
    """Some forwards want more than a plain input: a row with a reason, not a crash from inside the layer."""
    assert not report(nn.Sequential(layer))["0.weight"].pattern


def test_surveying_leaves_the_model_and_the_random_state_alone():
    model = nn.Sequential(StdConv2d(8, 8, 3), nn.BatchNorm2d(8), Conv2dSame(8, 8, 3)).train()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    survey(model, TWO_FOUR)
    assert torch.get_rng_state().equal(random)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["nfnet_l0", "resnetv2_50x1_bit"])
def test_weight_standardized_families(name):
    """Their 3x3 and 1x1 convolutions all have inputs that fit 2:4; only what is standardized keeps them dense."""
    rows = timm_report(name)
    standardized = {n for n, row in rows.items() if row.reason == "its layer transforms the weight before using it"}
    assert len(standardized) > 40
    assert not any("conv" in n for n in sparse(rows))


def test_same_padding_is_no_reason():
    rows = timm_report("tf_efficientnet_b0")
    assert "blocks.2.0.conv_pw.weight" in sparse(rows)
    assert rows["blocks.2.0.conv_dw.weight"].reason == "depthwise"  # a Conv2dSame
    assert rows["conv_stem.weight"].reason.startswith("3 inputs")  # and this one
    assert rows["classifier.weight"].reason == "classifier"


# --- weights that are not a parameter of their own ---


def test_parametrized_weights_stay_dense():
    """Writing zeros into a computed tensor would be lost at the next forward."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Conv2d(8, 8, 3))
    parametrizations.spectral_norm(model[1])
    assert [row.reason for row in survey(model, TWO_FOUR)] == ["its weight is computed from other parameters"] * 2
    parametrize.remove_parametrizations(model[1], "weight")
    assert sparse(report(model)) == {"1.weight"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_are_one_layer(device):
    """Two masks for one Parameter would fight; the second mention says whose weight it is."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    model[2].weight = model[0].weight
    rows = report(model)
    assert sparse(rows) == {"0.weight"}
    assert rows["2.weight"].reason == "shares its weight with 0.weight"
    assert list(sparse_layers(model, list(rows.values()))) == ["0.weight"]


def test_a_head_tied_to_an_embedding_stays_dense():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    assert not sparse(report(model))


def test_a_shared_module_is_one_layer():
    layer = nn.Linear(8, 8)
    assert list(report(nn.Sequential(layer, nn.ReLU(), layer))) == ["0.weight"]


def test_frozen_weights_stay_dense():
    """Nothing trains them, so nothing can adapt to their zeros."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad = False
    model[1].bias.requires_grad = False
    rows = report(model)
    assert rows["0.weight"].reason == "frozen"
    assert rows["1.weight"].pattern


def test_fused_attention_weights_are_listed():
    """torch's attention holds q, k and v in one bare parameter: listed, so that nobody thinks it is sparse."""
    rows = report(nn.TransformerEncoderLayer(8, 2, 16))
    assert rows["self_attn.in_proj_weight"].reason == "MultiheadAttention is not a Linear or Conv2d layer"
    assert rows["self_attn.in_proj_weight"].shape == (24, 8)
    assert sparse(rows) == {"self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}


# --- a sparse method needs a sparse layer ---


def test_nothing_sparse_is_an_error_that_says_why():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Linear(6, 10))
    with pytest.raises(ConfigError, match="nothing in this model can be sparse") as error:
        demand_sparse(survey(model, Pattern(1, 16), keep_dense={"2": "classifier"}))
    assert "3 inputs per output are not a multiple of 16" in str(error.value)
    assert "depthwise" in str(error.value)


def test_a_model_without_any_layer_is_an_error_too():
    with pytest.raises(ConfigError, match="no Linear or Conv2d layer"):
        demand_sparse(survey(nn.Sequential(nn.ReLU()), TWO_FOUR))


def test_one_sparse_layer_is_enough(small_net):
    demand_sparse(survey(small_net, TWO_FOUR, exclude=["*"], include=["7"]))


def test_a_layer_that_cannot_be_what_include_asks_is_refused(small_net):
    """Silence would leave it dense under a command that says sparse."""
    with pytest.raises(ConfigError, match=r"0\.weight cannot be sparse .* not a multiple of 32"):
        survey(small_net, Pattern(1, 32), include=["0"])
    assert survey(small_net, Pattern(1, 32), include=["*"])
