"""What a dense run would need too: models, data, optimizer, schedule, checkpoints."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from bame_cli.errors import ConfigError
from bame_cli.tasks.images import data, models
from bame_cli.tasks.images.batches import Look
from bame_cli.training import optim
from bame_cli.training.checkpoint import Checkpoints
from bame_cli.training.distributed import Ranks
from bame_cli.training.loop import evaluate

GREY = Look(None, [0.5], [0.25])
COLOUR = Look(None, [0.5] * 3, [0.25] * 3)


# --- models ---


@pytest.mark.parametrize(
    ("name", "width", "millions"),
    [
        ("resnet20_cifar", 16, 0.27),
        ("resnet32_cifar", 16, 0.46),
        ("resnet32_cifar", 32, 1.85),
        ("resnet56_cifar", 16, 0.85),
        ("mobilenetv2_cifar", None, 2.24),
    ],
)
def test_cifar_networks_have_their_published_size(name, width, millions):
    model = models.skeleton(name, num_classes=10, image_shape=(3, 32, 32), width=width)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_a_cifar_stem_keeps_the_resolution():
    model = models.skeleton("resnet18_cifar", num_classes=10, image_shape=(3, 32, 32))
    assert model.conv1.kernel_size == (3, 3)
    assert model.conv1.stride == (1, 1)
    assert model.forward_features(torch.empty(1, 3, 32, 32, device="meta")).shape[-1] == 4


def test_small_images_on_an_imagenet_stem_are_warned_about():
    assert "resnet18_cifar" in models.warnings("resnet18", 32)[0]
    assert models.warnings("resnet18_cifar", 32) == []
    assert models.warnings("resnet18", 224) == []
    assert models.warnings("vit_tiny_patch16_224", 32) == [], "its patches follow the image"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("resnt50", {}, "did you mean 'resnet50'"),
        ("resnet18.nope", {}, "resnet18.a1_in1k"),
        ("resnet18", {"width": 3}, "width=3"),
        ("vit_tiny_patch16_224", {}, "dataset.image_size=224"),
    ],
)
def test_a_model_that_cannot_be_is_one_line(name, options, says):
    with pytest.raises(ConfigError) as caught:
        models.skeleton(name, num_classes=10, image_shape=(1, 8, 8), **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_classifier_of_another_size_is_replaced_and_said_so(tmp_path):
    source = models.create("resnet20_cifar", num_classes=7, image_shape=(1, 8, 8))
    torch.save(source.state_dict(), tmp_path / "w.pt")
    model = models.create("resnet20_cifar", num_classes=10, image_shape=(1, 8, 8))
    notes = models.load_weights(model, tmp_path / "w.pt")
    assert "fc.weight" in notes[0]
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_weights_that_do_not_fit_are_named(tmp_path):
    torch.save({"other": torch.ones(1)}, tmp_path / "w.pt")
    model = models.create("resnet20_cifar", num_classes=10, image_shape=(1, 8, 8))
    with pytest.raises(ConfigError, match="other"):
        models.load_weights(model, tmp_path / "w.pt")


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Bad:
        def __reduce__(self):
            return (print, ("this must not be printed",))

    (tmp_path / "w.pt").write_bytes(pickle.dumps(Bad()))
    model = models.create("resnet20_cifar", num_classes=10, image_shape=(1, 8, 8))
    with pytest.raises(ConfigError):
        models.load_weights(model, tmp_path / "w.pt")


# --- data ---


def write_fashion(folder, *, packed: bool) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 20)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            raw = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{part}-{name}"
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(raw))
            else:
                path.write_bytes(raw)


@pytest.mark.parametrize(("place", "packed"), [("", True), ("FashionMNIST/raw", False)])
def test_fashion_mnist_is_read_where_it_lies(tmp_path, place, packed):
    write_fashion(tmp_path / "d" / place, packed=packed)
    made = data.load("fashion_mnist", root=str(tmp_path / "d"), look=GREY, download=False)
    assert made.facts == data.Facts(30, 20, 10, (1, 28, 28))
    images, labels = next(made.val.eval_batches(20))
    assert images.shape == (20, 1, 28, 28)
    assert labels.dtype == torch.int64


def write_cifar(root, monkeypatch) -> None:
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {"data": random.integers(0, 256, (8, 3072), dtype=np.uint8), "labels": list(range(8))}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    # The files are ours, so their checksums are not the published ones.
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


def test_cifar_is_read_from_its_pickles(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch)
    made = data.load("cifar10", root=str(tmp_path), look=COLOUR, download=False)
    assert made.facts == data.Facts(40, 8, 10, (3, 32, 32))


def write_pictures(root, counts=(("train", 6), ("val", 3))) -> None:
    random = np.random.default_rng(0)
    for part, count in counts:
        for kind in ("cat", "dog"):
            folder = root / part / kind
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{i}.JPEG")


@pytest.mark.parametrize("name", ["imagenet", "image_folder"])
def test_folders_of_pictures(tmp_path, name):
    write_pictures(tmp_path)
    look = Look(32, [0.5] * 3, [0.25] * 3, flip=True)
    made = data.load(name, root=str(tmp_path), look=look, workers=0)
    assert made.facts == data.Facts(12, 6, 2, (3, 32, 32))
    assert sum(len(labels) for _, labels in made.val.eval_batches(4)) == 6, "the short last batch counts"


@pytest.mark.slow
def test_augmentation_does_not_depend_on_the_workers(tmp_path):
    write_pictures(tmp_path)
    look = Look(32, [0.5] * 3, [0.25] * 3, flip=True)
    epochs = []
    for workers in (0, 2):
        made = data.load("image_folder", root=str(tmp_path), look=look, workers=workers)
        epochs.append([list(made.train.train_batches(4, seed=1, epoch=e)) for e in range(2)])
    for one, other in zip(*epochs, strict=True):
        for (x, _), (y, _) in zip(one, other, strict=True):
            assert torch.equal(x, y)
    first, second = (torch.cat([x for x, _ in epoch]).sum((1, 2, 3)).sort().values for epoch in epochs[0])
    assert not torch.equal(first, second), "another epoch draws other crops"


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_an_epoch_goes_on_where_it_stopped(tmp_path, kind):
    if kind == "folder":
        write_pictures(tmp_path)
        made = data.load("image_folder", root=str(tmp_path), look=Look(32, [0.5], [0.2], flip=True), workers=0)
    else:
        made = data.load("synthetic", root="", look=Look(8, [0.5], [0.2], 2, True), train_size=20, val_size=4)
    whole = list(made.train.train_batches(4, seed=3, epoch=5))
    rest = list(made.train.train_batches(4, seed=3, epoch=5, start=2))
    assert len(rest) == len(whole) - 2
    for (x, a), (y, b) in zip(whole[2:], rest, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(a, b)


def test_every_training_image_comes_once_an_epoch_and_seeds_differ():
    made = data.load("synthetic", root="", look=Look(8, [0.5], [0.2]), train_size=20, val_size=4)
    seen = [torch.cat([x for x, _ in made.train.train_batches(5, seed=s, epoch=0)]) for s in (0, 1)]
    assert not torch.equal(seen[0], seen[1])
    sums = [x.sum((1, 2, 3)).sort().values for x in (*seen, torch.cat([x for x, _ in made.train.eval_batches(20)]))]
    assert torch.allclose(sums[0], sums[1])
    assert torch.allclose(sums[0], sums[2])


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_is_held_out_is_not_trained_on_and_is_no_validation_image(tmp_path, kind):
    if kind == "folder":
        write_pictures(tmp_path)
        plain, made = (
            data.load("image_folder", root=str(tmp_path), look=GREY, holdout=count, workers=0) for count in (None, 3)
        )
        trained, held = (set(split.samples) for split in (made.train, made.val))
        assert trained | held == set(plain.train.samples)
        assert not trained & held
    else:
        plain, made = (data.load("digits", root="", look=GREY, holdout=count) for count in (None, 100))
        together = torch.cat([made.train.images, made.val.images]).flatten(1).long().sum(1).sort().values
        assert torch.equal(together, plain.train.images.flatten(1).long().sum(1).sort().values)
        assert made.facts == data.facts("digits", look=GREY, holdout=100)
    assert len(made.train) + len(made.val) == len(plain.train)
    with pytest.raises(ConfigError, match=r"dataset\.holdout"):
        data.load("digits", root="", look=GREY, holdout=5000)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_ranks_share_out_every_batch_and_every_validation_image(tmp_path, kind):
    if kind == "folder":
        write_pictures(tmp_path)
        look = Look(32, [0.5], [0.2], flip=True, auto_augment="rand-m9-mstd0.5-inc1")
        made = data.load("image_folder", root=str(tmp_path), look=look, workers=0)
    else:
        look = Look(8, [0.5], [0.2], 2, True)
        made = data.load("synthetic", root="", look=look, train_size=12, val_size=7)
    ranks = [Ranks(rank, 2) for rank in range(2)]
    whole = list(made.train.train_batches(4, seed=3, epoch=1))
    shares = [list(made.train.train_batches(4, seed=3, epoch=1, ranks=rank)) for rank in ranks]
    for (x, a), *parts in zip(whole, *shares, strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(a, torch.cat([part[1] for part in parts]))
    seen = [labels for rank in ranks for _, labels in made.val.eval_batches(3, ranks=rank)]
    assert sum(map(len, seen)) == len(made.val)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", "original"])
def test_a_policy_does_not_depend_on_the_workers(tmp_path, policy):
    write_pictures(tmp_path)
    look = Look(32, [0.5] * 3, [0.25] * 3, flip=True, auto_augment=policy)
    runs = []
    for workers in (0, 2):
        made = data.load("image_folder", root=str(tmp_path), look=look, workers=workers)
        runs.append([x for x, _ in made.train.train_batches(4, seed=1, epoch=0)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    plain = data.load("image_folder", root=str(tmp_path), look=Look(32, [0.5] * 3, [0.25] * 3, flip=True))
    assert not torch.equal(runs[0][0], next(plain.train.train_batches(4, seed=1, epoch=0))[0])


def test_images_are_resized_and_normalized():
    made = data.load("digits", root="", look=Look(16, [0.3], [0.4]))
    images, _ = next(made.val.eval_batches(10))
    assert images.shape == (10, 1, 16, 16)
    assert made.image_shape == (1, 16, 16)


def test_known_facts_are_those_of_the_data():
    """The bill is counted without opening a data set; it must not be counted for another one."""
    assert data.facts("digits", look=GREY) == data.load("digits", root="", look=GREY).facts


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "imagenet"])
def test_missing_data_say_where_they_were_looked_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr("bame_cli.tasks.images.arrays.DEBIAN", tmp_path / "nowhere")
    with pytest.raises(ConfigError) as caught:
        data.load(name, root=str(tmp_path / "none"), look=COLOUR, download=False)
    assert str(tmp_path / "none") in str(caught.value)
    assert "dataset.root=" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_download_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with pytest.raises(ConfigError, match="no route to host"):
        data.load("cifar10", root=str(tmp_path), look=COLOUR, download=True)


def test_options_of_made_up_data_do_not_apply_to_real_ones():
    with pytest.raises(ConfigError, match=r"dataset\.classes"):
        data.load("digits", root="", look=GREY, classes=3)


@pytest.mark.parametrize("batch", [7, 50, 53])
def test_accuracy_counts_every_image_once(batch):
    made = data.load("synthetic", root="", look=Look(8, [0.5], [0.2]), train_size=20, val_size=53)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
    images, labels = next(made.val.eval_batches(53))
    figures = evaluate(model, made.val.eval_batches(batch))
    assert figures["top1"] == 100 * int((model(images).argmax(1) == labels).sum()) / 53
    loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert figures["val_loss"] == pytest.approx(loss, rel=1e-5)


# --- optimizer and schedule ---


def test_the_learning_rate_rises_peaks_and_ends_at_its_least():
    p = torch.nn.Parameter(torch.ones(2, 2))
    schedule = optim.Schedule(torch.optim.SGD([p], lr=0.1), total_steps=50, warmup_steps=20, min_lr=0.001)
    rates = [schedule.set(step) for step in range(50)]
    assert rates[0] == 0
    assert rates[20] == max(rates) == pytest.approx(0.1)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.001)
    assert schedule.set(13) == rates[13], "a function of the step, whatever came before"


def test_no_weight_decay_on_biases_and_normalization():
    model = models.create("resnet20_cifar", num_classes=10, image_shape=(1, 8, 8))
    optimizer = optim.build_optimizer(model, name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    for group in optimizer.param_groups:
        assert all((p.dim() > 1) == (group["weight_decay"] > 0) for p in group["params"])
        assert group["nesterov"] is False


@pytest.mark.parametrize(("name", "args"), [("sgdd", {}), ("sgd", {"nope": 1})])
def test_a_wrong_optimizer_is_one_line(name, args):
    with pytest.raises(ConfigError, match=r"recipe\.optimizer"):
        optim.build_optimizer(torch.nn.Linear(2, 2), name=name, lr=0.1, momentum=0, weight_decay=0, args=args)


# --- checkpoints ---


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save({"step": 1})
    kept.save({"step": 2})
    kept.last.write_bytes(kept.last.read_bytes()[:50])
    state, note = kept.load()
    assert state == {"step": 1}
    assert "damaged" in note


def test_only_damaged_checkpoints_are_no_fresh_start(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save({"step": 1})
    kept.last.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="overwrite"):
        kept.load()


def test_without_checkpoints_there_is_nothing_to_load(tmp_path):
    assert Checkpoints(tmp_path).load() == (None, "")


def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    kept.save({"step": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="disk full"):
        kept.save({"step": 2})
    assert kept.load() == ({"step": 1}, "")
