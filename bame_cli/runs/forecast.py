"""`bame flops`: what methods would cost, from shapes and schedules alone, and finished runs charged another way."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.methods import name_of
from bame_cli.methods.srste import SRSTE
from bame_cli.options.schema import Config
from bame_cli.plots.columns import aligned
from bame_cli.runs import folder as folders
from bame_cli.runs.plan import RunPlan, known_facts, run_plan
from bame_cli.sparsity.flops import Bill, ForwardCost, spans

Row = dict[str, Any]


def compare(configs: Sequence[Config], said: Sequence[str]) -> list[Row]:
    """A row per configuration; ratios to SR-STE refer to the same options with that method.

    said: what sets each configuration apart from the others, besides its method and its pattern.
    """
    plans = list[RunPlan]()
    for config in configs:
        plans.append(run_plan(config, known_facts(config), like=plans[-1] if plans else None))
    rows, made = list[Row](), list(plans)
    for plan, words in zip(plans, said, strict=True):
        srste = _as_srste(plan.config)
        yardstick = next((other for other in made if other.config == srste), None)
        if yardstick is None:
            made.append(yardstick := run_plan(srste, plan.facts, like=plan))
        rows.append(_row(plan, yardstick, words))
    return rows


def _as_srste(config: Config) -> Config:
    return replace(config, method=SRSTE(ramp=config.sparsity.ramp))


def _row(plan: RunPlan, yardstick: RunPlan, options: str) -> Row:
    config, bill = plan.config, plan.expected
    sparse = plan.cost.at(plan.density)
    return {
        "method": name_of(config.method),
        "options": options,
        "pattern": str(config.target) if config.target else None,
        "forward_dense": plan.cost.total,
        "forward_dense_macs": plan.cost.total // 2,
        "forward_sparse": sparse,
        "inference_ratio": sparse / plan.cost.total,
        "epochs": config.recipe.epochs,
        "images": bill.images,
        "train_dense": bill.dense().total,
        **_products(bill),
        "train": bill.total,
        "train_ratio": bill.ratio(),
        "train_ratio_dense_grad_input": bill.ratio_dense_grad_input(),
        "times_cheaper_than_srste": yardstick.expected.total / bill.total,
        "not_counted": sorted(plan.cost.not_counted),
    }


def _products(bill: Bill) -> dict[str, int]:
    return {"forward": bill.forward, "grad_input": bill.grad_input, "grad_weight": bill.grad_weight}


def per_layer(config: Config) -> list[Row]:
    """Where a configuration's training FLOPs go: a row per weight, one for attention; they add up to the bill."""
    plan = run_plan(config, known_facts(config))
    parts = {name: ForwardCost({name: flops}, first=plan.cost.first) for name, flops in plan.cost.layers.items()}
    if plan.cost.products:
        parts["(products of activations)"] = ForwardCost({}, plan.cost.products)
    equal = list(spans(config.method))
    rows = []
    for name, cost in parts.items():
        bill, pattern = Bill(cost, config.flops.skip_first), plan.patterns.get(name)
        for densities, steps in equal:
            bill.charge(densities, steps * config.recipe.batch_size)
        row = {"layer": name, "pattern": str(pattern) if pattern else None, "forward_one_image": cost.total}
        rows.append(row | _products(bill) | {"train": bill.total, "train_ratio": bill.ratio()})
    return rows


def recharge(path: Path) -> list[Row]:
    """A run's bill under each convention for grad_input, from the products its result holds apart."""
    result = folders.result_of(path)
    if result is None or "flops" not in result:
        raise ConfigError(f"run={path}: no result.json with a bill in it")
    flops = result["flops"]
    dense_forward = flops["images"] * flops["forward_dense"]
    conventions = {
        "as billed": flops["grad_input"],
        "grad_input dense": flops["dense_grad_input"],
        # Attention's two backward products are all of what a dense grad_input has beyond a dense forward.
        "grad_input at forward's density": flops["forward"] + flops["dense_grad_input"] - dense_forward,
    }
    if folders.options_of(path)["flops"]["skip_first"]:
        del conventions["grad_input at forward's density"]  # what the first layer would have cost is not in the sums
    rows = []
    for convention, grad_input in conventions.items():
        train = flops["forward"] + grad_input + flops["grad_weight"]
        row = {"convention": convention, "forward": flops["forward"], "grad_input": grad_input}
        row |= {"grad_weight": flops["grad_weight"], "train": train, "train_ratio": train / flops["train_dense"]}
        rows.append(row | {"inherited": flops["inherited"]})
    return rows


def cumulative(config: Config) -> tuple[list[float], list[float]]:
    """Steps made (share of training) and FLOPs so far (share of the dense bill), where the cost of a step changes."""
    plan = run_plan(config, known_facts(config))
    bill, done, whole = Bill(plan.cost, config.flops.skip_first), 0, plan.expected.dense().total
    shares, totals = [0.0], [0.0]
    for densities, steps in spans(config.method):
        bill.charge(densities, steps * config.recipe.batch_size)
        done += steps
        shares.append(done / plan.total_steps)
        totals.append(bill.total / whole)
    return shares, totals


# --- rows as text ---

_COLUMNS = {
    "method": "method",
    "options": "options",
    "pattern": "pattern",
    "forward_dense": "forward dense",
    "forward_sparse": "forward sparse",
    "train": "training",
    "train_ratio": "÷ dense",
    "train_ratio_dense_grad_input": "÷ dense, grad_input dense",
    "times_cheaper_than_srste": "SR-STE ÷ this",
    "forward": "forward",
    "grad_input": "grad_input",
    "grad_weight": "grad_weight",
}


def show(rows: list[Row], how: str) -> str:
    """Rows as text, md, csv or json. Text and Markdown round; CSV and JSON give exact integers."""
    if how == "json":
        return json.dumps(rows, indent=1)
    if how == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().rstrip()
    keys = [key for key in _COLUMNS if rows[0].get(key, "") != ""] if "method" in rows[0] else list(rows[0])
    table = [tuple(_COLUMNS.get(key, key) for key in keys), *(tuple(_cell(row[key]) for key in keys) for row in rows)]
    if how == "md":
        lines = [f"| {' | '.join(cells)} |" for cells in table]
        return "\n".join([lines[0], "|" + "---|" * len(keys), *lines[1:]])
    return aligned(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and value >= 10**6:
        return f"{value:.4g}"
    return str(value)
