"""The registry: one line per method. Its dataclass is its option schema, `conf/method/<name>.yaml` its defaults."""

from __future__ import annotations

from bame_cli.methods.asp import ASP
from bame_cli.methods.bame import BAME
from bame_cli.methods.bame_swap import BAMESwap
from bame_cli.methods.base import Method
from bame_cli.methods.decay_mask import DecayMask
from bame_cli.methods.dense import Dense
from bame_cli.methods.srste import SRSTE, STE
from bame_cli.methods.static import Static

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "static": Static,
    "asp": ASP,
    "ste": STE,
    "srste": SRSTE,
    "decay_mask": DecayMask,
    "bame": BAME,
    "bame_swap": BAMESwap,
}

__all__ = ["METHODS", "Method"]


def name_of(method: Method) -> str:
    """The registry name of a method."""
    return next(name for name, kind in METHODS.items() if kind is type(method))
