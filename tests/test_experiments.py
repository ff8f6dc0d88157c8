"""Every shipped experiment, run from end to end on a few images in the format of its real data."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from commands import bame, result
from PIL import Image
from test_training import write_cifar, write_fashion

from bame_cli.options import compose

EXPERIMENTS = sorted(f.name.removesuffix(".yaml") for f in (files("bame_cli.conf") / "experiment").iterdir())
# Of the recipe only what is long is cut; everything else is as shipped.
SHORT = ["recipe.epochs=1", "recipe.warmup_epochs=0", "recipe.batch_size=8", "dataset.root=data", "dataset.workers=2"]
EXTRA = {"digits": ["dataset.train_size=64", "dataset.val_size=32"], "fashion_mnist": ["dataset.download=false"]}


pytestmark = pytest.mark.usefixtures("empty_folder")


def write_imagenet(root: Path) -> None:
    """Folders of JPEGs as ImageNet's archives unpack: wordnet names, pictures of different sizes, one in grey."""
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for kind in ("n01440764", "n01443537"):
            (root / part / kind).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (240 + i, 300, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).convert("L" if i == 0 else "RGB")
                picture.save(root / part / kind / f"{kind}_{i}.JPEG")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_on_files_of_its_format(name, monkeypatch):
    dataset = compose.composed([f"experiment={name}"]).dataset.name
    if dataset == "imagenet":
        write_imagenet(Path("data"))
    elif dataset == "cifar10":
        write_cifar(Path("data"), monkeypatch)
    elif dataset == "fashion_mnist":
        write_fashion(Path("data/FashionMNIST/raw"), packed=True)
    words = [f"experiment={name}", *SHORT, *EXTRA.get(dataset, []), "method=srste", "sparsity=1:4", "run.dir=run"]
    assert bame("train", *words) == 0
    made = result("run")
    assert made["dataset"] == dataset
    assert made["steps"] == made["flops"]["images"] // 8 > 0
    assert made["sparsity"]["verified"]
    assert Path("run/plots/curves.png").read_bytes().startswith(b"\x89PNG")
