"""The front door. Every verb takes key=value words; heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from bame_cli import __version__, texts
from bame_cli.errors import ConfigError, follows, near_misses
from bame_cli.words import demand_one_of, one_name, positive, split, yes


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # here, where a pipe that nobody reads any more is caught
    except ConfigError as error:
        if not follows():  # rank 0 says it once for all
            print(f"bame: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as error:  # a place that cannot be written is the command's fault, a full disk is not
        if not follows():
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
    from bame_cli import sweeps

    return sweeps.train(words)


# --- verbs that compose options without training ---


def _layers(words: list[str]) -> int:
    own, words = split(words, {"format": "text"})
    demand_one_of(("text", "json"), format=own["format"])
    from bame_cli import blueprint, compose, report

    plans = [blueprint.blueprint(config, blueprint.known_facts(config)) for config in compose.configs(words)]
    tables = [report.layer_report(plan) for plan in plans]
    if own["format"] == "json":
        print(json.dumps(tables if len(tables) > 1 else tables[0], indent=1))
    else:
        print("\n\n".join(report.layer_text(table) for table in tables))
    return 0


def _flops(words: list[str]) -> int:
    own, words = split(words, {"format": "text", "run": "", "per_layer": "false", "plot": ""})
    demand_one_of(("text", "md", "csv", "json"), format=own["format"])
    from bame_cli import compose, costs

    if own["run"]:
        if beside := [*words, *(key for key in ("per_layer", "plot") if own[key] not in ("", "false"))]:
            raise ConfigError(f"run={own['run']} is charged as it was run: {beside[0]} has no place beside it")
        print(costs.show(costs.recharge(Path(own["run"])), own["format"]))
        return 0
    one = any(word.startswith(("method=", "method.")) for word in words)
    words = words if one else [*words, f"method={','.join(_compared())}"]
    configs = compose.configs(words)
    if yes("per_layer", own["per_layer"]):
        if len(configs) > 1:
            raise ConfigError("per_layer=true shows one method at one pattern: name them, method=bame sparsity=2:4")
        if own["plot"]:
            raise ConfigError(f"plot={own['plot']} draws methods side by side: it has no place beside per_layer=true")
        print(costs.show(costs.per_layer(configs[0]), own["format"]))
        return 0
    rows = costs.compare(configs, compose.differences(words))
    print(costs.show(rows, own["format"]))
    if own["plot"]:
        from bame_cli import plots

        plots.bills(rows, list(map(costs.cumulative, configs)), Path(own["plot"]))
    return 0


def _compared() -> list[str]:
    from bame_cli.methods import METHODS

    return list(METHODS)


_SIZES = {"size": "64", "batch": "16", "rounds": "7"}


def _bench(words: list[str]) -> int:
    from bame_cli import bench, compose
    from bame_cli.training.distributed import join

    own, words = split(words, {"format": "text", "methods": bench.METHODS, "parts": bench.DEFAULT} | _SIZES)
    demand_one_of(("text", "json"), format=own["format"])
    numbers = {key: positive(key, own[key]) for key in _SIZES}
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
    if words[:1] == ["masks"]:
        return _plot_masks(words[1:])
    own, rest = split(words, {"out": "", "scale": "paper", "root": "outputs", "kept": ""})
    name = one_name(
        rest, "bame plot <table> [scale=] [kept=file] [out=folder], or bame plot masks|weights run=<run folder>"
    )
    from bame_cli import pictures, studies

    study = studies.read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    folder = Path(
        own["out"] or studies.manifest_path(Path(own["root"]), study.table.name, own["scale"]).with_suffix("")
    )
    print(*pictures.draw(study, folder), sep="\n")
    return 0


def _plot_masks(words: list[str]) -> int:
    own, rest = split(words, {"run": "", "out": ""})
    if rest or not own["run"]:
        raise ConfigError("bame plot masks run=<run folder> [out=file.png]")
    from bame_cli import evolution, plots

    run = Path(own["run"])
    seen, path = evolution.read(run), Path(own["out"] or run / "plots" / "masks.png")
    if not own["out"]:
        path.parent.mkdir(exist_ok=True)
    plots.masks(seen, path)
    print(path)
    return 0


def _network(verb: str) -> Callable[[list[str]], int]:
    """A verb that takes a finished network: bame_cli.network."""

    def run(words: list[str]) -> int:
        from bame_cli import network

        return network.VERBS[verb](words)

    return run


def _table(words: list[str]) -> int:
    mine = {"scale": "paper", "format": "text", "against": "", "strict": "false", "root": "outputs", "out": ""}
    own, rest = split(words, mine | {"kept": ""})
    name = one_name(rest, "bame table <name> [scale=paper|small|smoke] [format=md] [strict=true] [out=file]")
    from bame_cli import folder, rendering, studies, tables

    demand_one_of(rendering.FORMATS, format=own["format"])
    strict = yes("strict", own["strict"])
    study = studies.read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    shown, missing = rendering.show(study, own["format"], rival=own["against"]), tables.unfinished(study)
    if own["out"]:
        folder.write(Path(own["out"]), shown + "\n")
    print(own["out"] or shown)
    if missing and strict:
        print(f"bame: {len(missing)} of {len(study.jobs)} runs are not finished", file=sys.stderr)
    return 1 if missing and strict else 0


def _report(words: list[str]) -> int:
    own, rest = split(words, {"scale": "paper", "root": "outputs", "out": "", "kept": ""})
    name = one_name(rest, "bame report <table> [scale=] [kept=file] [root=outputs] [out=file.html]")
    from bame_cli import folder, page, studies

    study = studies.read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    beside = studies.manifest_path(Path(own["root"]), study.table.name, own["scale"])
    out = Path(own["out"] or beside.with_suffix(".html"))
    if not out.suffix:
        raise ConfigError(f"out={out}: a page is a file, {out}.html; its pictures lie in {out}")
    folder.write(out, page.page(study, out.with_suffix("")))
    print(out)
    return 0


def _runs(words: list[str]) -> int:
    from bame_cli import runs

    own, rest = split(words, {"root": "outputs", "format": "text", **dict.fromkeys(runs.FILTERS, "")})
    demand_one_of(("text", "json"), format=own["format"])
    if rest[:1] == ["diff"]:
        if len(rest) != 3 or any(word.partition("=")[0] in (*runs.FILTERS, "root") for word in words):
            raise ConfigError("bame runs diff takes two run folders and format=text|json")
        print(runs.show_differences(Path(rest[1]), Path(rest[2]), own["format"]))
        return 0
    if rest:
        raise ConfigError(
            f"{rest[0]} has no place here{near_misses(rest[0].partition('=')[0], own)} (bame runs --help)"
        )
    wanted = {key: own[key] for key in runs.FILTERS if own[key]}
    print(runs.show(runs.matching(runs.find(Path(own["root"])), wanted), own["format"], time.time()))
    return 0


VERBS: dict[str, tuple[Callable[[list[str]], int], str | Callable[[], str]]] = {
    "train": (_train, texts.train),
    "layers": (_layers, texts.LAYERS),
    "flops": (_flops, texts.FLOPS),
    "table": (_table, texts.TABLE),
    "report": (_report, texts.REPORT),
    "runs": (_runs, texts.RUNS),
    "plot": (_plot, texts.PLOT),
    "verify": (_network("verify"), texts.VERIFY),
    "eval": (_network("eval"), texts.EVAL),
    "predict": (_network("predict"), texts.PREDICT),
    "export": (_network("export"), texts.EXPORT),
    "bench": (_bench, texts.BENCH),
}
