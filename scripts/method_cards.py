"""Write docs/methods.md from the docstrings of bame_cli/methods: the card is the code's own first words."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from types import ModuleType

from bame_cli.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
HEAD = """# The methods

One card per method, as its module opens; `make cards` writes this page. w is an effective weight, W a master weight
behind it, m the mask, g the gradient at the effective weights, d = N/M the density. *Cost* is the share of a sparse
layer's three products that a training step computes. *Departs* says what differs from the paper or its public code.
"""


def page() -> str:
    """The whole page: each module once, with the options of its methods."""
    modules = dict.fromkeys(sys.modules[kind.__module__] for kind in METHODS.values())
    return HEAD + "".join(card(module) for module in modules)


def card(module: ModuleType) -> str:
    """One module's docstring, under the names it is chosen by."""
    names = [name for name, kind in METHODS.items() if kind.__module__ == module.__name__]
    title, _, body = (inspect.getdoc(module) or "").partition("\n")
    lines = [", ".join(f"`{f.name}={f.default}`" for f in dataclasses.fields(METHODS[n])) for n in names]
    options = "".join(f"- `{name}`: {line or 'no options'}\n" for name, line in zip(names, lines, strict=True))
    heading = ", ".join(f"`method={name}`" for name in names)
    return f"\n## {heading}\n\n{title}\n\n```text\n{body.strip()}\n```\n\nOptions and defaults:\n\n{options}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
