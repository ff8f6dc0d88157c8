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

from bame_cli import __version__, help
from bame_cli.errors import ConfigError, follows, near_misses
from bame_cli.options.words import demand_one_of, one_name, positive, split, yes


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
        print(help.BAME, end="")
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
    from bame_cli.studies import sweep

    return sweep.train(words)


# --- verbs that compose options without training ---


def _layers(words: list[str]) -> int:
    own, words = split(words, {"format": "text"})
    demand_one_of(("text", "json"), format=own["format"])
    from bame_cli.options import compose
    from bame_cli.runs import summary
    from bame_cli.runs.plan import known_facts, run_plan

    plans = [run_plan(config, known_facts(config)) for config in compose.configs(words)]
    tables = [summary.layer_report(plan) for plan in plans]
    if own["format"] == "json":
        print(json.dumps(tables if len(tables) > 1 else tables[0], indent=1))
    else:
        print("\n\n".join(summary.layer_text(table) for table in tables))
    return 0


def _flops(words: list[str]) -> int:
    own, words = split(words, {"format": "text", "run": "", "per_layer": "false", "plot": ""})
    demand_one_of(("text", "md", "csv", "json"), format=own["format"])
    from bame_cli.options import compose
    from bame_cli.runs import forecast

    if own["run"]:
        if beside := [*words, *(key for key in ("per_layer", "plot") if own[key] not in ("", "false"))]:
            raise ConfigError(f"run={own['run']} is charged as it was run: {beside[0]} has no place beside it")
        print(forecast.show(forecast.recharge(Path(own["run"])), own["format"]))
        return 0
    one = any(word.startswith(("method=", "method.")) for word in words)
    words = words if one else [*words, f"method={','.join(_compared())}"]
    configs = compose.configs(words)
    if yes("per_layer", own["per_layer"]):
        if len(configs) > 1:
            raise ConfigError("per_layer=true shows one method at one pattern: name them, method=bame sparsity=2:4")
        if own["plot"]:
            raise ConfigError(f"plot={own['plot']} draws methods side by side: it has no place beside per_layer=true")
        print(forecast.show(forecast.per_layer(configs[0]), own["format"]))
        return 0
    rows = forecast.compare(configs, compose.differences(words))
    print(forecast.show(rows, own["format"]))
    if own["plot"]:
        from bame_cli.plots.run import bills

        bills(rows, list(map(forecast.cumulative, configs)), Path(own["plot"]))
    return 0


def _compared() -> list[str]:
    from bame_cli.methods import METHODS

    return list(METHODS)


_SIZES = {"size": "64", "batch": "16", "rounds": "7"}


def _bench(words: list[str]) -> int:
    from bame_cli import bench
    from bame_cli.options import compose
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
    from bame_cli.studies import plots
    from bame_cli.studies.study import manifest_path, read

    study = read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    folder = Path(own["out"] or manifest_path(Path(own["root"]), study.table.name, own["scale"]).with_suffix(""))
    print(*plots.draw(study, folder), sep="\n")
    return 0


def _plot_masks(words: list[str]) -> int:
    own, rest = split(words, {"run": "", "out": ""})
    if rest or not own["run"]:
        raise ConfigError("bame plot masks run=<run folder> [out=file.png]")
    from bame_cli.plots import masks

    run = Path(own["run"])
    seen, path = masks.read(run), Path(own["out"] or run / "plots" / "masks.png")
    if not own["out"]:
        path.parent.mkdir(exist_ok=True)
    masks.draw(seen, path)
    print(path)
    return 0


def _network(verb: str) -> Callable[[list[str]], int]:
    """A verb that takes a finished network: bame_cli.networks.verbs."""

    def run(words: list[str]) -> int:
        from bame_cli.networks import verbs

        return verbs.VERBS[verb](words)

    return run


def _table(words: list[str]) -> int:
    mine = {"scale": "paper", "format": "text", "against": "", "strict": "false", "root": "outputs", "out": ""}
    own, rest = split(words, mine | {"kept": ""})
    name = one_name(rest, "bame table <name> [scale=paper|small|smoke] [format=md] [strict=true] [out=file]")
    from bame_cli.runs import folder
    from bame_cli.studies import table
    from bame_cli.studies.lines import unfinished
    from bame_cli.studies.study import read

    demand_one_of(table.FORMATS, format=own["format"])
    strict = yes("strict", own["strict"])
    study = read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    shown, missing = table.show(study, own["format"], rival=own["against"]), unfinished(study)
    if own["out"]:
        folder.write(Path(own["out"]), shown + "\n")
    print(own["out"] or shown)
    if missing and strict:
        print(f"bame: {len(missing)} of {len(study.jobs)} runs are not finished", file=sys.stderr)
    return 1 if missing and strict else 0


def _report(words: list[str]) -> int:
    own, rest = split(words, {"scale": "paper", "root": "outputs", "out": "", "kept": ""})
    name = one_name(rest, "bame report <table> [scale=] [kept=file] [root=outputs] [out=file.html]")
    from bame_cli.runs import folder
    from bame_cli.studies import page
    from bame_cli.studies.study import manifest_path, read

    study = read(name, own["scale"], Path(own["root"]), kept=own["kept"])
    beside = manifest_path(Path(own["root"]), study.table.name, own["scale"])
    out = Path(own["out"] or beside.with_suffix(".html"))
    if not out.suffix:
        raise ConfigError(f"out={out}: a page is a file, {out}.html; its pictures lie in {out}")
    folder.write(out, page.page(study, out.with_suffix("")))
    print(out)
    return 0


def _runs(words: list[str]) -> int:
    from bame_cli.runs import listing

    own, rest = split(words, {"root": "outputs", "format": "text", **dict.fromkeys(listing.FILTERS, "")})
    demand_one_of(("text", "json"), format=own["format"])
    if rest[:1] == ["diff"]:
        if len(rest) != 3 or any(word.partition("=")[0] in (*listing.FILTERS, "root") for word in words):
            raise ConfigError("bame runs diff takes two run folders and format=text|json")
        print(listing.show_differences(Path(rest[1]), Path(rest[2]), own["format"]))
        return 0
    if rest:
        raise ConfigError(
            f"{rest[0]} has no place here{near_misses(rest[0].partition('=')[0], own)} (bame runs --help)"
        )
    wanted = {key: own[key] for key in listing.FILTERS if own[key]}
    print(listing.show(listing.matching(listing.find(Path(own["root"])), wanted), own["format"], time.time()))
    return 0


VERBS: dict[str, tuple[Callable[[list[str]], int], str | Callable[[], str]]] = {
    "train": (_train, help.train),
    "layers": (_layers, help.LAYERS),
    "flops": (_flops, help.FLOPS),
    "table": (_table, help.TABLE),
    "report": (_report, help.REPORT),
    "runs": (_runs, help.RUNS),
    "plot": (_plot, help.PLOT),
    "verify": (_network("verify"), help.VERIFY),
    "eval": (_network("eval"), help.EVAL),
    "predict": (_network("predict"), help.PREDICT),
    "export": (_network("export"), help.EXPORT),
    "bench": (_bench, help.BENCH),
}
