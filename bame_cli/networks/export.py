"""`bame export`: a finished run as a file that others read, proven against the accuracy that the run logged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bame_cli import formats
from bame_cli.errors import ConfigError
from bame_cli.formats import compressed, hub, onnx_file, semi_structured
from bame_cli.formats.plain import write_weights
from bame_cli.formats.verify import verify_weights
from bame_cli.networks import finished, inference
from bame_cli.runs.plan import load_data
from bame_cli.tasks.images import data as datasets
from bame_cli.tasks.images import models

# Where in the run's folder an export goes, and whether it gives back the very weights.
_TARGETS = {
    "safetensors": "safetensors",
    "onnx": "model.onnx",
    "semi_structured": "model.semi_structured.safetensors",
    "compressed": "model.compressed.safetensors",
}
_EXACT = ("safetensors", "compressed")
_SPARSE = ("semi_structured", "compressed")
# How far scores may be from torch's, as a share of the largest score: what sums in another order, and float16, explain.
BOUNDS = {"float32": 1e-4, "float16": 2e-2}


@dataclass(frozen=True)
class Order:
    """What is asked for. opset, licence: 0 and empty for the usual. words: of the evaluation, such as dataset.root."""

    format: str
    out: Path | None = None
    float16: bool = False
    opset: int = 0
    licence: str = ""
    overwrite: bool = False
    verify: bool = True
    words: tuple[str, ...] = ()


def export(run: Path, order: Order) -> tuple[list[str], bool]:
    """Write the network of a run; what to say of it, and whether it holds what it should.

    Raises ConfigError, with nothing written, for a run or a target that cannot be served.
    """
    _demand(order)
    order = replace(order, opset=order.opset or onnx_file.OPSETS[0], licence=order.licence or "apache-2.0")
    saved = finished.read_run(run)
    target = _target(run, order)
    source = inference.source(run, list(order.words))
    data = _images(source, saved) if order.verify else None
    if order.format in _SPARSE and not saved.patterns:
        raise ConfigError(f"format={order.format} is for sparse networks, and the run in {run} is dense")
    _write(saved, source, target, order)
    lines, good = _described(saved, formats.read(target), target, order)
    if data:
        proof, held = _proven(source, target, data, order)
        lines, good = [*lines, *proof], good and held
    return lines, good


def _demand(order: Order) -> None:
    if order.format not in formats.NAMES:
        raise ConfigError(f"format={order.format or '...'}: one of {', '.join(formats.NAMES)}")
    if order.float16 and order.format != "onnx":
        raise ConfigError(f"float16=true belongs to format=onnx, not to {order.format}")
    if order.opset and order.format != "onnx":
        raise ConfigError(f"opset={order.opset} belongs to format=onnx, not to {order.format}")
    if order.licence and order.format != "safetensors":
        raise ConfigError(f"license={order.licence} belongs to format=safetensors and its card, not to {order.format}")
    if order.opset and order.opset not in onnx_file.OPSETS:
        raise ConfigError(f"opset={order.opset}: from {onnx_file.OPSETS[0]} to {onnx_file.OPSETS[-1]}")
    if order.format == "onnx":
        onnx_file.demand_packages()


def _target(run: Path, order: Order) -> Path:
    """Where the export goes. Raises ConfigError when something is there, or its name would not be recognized."""
    name = _TARGETS[order.format]
    target = order.out or run / "export" / (name.replace(".onnx", ".float16.onnx") if order.float16 else name)
    wanted = Path(name).suffix
    if target.suffix != wanted and wanted:
        raise ConfigError(f"out={target}: format={order.format} is a file that ends in {wanted}")
    if target.exists() and target.is_dir() == bool(wanted):
        raise ConfigError(f"out={target}: format={order.format} is a {'file' if wanted else 'folder'}, not that")
    if finished.is_run(target) or (target.name == "model.safetensors" and finished.is_run(target.parent)):
        raise ConfigError(f"out={target} is a run's own: an export goes elsewhere")
    there = target.exists() if wanted else target.is_dir() and any(target.iterdir())
    if there and not order.overwrite:
        raise ConfigError(f"{target} exists already: overwrite=true replaces it, out= puts it elsewhere")
    return target


def _images(source: inference.Source, saved: formats.Saved) -> datasets.Data:
    """The validation images that the export is proven on. Raises ConfigError when they are not such as it takes."""
    data = load_data(source.config)
    inference.demand_fit(source, data.image_shape[0], len(data.classes))
    if data.image_shape != _shape(saved):
        raise ConfigError(f"the network is proven on images of {_shape(saved)}; the data set gives {data.image_shape}")
    return data


# --- writing ---


def _write(saved: formats.Saved, source: inference.Source, target: Path, order: Order) -> None:
    if order.format == "safetensors":
        _write_hub(saved, target, order.licence)
    elif order.format == "onnx":
        _write_onnx(saved, source, target, order)
    else:
        formats.write_packed(saved, target, order.format, saved.about)


def _write_hub(saved: formats.Saved, target: Path, licence: str) -> None:
    about, result = saved.about, finished.demand_finished(saved.file.parent)
    settings, card = _hub_config(saved), hub.card(about, result, licence, ours=models.is_ours(about["model"]))
    # A folder to be published does not say where data lies on this machine.
    dataset = {key: value for key, value in json.loads(about["dataset_options"]).items() if key != "root"}
    target.mkdir(parents=True, exist_ok=True)
    told = about | {"dataset_options": json.dumps(dataset)}
    write_weights(target / "model.safetensors", saved.weights, patterns=saved.patterns, about=told)
    hub.write(target, settings, card)


def _write_onnx(saved: formats.Saved, source: inference.Source, target: Path, order: Order) -> None:
    model, precision = _as_torch(source), "float16" if order.float16 else "float32"
    onnx_file.write(
        semi_structured.HalfInside(model) if order.float16 else model,
        target,
        image_shape=_shape(saved),
        opset=order.opset,
        weights=saved.weights,
        patterns=saved.patterns,
        about=saved.about | {"precision": precision},
    )


def _hub_config(saved: formats.Saved) -> dict[str, Any]:
    about, shape = saved.about, _shape(saved)
    args, classes = json.loads(about["model_args"]), json.loads(about["classes"])
    model = models.skeleton(about["model"], image_shape=shape, num_classes=len(classes), args=args)
    crop = datasets.central_crop(about["dataset"])
    return hub.config(
        about, own=models.timm_config(model), num_features=getattr(model, "num_features", 0), crop=(crop, "bilinear")
    )


def _shape(saved: formats.Saved) -> tuple[int, int, int]:
    channels, height, width = json.loads(saved.about["image_shape"])
    return channels, height, width


def _as_torch(source: inference.Source) -> nn.Module:
    """The run's own network, on the CPU."""
    classes, shape = json.loads(source.about["classes"]), json.loads(source.about["image_shape"])
    return inference.network(source, image_shape=tuple(shape), classes=len(classes))[0].cpu()


