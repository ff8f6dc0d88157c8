"""ONNX: written by torch's dynamo exporter, run by ONNX Runtime, its weights found whichever way they are laid out.

TensorRT's sparse kernels want N:M along the input channels C of a convolution's KCRS kernel, and along the axis that a
matrix product sums over. Both are dimension 1 of a weight turned to (output, input, kernel...), as `matrices` turns it.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bame_cli.errors import ConfigError, first_line
from bame_cli.formats.semi_structured import INSIDE
from bame_cli.sparsity.pattern import Pattern

# The lowest that the dynamo exporter writes for every operation, and the highest that it was tried with.
OPSETS = range(18, 24)
_PRODUCTS = ("Conv", "Gemm", "MatMul")


def write(
    network: nn.Module,
    path: Path,
    *,
    image_shape: tuple[int, int, int],
    opset: int,
    weights: Mapping[str, Tensor],
    patterns: Mapping[str, Pattern],
    about: Mapping[str, str],
) -> None:
    """Write a network on the CPU, from `images` (any batch, float32) to `scores`, checked by onnx.

    weights, patterns: by the names that sparse weights shall have in the file. Raises ConfigError when the exporter
    cannot write the network, or a sparse weight is not found in what it wrote.
    """
    onnx = _package("onnx")
    made = _exported(network, image_shape, opset)
    _rename(made, _written(matrices(made), weights, patterns))
    told = {**about, "patterns": json.dumps({name: str(pattern) for name, pattern in patterns.items()})}
    onnx.helper.set_model_props(made, told)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_bytes(made.SerializeToString())
    try:
        onnx.checker.check_model(str(aside), full_check=True)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _exported(network: nn.Module, image_shape: tuple[int, int, int], opset: int) -> Any:
    """The ModelProto that torch makes of a network."""
    _package("onnxscript")
    example = torch.randn(2, *image_shape)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network.eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["scores"],
                opset_version=opset,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # whatever a model makes torch.export or the exporter raise
        raise ConfigError(f"format=onnx: torch cannot export this model ({first_line(error)})") from error
    made: Any = program.model_proto if program else None
    written = {entry.domain: entry.version for entry in made.opset_import}.get("")
    if written != opset:
        raise ConfigError(f"format=onnx opset={opset}: the exporter could only write opset {written}")
    return made


def _written(found: Mapping[str, Tensor], own: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, str]:
    """Initializer -> the sparse weight in it: of its name, or, where the exporter renamed it, with its zeros."""
    left = {key.removeprefix(f"{INSIDE}."): (key, tensor) for key, tensor in found.items()}
    names = {left.pop(name)[0]: name for name in patterns if name in left}
    for name in [name for name in patterns if name not in names.values()]:
        dropped = own[name] == 0
        like = [key for key, (_, w) in left.items() if w.shape == dropped.shape and not w[dropped].any()]
        if not like:
            raise ConfigError(f"format=onnx: {name} is not among the weights that the exporter wrote")
        names[left.pop(like[0])[0]] = name
    return names


def _rename(model: Any, names: Mapping[str, str]) -> None:
    """Give initializers other names, wherever they are used."""
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(given, given) for given in node.input]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights by name, turned to (output, input, kernel...), and metadata. ConfigError for what is no ONNX file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        model = _package("onnx").load(str(path))
    except ConfigError:
        raise
    except Exception as error:  # protobuf, onnx and the system each raise their own
        raise ConfigError(f"{path} is no ONNX file ({first_line(error)})") from error
    if not model.graph.node:
        raise ConfigError(f"{path} is no ONNX file: it has no graph")
    return matrices(model), {entry.key: entry.value for entry in model.metadata_props}


def matrices(model: Any) -> dict[str, Tensor]:
    """Every constant that a convolution or matrix product multiplies with, turned to (output, input, kernel...)."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {output: node for node in model.graph.node for output in node.output}
    found = dict[str, Tensor]()
    for node in model.graph.node:
        if node.op_type in _PRODUCTS:
            for name, tensor in _operands(node, stored, makers):
                found.setdefault(name, tensor)
    return found


def _operands(node: Any, stored: Mapping[str, Any], makers: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    flags = {attribute.name: attribute.i for attribute in node.attribute}
    for place, given in enumerate(node.input[:2]):
        constant = _constant(given, stored, makers)
        if constant is None:
            continue
        name, tensor = constant
        if node.op_type == "Conv":
            yield name, tensor
        elif tensor.dim() == 2:
            # A product sums over the columns of its left operand and the rows of its right one.
            summed_first = bool(flags.get("transA", 0)) if place == 0 else not flags.get("transB", 0)
            yield name, tensor.T.contiguous() if summed_first else tensor


def _constant(name: str, stored: Mapping[str, Any], makers: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    """The constant behind a value and its name, through transpositions and casts; None for what is computed."""
    helper = _package("onnx").numpy_helper
    if name in stored:
        return name, torch.from_numpy(helper.to_array(stored[name]).astype("float32"))
    node = makers.get(name)
    attributes = {attribute.name: attribute for attribute in node.attribute} if node else {}
    if node and node.op_type == "Constant" and "value" in attributes:
        return name, torch.from_numpy(helper.to_array(attributes["value"].t).astype("float32"))
    if node is None or node.op_type not in ("Transpose", "Identity", "Cast"):
        return None
    behind = _constant(node.input[0], stored, makers)
    if behind is None or node.op_type != "Transpose":
        return behind
    turned = tuple(attributes["perm"].ints) if "perm" in attributes else tuple(reversed(range(behind[1].dim())))
    return behind[0], behind[1].permute(turned).contiguous()


class Session(nn.Module):
    """An ONNX file run by ONNX Runtime on the CPU, from images to scores. Raises ConfigError if it cannot be run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        runtime = _package("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own classes, one per cause
            raise ConfigError(f"{path}: ONNX Runtime cannot run it ({first_line(error)})") from error
        given = self.session.get_inputs()
        if len(given) != 1 or given[0].type != "tensor(float)":
            raise ConfigError(f"{path}: a network here takes one input, float32 images")
        self.path, self.name, self.image_shape = path, given[0].name, tuple(given[0].shape[1:])
        self.classes = tuple(self.session.get_outputs()[0].shape[1:])

    def forward(self, images: Tensor) -> Tensor:
        try:
            scores = self.session.run(None, {self.name: images.contiguous().numpy()})[0]
        except Exception as error:  # a batch or an image of another size than the file was made for, above all
            raise ConfigError(f"{self.path}: ONNX Runtime cannot run it ({first_line(error)})") from error
        return torch.from_numpy(scores)


def demand_packages() -> None:
    """Raise ConfigError when a package that ONNX needs is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _package(name)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"ONNX needs the package {name}: pip install 'bame-cli[onnx]'") from error
