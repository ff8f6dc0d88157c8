"""Assembly: options -> model, data, method, optimizer, log -> train(), and the record of how it ended."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bame_cli import __version__
from bame_cli import folder as folders
from bame_cli.address import digest, folder
from bame_cli.blueprint import Blueprint, blueprint, load_data, model_options, optimization
from bame_cli.config import Config
from bame_cli.errors import ConfigError
from bame_cli.export import patterns_in, read_weights, verify_weights, write_weights
from bame_cli.methods import name_of
from bame_cli.report import closing, layer_table, preface, result_of_run
from bame_cli.sparsity.flops import Bill
from bame_cli.sparsity.layers import sparse_layers
from bame_cli.training import log as logs
from bame_cli.training import models
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.data import Data
from bame_cli.training.loop import Interrupted, Run, restore, train

logger = logs.logger


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code it asks for, its folder, its result."""

    code: int
    folder: Path
    result: dict[str, Any]


def run(config: Config, config_text: str) -> Outcome:
    """Train what the options describe, or say that it is finished, or go on with it.

    Raises ConfigError, with nothing written, when the options cannot be served.
    """
    where, mark = folder(config), digest(config)
    ours = folders.demand_ours(where, mark, replace=config.run.overwrite) and not config.run.overwrite
    result = folders.result_of(where) if ours else None
    if result and result["status"] == "finished":
        print(f"finished already: top-1 {result['top1']:.2f} %, {where} (run.overwrite=true trains it again)")
        return Outcome(0, where, result)
    if ours and config.run.resume == "never":
        raise ConfigError(f"{where} holds an unfinished run: run.resume=auto goes on, run.overwrite=true starts again")
    device = device_of(config.device)
    data = load_data(config, device)
    plan = blueprint(config, data.facts)
    with folders.claimed(where):
        if config.run.overwrite:
            folders.clear(where)
        folders.write(where / "digest", mark + "\n")
        folders.write(where / "config.yaml", config_text)
        folders.write(where / "layers.json", json.dumps(layer_table(plan), indent=1) + "\n")
        with logs.RunLog(where, tracker=lambda: _tracker(config, where)) as log:
            try:
                return _guarded(plan, data, where, device, log)
            except ConfigError:  # refused after all: leave no trace of a run that never was
                if not ours:
                    folders.discard(where)
                raise


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name}: not on this machine ({str(error).splitlines()[0]})") from error
    return device


# --- the run ---


def _guarded(plan: Blueprint, data: Data, where: Path, device: torch.device, log: logs.RunLog) -> Outcome:
    """Train and write the result; whatever ends the run early is said in one line and in the result."""
    run: Run | None = None
    status, code, error = "finished", 0, ""
    try:
        run = build(plan, data, where, device, log)
        for line in preface(plan, data.about, where, device):
            logger.info(line)
        resume(plan, run)
        train(run)
    except ConfigError:
        raise
    except Interrupted as stop:
        status, code, error = "interrupted", stop.exit_code, f"{stop}; the same command goes on"
    except FloatingPointError as diverged:
        status, code, error = "diverged", 1, str(diverged)
    except Exception as failure:
        status, code = "failed", 1
        error = f"{type(failure).__name__}: {(str(failure) or 'no message').splitlines()[0]}"
        logger.error(traceback.format_exc(), extra={"file_only": True})
    result = result_of_run(plan, run, status, error)
    if run and status == "finished":
        result |= _save_final(plan, run, where)
        if not result["sparsity"]["verified"]:
            code, result["status"] = 1, "failed"
            result["error"] = "the final network breaks its pattern: `bame verify` names the blocks"
    folders.write(where / "result.json", json.dumps(result, indent=1) + "\n")
    log.finish(result["status"])
    for line in closing(result, where):
        logger.info(line)
    return Outcome(code, where, result)


