"""`execution=sparse`: products of sparse matrices are those of dense ones, and are used where they are the faster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from commands import TINY, bame
from safetensors.torch import load_file
from torch import nn
from training_bed import CASES, OPTIMIZERS, build, double, start

from bame_cli.methods import METHODS
from bame_cli.sparsity.layers import sparse_layers, survey
from bame_cli.sparsity.pattern import Pattern
from bame_cli.training import execution
from bame_cli.training.execution import SparseLayer, execute_sparsely

CPU = torch.device("cpu")
WANT_LITTLE = [case for case, (name, _) in CASES.items() if METHODS[name].sparse_gradients]
LAYERS = {
    "linear": (lambda: nn.Linear(64, 24), (5, 3, 64)),
    "linear without bias": (lambda: nn.Linear(32, 48, bias=False), (7, 32)),
    "1x1": (lambda: nn.Conv2d(32, 24, 1), (3, 32, 5, 4)),
    "1x1 with stride": (lambda: nn.Conv2d(32, 24, 1, stride=2, bias=False), (3, 32, 7, 5)),
}


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def always(monkeypatch):
    """Sparse products whatever the clock says."""
    monkeypatch.setattr(SparseLayer, "_ratio", lambda *_: 0.0)


def executed(layer: nn.Module, mask: torch.Tensor) -> nn.Module:
    """A layer that computes by the entries of a mask alone."""

    class Fixed(METHODS["static"]):
        def support(self, name):
            return mask

    method = Fixed()
    method.patterns = {"0.weight": Pattern(1, 16)}
    assert len(execute_sparsely(nn.Sequential(layer), method, CPU)) == 1
    return layer


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_products_are_the_dense_ones(kind, memory, always):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    inputs = torch.randn(shape, dtype=torch.float64)
    if len(shape) == 4:
        inputs = inputs.contiguous(memory_format=memory)
    inputs, layer = inputs.requires_grad_(), make().double()
    mask = Pattern(1, 16).project(layer.weight)
    layer.weight.data.mul_(mask)

    def products(made: nn.Module) -> list[torch.Tensor]:
        out = made(inputs)
        seed = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        return [out, *torch.autograd.grad(out, [inputs, *made.parameters()], seed)]

    expected = products(layer)
    expected[2] = expected[2] * mask
    for mine, dense in zip(products(executed(layer, mask)), expected, strict=True):
        assert mine.shape == dense.shape
        assert torch.allclose(mine, dense, rtol=1e-12, atol=1e-12)
    out, grad = products(layer)[:2]
    assert out.stride() == expected[0].stride(), "neighbours read what comes out as fast as before"
    assert "stride" in kind or grad.stride() == expected[1].stride()
    assert not layer.eval()(inputs).isnan().any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", WANT_LITTLE)
def test_outside_its_support_no_method_reads_a_gradient(case, optimizer):
    """What `support` promises: a weight is 0 there, and whatever gradient stands there changes nothing."""
    one, other = (start(build(case), optimizer, pattern="1:8", model=double()) for _ in range(2))
    asked = 0
    for step in range(one.total):
        for training in (one, other):
            training.backward(step)
        for name in other.method.patterns:
            support = other.method.support(name)
            if support is not None:
                asked += 1
                p = other.model.get_parameter(name)
                assert not p[~support].any()
                p.grad[~support] = 1e6
        for training in (one, other):
            training.update(step)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert a.equal(b), step
    assert asked


@pytest.mark.parametrize("case", WANT_LITTLE)
def test_training_is_the_same_to_rounding(case, always):
    """Also where masks move: entries are looked up anew whenever the mask was written to."""

    def network() -> nn.Sequential:
        torch.manual_seed(1)
        body = [nn.Conv2d(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.Flatten(), nn.Linear(256, 32)]
        return nn.Sequential(*body, nn.ReLU(), nn.Linear(32, 4)).double()

    dense, sparse = (start(build(case), pattern="1:8", model=network()) for _ in range(2))
    assert len(execute_sparsely(sparse.model, sparse.method, CPU)) == 3
    for step in range(dense.total):
        assert dense.step(step) == pytest.approx(sparse.step(step), rel=1e-9), step
    assert all(mask.equal(sparse.masks()[name]) for name, mask in dense.masks().items())


def test_the_faster_way_is_taken_and_measured_once_per_shape(monkeypatch):
    ratio, measured = 0.95, []
    monkeypatch.setattr(SparseLayer, "_ratio", lambda self, *_: measured.append(self.name) or ratio)
    products = []
    monkeypatch.setattr(execution._Product, "apply", lambda *args: products.append(1) or args[0] @ args[1].t())
    model = nn.Sequential(nn.Linear(32, 16))
    training = start(METHODS["static"](), pattern="1:16", model=model)
    execute_sparsely(model, training.method, CPU)
    for size in (8, 8, 4):
        model(torch.randn(size, 32))
    assert len(measured) == 2
    assert not products, "a saving so small may be the clock's"
    ratio = 0.5
    model(torch.randn(2, 32))
    model(torch.randn(2, 32))
    assert (len(measured), len(products)) == (3, 2)
    model.eval()(torch.randn(2, 32))
    with torch.no_grad():
        model.train()(torch.randn(2, 32))
    assert len(products) == 2, "only training steps are computed sparsely"


@pytest.mark.parametrize("price", [0.5, 2.0])
def test_the_ratio_is_of_the_times_of_both_ways(price, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(execution, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def costing(seconds, call):
        def timed(*args):
            clock[0] += seconds
            return call(*args)

        return timed

    model = nn.Sequential(nn.Linear(32, 16))
    training = start(METHODS["static"](), pattern="1:16", model=model)
    (layer,) = execute_sparsely(model, training.method, CPU)
    layer.way, layer._dense = costing(price, layer.way), costing(1.0, layer._dense)
    model(torch.randn(8, 32))
    assert list(layer.ratios.values()) == [price]


def test_a_run_with_an_average_ends_where_a_dense_one_does(always):
    words = [*TINY, "model=vit_tiny_patch16_224", "+model.args={embed_dim:32,depth:1,num_heads:2,patch_size:4}"]
    words += ["recipe.batch_size=16", "method=static", "sparsity=1:8", "recipe.ema=0.9"]
    words.remove("method.interval=3")
    assert bame("train", *words, "run.dir=dense") == 0
    assert bame("train", *words, "execution=sparse", "run.dir=sparse") == 0
    dense, sparse = (load_file(f"{folder}/model.safetensors") for folder in ("dense", "sparse"))
    assert all(torch.allclose(dense[name].float(), sparse[name].float(), atol=1e-3) for name in dense)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["amp=bfloat16"], "amp=none"),
        (["compile=true"], "compile=false"),
        (["deterministic=true"], "deterministic=false"),
        (["method=srste"], "static, asp, bame"),
        (["execution=fast"], "dense, sparse"),
    ],
)
def test_what_it_does_not_go_with(words, said, capsys):
    base = [word for word in TINY if not word.startswith("method.")]
    assert bame("train", *base, "execution=sparse", *words) == 2
    assert said in capsys.readouterr().err


def test_a_layer_of_another_kind_stays_as_it_is():
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1, padding=1), nn.Conv2d(32, 16, 1, groups=2))
    method = METHODS["static"]()
    rows = survey(model, Pattern(1, 16))
    method.attach(sparse_layers(model, rows), torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert execute_sparsely(model, method, CPU) == []
