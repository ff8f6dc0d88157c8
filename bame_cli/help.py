"""What the verbs say when asked for help."""

from __future__ import annotations

from bame_cli import __version__

BAME = f"""bame {__version__}: train N:M structured-sparse networks, with an honest bill of FLOPs

usage: bame <verb> [key=value ...]

  train    train a network: bame train model=resnet50 sparsity=1:16
  layers   which layers would be sparse, and why the others not: bame layers model=resnet50 sparsity=1:16
  flops    what methods would cost in training FLOPs: bame flops model=resnet50 dataset=imagenet sparsity=1:16
  table    what a table's runs came to, beside published figures: bame table methods_small scale=smoke
  runs     what is in outputs/, and what sets two runs apart: bame runs status=failed
  report   a table as one HTML page: its pictures, every run's configuration: bame report methods_small scale=smoke
  plot     a table's pictures, how masks evolved, what weights look like: bame plot masks run=<run folder>
  verify   check every block of a saved network: bame verify <run folder or file>
  eval     top-1, top-5, loss and speed of a run, an export or a timm checkpoint: bame eval <run folder or file>
  predict  the classes of pictures: bame predict <run folder or file> <pictures...>
  export   a finished run as a file that others read: bame export <run folder> format=onnx
  bench    measure methods against dense training: bame bench model=resnet50 sparsity=1:16

  bame <verb> --help says what a verb takes.

N:M keeps N of every M consecutive inputs: 1:16 keeps 1 of 16 and is 93.75 % sparse.
Exit codes: 0 done, 1 a run failed or a check did not hold, 2 the command is wrong, 130/143 interrupted (resumable).
"""

LAYERS = """bame layers [key=value ...] [format=text|json]

Prints which weights would be N:M sparse, and why the others stay dense. Trains nothing, needs no data.

  bame layers model=resnet50 dataset=imagenet sparsity=1:16
  bame layers model=vit_small_patch16_224 dataset=imagenet sparsity=2:4 'sparsity.exclude=["*.attn.*"]'
  bame layers sparsity=2:4,1:16 format=json

Takes every option of `bame train`; lists of patterns, models and methods need no -m.
"""

FLOPS = """bame flops [key=value ...] [format=text|md|csv|json] [per_layer=true] [plot=file.png]
bame flops run=<run folder> [format=...]

What each method would cost, counted from shapes and schedules: no training, no data, no GPU. FLOPs are 2 x
multiply-accumulates. `forward` columns are one image; `training` and its three products are the whole recipe.

  bame flops model=resnet50 dataset=imagenet sparsity=1:16            all methods side by side
  bame flops model=resnet50 dataset=imagenet sparsity=2:4,1:4,1:16 method=bame,srste
  bame flops model=deit_small_patch16_224 dataset=imagenet method=srste per_layer=true
  bame flops model=resnet50 dataset=imagenet sparsity=1:16 plot=bills.png
  bame flops run=outputs/digits/...                                   a finished run, charged in other conventions

Takes every option of `bame train`; lists need no -m. `÷ dense, grad_input dense` charges that product at 1, as
hardware without transposable masks would. `flops.skip_first=true` leaves out the first layer's input gradient.
"""

VERIFY = """bame verify <run folder or file> [pattern=N:M] [convention=kept|zeros] [format=text|json]

Checks every block of every sparse weight of a run, of a safetensors or ONNX file, ours or not. A line per weight: its
pattern, its density, and the first block that has more than N non-zeros. Exit code 1 when there is one.
A file of ours says itself which weights are sparse; `pattern` checks another file, or against another pattern: every
weight of two or four dimensions whose inputs are a multiple of M, and that has zeros at all. `convention=zeros` reads
that pattern as some papers and tools write it, N zeros of M: 3:4 is then our 1:4.
"""

