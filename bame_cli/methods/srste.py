"""SR-STE: sparse forward, straight-through gradient to dense weights, a pull on dropped ones (Zhou et al. 2021).

Forward   m * W, the mask by magnitude of W after every update
Gradient  g + decay * (1 - m) * W, g taken at the effective weights (their equation 9)
Dropped   keep training
Cost      forward d, grad_input 1, grad_weight 1. The masked weight would allow grad_input at d; the group's code
          charges it densely, so do we, and the bill keeps the products apart for whoever wants to re-charge
Departs   The public code adds the decay term in every process before gradients are summed, so its effective
          decay grows with the number of GPUs: `public_code_gpus` reproduces that, off at 1. It also makes the stem
          sparse and lets blocks cross kernel positions there; here the layer report decides. Under AdamW the term
          is coupled (part of the gradient) unless `decoupled`, which shrinks dropped weights by lr * decay instead.

`STE` is the same with decay 0: the plain straight-through estimator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bame_cli.methods.master import RampMethod
from bame_cli.methods.options import demand_at_least, demand_share


@dataclass(kw_only=True)
class STE(RampMethod):
    """Straight-through estimator: dense weights get the gradient taken at the masked ones, and nothing else."""

    def validate(self) -> None:
        demand_share(ramp=self.ramp)


@dataclass(kw_only=True)
class SRSTE(STE):
    """`decay` (lambda, 2e-4 in the paper), once per optimizer step whatever the ranks and micro-batches."""

    decay: float = 2e-4
    decoupled: bool = False
    public_code_gpus: int = 1

    def validate(self) -> None:
        super().validate()
        demand_at_least(0, decay=self.decay)
        demand_at_least(1, public_code_gpus=self.public_code_gpus)

    @torch.no_grad()
    def after_backward(self, step: int) -> None:
        decay = self.decay * self.public_code_gpus
        for name in self.parameters:
            if self.decoupled:
                self.shrink_dropped(name, self.learning_rate(name) * decay)
            else:
                self.add_decay(name, decay)
        super().after_backward(step)

    def shrink_dropped(self, name: str, share: float) -> None:
        """W -= share * (1 - mask) * W: weight decay of dropped weights alone, as AdamW decays, before the step."""
        torch.mul(self.master[name], 1 - share, out=self.effective[name])
        torch.where(self.masks[name], self.master[name], self.effective[name], out=self.master[name])
