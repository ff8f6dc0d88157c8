"""What a training method is: three moments per step, and the invariant that makes them enough.

Between steps the model *is* the network being trained, zeros included: its parameters hold the effective weights.
`Method` does nothing at any moment, which is dense training. `SparseMethod` adds masks, `MasterMethod` adds dense
master weights W behind the effective ones: the Parameter object never changes, `after_backward` points its data at
W so that the optimizer steps W, and `after_update` writes mask * W into a fixed buffer and points back at it. The
gradient taken at the effective weights is then the gradient that W gets: straight-through by construction.

    method.attach(layers, optimizer, total_steps)          # layers: name -> (Parameter, Pattern)
    for step in range(total_steps):
        loss.backward()
        method.after_backward(step)
        optimizer.step()
        method.after_update(step)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError
from bame_cli.methods.optimizers import clear_state, group_index, keeps_zeros
from bame_cli.sparsity.flops import ALL_DENSE, Densities, Density
from bame_cli.sparsity.layers import Layer
from bame_cli.sparsity.pattern import Pattern, pack, unpack, zero_where_

Layers = Mapping[str, tuple[nn.Parameter, Pattern]]
Shapes = Mapping[str, tuple[torch.Size, Pattern]]


@dataclass(kw_only=True)
class Method:
    """Dense training, and the interface of every other method. Fields are hyperparameters, so they are the schema."""

    sparse: ClassVar[bool] = False
    """Whether the method needs a pattern."""
    wants_dense_weights: ClassVar[bool] = False
    """Whether training from a random initialization defeats the method's purpose."""
    sparse_gradients: ClassVar[bool] = False
    """Whether there are steps at which it can do without part of a gradient: whether `support` ever says so."""

    def validate(self) -> None:
        """Raise ConfigError when a hyperparameter has no meaning; called before anything is built."""

    def review(self, row: Layer) -> Layer:
        """The layer report as this method would have it: it may leave a layer dense, or add a note to its row."""
        return row

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        """Fix the schedule from shapes alone, no weights: enough for `densities` and `pattern_at`."""
        self.validate()
        self.patterns = {name: pattern for name, (_, pattern) in shapes.items()}
        self.shapes = {name: shape for name, (shape, _) in shapes.items()}
        self.total_steps = total_steps

    def admit(self, optimizer: Optimizer) -> None:
        """Raise ConfigError for an optimizer under which the method would not be what it says."""

    def attach(self, layers: Layers, optimizer: Optimizer, total_steps: int) -> None:
        """Take over: once, after the optimizer is built, on fresh or pretrained weights."""
        self.admit(optimizer)
        self.plan({name: (p.shape, pattern) for name, (p, pattern) in layers.items()}, total_steps)

    def after_backward(self, step: int) -> None:
        """Turn the gradients into what the optimizer shall see; averaged and unscaled, not yet clipped."""

    def after_update(self, step: int) -> None:
        """Make masks and weights fit again after the optimizer moved the weights."""

    def densities(self, step: int) -> Densities:
        """What step `step` computes of each sparse layer's three products. The same object while nothing changes."""
        return ALL_DENSE

    def turns(self) -> Iterable[int]:
        """The steps at which `densities`, as planned, may change, in any order: in between it does not."""
        return ()

    def pattern_at(self, step: int) -> Mapping[str, Pattern] | None:
        """The patterns of the network that step `step` sees, by layer; None while a mask is soft."""
        return {}

    @contextmanager
    def hardened(self) -> Iterator[None]:
        """Within it the model is at its target pattern; it differs from the model trained only while a mask is soft."""
        yield

    def current_masks(self) -> dict[str, Tensor]:
        """The mask of each layer's network as it is between steps; none for dense training."""
        return {}

    def mask_hash(self) -> str:
        """Sixteen hexadecimal digits over all masks as they are between steps; empty for dense training."""
        masks = sorted(self.current_masks().items())
        bits = hashlib.sha256(b"".join(pack(mask).cpu().numpy().tobytes() for _, mask in masks))
        return bits.hexdigest()[:16] if masks else ""

    def warnings(self) -> list[str]:
        """What the user should know about this plan before it runs."""
        return []

    def support(self, name: str) -> Tensor | None:
        """The mask outside which a layer's weight is 0 and the next gradient is not wanted; None: wanted everywhere."""
        return None

    def metrics(self, *, per_layer: bool = False) -> dict[str, Any]:
        """The method's own figures since the last call, for one row of the log; `layers` holds them by layer."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Whatever must outlive a restart; schedules are functions of the step and need no place here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state saved by the same method, after `attach`."""


