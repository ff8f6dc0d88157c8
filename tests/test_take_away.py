"""A network taken away: whatever the format, it is the run's network, and scores what the run logged."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from bame_cli import cli, formats
from bame_cli.errors import ConfigError
from bame_cli.formats import compressed, onnx_file, semi_structured
from bame_cli.formats.plain import read_weights, write_weights
from bame_cli.networks import finished, inference
from bame_cli.options import compose
from bame_cli.runs.plan import load_data
from bame_cli.sparsity.pattern import Pattern
from bame_cli.training.loop import evaluate

SYNTHETIC = ["dataset=synthetic", "dataset.train_size=64", "dataset.val_size=40", "recipe.batch_size=16"]
SYNTHETIC += ["recipe.epochs=2"]
SMALL_VIT = ["model=vit_tiny_patch16_224", "dataset.image_size=16", "+model.args.depth=2", "+model.args.patch_size=8"]
SMALL_VIT += ["+model.args.embed_dim=64", "+model.args.num_heads=2"]
RUNS = {
    "cnn": ["dataset.image_size=8"],
    "vit": [*SMALL_VIT, "recipe.eval_batch_size=16"],
    "timm": ["model=resnet10t", "dataset.image_size=32", "sparsity=1:16", "recipe.ema=0.9", "channels_last=true"],
    "mixed": [*SMALL_VIT, "+sparsity.overrides={*.fc1:1:4}"],
    "dense": ["dataset.image_size=8", "method=dense"],
}
FORMATS = [(run, how) for run in ("cnn", "vit", "timm") for how in formats.NAMES if how != "semi_structured"]
FORMATS += [("vit", "semi_structured"), ("mixed", "compressed"), ("dense", "safetensors"), ("dense", "onnx")]
FILES = {
    "safetensors": "safetensors",
    "onnx": "model.onnx",
    "semi_structured": "model.semi_structured.safetensors",
    "compressed": "model.compressed.safetensors",
}


def bame(*words: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(words))
    return left.value.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of finished runs by name, each trained when it is first asked for."""
    root = tmp_path_factory.mktemp("runs")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            torch.set_num_threads(1)
            assert bame("train", *SYNTHETIC, *RUNS[name], f"run.dir={root / name}") == 0
        return root / name

    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of a finished run, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda name: Path(shutil.copytree(trained(name), name))


def last_row(folder: Path) -> dict:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "top1" in row][-1]


def scores(source: inference.Source) -> torch.Tensor:
    """What a network makes of all validation images."""
    data = load_data(source.config)
    network, _ = inference.network(source, image_shape=data.image_shape, classes=len(data.classes))
    with torch.no_grad():
        return torch.cat([network(images) for images, _ in data.val.eval_batches(16)])


# --- eval ---


@pytest.mark.parametrize("name", ["cnn", "vit", "timm", "dense"])
def test_a_run_is_evaluated_as_it_logged(name, run, capsys):
    folder = run(name)
    capsys.readouterr()
    assert bame("eval", str(folder), "format=json") == 0
    row, logged = json.loads(capsys.readouterr().out), last_row(folder)
    assert (row["top1"], row["top5"], row["loss"]) == (logged["top1"], logged["top5"], logged["val_loss"])
    assert row["images"] == 40
    assert row["images_per_second"] > 0
    assert bame("eval", str(folder)) == 0
    assert capsys.readouterr().out.rstrip().endswith("the same")


