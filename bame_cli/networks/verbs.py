"""The verbs that take a finished network: eval, predict, verify, export, and the picture of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bame_cli.errors import ConfigError
from bame_cli.options.words import demand_one_of, positive, split, yes


def _eval(words: list[str]) -> int:
    own, rest = split(words, {"format": "text"})
    demand_one_of(("text", "json"), format=own["format"])
    path, options = _path(rest, "bame eval <run folder or file> [dataset=<name>] [model=<name>]")
    from bame_cli.networks import inference

    row = inference.score(inference.source(path, options))
    _say(row, own["format"], inference.score_text)
    return 0


def _predict(words: list[str]) -> int:
    own, rest = split(words, {"format": "text"})
    demand_one_of(("text", "json"), format=own["format"])
    path, others = _path(rest, "bame predict <run folder or file> <pictures...>")
    pictures = [Path(word) for word in others if "=" not in word or Path(word).exists()]
    if not pictures:
        raise ConfigError(f"no picture to look at: bame predict {path} <pictures...>")
    from bame_cli.networks import inference

    options = [word for word in others if Path(word) not in pictures]
    rows = inference.predict(inference.source(path, options), pictures)
    _say(rows, own["format"], inference.predictions_text)
    return 0


def _verify(words: list[str]) -> int:
    own, rest = split(words, {"format": "text", "pattern": "", "convention": "kept"})
    demand_one_of(("text", "json"), format=own["format"])
    if len(rest) != 1 or "=" in rest[0]:
        raise ConfigError("bame verify takes one run folder or file: bame verify outputs/... [pattern=2:4]")
    from bame_cli.formats import verify

    rows = verify.verify(Path(rest[0]), verify.asked(own["pattern"], own["convention"]))
    _say(rows, own["format"], verify.text)
    return 0 if all(row["ok"] for row in rows) else 1


_EXPORT = {"format": "", "out": "", "float16": "false", "opset": "", "license": "", "overwrite": "false"}


def _export(words: list[str]) -> int:
    own, rest = split(words, {**_EXPORT, "verify": "true"})
    run, options = _path(rest, "bame export <run folder> format=safetensors|onnx|semi_structured|compressed")
    from bame_cli.networks import export

    order = export.Order(
        format=own["format"],
        out=Path(own["out"]) if own["out"] else None,
        float16=yes("float16", own["float16"]),
        opset=positive("opset", own["opset"]) if own["opset"] else 0,
        licence=own["license"],
        overwrite=yes("overwrite", own["overwrite"]),
        verify=yes("verify", own["verify"]),
        words=tuple(options),
    )
    lines, good = export.export(run, order)
    print("\n".join(lines))
    return 0 if good else 1


def _plot_weights(words: list[str]) -> int:
    own, rest = split(words, {"run": "", "layer": "", "out": ""})
    if rest or not own["run"]:
        raise ConfigError("bame plot weights run=<run folder or file> [layer=<name>] [out=file.png]")
    from bame_cli import formats
    from bame_cli.networks import finished
    from bame_cli.plots.run import weights

    saved = formats.read(Path(own["run"]))
    name, pattern = formats.layer(saved, own["layer"])
    beside = saved.file.parent / "plots" if finished.is_run(Path(own["run"])) else saved.file.parent
    out = Path(own["out"]) if own["out"] else beside / f"{name}.png"
    if not own["out"]:
        out.parent.mkdir(exist_ok=True)
    weights(saved.weights[name].float().numpy(), out, name=name, pattern=(pattern.n, pattern.m))
    print(out)
    return 0


def _path(words: list[str], usage: str) -> tuple[Path, list[str]]:
    """The network that the first word without `=` names, and the other words. A path may hold `=` when it is there."""
    for index, word in enumerate(words):
        if "=" not in word or Path(word).exists():
            return Path(word), words[:index] + words[index + 1 :]
    raise ConfigError(usage)


def _say(rows: Any, how: str, text: Any) -> None:
    print(json.dumps(rows, indent=1) if how == "json" else text(rows))


VERBS = {"eval": _eval, "predict": _predict, "verify": _verify, "export": _export, "plot weights": _plot_weights}
