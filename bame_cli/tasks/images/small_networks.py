"""The networks for small images that timm lacks, registered with timm."""

from __future__ import annotations

from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F


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
        "resnet8_cifar": _cfg("conv1", "fc"),
        "resnet20_cifar": _cfg("conv1", "fc"),
        "resnet32_cifar": _cfg("conv1", "fc"),
        "resnet56_cifar": _cfg("conv1", "fc"),
        "resnet18_cifar": _cfg("conv1", "fc"),
        "resnet50_cifar": _cfg("conv1", "fc"),
        "mobilenetv2_cifar": _cfg("conv_stem", "classifier"),
    }
)


REGISTERED = {name.split(".")[0] for name in default_cfgs}
"""The names that timm knows only where this module is imported."""


@register_model
def resnet8_cifar(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """0.08 M parameters at width 16: small enough to study methods on a CPU."""
    return build_model_with_cfg(CifarResNet, "resnet8_cifar", pretrained, depth=8, **kwargs)


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