def test_other_images_are_not_compared_with_the_run(run, capsys):
    folder = run("cnn")
    capsys.readouterr()
    assert bame("eval", str(folder), "dataset.val_size=7", "format=json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["images"] == 7
    assert row["logged"] is None


@pytest.mark.parametrize("name", ["net.pth", "net.safetensors"])
def test_a_checkpoint_of_timm_is_evaluated(name, run, capsys):
    run("cnn")
    model = timm.create_model("resnet10t", num_classes=10, in_chans=3)
    torch.save({"state_dict": model.state_dict()}, "net.pth")
    save_file(model.state_dict(), "net.safetensors")
    capsys.readouterr()
    words = ["dataset=synthetic", "dataset.val_size=30", "dataset.image_size=32"]
    assert bame("eval", name, "model=resnet10t", *words, "format=json") == 0
    row = json.loads(capsys.readouterr().out)
    data = load_data(compose.composed(words))
    assert row["loss"] == evaluate(model, data.val.eval_batches(256))["val_loss"]
    assert bame("eval", name, *words) == 2
    assert "model=<name>" in capsys.readouterr().err


class Malice:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_bad_files_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pickle.pth").write_bytes(pickle.dumps(Malice()))
    torch.save(Malice(), "torch.pth")
    for name in ("junk.pth", "junk.onnx", "junk.safetensors", "empty.onnx"):
        Path(name).write_text("" if name.startswith("empty") else "junk")
    save_file({"w": torch.ones(2, 2)}, "other.safetensors")
    torch.save(timm.create_model("resnet10t", num_classes=7).state_dict(), "seven.pth")
    data, model = ["dataset=synthetic"], ["model=resnet10t"]
    for words, says in [
        (["pickle.pth", *data, *model], "no checkpoint we can read"),
        (["torch.pth", *data, *model], "no checkpoint we can read"),
        (["junk.pth", *data, *model], "no checkpoint we can read"),
        (["junk.onnx", *data], "no ONNX file"),
        (["empty.onnx", *data], "no ONNX file"),
        (["junk.safetensors", *data], "no safetensors file"),
        (["other.safetensors", *data, *model], "does not fit"),
        (["seven.pth", *data, *model], "other classes"),
        (["other.safetensors", *data], "add model=<name>"),
        (["nothing", *data], "no such file or folder"),
        ([".", *data], "no model.safetensors"),
    ]:
        assert bame("eval", *words) == 2, words
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert not Path("pwned").exists()


def test_words_that_do_not_fit_the_network_are_one_line(run, capsys):
    cnn, vit = run("cnn"), run("vit")
    capsys.readouterr()
    for words, says in [
        ([str(cnn), "model=resnet18"], "says itself which network"),
        ([str(cnn), "method=bame"], "no place here"),
        ([str(cnn), "dataset=digits"], "on images of 3 channels"),
        ([str(cnn), "dataset.classes=7"], "tells 10 classes apart"),
        ([str(cnn), "dataset.val_size=7,8"], "one evaluation at a time"),
        ([str(vit), "dataset.image_size=32"], "does not fit"),
        ([], "bame eval <run"),
    ]:
        assert bame("eval", *words) == 2, words
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


# --- every format is the run's network ---


@pytest.mark.parametrize(("name", "how"), FORMATS)
def test_an_export_scores_what_the_run_logged(name, how, run, capsys):
    folder = run(name)
    before = (folder / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert bame("export", str(folder), f"format={how}") == 0
    logged, out = last_row(folder), capsys.readouterr().out
    assert f"top-1     {logged['top1']:.2f} % (the run's: {logged['top1']:.2f} %)" in out
    made = folder / "export" / FILES[how]
    assert bame("eval", str(made), "format=json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["format"] == how
    assert row["top1"] == logged["top1"]
    if how in ("safetensors", "compressed"):
        assert (row["top5"], row["loss"]) == (logged["top5"], logged["val_loss"])
    if name != "dense":
        assert bame("verify", str(made), "format=json") == 0
        checked = {row["name"]: row["pattern"] for row in json.loads(capsys.readouterr().out)}
        layers = json.loads((folder / "layers.json").read_text())
        assert checked == {row["name"]: row["pattern"] for row in layers if row["sparse"]}
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("cnn", ["format=onx"], "one of safetensors, onnx"),
        ("cnn", [], "one of safetensors, onnx"),
        ("cnn", ["format=semi_structured"], "a convolution"),
        ("timm", ["format=semi_structured"], "conv1.6.weight is 1:16"),
        ("mixed", ["format=semi_structured"], "fc1.weight is 1:4"),
        ("dense", ["format=semi_structured"], "is dense"),
        ("dense", ["format=compressed"], "is dense"),
        ("cnn", ["format=compressed", "float16=true"], "belongs to format=onnx"),
        ("cnn", ["format=onnx", "opset=9"], "opset=9: from 18"),
        ("cnn", ["format=onnx", "out=net.pt"], "ends in .onnx"),
        ("cnn", ["format=safetensors", "out=cnn", "overwrite=true"], "a run's own"),
        ("cnn", ["format=compressed", "out=cnn/model.safetensors", "overwrite=true"], "a run's own"),
        ("cnn", ["format=safetensors", "overwrite=yes"], "true or false"),
        ("cnn", ["format=safetensors", "sparsity=1:4"], "no place here"),
        ("vit", ["format=onnx", "dataset=digits"], "on images of 3 channels"),
        ("cnn", ["format=onnx", "dataset.image_size=16"], "proven on images of (3, 8, 8)"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(name, words, says, run, capsys):
    folder = run(name)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    capsys.readouterr()
    assert bame("export", str(folder), *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_only_a_finished_run_is_exported(tmp_path, monkeypatch, capsys):
    from bame_cli.training import loop

    monkeypatch.chdir(tmp_path)
    plain = loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda *a: (plain(*a), os.kill(os.getpid(), signal.SIGTERM))[0])
    assert bame("train", *SYNTHETIC, *RUNS["cnn"], "run.dir=cut") == 143
    capsys.readouterr()
    for verb in (["export", "cut", "format=onnx"], ["eval", "cut"], ["predict", "cut", "a.png"]):
        assert bame(*verb) == 2
        assert "is interrupted" in capsys.readouterr().err
    assert bame("export", "nowhere", "format=onnx") == 2
    assert "no run folder" in capsys.readouterr().err


def test_a_target_that_exists_is_left_alone(run, capsys):
    folder = run("cnn")
    Path("net.onnx").write_text("mine")
    Path("hub").mkdir()
    Path("hub/notes").write_text("mine")
    for words in (["format=onnx", "out=net.onnx"], ["format=safetensors", "out=hub"]):
        assert bame("export", str(folder), *words) == 2
        assert "overwrite=true" in capsys.readouterr().err
        assert bame("export", str(folder), *words, "overwrite=true", "verify=false") == 0
    assert Path("hub/notes").read_text() == "mine"
    assert bame("verify", "net.onnx") == 0


def test_a_run_made_again_loses_its_exports(run):
    folder = run("cnn")
    assert bame("export", str(folder), "format=compressed", "verify=false") == 0
    assert bame("train", *SYNTHETIC, *RUNS["cnn"], f"run.dir={folder}", "run.overwrite=true") == 0
    assert not (folder / "export").exists()


# --- safetensors, as timm and the hub see it ---


@pytest.fixture
def hub(run) -> Path:
    """The exported folder of a network that plain timm knows."""
    folder = run("timm")
    assert bame("export", str(folder), "format=safetensors", "out=hub", "verify=false") == 0
    return Path("hub")


def patched_hub(monkeypatch, folder: Path) -> None:
    def download(repo_id, filename, **_):
        assert repo_id == "somebody/net"
        return str(folder / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)


@pytest.mark.parametrize("door", ["checkpoint_path", "local-dir", "hf-hub"])
def test_plain_timm_loads_the_folder_and_scores_the_same(door, hub, monkeypatch):
    if door == "checkpoint_path":
        options = {"checkpoint_path": hub / "model.safetensors", "num_classes": 10, "in_chans": 3}
        model = timm.create_model("resnet10t", **options)
    elif door == "local-dir":
        model = timm.create_model(f"local-dir:{hub}", pretrained=True)
    else:
        patched_hub(monkeypatch, hub)
        model = timm.create_model("hf-hub:somebody/net", pretrained=True)
    source = inference.source(Path("timm"), [])
    model = model.to(memory_format=torch.channels_last)
    figures = evaluate(model, load_data(source.config).val.eval_batches(256))
    logged = last_row(Path("timm"))
    assert (figures["top1"], figures["val_loss"]) == (logged["top1"], logged["val_loss"])


def test_the_folder_says_how_pictures_are_shown(hub):
    model = timm.create_model(f"local-dir:{hub}", pretrained=True)
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (3, 32, 32)
    assert (list(data["mean"]), list(data["std"])) == ([0.5] * 3, [0.25] * 3)
    assert model.pretrained_cfg["label_names"] == [str(i) for i in range(10)]
    assert model.num_classes == 10
    settings = json.loads((hub / "config.json").read_text())
    assert settings["num_features"] == model.num_features


def test_options_of_the_model_travel_with_it(run):
    folder = run("vit")
    assert bame("export", str(folder), "format=safetensors", "verify=false") == 0
    model = timm.create_model(f"local-dir:{folder / 'export/safetensors'}", pretrained=True)
    assert len(model.blocks) == 2
    assert model.patch_embed.img_size == (16, 16)


def test_the_card_has_the_row_the_bill_and_the_licence(hub):
    text, result = (hub / "README.md").read_text(), json.loads(Path("timm/result.json").read_text())
    head = dict(line.split(": ", 1) for line in text.split("---")[1].strip().splitlines())
    assert head["license"] == "apache-2.0"
    assert head["library_name"] == "timm"
    cells = next(line for line in text.splitlines() if line.startswith("| resnet10t"))
    for value in ("1:16", f"{result['top1']:.2f}", f"{result['flops']['train_ratio']:.4f}"):
        assert f" {value} " in cells
    assert f"{result['flops']['train']:,} FLOPs" in text
    assert "import bame_cli" not in text, "plain timm knows this one"


def test_a_published_file_names_no_folder_of_this_machine(run):
    folder = run("cnn")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("root: data", "root: /home/somebody/secret"))
    assert bame("export", str(folder), "format=safetensors", "out=hub", "verify=false") == 0
    for path in Path("hub").iterdir():
        assert b"secret" not in path.read_bytes()
    assert "import bame_cli.tasks.images.models" in Path("hub/README.md").read_text()


def test_the_same_network_is_the_same_bytes(tmp_path):
    """An address is made of them; safetensors itself orders metadata anew each time."""
    weights, about = {"b": torch.arange(3.0), "a": torch.ones(2, 8)}, {str(key): f"é{key}" for key in range(20)}
    for name in "xyz":
        write_weights(tmp_path / name, weights, patterns={"a": Pattern(2, 4)}, about=about)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()
    read, metadata = read_weights(tmp_path / "x")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {n: t.tolist() for n, t in weights.items()}
    assert about.items() <= metadata.items()


# --- compressed ---


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(), (1, 1), (3, 2)]),
    st.one_of(st.integers(1, 17), st.sampled_from([255, 256, 257, 512])),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_compression_gives_back_every_bit(outputs, blocks, kernel, m, seed):
    torch.manual_seed(seed)
    pattern = Pattern(int(torch.randint(1, m + 1, ())), m)
    weight = torch.randn(outputs, blocks * m, *kernel)
    weight = torch.where(pattern.project(weight) & (torch.rand_like(weight) > 0.2), weight, 0.0)
    state = {"w": weight, "b": torch.randn(outputs), "count": torch.tensor(3)}
    tensors = compressed.encode(state, {"w": pattern})
    shapes = {name: tensor.shape for name, tensor in state.items()}
    back = compressed.decode(tensors, {"w": pattern}, shapes)
    assert list(back) == list(state)
    assert torch.equal(back["w"].view(torch.int32), weight.view(torch.int32))
    assert torch.equal(back["b"], state["b"])
    count = weight.numel() // m
    width = math.ceil(math.log2(m))
    if pattern.n < m:
        stored = sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith("w."))
        assert stored == 4 * count * pattern.n + math.ceil(count * min(m, pattern.n * width) / 8)