EVAL = """bame eval <run folder, export or checkpoint> [dataset=...] [dataset.*=...] [model=...] [format=text|json]

Top-1, top-5, loss and images a second on the validation images. A run and its exports say themselves which network they
are and how its images are read; a run's own figures stand beside. A checkpoint of timm's needs model= and dataset=.
Checkpoints are loaded safely: a pickle that holds more than tensors is refused.

  bame eval outputs/digits/...                                  the run's final network, on the run's own data
  bame eval net.onnx dataset.root=/data/imagenet                an export, on images that lie elsewhere
  bame eval resnet18.pth model=resnet18 dataset=imagenet        a checkpoint

Also takes device=, channels_last=, recipe.eval_batch_size= and, for a checkpoint, model.* as `bame train` does.
"""

PREDICT = """bame predict <run folder, export or checkpoint> <pictures...> [format=text|json]

The five likeliest classes of each picture, with their probabilities. A picture is made grey or coloured, scaled and cut
to the network's images as validation images are. A checkpoint of timm's needs model= and dataset=, and its classes are
numbers.

  bame predict outputs/image_folder/... cat.jpg dog.png
"""

EXPORT = """bame export <run folder> format=safetensors|onnx|semi_structured|compressed [out=...] [overwrite=true]

Writes the final network of a finished run into <run folder>/export, or to `out`, reads it back, checks every block, and
evaluates it on the run's validation images (verify=false leaves that out). Exit code 1 when a check does not hold.

  safetensors       a folder that timm and the Hugging Face hub load: weights, config.json, a model card with the bill
                    (license=apache-2.0 is what the card says)
  onnx              float32, or float16 inside (float16=true); opset=18; any batch; scores compared with torch's
  compressed        the values of every block and where they stand: the size on disk of an N:M network
  semi_structured   2:4 alone: weights of linear layers as torch keeps them for sparse tensor cores, in float16

  bame export outputs/digits/... format=onnx
  bame export outputs/imagenet/... format=safetensors out=hub verify=false

ONNX needs more packages: pip install 'bame-cli[onnx]'. Options of the evaluation may follow, dataset.root= above all.
"""

TABLE = """bame table <name> [scale=paper|small|smoke] [format=<format>] [against=<row>] [kept=file] [strict=true]

What the runs of a table came to: top-1 as mean ± standard deviation (runs), training and inference FLOPs against dense,
beside published figures with their sources. Reads result.json files only; the same runs give the same bytes.
against=SR-STE adds by how many points each row leads that one: mean and standard error of the differences seed by seed.
Formats: text, md, latex, csv, json, and jsonl, which is a line per run with all that its result says. root= says where
the runs are, outputs unless given; out= writes to a file. kept=<file of such lines>: its finished runs stand in for
those that are not finished here, and `bame train +table=<name> kept=<file>` trains the others alone.

  bame train +table=methods_small scale=smoke         makes the runs: finishes them, or finds them finished
  bame table methods_small scale=smoke format=md against=SR-STE
  bame table imagenet_resnet50 format=latex out=table.tex

Tables: see conf/table/, or the path of a file of your own like those. The difference to a published figure is taken at
scale=paper alone. Runs of different recipes never share a line. Runs that failed, diverged or are missing are listed;
strict=true leaves with exit code 1 when there are any.
"""

REPORT = """bame report <table> [scale=paper|small|smoke] [root=outputs] [kept=file] [out=file.html]

One page that opens without a network: the table (a click on a head sorts it), what is not finished, the pictures, every
run's configuration, result and curve, and the environments they were computed in. Beside the table's manifest, unless
`out` names another file; its pictures are in a folder of the same name.

  bame report methods_small scale=smoke
"""

RUNS = """bame runs [root=outputs] [status=] [method=] [dataset=] [model=] [pattern=] [seed=] [format=text|json]
bame runs diff <run folder> <run folder> [format=text|json]

Every run below a folder: status, whether the same command would go on with it, top-1, training FLOPs against dense, how
long ago it last wrote. A filter takes several values: status=failed,diverged; status=resumable is one too.
`diff` shows the options in which two runs differ.
"""

