"""Which weights of a model become N:M sparse, and why the others stay dense.

`survey` looks at every module that owns a weight matrix or kernel and decides by the first rule that applies:
what a weight *can* be (its kind, its shape, how its layer uses it), then what the user named (`include`, then
`exclude`), then the default that stem and classifier stay dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bame_cli.errors import ConfigError, near_misses
from bame_cli.sparsity.pattern import Pattern

DENSE = "dense"


@dataclass(frozen=True)
class Layer:
    """One weight of the model: its state-dict name, shape, pattern (None = dense) and, when dense, the reason."""

    name: str
    shape: tuple[int, ...]
    pattern: Pattern | None
    reason: str = ""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def survey(
    model: nn.Module,
    pattern: Pattern,
    *,
    keep_dense: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> list[Layer]:
    """Decide for every weight of `model`, in the order of its modules.

    keep_dense: module name -> reason, dense unless `include` names it (stem and classifier).
    include, exclude: shell patterns of module names; `include` wins, so `exclude=["*"] include=["layer4.*"]`
        sparsifies layer4 alone. overrides: shell pattern -> "N:M" or "dense"; the last match wins.
    Works on any device, `meta` too. Raises ConfigError for a shell pattern that matches no layer, or an `include`
    none of whose layers can be sparse.
    """
    weights = list(_weights(model))
    names = [name for name, _, _ in weights]
    for text in (*include, *exclude, *(overrides or {})):
        _demand_match(text, names)
    rows, owners = [], dict[int, str]()
    for name, module, weight in weights:
        chosen, choice = _choose(name, pattern, keep_dense or {}, include, exclude, overrides or {})
        key = f"{name}.{_attribute(module)}".lstrip(".")  # a model may be one layer, without a name
        reason = _impossible(module, weight, chosen, owners) or choice
        owners.setdefault(id(weight), key)
        rows.append(Layer(key, tuple(weight.shape), None if reason else chosen, reason))
    for text in include:
        named = [row for row, name in zip(rows, names, strict=True) if _matches(text, name)]
        asked = [row for row in named if not row.reason.startswith("overrides")]
        if asked and not any(row.pattern for row in asked):
            raise ConfigError(f"{asked[0].name} cannot be sparse as {text!r} asks: {asked[0].reason}")
    return rows


def sparse_layers(model: nn.Module, rows: Sequence[Layer]) -> dict[str, tuple[nn.Parameter, Pattern]]:
    """What a method attaches to: the parameters of the sparse rows, with their patterns."""
    return {row.name: (model.get_parameter(row.name), row.pattern) for row in rows if row.pattern}


def demand_sparse(rows: Sequence[Layer]) -> None:
    """Raise ConfigError when no weight at all can be sparse: such a run would be dense under a sparse name."""
    if not any(row.pattern for row in rows):
        reasons = "; ".join(dict.fromkeys(row.reason for row in rows)) or "it has no Linear or Conv2d layer"
        raise ConfigError(f"nothing in this model can be sparse: {reasons}")


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every module that owns a weight of two or more dimensions, shared modules once."""
    for name, module in model.named_modules():
        weight = getattr(module, _attribute(module), None)
        if isinstance(weight, Tensor) and weight.dim() >= 2:
            yield name, module, weight


def _attribute(module: nn.Module) -> str:
    return "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"


def _matches(text: str, name: str) -> bool:
    return any(fnmatchcase(full, text) for full in (name, f"{name}.weight", f"{name}.in_proj_weight"))


def _demand_match(text: str, names: list[str]) -> None:
    if not any(_matches(text, name) for name in names):
        raise ConfigError(f"no layer is named {text!r}{near_misses(text, names)} (`bame layers` lists them all)")


def _choose(
    name: str,
    pattern: Pattern,
    keep_dense: Mapping[str, str],
    include: Sequence[str],
    exclude: Sequence[str],
    overrides: Mapping[str, str],
) -> tuple[Pattern, str]:
    """The pattern a layer would get, and why it is nevertheless left dense ('' = it is not)."""
    special = [text for text in overrides if _matches(text, name)]
    if special:
        asked = overrides[special[-1]]
        return (pattern, f"overrides: {special[-1]}") if asked == DENSE else (Pattern.parse(asked), "")
    if any(_matches(text, name) for text in include):
        return pattern, ""
    if any(_matches(text, name) for text in exclude):
        return pattern, "excluded"
    return pattern, next((why for key, why in keep_dense.items() if name == key or name.startswith(f"{key}.")), "")


def _impossible(module: nn.Module, weight: Tensor, pattern: Pattern, owners: Mapping[int, str]) -> str:
    """Why this weight cannot be N:M sparse whatever the user asks; '' when it can."""
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"{type(module).__name__} is not a Linear or Conv2d layer"
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if id(weight) in owners:
        return f"shares its weight with {owners[id(weight)]}"
    if not weight.requires_grad:
        return "frozen"
    if isinstance(module, nn.Conv2d) and weight.shape[1] == 1 and module.groups > 1:
        return "depthwise"
    if not pattern.fits(weight.shape):
        return f"{weight.shape[1]} inputs per output are not a multiple of {pattern.m}"
    return _misuse(module)


def _misuse(layer: nn.Linear | nn.Conv2d) -> str:
    """Why zeros in the weight would not be zeros in the layer's product; '' when they are.

    Plain layers use their weight as it is. A subclass with a forward of its own (weight standardization, padding
    'same', ...) is tried on random numbers: its output must be linear in the weight, and blind to an input whose
    weights are 0.
    """
    own = (type(layer).forward, getattr(type(layer), "_conv_forward", None))
    if own in ((nn.Linear.forward, None), (nn.Conv2d.forward, nn.Conv2d._conv_forward)):
        return ""
    try:
        obeys = _uses_weight_as_is(layer)
    except Exception:  # whatever a forward raises that wants more than one tensor of the usual shape
        return "its layer has a forward of its own that cannot be tried"
    return "" if obeys else "its layer transforms the weight before using it"


@torch.no_grad()
def _uses_weight_as_is(layer: nn.Linear | nn.Conv2d) -> bool:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.ones(t.shape) for name, t in (*layer.named_parameters(), *layer.named_buffers())}
    v, w = (torch.randn(layer.weight.shape, generator=generator) for _ in range(2))
    x = torch.randn(_probe_shape(layer), generator=generator)

    def f(weight: Tensor, image: Tensor) -> Tensor:
        return functional_call(layer, {**state, "weight": weight}, (image,))

    def same(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))

    linear = same(f(v, x) + f(w, x), f(v + w, x) + f(0 * v, x))
    v[:, 0] = 0
    other = x.clone()
    other[:, :: layer.weight.shape[1]] += 1  # the first input of every group, which v ignores
    blind = same(f(v, x) - f(0 * v, x), f(v, other) - f(0 * v, other))
    return linear and blind


def _probe_shape(layer: nn.Linear | nn.Conv2d) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return (2, layer.in_features)
    return (1, layer.in_channels, *(2 * d * k for d, k in zip(layer.dilation, layer.kernel_size, strict=True)))
