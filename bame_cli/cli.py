"""The front door. Every verb takes key=value words; heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bame_cli import __version__
from bame_cli.errors import ConfigError, near_misses

HELP = f"""bame {__version__}: train N:M structured-sparse networks, with an honest bill of FLOPs

usage: bame <verb> [key=value ...]

  train    train a network: bame train model=resnet50 sparsity=1:16
  layers   which layers would be sparse, and why the others not: bame layers model=resnet50 sparsity=1:16
  verify   check every block of a saved network: bame verify <run folder or file.safetensors>
  bench    measure methods against dense training: bame bench model=resnet50 sparsity=1:16

  bame <verb> --help says what a verb takes.

N:M keeps N of every M consecutive inputs: 1:16 keeps 1 of 16 and is 93.75 % sparse.
Exit codes: 0 done, 1 a run failed or a check did not hold, 2 the command is wrong, 130/143 interrupted (resumable).
"""

LAYERS_HELP = """bame layers [key=value ...] [format=text|json]

Prints which weights would be N:M sparse, and why the others stay dense. Trains nothing, needs no data.

  bame layers model=resnet50 dataset=imagenet sparsity=1:16
  bame layers model=vit_small_patch16_224 dataset=imagenet sparsity=2:4 'sparsity.exclude=["*.attn.*"]'
  bame layers sparsity=2:4,1:16 format=json

Takes every option of `bame train`; lists of patterns, models and methods need no -m.
"""

VERIFY_HELP = """bame verify <run folder or file.safetensors> [pattern=N:M] [format=text|json]

Checks every block of every sparse weight. Exit code 1 when one has more than N non-zeros, and says which.
A file of ours says itself which weights are sparse; `pattern` checks another file, or against another pattern: every
weight of two or more dimensions whose inputs are a multiple of M, and that has zeros at all.
"""

BENCH_HELP = """bame bench [key=value ...] [methods=a,b] [size=64] [batch=16] [rounds=7] [format=text|json]

