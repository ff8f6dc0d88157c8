"""A folder that timm's and Hugging Face's hub loaders accept: `config.json` and a model card beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = ("model.safetensors", "config.json", "README.md")


def config(
    about: Mapping[str, str], *, own: Mapping[str, Any], num_features: int, crop: tuple[float, str]
) -> dict[str, Any]:
    """timm's hub configuration. own: the model's `pretrained_cfg`. crop: share of the picture kept, interpolation."""
    dataset, shape = json.loads(about["dataset_options"]), json.loads(about["image_shape"])
    classes, args = json.loads(about["classes"]), json.loads(about["model_args"])
    kept = {key: own[key] for key in ("first_conv", "classifier", "fixed_input_size") if own.get(key) is not None}
    if own.get("fixed_input_size"):
        args = {**args, "img_size": args.get("img_size", shape[1])}
    return {
        "architecture": about["model"].split(".")[0],
        "num_classes": len(classes),
        "num_features": num_features,
        "label_names": classes,
        "model_args": {**args, "in_chans": shape[0]},
        "pretrained_cfg": {
            **kept,
            "input_size": shape,
            "mean": _per_channel(dataset["mean"], shape[0]),
            "std": _per_channel(dataset["std"], shape[0]),
            "crop_pct": crop[0],
            "interpolation": crop[1],
            "crop_mode": "center",
            "num_classes": len(classes),
        },
    }


def _per_channel(values: list[float], channels: int) -> list[float]:
    return values * channels if len(values) == 1 else values


def card(about: Mapping[str, str], result: Mapping[str, Any], licence: str, *, ours: bool) -> str:
    """The model card: what it is, its row of a table, its bill, how to load it, its licence.

    ours: whether the architecture is one that this package registers with timm.
    """
    flops, sparsity = result["flops"], result["sparsity"]
    before = "import bame_cli.tasks.images.models  # registers this architecture with timm\n" if ours else ""
    return f"""---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm, n-m-sparsity]
license: {licence}
---
# {about["model"]}, {result["pattern"] or "dense"}, by {result["method"]}

{_what(result)} Trained on {result["dataset"]} by bame-cli {about["bame_cli"]}.

{_row(result)}

Accuracy is that of the final network on the whole validation set. Sparse weights: {sparsity["layers_sparse"]} of \
{sparsity["layers_total"]} layers; {sparsity["weights_zero"]:,} of {sparsity["weights_total"]:,} weights of all layers \
are zero.

## The bill

Training took {flops["train"]:,} FLOPs (2 x multiply-accumulates, counted step by step): {flops["forward"]:,} for \
forward passes, {flops["grad_input"]:,} for gradients of inputs, {flops["grad_weight"]:,} for gradients of weights. \
Dense training takes {flops["train_dense"]:,}. With dense gradients of inputs the bill is \
{flops["train_ratio_dense_grad_input"]:.4f} of dense. One image takes {flops["forward_sparse"]:,} FLOPs, dense \
{flops["forward_dense"]:,}.{_inherited(flops["inherited"])}

## Loading

```python
{before}import timm

model = timm.create_model("local-dir:<this folder>", pretrained=True)  # or hf-hub:<owner>/<name>
```

Images of {"x".join(map(str, json.loads(about["image_shape"])))}, normalized as `config.json` says.

## Licence

{licence}. The data that it was trained on has terms of its own.
"""


def _row(result: Mapping[str, Any]) -> str:
    """The run as a table of one row."""
    flops = result["flops"]
    cells = {key: str(result[key]) for key in ("model", "dataset", "method")}
    cells |= {"pattern": result["pattern"] or "dense", "seed": str(result["seed"]), "epochs": str(result["epochs"])}
    cells |= {"top-1, %": f"{result['top1']:.2f}", "top-5, %": f"{result['top5']:.2f}"}
    cells |= {"training FLOPs ÷ dense": f"{flops['train_ratio']:.4f}"}
    cells |= {"inference FLOPs ÷ dense": f"{flops['inference_ratio']:.4f}"}
    return "\n".join([f"| {' | '.join(cells)} |", "|" + "---|" * len(cells), f"| {' | '.join(cells.values())} |"])


def _what(result: Mapping[str, Any]) -> str:
    if not result["pattern"]:
        return "A dense image classifier."
    n, m = result["pattern"].split(":")
    return f"An image classifier whose sparse weights keep {n} of every {m} consecutive inputs of an output."


def _inherited(flops: int) -> str:
    return f" The run that its weights came from took {flops:,} FLOPs before." if flops else ""


def write(folder: Path, settings: Mapping[str, Any], text: str) -> None:
    """Write what stands beside the weights."""
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "README.md").write_text(text)