PLOT = """bame plot <table> [scale=paper|small|smoke] [root=outputs] [kept=file] [out=folder]
bame plot masks run=<run folder> [out=file.png]
bame plot weights run=<run folder or file> [layer=<name>] [out=file.png]

Of a table: top-1 against training FLOPs (Pareto front, error bars over seeds), top-1 against density, and training by
FLOPs instead of epochs; PNG and SVG, beside the table's manifest unless `out` names another folder.

  bame plot methods_small scale=smoke

masks: how a run's masks evolved, for a run trained with log.masks_every=<steps>: the share of blocks whose mask
changed, by layer and time; how many blocks changed how often; and which blocks of the most restless layer froze when.
weights: one sparse weight of a finished run or an export, the largest unless named; dropped weights are grey.

  bame train log.masks_every=25 run.dir=here
  bame plot masks run=here
  bame plot weights run=here layer=layer2.0.conv1
"""

BENCH = """bame bench [key=value ...] [methods=a,b] [parts=...] [size=64] [batch=16] [rounds=7] [format=text|json]

Ratios to dense training, interleaved in one process, medians with their spread. parts, by default the first three:

  steps        a training step of each method: forward, backward, method, optimizer, in dense steps
  method       the method's own work over one interval of its own, in copies of the sparse weights, in nanoseconds per
               weight (and, with steps, in dense steps); bytes that it holds per sparse weight
  projection   all masks of the model, against sorting and against a plain copy
  checkpoint   saving and loading, in dense steps
  loop         an epoch of `bame train` on the data set against a bare loop; reading images and building the run, too
  memory       peak memory of each method (of a process of its own on a CPU)

Takes the options of `bame train`: model, sparsity, amp, channels_last, device, options of the named methods. Steps are
bare: compile, averages of weights and what is done to images and labels are left out.

  bame bench model=resnet50 sparsity=1:16
  bame bench model=resnet50 sparsity=2:4 size=128 batch=32 methods=static,bame parts=steps,memory
"""


def train() -> str:
    """What `bame train` takes: its groups, and every option with its default."""
    from importlib.resources import files

    from bame_cli.options import compose
    from bame_cli.studies.study import known

    groups = []
    for group in ("model", "dataset", "sparsity", "method", "recipe", "experiment", "logger"):
        folder = files("bame_cli.conf").joinpath(group)  # the group of patterns has no files at all
        listed = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir()) if folder.is_dir() else []
        extra = {"model": "any timm classifier by name", "sparsity": "any N:M, for example 2:4 or 1:16"}.get(group)
        groups.append(f"  {group:<12}{', '.join([*listed, *([extra] if extra else [])])}")
    tables, scales = (", ".join(known(kind)) for kind in ("table", "scale"))
    groups += [f"  +table      {tables}", f"  scale       {scales}"]
    options = "\n".join(f"  {line}" for line in compose.composed([], plain=True).splitlines())
    return f"""bame train [group=option ...] [key=value ...] [-m] [--cfg job]

Trains a network, N:M sparse by the chosen method, and writes a folder with its log, metrics, checkpoints, final
weights and result. The same command again says that it is finished, or goes on where it stopped.

  bame train                                          a small residual network by BAME at 2:4 on digits
  bame train model=resnet50 sparsity=1:16             any timm model, any pattern
  bame train method=srste method.decay=1e-4 seed=1    a method and its options
  bame train -m method=bame,srste seed=0,1,2          a sweep: every combination, one after the other
  bame train experiment=imagenet_resnet50             model, data and recipe of a paper under one name
  bame train -m method=bame,srste dry_run=true        its jobs: folders, states, expected bills; nothing is trained
  bame train +table=methods_small scale=smoke         the runs of a table, finished or found finished
  bame train search=bame                              Optuna looks for BAME's options
  bame train method=srste --cfg job                   what a command amounts to, without running it
  bame train +model.args.drop_path_rate=0.1           an argument of the model's own, with a plus sign
  bame train '+sparsity.overrides={{*.conv2:2:4}}'      another pattern for some layers, or `dense`

groups (one file each under conf/)
{chr(10).join(groups)}

options with their defaults (those of `method` differ by method: see conf/method/)
{options}
"""
