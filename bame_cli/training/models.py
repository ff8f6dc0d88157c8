"""The one door to timm's models, and the CIFAR networks that timm lacks, registered with timm."""

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
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from bame_cli.errors import ConfigError, near_misses

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
                f"model.pretrained: no weights for {name} ({_first_line(error)}); "
                "model.checkpoint=<file> loads weights you already have"
            ) from error
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise ConfigError(f"model={name} cannot be built with {given}: {_first_line(error)}") from error


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
            raise ConfigError(f"images of {size} do not fit {name}: {_first_line(error)}{hint}") from error
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
    if image_size >= _SMALL or base in _OURS or _config(name).get("fixed_input_size"):
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
    return name.split(".")[0] in _OURS


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
        raise ConfigError(f"{key}{path} is no checkpoint we can read: {_first_line(error)}") from error
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- networks for small images that timm lacks ---


class CifarBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of He et al. 2016, section 4.2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2)
            )
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """ResNet-6n+2 for 32x32 images: a 3x3 stem, three stages of width, 2 width, 4 width (He et al. 2016)."""

    def __init__(self, depth: int, width: int = 16, num_classes: int = 10, in_chans: int = 3) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, 4 * width
        self.conv1 = nn.Conv2d(in_chans, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, (depth - 2) // 6, 1)
        self.layer2 = _stage(width, 2 * width, (depth - 2) // 6, 2)
        self.layer3 = _stage(2 * width, 4 * width, (depth - 2) // 6, 2)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, x: Tensor) -> Tensor:
        return self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.forward_features(x).mean((2, 3)))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = CifarBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(CifarBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


def _cfg(first_conv: str, classifier: str) -> dict[str, Any]:
    return {
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "fixed_input_size": False,
        "first_conv": first_conv,
        "classifier": classifier,
    }


default_cfgs = generate_default_cfgs(
    {
        "resnet20_cifar": _cfg("conv1", "fc"),
        "resnet32_cifar": _cfg("conv1", "fc"),
        "resnet56_cifar": _cfg("conv1", "fc"),
        "resnet18_cifar": _cfg("conv1", "fc"),
        "resnet50_cifar": _cfg("conv1", "fc"),
        "mobilenetv2_cifar": _cfg("conv_stem", "classifier"),
    }
)


_OURS = {name.split(".")[0] for name in default_cfgs}


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """0.27 M parameters at width 16."""
    return build_model_with_cfg(CifarResNet, "resnet20_cifar", pretrained, depth=20, **kwargs)


@register_model
def resnet32_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """0.46 M parameters at width 16, 1.85 M at width 32 (the wide one of Bi-Mask's code)."""
    return build_model_with_cfg(CifarResNet, "resnet32_cifar", pretrained, depth=32, **kwargs)


@register_model
def resnet56_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """0.85 M parameters at width 16."""
    return build_model_with_cfg(CifarResNet, "resnet56_cifar", pretrained, depth=56, **kwargs)


def _small_stem(variant: str, like: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """timm's ImageNet ResNet with a 3x3 stem of stride 1 and no max-pooling."""
    if pretrained:
        raise ValueError(f"there are no pretrained weights for {variant}")
    model: Any = timm.create_model(like, **kwargs)
    old = model.conv1
    model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, 1, 1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """timm's resnet18 with a stem for small images."""
    return _small_stem("resnet18_cifar", "resnet18", pretrained, kwargs)


@register_model
def resnet50_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """timm's resnet50 with a stem for small images."""
    return _small_stem("resnet50_cifar", "resnet50", pretrained, kwargs)


@register_model
def mobilenetv2_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """timm's mobilenetv2_100 (depthwise) with stem and second stage at stride 1; 2.24 M parameters for 10 classes."""
    if pretrained:
        raise ValueError("there are no pretrained weights for mobilenetv2_cifar")
    model: Any = timm.create_model("mobilenetv2_100", **kwargs)
    model.conv_stem.stride = model.blocks[1][0].conv_dw.stride = (1, 1)
    return model