def build(plan: Blueprint, data: Data, where: Path, device: torch.device, log: logs.RunLog) -> Run:
    """Everything a run is made of, at its first step."""
    config, recipe = plan.config, plan.config.recipe
    torch.manual_seed(config.seed)
    model = models.create(
        image_shape=data.image_shape,
        pretrained=config.model.pretrained,
        **model_options(config, plan.facts.classes),
    )
    _load_weights(config, model)
    model.to(device)
    optimizer, schedule = optimization(config, model, plan.steps_per_epoch)
    layers = sparse_layers(model, plan.rows)
    config.method.attach(layers, optimizer, plan.total_steps)
    return Run(
        model,
        config.method,
        optimizer,
        schedule,
        data,
        Bill(plan.cost, config.flops.skip_first),
        log,
        Checkpoints(where / "checkpoints"),
        plan.patterns,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        seed=config.seed,
        label_smoothing=recipe.label_smoothing,
        eval_batch_size=recipe.eval_batch_size,
        log_every=config.log.every,
        per_layer=config.log.per_layer,
        masks_every=config.log.masks_every,
        save_every_epochs=config.checkpoint.every_epochs,
    )


def resume(plan: Blueprint, run: Run) -> None:
    """Say what the user should know before time is spent, and go on from a checkpoint where there is one."""
    for note in _notes(plan):
        logger.warning(note)
    run.checkpoints.folder.mkdir(exist_ok=True)
    state, note = run.checkpoints.load()
    if note:
        logger.warning(note)
    if state is None:
        run.log.rewind(0)  # rows of a run that was cut before its first checkpoint
    else:
        restore(run, state)


def _load_weights(config: Config, model: nn.Module) -> None:
    if not config.model.checkpoint:
        return
    path = Path(config.model.checkpoint)
    for note in models.load_weights(model, path / "model.safetensors" if path.is_dir() else path):
        logger.info(note)


def _notes(plan: Blueprint) -> list[str]:
    config = plan.config
    notes = models.warnings(config.model.name, plan.facts.image_shape[1]) + config.method.warnings()
    if config.method.wants_dense_weights and not (config.model.pretrained or config.model.checkpoint):
        notes.append(
            f"{name_of(config.method)} prunes dense-trained weights, and these are random: "
            "set model.pretrained=true or model.checkpoint=<file or run folder>"
        )
    if plan.cost.not_counted:
        notes.append(f"not counted in the bill: {', '.join(plan.cost.not_counted)}")
    return notes


def _tracker(config: Config, where: Path) -> logs.Tracker | None:
    if config.logger.name == "tensorboard":
        return logs.TensorBoardTracker(where)
    if config.logger.name == "none":
        return None
    group = "-".join(where.parts[-5:-1])
    return logs.WandbTracker(
        project=config.logger.project,
        name=f"{name_of(config.method)} {config.target or 'dense'} seed {config.seed}",
        group=group[:120],
        mode=config.logger.mode,
        folder=where,
        config=_as_dict(config),
        run_id=digest(config),
    )


def _as_dict(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config), default=str)) | {"pattern": str(config.target or "")}


def _save_final(plan: Blueprint, run: Run, where: Path) -> dict[str, Any]:
    """Write the final weights, read them back, and check every block of every sparse layer."""
    config, path = plan.config, where / "model.safetensors"
    about = {
        "model": config.model.name,
        "model_args": dict(config.model.args) | ({"width": config.model.width} if config.model.width else {}),
        "dataset": config.dataset.name,
        "classes": list(run.data.classes),
        "image_shape": list(plan.facts.image_shape),
        "method": name_of(config.method),
        "pattern": str(config.target or ""),
        "bame_cli": __version__,
    }
    write_weights(path, run.model.state_dict(), patterns=plan.patterns, about=about)
    weights, metadata = read_weights(path)
    verdicts = verify_weights(weights, patterns_in(metadata))
    named = [weights[row.name] for row in plan.rows]
    return {
        "sparsity": {
            "layers_sparse": len(plan.patterns),
            "layers_total": len(plan.rows),
            "weights_zero": sum(w.numel() - int(w.count_nonzero()) for w in named),
            "weights_total": sum(w.numel() for w in named),
            "verified": all(verdict.violation is None for verdict in verdicts),
        }
    }
