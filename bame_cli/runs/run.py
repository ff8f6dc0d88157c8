"""Assembly: options -> model, data, method, optimizer, log -> train(), and the record of how it ended."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bame_cli import __version__
from bame_cli.errors import ConfigError
from bame_cli.formats.plain import patterns_in, read_weights, write_weights
from bame_cli.formats.verify import verify_weights
from bame_cli.methods import name_of
from bame_cli.options.schema import Config
from bame_cli.plots.run import curves
from bame_cli.runs import folder as folders
from bame_cli.runs.assembly import build
from bame_cli.runs.attempt import Attempt, caught
from bame_cli.runs.path import digest, parent, run_path, source
from bame_cli.runs.plan import RunPlan, demand_parts, load_data, run_plan
from bame_cli.runs.summary import closing, identity, inherited_bill, layer_table, preface
from bame_cli.tasks.images import models
from bame_cli.training import log as logs
from bame_cli.training.distributed import Ranks, join
from bame_cli.training.loop import Run, restore, train
from bame_cli.training.precision import set_determinism
from bame_cli.training.signals import Stopped, stop_signals

logger = logs.logger
Place = tuple[Ranks, torch.device]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the exit code it asks for, its folder, its result."""

    code: int
    folder: Path
    result: dict[str, Any]


def run(config: Config, config_text: str) -> Outcome:
    """Train what the options describe, or say that it is finished, or go on with it.

    Raises ConfigError, with nothing written or removed, when the options cannot be served.
    """
    ranks, device = join(config.device)
    set_determinism(config.deterministic)
    where, mark = run_path(config), digest(config)
    if result := ranks.lead(lambda: _finished(config, where, mark)):
        return _already(result, where)
    _demand_parent(config)
    data = ranks.first(lambda: load_data(config, device))
    plan = run_plan(config, data.facts)
    demand_parts(config, ranks.world)
    if config.sync_batchnorm and device.type != "cuda":
        raise ConfigError("sync_batchnorm=true: torch synchronizes batch statistics on GPUs only")
    attempt = Attempt(plan, (ranks, device), identity(plan, (ranks, device)), inherited_bill(config))
    with caught(attempt, where):
        attempt.run = build(plan, data, where, attempt.place)
    with ExitStack() as held:
        ranks.lead(lambda: held.enter_context(folders.claimed(where)))
        if result := ranks.lead(lambda: _finished(config, where, mark)):  # by another process, since we looked
            return _already(result, where)
        ranks.lead(lambda: _open(plan, where, mark, config_text))
        log = logs.RunLog(where, tracker=lambda: _tracker(config, where)) if ranks.leads else logs.NoLog()
        held.enter_context(log)
        return _guarded(attempt, where, log, held.enter_context(stop_signals()))


def _already(result: dict[str, Any], where: Path) -> Outcome:
    print(f"finished already: top-1 {result['top1']:.2f} %, {where} (run.overwrite=true trains it again)")
    return Outcome(0, where, result)


def _finished(config: Config, where: Path, mark: str) -> dict[str, Any] | None:
    """The result of this run when it is finished. Raises ConfigError when the folder cannot be this run's."""
    if not folders.demand_ours(where, mark, replace=config.run.overwrite) or config.run.overwrite:
        return None
    result = folders.result_of(where)
    if result and result["status"] == "finished":
        return result
    if config.run.resume == "never":
        raise ConfigError(f"{where} holds an unfinished run: run.resume=auto goes on, run.overwrite=true starts again")
    return None


def _demand_parent(config: Config) -> None:
    """Raise ConfigError when the run that this one starts from is not finished."""
    if before := parent(config):
        where = run_path(before)
        result = folders.result_of(where)
        if result is None or result["status"] != "finished":
            raise ConfigError(
                f"model.parent={config.model.parent}: {where} holds no finished run; it is made by this command with "
                f"method={config.model.parent} and without model.parent"
            )


def _open(plan: RunPlan, where: Path, mark: str, config_text: str) -> None:
    """Write what a run's folder holds before the first step."""
    if plan.config.run.overwrite:
        folders.clear(where)
    folders.write(where / "digest", mark + "\n")  # first: with it the folder is known to be this run's
    folders.reserve(where)
    folders.write(where / "config.yaml", config_text)
    folders.write(where / "layers.json", json.dumps(layer_table(plan), indent=1) + "\n")


# --- the run ---


def _guarded(attempt: Attempt, where: Path, log: logs.RunLog, stopped: Stopped) -> Outcome:
    """Train and write the result; whatever ends the run early is said in one line and in the result."""
    ranks = attempt.place[0]
    if run := attempt.run:
        run.log = log
        with caught(attempt, where):
            _train(attempt, run, where, stopped)
    if attempt.trace:
        _keep_traceback(attempt.trace, where, ranks)
    result = attempt.result()
    if ranks.leads:
        _conclude(result, where, log)
    if attempt.status != "failed":  # which the ranks know of one after the other
        ranks.meet()  # the first to leave with an error code would have torchrun end the others
    return Outcome(attempt.code, where, result)


def _train(attempt: Attempt, run: Run, where: Path, stopped: Stopped) -> None:
    """From what the run has to say to the proof of its final network."""
    plan = attempt.plan
    for line in [*preface(plan, run.data.about, where, attempt.place), *run.notes]:
        logger.info(line)
    resume(plan, run)
    attempt.begun = True
    train(run, stopped)
    attempt.proof = run.ranks.lead(lambda: _save_final(plan, run, where))
    if not attempt.proof["sparsity"]["verified"]:
        attempt.ends("failed", 1, "the final network breaks its pattern: `bame verify` names the blocks")


def _conclude(result: dict[str, Any], where: Path, log: logs.RunLog) -> None:
    """Write the result, draw the curves, say how it ended."""
    folders.release(where)
    folders.write(where / "result.json", json.dumps(result, indent=1) + "\n")
    _draw(where)
    log.finish(result["status"])
    for line in closing(result, where):
        logger.info(line)


def _keep_traceback(text: str, where: Path, ranks: Ranks) -> None:
    """In `train.log`, also from a rank that does not lead."""
    folders.release(where)
    if ranks.leads:
        logger.error(text, extra={"file_only": True})
        return
    with (where / "train.log").open("a") as file:
        file.write(f"rank {ranks.rank}: {text}")


def _draw(where: Path) -> None:
    """The run's curves. A picture that cannot be drawn ends no run."""
    try:
        rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        (where / "plots").mkdir(exist_ok=True)
        curves(rows, where / "plots" / "curves.png")
    except Exception as error:
        logger.warning("plots/curves.png was not drawn: %s", error)


def resume(plan: RunPlan, run: Run) -> None:
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


def _notes(plan: RunPlan) -> list[str]:
    config = plan.config
    notes = models.warnings(config.model.name, plan.facts.image_shape[1]) + config.method.warnings()
    if config.method.wants_dense_weights and not (config.model.pretrained or source(config)):
        notes.append(
            f"{name_of(config.method)} prunes dense-trained weights, and these are random: "
            "set model.pretrained=true, model.checkpoint=<file or run folder>, or model.parent=dense"
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
    )


def _as_dict(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config), default=str)) | {"pattern": str(config.target or "")}


def _save_final(plan: RunPlan, run: Run, where: Path) -> dict[str, Any]:
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
        "ema": config.recipe.ema or 0,
        "bame_cli": __version__,
    }
    with config.method.hardened():  # off its pattern when the step that would have brought it there was skipped
        write_weights(path, run.network().state_dict(), patterns=plan.patterns, about=about)
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
