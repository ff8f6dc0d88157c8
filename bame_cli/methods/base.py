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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bame_cli.errors import ConfigError
from bame_cli.methods.optimizers import clear_state, group_index, keeps_zeros
from bame_cli.sparsity.flops import ALL_DENSE, ONE, Densities, Density
from bame_cli.sparsity.layers import Layer
from bame_cli.sparsity.pattern import Pattern, is_dense, keep_where, zero_where_

Layers = Mapping[str, tuple[nn.Parameter, Pattern]]
Shapes = Mapping[str, tuple[torch.Size, Pattern]]


@dataclass(kw_only=True)
class Method:
    """Dense training, and the interface of every other method. Fields are hyperparameters, so they are the schema."""

    sparse: ClassVar[bool] = False
    """Whether the method needs a pattern."""
    wants_dense_weights: ClassVar[bool] = False
    """Whether training from a random initialization defeats the method's purpose."""

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

    def pattern_at(self, step: int) -> Mapping[str, Pattern] | None:
        """The patterns of the network that step `step` sees, by layer; None while a mask is soft."""
        return {}

    @contextmanager
    def hardened(self) -> Iterator[None]:
        """Within it the model is at its target pattern; it differs from the model trained only while a mask is soft."""
        yield

    def warnings(self) -> list[str]:
        """What the user should know about this plan before it runs."""
        return []

    def metrics(self) -> dict[str, float]:
        """The method's own figures since the last call, for one row of the log."""
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
        self.changes = torch.zeros((), dtype=torch.int64, device=next(iter(self.parameters.values())).device)
        self.reported = 0
        self.keeps_zeros = keeps_zeros(optimizer)
        self.take_over()

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
        self.changes += changed.count_nonzero()
        self.masks[name] = new
        return changed

    def metrics(self) -> dict[str, float]:
        total = int(self.changes)
        new, self.reported = total - self.reported, total
        entries = sum(mask.numel() for mask in self.masks.values())
        return {"mask_changes": new, "mask_flip_rate": new / entries}

    def state_dict(self) -> dict[str, Any]:
        return {"masks": dict(self.masks), "changes": int(self.changes), "reported": self.reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mask in self.masks.items():
            mask.copy_(state["masks"][name])
        self.changes.fill_(state["changes"])
        self.reported = state["reported"]


@dataclass(kw_only=True)
class MasterMethod(SparseMethod):
    """A method that trains dropped weights too. As it stands: straight-through, a new mask after every update."""

    def plan(self, shapes: Shapes, total_steps: int) -> None:
        super().plan(shapes, total_steps)
        self.cost = {name: Density(pattern.density, ONE, ONE) for name, pattern in self.patterns.items()}

    @torch.no_grad()
    def take_over(self) -> None:
        # A weight that is a slice of something larger gets memory of its own, so that all buffers are laid out alike.
        self.master = {name: p.data if is_dense(p) else p.data.clone() for name, p in self.parameters.items()}
        self.effective = {name: torch.empty_like(w) for name, w in self.master.items()}
        for name in self.parameters:
            self.show(name)

    def show(self, name: str) -> None:
        """Point the parameter at the effective weights mask * W, freshly written."""
        keep_where(self.master[name], self.masks[name], out=self.effective[name])
        self.parameters[name].data = self.effective[name]

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        for name, p in self.parameters.items():
            p.data = self.master[name]

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        for name in self.parameters:
            self.replace_mask(name, self.patterns[name].project(self.master[name]))
            self.show(name)

    def add_decay(self, name: str, decay: float) -> None:
        """grad += decay * (1 - mask) * W: SR-STE's pull on dropped weights, while p.data is the effective weight.

        The effective buffer is free between backward and update, and serves as scratch.
        """
        grad, scratch = self.parameters[name].grad, self.effective[name]
        if decay and grad is not None:
            keep_where(self.master[name], ~self.masks[name], out=scratch)
            grad.add_(scratch, alpha=decay)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"master": dict(self.master)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, weight in self.master.items():
            weight.copy_(state["master"][name])
