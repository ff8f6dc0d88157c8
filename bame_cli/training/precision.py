"""How a step is computed: autocast, gradient scaling, clipping, and whether every sum must repeat to the last bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A loss scale below which no gradient of float16 is left: a run that gets there does not train any more.
_LEAST_SCALE = 2.0**-14


class Precision:
    """Autocast to `amp`, a gradient scaler for float16, and gradient clipping, in the order that keeps all exact:

    scale, backward, unscale, (the method), clip, step, update the scale.

    clip_mode is timm's: norm (of all gradients), value, agc (adaptive). Weights and evaluation stay float32.
    """

    def __init__(
        self, device: torch.device, *, amp: str = "none", clip_grad: float | None = None, clip_mode: str = "norm"
    ) -> None:
        self.device, self.dtype = device, DTYPES[amp]
        self.scaler = GradScaler(device.type, enabled=self.dtype is torch.float16)
        self.clip_grad, self.clip_mode = clip_grad, clip_mode

    @property
    def scales(self) -> bool:
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscaled(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Unscale the gradients; whether they are all numbers, so that the step can be made."""
        if not self.scales:
            return True
        self.scaler.unscale_(optimizer)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return bool(get_total_norm(grads, norm_type=float("inf")).isfinite())

    def update(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip, and move the weights."""
        if self.clip_grad is not None:
            dispatch_clip_grad(model.parameters(), self.clip_grad, mode=self.clip_mode)
        self.scaler.step(optimizer)

    def end_step(self) -> None:
        """Adapt the scale. Raises FloatingPointError when gradients overflow at any scale."""
        self.scaler.update()
        if self.scales and self.scaler.get_scale() < _LEAST_SCALE:
            raise FloatingPointError("gradients overflow float16 at every loss scale: amp=bfloat16 has the range")

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scales:
            self.scaler.load_state_dict(dict(state))


def set_determinism(deterministic: bool) -> None:
    """Whether only operations that repeat to the last bit may run; one that cannot raises RuntimeError and is named.

    Without it cuDNN picks its fastest kernels by trying them.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
