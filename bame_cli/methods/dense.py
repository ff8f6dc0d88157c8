"""Dense training, the yardstick.

Forward   W
Gradient  g
Dropped   there are none
Cost      forward 1, grad_input 1, grad_weight 1
"""

from __future__ import annotations

from dataclasses import dataclass

from bame_cli.methods.base import Method


@dataclass(kw_only=True)
class Dense(Method):
    """No mask, no pattern: the base class does exactly this."""
