"""The front door. Every verb takes key=value words; heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bame_cli import __version__, texts
from bame_cli.errors import ConfigError, near_misses
from bame_cli.words import demand_format as _demand_format
from bame_cli.words import number as _number
from bame_cli.words import split as _split


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
    except ConfigError as error:
        if not _follows():  # rank 0 says it once for all
            print(f"bame: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # a place that cannot be written is the command's fault, a full disk is not
        print(f"bame: {error}", file=sys.stderr)
        code = 1 if error.errno == errno.ENOSPC else 2
    sys.exit(code)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(texts.BAME, end="")
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
    if multirun and any(word in ("--cfg", "-c") for word in words):
        raise ConfigError("--cfg shows the configuration of one job: leave out -m, and name one value for each key")
    root = next((word.partition("=")[2] for word in reversed(words) if word.startswith("run.root=")), "outputs")
    sweep = Path(root, "sweeps", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}").absolute()
    os.environ["BAME_SWEEP"] = str(sweep)
    _outcomes.clear()
    if _follows():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 for as long as the process lives
    compose.run_jobs(words, _job)
    if not multirun or _follows():
        return max((outcome["code"] for outcome in _outcomes), default=0)
    return _sweep_summary([json.loads(path.read_text()) for path in sorted(sweep.glob("jobs/*.json"))], sweep)


def _follows() -> bool:
    """Whether torchrun started this process as one of several, and not the one that speaks."""
    return int(os.environ.get("RANK", 0)) > 0


_outcomes: list[dict[str, Any]] = []


def _job(node: Any) -> float:
    """One training run, in whatever process the launcher runs it; returns what a search maximizes."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    words = [word.replace("\\", "") for word in hydra.overrides.task]
    record: dict[str, Any] = {"overrides": words, "code": 0, "error": ""}
    try:
        from bame_cli import config, run

        outcome = run.run(config.from_hydra(node), config.to_yaml(node))
        record |= {"code": outcome.code, "folder": str(outcome.folder), "status": outcome.result["status"]}
        record |= {"error": outcome.result.get("error", ""), "top1": outcome.result.get("top1")}
    except ConfigError as error:
        if not _follows():
            print(f"bame: {error}", file=sys.stderr)
        record |= {"code": 2, "status": "refused", "error": str(error)}
    if hydra.mode == RunMode.RUN or _follows():
        _outcomes.append(record)
        if record["code"] == 1:
            print(f"bame: {record['status']}: {record['error']}", file=sys.stderr)
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


def _flops(words: list[str]) -> int:
    own, words = _split(words, {"format": "text", "run": "", "per_layer": "false", "plot": ""})
    if own["format"] not in ("text", "md", "csv", "json"):
        raise ConfigError(f"format={own['format']}: text, md, csv or json")
    from bame_cli import compose, costs

    if own["run"]:
        if words:
            raise ConfigError(f"run={own['run']} is charged as it was run: {words[0]} has no place beside it")
        print(costs.show(costs.recharge(Path(own["run"])), own["format"]))
        return 0
    one = any(word.startswith(("method=", "method.")) for word in words)
    configs = compose.configs(words if one else [*words, f"method={','.join(_compared())}"])
    if own["per_layer"] not in ("true", "false"):
        raise ConfigError(f"per_layer={own['per_layer']}: true or false")
    if own["per_layer"] == "true":
        if len(configs) > 1:
            raise ConfigError("per_layer=true shows one method at one pattern: name them, method=bame sparsity=2:4")
        print(costs.show(costs.per_layer(configs[0]), own["format"]))
        return 0
    others = [word for word in words if not word.startswith(("method=", "method.", "sparsity="))]
    rows = costs.compare(configs, compose.composed([*others, "method=srste"]))
    print(costs.show(rows, own["format"]))
    if own["plot"]:
        from bame_cli import plots

        labels = [" ".join(filter(None, (row["method"], row["pattern"]))) for row in rows]
        plots.bills(rows, dict(zip(labels, map(costs.cumulative, configs), strict=True)), Path(own["plot"]))
    return 0


def _compared() -> list[str]:
    from bame_cli.methods import METHODS

    return list(METHODS)


_SIZES = {"size": "64", "batch": "16", "rounds": "7"}


def _bench(words: list[str]) -> int:
    from bame_cli import bench, compose
    from bame_cli.training.distributed import join

    own, words = _split(words, {"format": "text", "methods": bench.METHODS, "parts": bench.DEFAULT} | _SIZES)
    _demand_format(own["format"])
    numbers = {key: _number(key, own[key]) for key in _SIZES}
    parts = own["parts"].split(",")
    if unknown := [part for part in parts if part not in bench.PARTS]:
        raise ConfigError(f"parts={unknown[0]}: {', '.join(bench.PARTS)}")
    methods = ["dense", *(name for name in own["methods"].split(",") if name != "dense")]
    configs = {name: compose.configs([*words, f"method={name}"])[0] for name in methods}
    rows = bench.measure(configs, parts, **numbers, device=join(configs["dense"].device)[1])
    print(json.dumps(rows, indent=1) if own["format"] == "json" else bench.text(rows))
    return 0


def _plot(words: list[str]) -> int:
    if words[:1] == ["weights"]:
        return _network("plot weights")(words[1:])
    own, rest = _split(words, {"run": "", "out": ""})
    if rest != ["masks"] or not own["run"]:
        raise ConfigError("bame plot masks run=<run folder> [out=file.png], or bame plot weights run=<run or file>")
    from bame_cli import evolution, plots

    run = Path(own["run"])
    out = Path(own["out"]) if own["out"] else run / "plots" / "masks.png"
    seen = evolution.read(run)
    if not own["out"]:
        out.parent.mkdir(exist_ok=True)
    plots.masks(seen, out)
    print(out)
    return 0


def _network(verb: str) -> Callable[[list[str]], int]:
    """A verb that takes a finished network: bame_cli.network."""

    def run(words: list[str]) -> int:
        from bame_cli import network

        return network.VERBS[verb](words)

    return run


VERBS: dict[str, tuple[Callable[[list[str]], int], str | Callable[[], str]]] = {
    "train": (_train, texts.train),
    "layers": (_layers, texts.LAYERS),
    "flops": (_flops, texts.FLOPS),
    "plot": (_plot, texts.PLOT),
    "verify": (_network("verify"), texts.VERIFY),
    "eval": (_network("eval"), texts.EVAL),
    "predict": (_network("predict"), texts.PREDICT),
    "export": (_network("export"), texts.EXPORT),
    "bench": (_bench, texts.BENCH),
}
