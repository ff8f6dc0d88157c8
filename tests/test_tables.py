"""Tables: shipped ones compose at every scale, and what `bame table` says follows from result.json files alone."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from commands import bame, imports_of
from study_bed import study

from bame_cli.errors import ConfigError
from bame_cli.options import compose
from bame_cli.runs.plan import known_facts, run_plan
from bame_cli.studies import table
from bame_cli.studies.plan import Plan
from bame_cli.studies.study import known, read_table

NAMES = known("table")
PAPER = {"cifar10", "imagenet_resnet18", "imagenet_resnet50", "imagenet_deit", "decay_recipes", "bame_ablation"}


pytestmark = pytest.mark.usefixtures("empty_folder")


# --- what is shipped ---


def test_every_table_of_the_paper_is_there():
    assert set(NAMES) == PAPER | {"methods_small", "study", "study_bame", "study_swap"}
    assert known("scale") == ["paper", "small", "smoke"]


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_the_command_and_the_number_of_runs(name):
    text = Path(table.__file__).parents[2].joinpath("conf", "table", f"{name}.yaml").read_text()
    plan = Plan([], table=name, scale="paper", root=Path("outputs"))
    assert f"make table-{name}" in text
    assert f"bame train +table={name} scale=smoke" in text
    assert f" {len(plan.jobs)} runs" in text
    assert "# Published" in text


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["paper", "small", "smoke"])
@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_a_shipped_table_can_be_planned(name, scale):
    plan = Plan([], table=name, scale=scale, root=Path("outputs"))
    first = next((word for word in plan.jobs[0].words if word.startswith("seed=")), None)
    one_seed = [job for job in plan.jobs if first is None or first in job.words]
    made = None
    for job in one_seed:
        options = compose.composed(job.words)
        made = run_plan(options, known_facts(options), like=made)
        assert made.expected.total > 0


def test_published_figures_carry_their_source():
    for name in NAMES:
        for figure in read_table(name, "paper").published:
            assert figure.source, name
            assert 60 < figure.top1 < 80


def test_what_is_of_a_method_is_not_crossed_with_others():
    plan = Plan([], table="methods_small", scale="smoke", root=Path("outputs"))
    for job in plan.jobs:
        own = [word for word in job.words if word.startswith("method.")]
        assert bool(own) == any(m in job.words for m in ("method=bame", "method=bame_swap", "method=decay_mask"))
    assert sum("method=dense" in job.words for job in plan.jobs) == 2, "dense is not crossed with patterns"


# --- what a table says: made-up runs ---


def rows(capsys, *words: str) -> list[dict]:
    assert bame("table", "imagenet_resnet50", *words, "format=json") == 0
    return json.loads(capsys.readouterr().out)["rows"]


def row(made: list[dict], method: str, pattern: str = "1:16") -> dict:
    (found,) = [r for r in made if (r["method"], r["pattern"]) == (method, pattern)]
    return found


def test_a_cell_is_mean_and_sample_deviation_over_seeds_beside_the_published_value(capsys):
    study(seeds=(0, 1, 2))
    found = row(rows(capsys), "SR-STE")
    assert (found["top1_mean"], found["top1_std"], found["finished"]) == (72.0, 1.0, 3)
    assert (found["published_top1"], found["difference"]) == (71.5, 0.5)
    assert found["train_ratio"] == 0.4
    assert found["train_ratio_dense_grad_input"] == 0.6
    assert found["inference_ratio"] == 0.09
    assert bame("table", "imagenet_resnet50") == 0
    out = capsys.readouterr().out
    assert "72.00 ± 1.00 (3)" in out
    assert "BAME abstract, ICML 2025" in out


def test_json_lines_are_the_runs_with_all_that_their_results_say(capsys):
    study(bame1=None)
    assert bame("table", "imagenet_resnet50", "format=jsonl") == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run["row"], run["status"], run.get("top1")) for run in made] == [
        ("SR-STE", "finished", 71.0),
        ("SR-STE", "finished", 72.0),
        ("BAME", "finished", 71.0),
        ("BAME", "missing", None),
    ]
    assert made[0]["words"] == ["method=srste", "sparsity=1:16", "seed=0"]
    assert made[0]["flops"]["train"] == 40


def test_runs_kept_as_json_lines_stand_in_for_those_that_are_not_finished_here(capsys):
    study(bame0={"status": "diverged"})
    jsonl = ("imagenet_resnet50", "format=jsonl")
    assert bame("table", *jsonl, "out=kept.jsonl") == 0
    shutil.rmtree("outputs")
    study(srste0={"top1": 50.0}, srste1=None, bame0=None, bame1=None)
    capsys.readouterr()
    made = {(r["method"], r["pattern"]): r["top1"] for r in rows(capsys, "kept=kept.jsonl")}
    assert made[("SR-STE", "1:16")] == [50.0, 72.0], "what is here counts"
    assert made[("BAME", "1:16")] == [72.0], "what did not finish there is not finished here"
    assert bame("table", *jsonl, "kept=kept.jsonl", "out=again.jsonl") == 0
    before, after = (list(map(json.loads, Path(f).read_text().splitlines())) for f in ("kept.jsonl", "again.jsonl"))
    assert after[1] == before[1]
    assert after[1]["curve"] == [[0.2, 66.0], [0.4, 71.0]]
    assert bame("plot", "imagenet_resnet50", "kept=kept.jsonl") == 0
    for wrong in ("nowhere.jsonl", "outputs/tables/imagenet_resnet50-paper.json"):
        capsys.readouterr()
        assert bame("table", "imagenet_resnet50", f"kept={wrong}") == 2
        assert f"kept={wrong}: no runs that `bame table format=jsonl` wrote" in capsys.readouterr().err


def test_rows_are_compared_seed_by_seed(capsys):
    study(seeds=(0, 1, 2), bame0={"top1": 71.5}, bame1={"top1": 72.5}, bame2={"status": "diverged"})
    found = row(rows(capsys, "against=SR-STE"), "BAME")
    assert (found["ahead_of"], found["lead"], found["lead_error"]) == ("SR-STE", 0.5, 0.0)
    assert row(rows(capsys, "against=SR-STE"), "SR-STE")["lead"] is None
    assert row(rows(capsys), "BAME")["lead"] is None
    assert bame("table", "imagenet_resnet50", "against=SR-STE") == 0
    assert "+0.50 ± 0.00" in capsys.readouterr().out
    assert bame("table", "imagenet_resnet50", "against=SRSTE") == 2
    assert "against=SRSTE: no such row; did you mean 'SR-STE'? (SR-STE, BAME)" in capsys.readouterr().err


def test_published_rows_that_nobody_ran_stand_there_without_figures_of_ours(capsys):
    study()
    found = row(rows(capsys), "Bi-Mask", "2:4")
    assert (found["published_top1"], found["runs"], found["top1_mean"]) == (77.4, 0, None)


def test_no_difference_is_taken_at_another_scale(capsys):
    study(scale="smoke")
    assert all(r["difference"] is None for r in rows(capsys, "scale=smoke"))
    assert bame("table", "imagenet_resnet50", "scale=smoke") == 0
    assert "say nothing of methods" in capsys.readouterr().out


def test_runs_that_do_not_count_are_shown_and_listed_and_fail_a_strict_table(capsys):
    lost = {"bame0": {"status": "diverged", "error": "loss is nan at step 7"}, "bame1": None}
    study(**lost, srste1={"status": "failed", "error": "out of memory"})
    assert bame("table", "imagenet_resnet50", "strict=true") == 1
    said = capsys.readouterr()
    assert "3 of 4 runs are not finished" in said.err
    for line in ("1 diverged, 1 missing", "1 failed", "loss is nan at step 7", "- (0 of 2)", "71.00 (1 of 2)"):
        assert line in said.out, line
    assert "bame train method=bame sparsity=1:16 seed=1" in said.out
    assert bame("table", "imagenet_resnet50") == 0


def test_a_folder_that_holds_another_configuration_does_not_count(capsys):
    study(bame0={"digest": "other"})
    assert row(rows(capsys), "BAME")["not_finished"] == "1 missing"


def test_different_recipes_never_share_a_line(capsys):
    path = study()
    listed = json.loads(path.read_text())
    listed["jobs"][1] |= {"group": "other"}
    listed["jobs"][1]["overrides"].append("recipe.lr=0.2")
    path.write_text(json.dumps(listed))
    made = [r for r in rows(capsys) if r["method"].startswith("SR-STE") and r["runs"]]
    assert [r["method"] for r in made] == ["SR-STE [group-srste]", "SR-STE [recipe.lr=0.2]"]
    assert [r["runs"] for r in made] == [1, 1]


@pytest.mark.parametrize("how", table.FORMATS)
def test_rebuilding_gives_the_same_bytes(how):
    study(bame0=None)
    for name in ("a", "b"):
        assert bame("table", "imagenet_resnet50", f"format={how}", f"out={name}") == 0
    assert Path("a").read_bytes() == Path("b").read_bytes()


def test_csv_and_markdown_have_as_many_cells_in_every_row(capsys):
    study(bame0={"status": "failed", "error": "a | b"})
    assert bame("table", "imagenet_resnet50", "format=csv") == 0
    made = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert all(None not in r and None not in r.values() for r in made)
    assert bame("table", "imagenet_resnet50", "format=md") == 0
    text = capsys.readouterr().out
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "a \\| b" in text


def test_latex_escapes_what_latex_would_read(capsys):
    study(bame0={"status": "failed", "error": "100 % of a_b & c"})
    assert bame("table", "imagenet_resnet50", "format=latex") == 0
    out = capsys.readouterr().out
    assert r"100 \% of a\_b \& c" in out
    assert r"$\pm$" in out
    body = [line for line in out.splitlines() if line.endswith("\\\\")]
    assert len({line.count(" & ") for line in body}) == 1


def test_a_root_that_was_moved_is_read_where_it_is(capsys):
    study()
    Path("outputs").rename("elsewhere")
    assert row(rows(capsys, "root=elsewhere"), "BAME")["finished"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nosuch"], "no such table"),
        (["imagenet_resnet5"], "did you mean 'imagenet_resnet50'"),
        (["cifar10", "scale=big"], "paper, small, smoke"),
        (["cifar10", "format=xml"], "text, md, latex, csv, json or jsonl"),
        (["cifar10"], "bame train +table=cifar10 scale=paper makes the runs"),
        ([], "bame table <name>"),
        (["cifar10", "sclae=smoke"], "sclae=smoke has no place here"),
        (["mine.yaml"], "no such key: row"),
        (["gone.yaml"], "No such file"),
    ],
)
def test_a_wrong_word_is_one_line_that_mends_it(words, says, capsys):
    Path("mine.yaml").write_text("title: x\nrow: {}\n")
    assert bame("table", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_damaged_manifest_is_named(capsys):
    study().write_text("{")
    assert bame("table", "imagenet_resnet50") == 2
    assert "damaged" in capsys.readouterr().err


def test_tables_need_neither_torch_nor_hydra():
    study()
    assert not {"torch", "hydra", "timm", "matplotlib"} & imports_of("table", "imagenet_resnet50")


def test_a_table_of_ones_own_is_a_file(tmp_path):
    Path("mine.yaml").write_text(
        "title: Mine\nscales: {smoke: model=resnet20_cifar}\nrows: {dense: method=dense}\npublished: []\n"
    )
    plan = Plan(["seed=7"], table="mine.yaml", scale="smoke", root=Path("outputs"))
    assert [job.words[-2:] for job in plan.jobs] == [["model=resnet20_cifar", "method=dense"]]
    assert "seed=7" in plan.jobs[0].words
    with pytest.raises(ConfigError, match="no scale=paper"):
        Plan([], table="mine.yaml", scale="paper", root=Path("outputs"))
