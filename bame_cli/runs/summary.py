"""What a run says about itself: the lines before it, the lines after it, `layers.json` and `result.json`."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from bame_cli import __version__
from bame_cli.methods import name_of
from bame_cli.options.schema import Config
from bame_cli.plots.columns import aligned
from bame_cli.runs import folder as folders
from bame_cli.runs.path import content, digest, source
from bame_cli.runs.plan import RunPlan
from bame_cli.sparsity.flops import Bill
from bame_cli.tasks.images import models
from bame_cli.training.distributed import Ranks
from bame_cli.training.loop import Run


def preface(plan: RunPlan, about: str, where: Path, place: tuple[Ranks, torch.device]) -> list[str]:
    """What the run is about to do, in the lines that open its log."""
    config, expected, facts, (ranks, device) = plan.config, plan.expected, plan.facts, place
    recipe, target = config.recipe, config.target
    count, total = weight_counts(plan)
    sparsity = (
        f" at {target}: keep {target.n} of {target.m}, {100 * float(1 - target.density):.4g} % sparse" if target else ""
    )
    begins = source(config) or ("pretrained" if config.model.pretrained else "random weights")
    lines = {
        "model": f"{config.model.name}, {plan.parameters / 1e6:.2f} M parameters, {facts.classes} classes, "
        f"from {begins}",
        "data": f"{config.dataset.name}: {about}; {facts.train} training and {facts.val} validation "
        f"images of {'x'.join(map(str, facts.image_shape))}",
        "method": f"{name_of(config.method)}{sparsity}",
        "sparse": f"{len(plan.patterns)} of {len(plan.rows)} layers, {100 * count / total:.1f} % of their weights",
        "recipe": f"{recipe.name}: {recipe.epochs} epochs of {plan.steps_per_epoch} steps, batch {recipe.batch_size}, "
        f"{recipe.optimizer} at {recipe.lr:g}, seed {config.seed}",
        "bill": f"{expected.total:.3e} training FLOPs expected, {expected.ratio():.3f} of dense "
        f"({expected.ratio_dense_grad_input():.3f} with dense grad_input)",
        "device": f"{device}"
        + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else "")
        + (f", {ranks.world} ranks" if ranks.world > 1 else ""),
        "folder": str(where),
    }
    return [f"{key:<8}{value}" for key, value in lines.items()]


def weight_counts(plan: RunPlan) -> tuple[int, int]:
    """Weights in sparse layers, and in all layers of the report."""
    return sum(row.numel for row in plan.rows if row.pattern), sum(row.numel for row in plan.rows)


def layer_table(plan: RunPlan) -> list[dict[str, Any]]:
    """The layer report as `layers.json` holds it; flops are those of one image, forward, dense."""
    return [
        {
            "name": row.name,
            "shape": list(row.shape),
            "pattern": str(row.pattern) if row.pattern else None,
            "sparse": row.pattern is not None,
            "reason": row.reason,
            "flops": plan.cost.layers.get(row.name, 0),
        }
        for row in plan.rows
    ]


def layer_report(plan: RunPlan) -> dict[str, Any]:
    """`bame layers`, as JSON holds it: the table, and what it adds up to."""
    count, total = weight_counts(plan)
    return {
        "model": plan.config.model.name,
        "method": name_of(plan.config.method),
        "pattern": str(plan.config.target) if plan.config.target else None,
        "image_shape": list(plan.facts.image_shape),
        "layers": layer_table(plan),
        "layers_sparse": len(plan.patterns),
        "layers_total": len(plan.rows),
        "weights_sparse": count,
        "weights_total": total,
        "parameters": plan.parameters,
        "parameters_nonzero": plan.parameters - sum(r.numel - int(r.numel * d) for r, d in plan.sparse_rows()),
        "flops_dense": plan.cost.total,
        "flops_sparse": plan.cost.at(plan.density),
    }


def layer_text(report: dict[str, Any]) -> str:
    """The layer report for the eye."""
    rows = [
        (r["name"], "x".join(map(str, r["shape"])), r["pattern"] or "dense", f"{r['flops'] / 1e6:.2f}", r["reason"])
        for r in report["layers"]
    ]
    table = aligned([("layer", "shape", "pattern", "MFLOPs", "reason"), *rows])
    share = 100 * report["weights_sparse"] / max(1, report["weights_total"])
    ratio = report["flops_sparse"] / report["flops_dense"]
    return f"""{report["model"]} by {report["method"]}, images of {"x".join(map(str, report["image_shape"]))}

{table}

