"""The one door to timm's models."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
import warnings as python_warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from torch import nn

from bame_cli.errors import ConfigError, first_line, near_misses
from bame_cli.tasks.images.small_networks import REGISTERED

# An ImageNet stem halves the image twice before the first block; below this size little is left of it.
_SMALL = 64
TIMM_VERSION: str = timm.__version__


def create(
    name: str,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    pretrained: bool = False,
    width: int | None = None,
    args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Any timm image classifier for images of (channels, height, width), on torch's default device.

    Raises ConfigError for an unknown name (near misses named), an option the model does not take, or weights that
    cannot be had.
    """
    options = dict(args or {}) | ({} if width is None else {"width": width})
    if _config(name).get("fixed_input_size"):
        options.setdefault("img_size", image_shape[1])
    options |= {"num_classes": num_classes, "in_chans": image_shape[0]}
    try:
        if pretrained and _offline():
            huggingface_hub.constants.HF_HUB_OFFLINE = True  # the cache or nothing, without minutes of retries
        return timm.create_model(name, pretrained=pretrained, **options)
    except (TypeError, AssertionError, ValueError, OSError, RuntimeError) as error:
        if pretrained and not isinstance(error, TypeError):
            raise ConfigError(
                f"model.pretrained: no weights for {name} ({first_line(error)}); "
                "model.checkpoint=<file> loads weights you already have"
            ) from error
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ConfigError(f"model={name} cannot be built with {given}: {first_line(error)}") from error


def skeleton(name: str, *, image_shape: tuple[int, int, int], **options: Any) -> nn.Module:
    """The model on the meta device: shapes without memory. Raises ConfigError when images do not fit it."""
    with torch.device("meta"):
        model = create(name, image_shape=image_shape, **options | {"pretrained": False})
        try:
            with torch.no_grad():
                model.eval()(torch.empty(2, *image_shape))
        except Exception as error:
            wants = _config(name).get("input_size", (0, 0, 0))[-1]
            hint = f"; it was made for dataset.image_size={wants}" if wants else ""
            size = f"{image_shape[1]}x{image_shape[2]}"
            raise ConfigError(f"images of {size} do not fit {name}: {first_line(error)}{hint}") from error
    return model.train()


def _config(name: str) -> dict[str, Any]:
    """What timm knows of a model. Raises ConfigError when it knows nothing."""
    base = name.split(".")[0]
    if not timm.is_model(base):
        raise ConfigError(f"model={name}: timm knows no such model{near_misses(base, timm.list_models())}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = [full for full in timm.list_pretrained(f"{base}.*") if full.startswith(f"{base}.")]
        raise ConfigError(f"model={name}: no such weights; there are {', '.join(tags) or 'none'}") from error
    return config.to_dict() if config else {}


def _offline() -> bool:
    """Whether the model hub cannot be reached; behind a proxy we cannot tell, and say no."""
    if urllib.request.getproxies():
        return False
    host = urllib.parse.urlparse(huggingface_hub.constants.ENDPOINT).hostname
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return True
    return False


def synchronized(model: nn.Module) -> nn.Module:
    """The model with batch statistics taken over all ranks (timm's conversion, which knows its fused layers)."""
    converted: nn.Module = timm.layers.convert_sync_batchnorm(model)
    return converted


def warnings(name: str, image_size: int) -> list[str]:
    """What a user should know about a model on images of this size."""
    base = name.split(".")[0]
    if image_size >= _SMALL or base in REGISTERED or _config(name).get("fixed_input_size"):
        return []
    instead = f"; {base}_cifar has a stem for small images" if timm.is_model(f"{base}_cifar") else ""
    return [f"{name} has an ImageNet stem: of {image_size}x{image_size} images it leaves little{instead}"]


def always_dense(model: nn.Module) -> dict[str, str]:
    """Module names that stay dense by default, with the reason: timm says which are the stem and the classifier."""
    config = getattr(model, "pretrained_cfg", {})
    named = {"stem": config.get("first_conv"), "classifier": config.get("classifier")}
    return {name: why for why, names in named.items() for name in _as_tuple(names)}


def timm_config(model: nn.Module) -> dict[str, Any]:
    """What timm knows of a model that it built."""
    config: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or {})
    return config


def is_ours(name: str) -> bool:
    """Whether timm knows this model only where this module is imported."""
    return name.split(".")[0] in REGISTERED


def load_weights(model: nn.Module, path: Path, key: str = "model.checkpoint=") -> list[str]:
    """Load a checkpoint file into `model`; returns what the user should know. key: what errors call the path by.

    A classifier of another size is left freshly initialized. Raises ConfigError for anything else that does not fit.
    """
    if not path.is_file():
        raise ConfigError(f"{key}{path}: no such file")
    try:
        with python_warnings.catch_warnings():
            python_warnings.simplefilter("ignore")  # of an old pickle: it is read safely or not at all
            state = timm.models.load_state_dict(str(path), use_ema=False, device="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{key}{path} is no checkpoint we can read: {first_line(error)}") from error
    own = model.state_dict()
    heads = tuple(f"{name}." for name, why in always_dense(model).items() if why == "classifier")
    replaced = [k for k, v in state.items() if k.startswith(heads) and k in own and v.shape != own[k].shape]
    state = {k: v for k, v in state.items() if k not in replaced}
    wrong = [k for k, v in state.items() if k not in own or v.shape != own[k].shape]
    wrong += [k for k in own if k not in state and k not in replaced]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{key}{path} does not fit this model: {', '.join(wrong[:3])}{more}")
    model.load_state_dict(state, strict=False)
    return [f"classifier {', '.join(replaced)} has another size: initialized anew"] if replaced else []


def weights_tag(name: str) -> str:
    """The full name, tag included, of the weights that `pretrained` loads: timm's default tag may change."""
    config = _config(name)
    return f"{config.get('architecture', name)}.{config['tag']}" if config.get("tag") else name


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) and names else tuple(names or ())