# --- what was written, and the proof ---


def _described(saved: formats.Saved, made: formats.Saved, target: Path, order: Order) -> tuple[list[str], bool]:
    """What the written file holds, read back: its size, its patterns."""
    size, before = made.file.stat().st_size, saved.file.stat().st_size
    verdicts = verify_weights(made.weights, made.patterns)
    broken = [verdict.name for verdict in verdicts if verdict.violation]
    how = {"onnx": f", opset {order.opset}, {'float16' if order.float16 else 'float32'} inside"}.get(order.format, "")
    found = ", ".join(sorted({str(verdict.pattern) for verdict in verdicts}))
    blocks = sum(verdict.blocks for verdict in verdicts)
    lines = {
        "format": f"{order.format}{how}",
        "written": f"{target}, {size:,} bytes ({size / before:.3f} of the run's model.safetensors)",
        "pattern": f"{len(verdicts)} sparse weights, {blocks:,} blocks along their inputs, "
        + (f"BROKEN: {', '.join(broken)}" if broken else f"all {found}")
        if verdicts
        else "dense",
    }
    good = not broken
    if order.format in _EXACT:
        same = all(torch.equal(weight, made.weights[name]) for name, weight in saved.weights.items())
        lines["weights"] = "equal to the run's" if same else "NOT EQUAL to the run's"
        good = good and same
    return [f"{key:<10}{line}" for key, line in lines.items()] + list(_remarks(saved, order)), good


def _remarks(saved: formats.Saved, order: Order) -> Iterator[str]:
    """What a user of this format should know of this network."""
    if order.format == "safetensors":
        yield f"licence   {order.licence} (license= says another), in README.md beside config.json"
    if order.format == "semi_structured":
        reasons = semi_structured.refusals(saved.weights, saved.patterns)
        yield f"packed    {sum(not reason for reason in reasons.values())} of {len(reasons)} sparse weights, in float16"
        yield from (f"          {name} is not: {reason}" for name, reason in reasons.items() if reason)
    if order.format == "compressed":
        for pattern in sorted({p for p in saved.patterns.values() if not compressed.is_dense(p)}):
            yield f"index     {pattern}: {compressed.bits_per_block(pattern)} bits a block of {pattern.m} weights"
    if order.format == "onnx" and any(pattern != semi_structured.PATTERN for pattern in saved.patterns.values()):
        yield "note      sparse tensor cores take 2:4 alone: this network keeps its zeros, and runs at dense speed"


def _proven(source: inference.Source, target: Path, data: datasets.Data, order: Order) -> tuple[list[str], bool]:
    """The export's own accuracy beside the run's, and how far its scores are from the run's network."""
    made = inference.source(target, list(order.words))
    row = inference.score(made, data)
    logged = source.logged.get("top1")
    said = "" if logged is None else f" (the run's: {logged:.2f} %)"
    lines = [f"top-1     {row['top1']:.2f} %{said} on {row['images']} validation images"]
    good = logged is None or order.format not in _EXACT or row["top1"] == logged
    if not good:
        lines.append("FAILED    the weights are the run's, and the accuracy is not")
    if order.format in _EXACT:
        return lines, good
    precision = "float32" if order.format == "onnx" and not order.float16 else "float16"
    apart, largest = _distance(source, made, data)
    held = apart <= BOUNDS[precision] * largest
    lines.append(
        f"scores    differ from torch's by {apart:.2e} at most, {apart / largest:.1e} of the largest; "
        f"the bound is {BOUNDS[precision]:.0e}: {'held' if held else 'NOT HELD'}"
    )
    return lines, good and held


@torch.no_grad()
def _distance(one: inference.Source, other: inference.Source, data: datasets.Data) -> tuple[float, float]:
    """The largest difference of scores over the validation images, and the largest score."""
    (first, here), (second, there) = (
        inference.network(source, image_shape=data.image_shape, classes=len(data.classes)) for source in (one, other)
    )
    apart = largest = 0.0
    for images, _ in data.val.eval_batches(one.config.recipe.eval_batch_size):
        a, b = first(images.to(here)), second(images.to(there)).to(here)
        apart, largest = max(apart, _most(a - b)), max(largest, _most(a))
    return apart, largest


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max())