sparse: {report["layers_sparse"]} of {report["layers_total"]} layers, {share:.1f} % of their weights
parameters: {report["parameters"]:,}, of them non-zero {report["parameters_nonzero"]:,}
forward FLOPs of one image (2 x multiply-accumulates): {report["flops_dense"]:,} dense, \
{report["flops_sparse"]:,} sparse ({ratio:.4f})"""


def closing(result: dict[str, Any], where: Path) -> list[str]:
    """The lines that end a run: a table when it is finished, what happened and what to do when it is not."""
    if result["status"] != "finished":
        return [f"{result['status']}: {result['error']}", f"log: {where / 'train.log'}"]
    flops, sparsity = result["flops"], result["sparsity"]
    zeros = 100 * sparsity["weights_zero"] / sparsity["weights_total"]
    verdict = f"every block checked, {zeros:.1f} % zeros" if sparsity["verified"] else "VIOLATED, see bame verify"
    best = (
        f" (best {result['best_top1']:.2f} % in epoch {result['best_epoch'] + 1})"
        if result["best_epoch"] is not None
        else ""
    )
    lines = {
        "method": f"{' '.join(filter(None, (result['method'], result['pattern'])))} on {result['model']}, "
        f"{result['dataset']}",
        "top-1": f"{result['top1']:.2f} %{best}, top-5 {result['top5']:.2f} %",
        "training FLOPs": f"{flops['train']:.3e}, {flops['train_ratio']:.3f} of dense "
        f"({flops['train_ratio_dense_grad_input']:.3f} with dense grad_input)",
        "inference FLOPs": f"{flops['forward_sparse']:.3e}, {flops['inference_ratio']:.3f} of dense",
        "pattern": verdict if result["pattern"] else "none (dense)",
        "time": f"{result['seconds']:.0f} s, {result['images_per_second']:.0f} images/s",
        "network": str(where / "model.safetensors"),
    }
    if flops["inherited"]:
        lines["inherited FLOPs"] = f"{flops['inherited']:.3e} of the run it started from"
    rule = "-" * 72
    return [rule, *(f"{key:<17}{value}" for key, value in lines.items()), rule]


def _weights_source(config: Config) -> dict[str, str] | None:
    """Where the first weights came from, exactly enough to have them again."""
    if path := source(config):
        return {"file": str(path), "sha256": content(path)}
    if config.model.pretrained:
        return {"timm": models.weights_tag(config.model.name)}
    return None


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": models.TIMM_VERSION,
        "bame_cli": __version__,
    }


def _git() -> dict[str, Any]:
    """Commit and state of the source tree we run from; both None for an installed package."""
    here = Path(__file__).parent

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", Path(__file__).name)
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _compute(config: Config, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What a result is equal to the last bit only with: the kind of device, how many shared the work, how."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    how = {key: getattr(config, key) for key in ("amp", "channels_last", "compile", "execution", "deterministic")}
    return {"device": device.type, "name": name, "ranks": ranks.world, "threads": torch.get_num_threads()} | how


def identity(plan: RunPlan, place: tuple[Ranks, torch.device]) -> dict[str, Any]:
    """What `result.json` says of a run before its first step: what was asked for, of which weights, on what."""
    config, target = plan.config, plan.config.target
    return {
        "model": config.model.name,
        "dataset": config.dataset.name,
        "method": name_of(config.method),
        "pattern": str(target) if target else None,
        "seed": config.seed,
        "recipe": config.recipe.name,
        "digest": digest(config),
        "group": digest(config, seed=False),
        "epochs": config.recipe.epochs,
        "ema": config.recipe.ema,
        "weights": _weights_source(config),
        "compute": _compute(config, *place),
        "versions": _versions(),
        "git": _git(),
    }


def figures(plan: RunPlan, run: Run, inherited: int) -> dict[str, Any]:
    """What `result.json` says of a run as far as it got. inherited: the FLOPs of the run that it began from."""
    progress, last = run.progress, run.progress.last
    return {
        "steps": progress.step,
        "top1": last.get("top1"),
        "top5": last.get("top5"),
        "best_top1": progress.best_top1,
        "best_epoch": progress.best_epoch,
        "flops": _flops(plan, run.bill) | {"inherited": inherited},
        "seconds": round(progress.seconds, 3),
        "images_per_second": round(run.bill.images / progress.seconds, 1) if progress.seconds else None,
    }


def _flops(plan: RunPlan, bill: Bill) -> dict[str, Any]:
    sparse, dense = plan.cost.at(plan.density), bill.dense()
    return {
        "forward_dense": plan.cost.total,
        "forward_dense_macs": plan.cost.total // 2,
        "forward_sparse": sparse,
        "inference_ratio": sparse / plan.cost.total,
        "images": bill.images,
        "train_dense": dense.total,
        "dense_grad_input": dense.grad_input,
        "train": bill.total,
        "train_ratio": bill.ratio(),
        "forward": bill.forward,
        "grad_input": bill.grad_input,
        "grad_weight": bill.grad_weight,
        "train_ratio_dense_grad_input": bill.ratio_dense_grad_input(),
        "not_counted": sorted(plan.cost.not_counted),
    }


def inherited_bill(config: Config) -> int:
    """The bill of the run that these weights came from, with what that one inherited; 0 for other weights."""
    path = source(config)
    if path is None:
        return 0
    home = path if path.is_dir() else path.parent
    parent = folders.result_of(home.parent if home.name == "checkpoints" else home)
    return parent["flops"]["train"] + parent["flops"]["inherited"] if parent and "flops" in parent else 0