Measures a training step of each method as a ratio to dense, interleaved in one process, medians with their spread;
the projection of all masks against sorting and against a plain copy; and memory that does not grow with the batch.
Takes every option of `bame train` (model, sparsity, method options of the named method).

  bame bench model=resnet50 sparsity=1:16
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
    except ConfigError as error:
        print(f"bame: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        raise ConfigError(f"no such verb: {verb}{near_misses(verb, VERBS)} (bame --help lists them)")
    run, text = VERBS[verb]
    if any(word in ("-h", "--help") for word in rest):
        print(text() if callable(text) else text, end="")
        return 0
    return run(rest)


# --- train ---


def _train(words: list[str]) -> int:
    """Hand the words to Hydra, which composes each job and calls `_job`."""
    from bame_cli import compose

    compose.demand_assignments(words)
    multirun = any(word in ("-m", "--multirun") for word in words)
    sweep = Path("outputs", "sweeps", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}").absolute()
    os.environ["BAME_SWEEP"] = str(sweep)
    _outcomes.clear()
    compose.run_jobs(words, _job)
    if not multirun:
        return max((outcome["code"] for outcome in _outcomes), default=0)
    return _sweep_summary([json.loads(path.read_text()) for path in sorted(sweep.glob("jobs/*.json"))], sweep)


_outcomes: list[dict[str, Any]] = []


def _job(node: Any) -> float:
    """One training run, in whatever process the launcher runs it; returns what a search maximizes."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    record: dict[str, Any] = {"overrides": list(hydra.overrides.task), "code": 0, "error": ""}
    try:
        from bame_cli import config, run

        outcome = run.run(config.from_hydra(node), config.to_yaml(node))
        record |= {"code": outcome.code, "folder": str(outcome.folder), "status": outcome.result["status"]}
        record |= {"error": outcome.result.get("error", ""), "top1": outcome.result.get("top1")}
    except ConfigError as error:
        if hydra.mode == RunMode.RUN:
            raise
        print(f"bame: {error}", file=sys.stderr)
        record |= {"code": 2, "status": "refused", "error": str(error)}
    if hydra.mode == RunMode.RUN:
        _outcomes.append(record)
    else:
        jobs = Path(hydra.sweep.dir, "jobs")
        jobs.mkdir(parents=True, exist_ok=True)
        (jobs / f"{hydra.job.num:04d}.json").write_text(json.dumps(record))
    if record["code"] > 2:  # interrupted: whatever else the sweep would start must not start
        raise SystemExit(record["code"])
    return float(record.get("top1") or 0.0)


def _sweep_summary(records: list[dict[str, Any]], sweep: Path) -> int:
    """A line per job; 1 when any failed."""
    print(f"sweep of {len(records)} jobs ({sweep}):")
    for record in records:
        top1 = f"top-1 {record['top1']:6.2f} %" if record.get("top1") is not None else " " * 14
        print(f"  {record['status']:<12}{top1}  {' '.join(record['overrides'])}  {record['error']}".rstrip())
    failed = [record for record in records if record["code"]]
    for record in failed:
        print(f"bame: {record['status']}: {' '.join(record['overrides'])}: {record['error']}", file=sys.stderr)
    return 1 if failed else 0


def _train_help() -> str:
    from importlib.resources import files

    from bame_cli import compose

    groups = []
    for group in ("model", "dataset", "sparsity", "method", "recipe", "logger"):
        listed = sorted(f.name.removesuffix(".yaml") for f in files("bame_cli.conf").joinpath(group).iterdir())
        extra = {"model": "any timm classifier by name", "sparsity": "any N:M, for example 2:4 or 1:16"}.get(group)
        groups.append(f"  {group:<10}{', '.join([*listed, *([extra] if extra else [])])}")
    options = "\n".join(f"  {line}" for line in compose.composed([], plain=True).splitlines())
    return f"""bame train [group=option ...] [key=value ...] [-m] [--cfg job]

Trains a network, N:M sparse by the chosen method, and writes a folder with its log, metrics, checkpoints, final
weights and result. The same command again says that it is finished, or goes on where it stopped.

  bame train                                          a small residual network by BAME at 2:4 on digits
  bame train model=resnet50 sparsity=1:16             any timm model, any pattern
  bame train method=srste method.decay=1e-4 seed=1    a method and its options
  bame train -m method=bame,srste seed=0,1,2          a sweep: every combination, one after the other
  bame train method=srste --cfg job                   what a command amounts to, without running it
  bame train +model.args.drop_path_rate=0.1           an argument of the model's own, with a plus sign
  bame train '+sparsity.overrides={{*.conv2:2:4}}'      another pattern for some layers, or `dense`

groups (one file each under conf/)
{chr(10).join(groups)}

options with their defaults (those of `method` differ by method: see conf/method/)
{options}
"""


# --- verbs that compose options without training ---


def _layers(words: list[str]) -> int:
    own, words = _split(words, {"format": "text"})
    _demand_format(own["format"])
    from bame_cli import blueprint, compose, report

    plans = [blueprint.blueprint(config, blueprint.known_facts(config)) for config in compose.configs(words)]
    tables = [report.layer_report(plan) for plan in plans]
    if own["format"] == "json":
        print(json.dumps(tables if len(tables) > 1 else tables[0], indent=1))
    else:
        print("\n\n".join(report.layer_text(table) for table in tables))
    return 0


def _bench(words: list[str]) -> int:
    from bame_cli import bench, compose, run

    own, words = _split(words, {"format": "text", "methods": bench.METHODS, "size": "64", "batch": "16", "rounds": "7"})
    _demand_format(own["format"])
    numbers = {key: _number(key, own[key]) for key in ("size", "batch", "rounds")}
    methods = own["methods"].split(",")
    dense, *chosen = (compose.configs([*words, f"method={name}"])[0] for name in ("dense", *methods))
    rows = bench.measure(dense, dict(zip(methods, chosen, strict=True)), **numbers, device=run.device_of(dense.device))
    print(json.dumps(rows, indent=1) if own["format"] == "json" else bench.text(rows))
    return 0


def _verify(words: list[str]) -> int:
    own, rest = _split(words, {"format": "text", "pattern": ""})
    _demand_format(own["format"])
    if len(rest) != 1 or "=" in rest[0]:
        raise ConfigError("bame verify takes one run folder or file: bame verify outputs/... [pattern=2:4]")
    from bame_cli import export

    rows = export.verify(Path(rest[0]), own["pattern"] or None)
    print(json.dumps(rows, indent=1) if own["format"] == "json" else export.verify_text(rows))
    return 0 if all(row["ok"] for row in rows) else 1


def _split(words: list[str], own: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The verb's own key=value words (with defaults), and the rest."""
    mine, rest = dict(own), []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in own:
            mine[key] = value
        else:
            rest.append(word)
    return mine, rest


def _demand_format(value: str) -> None:
    if value not in ("text", "json"):
        raise ConfigError(f"format={value}: text or json")


def _number(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: a whole number from 1")
    return int(text)


VERBS: dict[str, tuple[Callable[[list[str]], int], str | Callable[[], str]]] = {
    "train": (_train, _train_help),
    "layers": (_layers, LAYERS_HELP),
    "verify": (_verify, VERIFY_HELP),
    "bench": (_bench, BENCH_HELP),
}