def test_the_compressed_file_holds_every_bit_of_the_run(run, capsys):
    folder = run("timm")
    assert bame("export", str(folder), "format=compressed", "out=small.safetensors", "verify=false") == 0
    whole, back = load_file(folder / "model.safetensors"), formats.read(Path("small.safetensors")).weights
    assert set(whole) == set(back)
    for name, tensor in whole.items():
        assert tensor.numpy().tobytes() == back[name].numpy().tobytes(), name
    assert Path("small.safetensors").stat().st_size < 0.08 * (folder / "model.safetensors").stat().st_size


def test_a_damaged_compressed_file_is_one_line(run, capsys):
    from safetensors import safe_open

    folder = run("cnn")
    assert bame("export", str(folder), "format=compressed", "out=small.safetensors", "verify=false") == 0
    with safe_open("small.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file("small.safetensors")
    tensors["layer1.0.conv1.weight.values"] = tensors["layer1.0.conv1.weight.values"][:5].clone()
    save_file(tensors, "small.safetensors", metadata)
    capsys.readouterr()
    assert bame("verify", "small.safetensors") == 2
    assert "layer1.0.conv1.weight: the compressed file is damaged" in capsys.readouterr().err


# --- semi-structured ---


def decoded(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """A dense matrix from CUTLASS's layout, entry by entry.

    An int16 of meta holds four blocks, four bits each: two positions of two bits. The element of (row, column) lies, in
    memory, where CUTLASS's `reorder_meta` puts it: rows are dealt out over groups of 32, 2x2 squares transposed, and
    pairs of columns are stored one after the other (ColumnMajorInterleaved<2>).
    """
    rows, half = packed.shape
    stored = (meta.flatten().to(torch.int64) & 0xFFFF).tolist()
    dense = torch.zeros(rows, 2 * half, dtype=packed.dtype)
    for row in range(rows):
        for column in range(half // 8):
            r, c = row // 32 * 32 + row % 8 * 4 + row % 32 // 8, column
            if r % 2 != c % 2:
                r, c = (r + 1, c - 1) if c % 2 else (r - 1, c + 1)
            word = stored[c // 2 * rows * 2 + r * 2 + c % 2]
            for block in range(4):
                bits = word >> 4 * block & 0xF
                for which, position in enumerate((bits & 3, bits >> 2)):
                    dense[row, 16 * column + 4 * block + position] = packed[row, 8 * column + 2 * block + which]
    return dense


@pytest.mark.parametrize("shape", [(32, 64), (64, 128), (96, 192)])
@pytest.mark.parametrize("fewer", [False, True], ids=["two of each block", "some blocks keep fewer"])
def test_the_packing_is_what_an_independent_decoder_reads(shape, fewer):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight = torch.where(semi_structured.PATTERN.project(weight), weight, 0.0)
    if fewer:
        weight[torch.rand(shape) < 0.5] = 0
    tensors = semi_structured.encode({"w": weight}, {"w": semi_structured.PATTERN})
    assert tensors["w.packed"].shape == (shape[0], shape[1] // 2)
    assert tensors["w.meta"].shape == (shape[0], shape[1] // 16)
    assert torch.equal(decoded(tensors["w.packed"], tensors["w.meta"]), weight.half())
    assert torch.equal(semi_structured.decode(tensors)["w"], weight.half().float())


def test_what_is_not_packed_has_a_reason():
    shapes = {"conv": (32, 64, 1, 1), "odd": (48, 64), "narrow": (32, 32), "good": (32, 64)}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    reasons = semi_structured.refusals(weights, dict.fromkeys(shapes, Pattern(2, 4)))
    assert reasons["good"] == ""
    assert "convolution" in reasons["conv"]
    assert "48 outputs are not a multiple of 32" in reasons["odd"]
    assert "32 inputs are not a multiple of 64" in reasons["narrow"]
    with pytest.raises(ConfigError, match="good is 1:4"):
        semi_structured.refusals(weights, {"good": Pattern(1, 4)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="sparse tensor cores are on CUDA devices, and there is none")
def test_a_semi_structured_network_runs_on_sparse_tensor_cores(run, capsys):
    folder = run("vit")
    assert bame("export", str(folder), "format=semi_structured", "out=net.safetensors", "verify=false") == 0
    source = inference.source(Path("net.safetensors"), ["device=cuda"])
    data = load_data(source.config, "cuda")
    network, _ = inference.network(source, image_shape=data.image_shape, classes=10)
    kinds = {type(p.data).__name__ for p in network.parameters() if p.dim() == 2}
    assert any("SparseSemiStructured" in kind for kind in kinds), kinds
    images, _ = next(data.val.eval_batches(16))
    with torch.no_grad():
        got = network(images).cpu()
    expected = scores(inference.source(folder, ["device=cpu"]))[: len(got)]
    assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


# --- ONNX ---


@pytest.mark.parametrize(("name", "float16"), [("cnn", False), ("vit", False), ("cnn", True), ("vit", True)])
def test_onnx_runtime_says_what_torch_says(name, float16, run):
    import onnx

    folder = run(name)
    words = ["format=onnx", "out=net.onnx", "opset=20", f"float16={str(float16).lower()}"]
    assert bame("export", str(folder), *words) == 0
    model = onnx.load("net.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {entry.version for entry in model.opset_import if entry.domain == ""} == {20}
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) > 1}
    assert kinds == {onnx.TensorProto.FLOAT16 if float16 else onnx.TensorProto.FLOAT}
    ours, theirs = scores(inference.source(folder, [])), scores(inference.source(Path("net.onnx"), []))
    assert (ours - theirs).abs().max() <= (2e-2 if float16 else 1e-4) * ours.abs().max()
    session = onnx_file.Session(Path("net.onnx"))
    size = 8 if name == "cnn" else 16
    for batch in (1, 3, 7):
        assert session(torch.randn(batch, 3, size, size)).shape == (batch, 10)


@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_sparse_initializers_are_n_of_m_along_the_summed_axis(name, run):
    """Read as the graph reads them: dimension 1 of a kernel, the first of a right operand unless it is transposed."""
    import onnx

    folder = run(name)
    assert bame("export", str(folder), "format=onnx", "out=net.onnx", "verify=false") == 0
    model = onnx.load("net.onnx")
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    sparse = {row["name"] for row in json.loads((folder / "layers.json").read_text()) if row["sparse"]}
    seen = set()
    for node in model.graph.node:
        if node.op_type in ("Conv", "MatMul", "Gemm") and node.input[1] in sparse:
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            axis = 1 if node.op_type == "Conv" or transposed else 0
            kept = np.moveaxis(values[node.input[1]] != 0, axis, -1)
            assert (kept.reshape(*kept.shape[:-1], -1, 4).sum(-1) == 2).all(), node.input[1]
            seen.add(node.input[1])
    assert seen == sparse


def test_a_weight_of_another_layout_is_turned():
    """Products written by hand: whichever operand, transposed by flag, by node, or not, in a Constant or not."""
    from onnx import TensorProto, helper, numpy_helper

    w = np.arange(12, dtype=np.float32).reshape(3, 4)  # 3 outputs, 4 inputs
    stored = {"right": w.T, "gemm_b": w, "gemm_n": w.T, "left": w, "left_t": w.T, "turned": w, "half": w.T}
    stored = {
        name: np.ascontiguousarray(value, np.float16 if name == "half" else np.float32)
        for name, value in stored.items()
    }
    constant = helper.make_node("Constant", [], ["const"], value=numpy_helper.from_array(np.ascontiguousarray(w.T)))
    nodes = [
        helper.make_node("MatMul", ["x", "right"], ["a"]),
        helper.make_node("Gemm", ["x", "gemm_b"], ["b"], transB=1),
        helper.make_node("Gemm", ["x", "gemm_n"], ["c"]),
        helper.make_node("MatMul", ["left", "y"], ["d"]),
        helper.make_node("Gemm", ["left_t", "y"], ["e"], transA=1),
        helper.make_node("Transpose", ["turned"], ["f"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "f"], ["g"]),
        helper.make_node("Cast", ["half"], ["h"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "h"], ["i"]),
        constant,
        helper.make_node("MatMul", ["x", "const"], ["j"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [2, 4]), ("y", [4, 2]))
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, [], tensors))
    found = onnx_file.matrices(model)
    assert set(found) == {*stored, "const"}
    for name, matrix in found.items():
        assert torch.equal(matrix, torch.from_numpy(w)), name


def test_verify_finds_the_block_that_breaks_in_an_onnx_file(run, capsys):
    import onnx

    folder = run("vit")
    assert bame("export", str(folder), "format=onnx", "out=net.onnx", "verify=false") == 0
    model = onnx.load("net.onnx")
    (tensor,) = (t for t in model.graph.initializer if t.name == "blocks.1.mlp.fc2.weight")
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[8:12, 5] = 1  # stored (input, output): inputs 8 to 11, block 2, of output 5
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, "broken.onnx")
    capsys.readouterr()
    assert bame("verify", "broken.onnx") == 1
    assert "at (output, block, kernel...) (5, 2), has 4 non-zeros" in capsys.readouterr().out
    del model.metadata_props[:]
    onnx.save(model, "foreign.onnx")
    assert bame("verify", "foreign.onnx") == 2
    assert bame("verify", "foreign.onnx", "pattern=2:4") == 1


def test_onnx_of_other_images_is_one_line(run, capsys):
    folder = run("cnn")
    assert bame("export", str(folder), "format=onnx", "out=net.onnx", "verify=false") == 0
    capsys.readouterr()
    for words, says in [(["dataset.image_size=16"], "made for images (3, 8, 8)"), (["device=cuda"], "on the CPU")]:
        assert bame("eval", "net.onnx", *words) == 2
        assert says in capsys.readouterr().err


def test_onnx_without_its_packages_says_what_to_install(run, monkeypatch, capsys):
    import sys

    folder = run("cnn")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert bame("export", str(folder), "format=onnx") == 2
    assert "pip install 'bame-cli[onnx]'" in capsys.readouterr().err


# --- verify ---


def test_verify_has_a_line_for_every_weight(run, capsys):
    folder = run("mixed")
    capsys.readouterr()
    assert bame("verify", str(folder)) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    layers = {row["name"]: row["pattern"] for row in json.loads((folder / "layers.json").read_text()) if row["sparse"]}
    assert {line.split()[0]: line.split()[1] for line in lines} == layers
    assert "against 1:4, 2:4: all obey" in last


def test_a_foreign_file_is_checked_in_either_convention(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(8, 16)
    weight = torch.where(Pattern(1, 4).project(weight), weight, 0.0)
    save_file({"w": weight, "head": torch.randn(3, 16)}, "w.safetensors")
    assert bame("verify", "w.safetensors", "pattern=1:4", "format=json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["density"]) == ("w", 0.25)
    assert bame("verify", "w.safetensors", "pattern=3:4", "convention=zeros") == 0
    assert "against 1:4" in capsys.readouterr().out
    weight[2, 4:8] = 1
    save_file({"w": weight}, "w.safetensors")
    assert bame("verify", "w.safetensors", "pattern=3:4", "convention=zeros") == 1
    assert "(2, 1), has 4 non-zeros" in capsys.readouterr().out
    for words in (["convention=zeros"], ["pattern=4:4", "convention=zeros"], ["pattern=1:4", "convention=other"]):
        assert bame("verify", "w.safetensors", *words) == 2
        assert "convention=" in capsys.readouterr().err


# --- predict ---


def test_a_validation_image_as_a_picture_gets_the_same_probabilities(run, capsys):
    """Pictures without loss, so that nothing but the way in differs."""
    folder = run("cnn")
    source = inference.source(folder, [])
    data = load_data(source.config)
    expected = scores(source).softmax(1)
    for index in range(3):
        Image.fromarray(data.val.images[index].permute(1, 2, 0).numpy()).save(f"{index}.png")
    capsys.readouterr()
    assert bame("predict", str(folder), "0.png", "1.png", "2.png", "format=json") == 0
    for index, row in enumerate(json.loads(capsys.readouterr().out)):
        best = expected[index].topk(5)
        assert row["picture"] == f"{index}.png"
        assert [entry["class"] for entry in row["classes"]] == [data.classes[i] for i in best.indices]
        assert [entry["probability"] for entry in row["classes"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert bame("predict", str(folder), "0.png") == 0
    assert f"0.png  {data.classes[expected[0].argmax()]} {100 * expected[0].max():.1f} %" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["onnx", "compressed"])
def test_pictures_of_any_kind_are_taken_by_any_format(how, run, capsys):
    folder = run("cnn")
    assert bame("export", str(folder), f"format={how}", "verify=false") == 0
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    Image.fromarray(noise, "RGBA").save("a=b.png")
    Image.fromarray(noise[..., 0], "L").save("grey.jpg")
    capsys.readouterr()
    assert bame("predict", str(folder / "export" / FILES[how]), "a=b.png", "grey.jpg", "format=json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["picture"] for row in made] == ["a=b.png", "grey.jpg"]
    for row in made:
        probabilities = [entry["probability"] for entry in row["classes"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1 + 1e-6


def test_what_is_no_picture_is_one_line(run, capsys):
    folder = run("cnn")
    Path("text.png").write_text("text")
    capsys.readouterr()
    for words, says in [
        (["text.png"], "text.png cannot be read as a picture"),
        (["none.png"], "no such file"),
        (["."], "cannot be read as a picture"),
        ([], "no picture to look at"),
    ]:
        assert bame("predict", str(folder), *words) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


# --- a picture of weights ---


def test_weights_are_drawn(run, capsys):
    folder = run("timm")
    capsys.readouterr()
    assert bame("plot", "weights", f"run={folder}") == 0
    made = Path(capsys.readouterr().out.strip())
    assert made.parent == folder / "plots"
    assert made.read_bytes().startswith(b"\x89PNG")
    assert bame("plot", "weights", f"run={folder}", "layer=layer1.0.conv1", "out=one.svg") == 0
    assert "<svg" in Path("one.svg").read_text()


def test_a_drawing_shows_what_is_zero(tmp_path):
    """Of a checkerboard, half the cells are grey, and frames stand at the blocks."""
    from bame_cli.plots.run import weights

    values = np.indices((8, 16)).sum(0) % 2 * 1.0
    weights(values, tmp_path / "w.png", name="w", pattern=(2, 4))
    pixels = np.asarray(Image.open(tmp_path / "w.png").convert("RGB")).reshape(-1, 3)
    grey, red = ((pixels == np.array(colour)).all(1).sum() for colour in ((208, 208, 208), (103, 0, 31)))
    assert 0.8 < grey / red < 1.25


def test_a_layer_that_is_not_there_is_one_line(run, capsys):
    folder, dense = run("cnn"), run("dense")
    capsys.readouterr()
    for words, says in [
        ([f"run={folder}", "layer=layer1.0.conv3"], "did you mean 'layer1.0.conv"),
        ([f"run={dense}"], "is dense"),
        ([f"run={folder}", "out=w.gif"], ".png, .svg or .pdf"),
        ([], "bame plot weights run="),
    ]:
        assert bame("plot", "weights", *words) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


def test_a_run_says_what_a_file_needs(run):
    about = finished.read_run(run("vit")).about
    assert json.loads(about["dataset_options"])["image_size"] == 16
    assert json.loads(about["eval_batch_size"]) == 16
    assert json.loads(about["top1"]) == last_row(Path("vit"))["top1"]