@dataclass(kw_only=True)
class SparseMethod(Method):
    """A method with one hard mask per layer; as it stands, masks never change and dropped weights are 0."""

    sparse: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True
    moves: ClassVar[bool] = False
    """Whether masks change after the first."""

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        self.cost = {name: Density(p.density, p.density, p.density) for name, p in self.patterns.items()}

    def densities(self, step: int) -> Densities:
        return self.cost

    def pattern_at(self, step: int) -> Mapping[str, Pattern] | None:
        return self.patterns

    def attach(self, layers: Layers, optimizer: Optimizer, total_steps: int) -> None:
        if not layers:
            raise ConfigError("nothing to make sparse: no layer was given")
        super().attach(layers, optimizer, total_steps)
        self.optimizer = optimizer
        self.parameters = {name: p for name, (p, _) in layers.items()}
        self.group_of = {n: group_index(optimizer, p) for n, p in self.parameters.items()}
        self.masks = {name: self.first_mask(name, p) for name, p in self.parameters.items()}
        self.changes = {n: torch.zeros((), dtype=torch.int64, device=p.device) for n, p in self.parameters.items()}
        self.keeps_zeros = keeps_zeros(optimizer)
        self.take_over()
        self.reported = {name: pack(mask) for name, mask in self.current_masks().items() if self.moves}

    def first_mask(self, name: str, weight: nn.Parameter) -> Tensor:
        """The mask that training starts from: by magnitude of the weights as they are."""
        return self.patterns[name].project(weight)

    @torch.no_grad()
    def take_over(self) -> None:
        """Make the parameters the effective weights, with an optimizer state that knows nothing of dropped ones."""
        for name, p in self.parameters.items():
            zero_where_(p.data, self.masks[name])
            clear_state(self.optimizer, p)

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                zero_where_(p.grad, self.masks[name])

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if not self.keeps_zeros:
            for name, p in self.parameters.items():
                zero_where_(p.data, self.masks[name])

    def learning_rate(self, name: str) -> float:
        """The learning rate of a layer's parameter group now."""
        return float(self.optimizer.param_groups[self.group_of[name]]["lr"])

    def replace_mask(self, name: str, new: Tensor) -> Tensor:
        """Set a layer's mask, count what changed; returns the entries that changed, shaped like the weight."""
        changed = new ^ self.masks[name]
        self.changes[name] += changed.count_nonzero()
        self.masks[name] = new
        return changed

    def support(self, name: str) -> Tensor | None:
        return self.masks[name]

    def current_masks(self) -> dict[str, Tensor]:
        return dict(self.masks)

    def metrics(self, *, per_layer: bool = False) -> dict[str, Any]:
        """Mask entries that changed since the last call, and how often one came back to where it was.

        An entry that changed k times ends where it began when k is even, and came back k // 2 times.
        """
        layers = {}
        for name, mask in self.current_masks().items():
            changed = moved = int(self.changes[name])
            if changed:
                before, self.reported[name] = self.reported[name], pack(mask)
                moved = int(unpack(before ^ self.reported[name], mask.shape).count_nonzero())
            layers[name] = {"mask_changes": changed, "mask_flip_backs": (changed - moved) // 2}
            self.changes[name].zero_()
        sums = {key: sum(row[key] for row in layers.values()) for key in ("mask_changes", "mask_flip_backs")}
        entries = sum(mask.numel() for mask in self.masks.values())
        return sums | {"mask_flip_rate": sums["mask_changes"] / entries} | ({"layers": layers} if per_layer else {})

    def state_dict(self) -> dict[str, Any]:
        return {"masks": dict(self.masks), "changes": dict(self.changes), "reported": dict(self.reported)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for mine, saved in ((self.masks, "masks"), (self.changes, "changes"), (self.reported, "reported")):
            for name, value in mine.items():
                value.copy_(state[saved][name])
