"""Pictures of a study and its page, which a real browser opens."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import bame
from study_bed import study

from bame_cli.studies import plots
from bame_cli.studies.study import read

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


pytestmark = pytest.mark.usefixtures("empty_folder")


# --- pictures ---


def test_the_front_holds_what_no_other_point_beats():
    points = [(0.5, 70.0), (0.3, 71.0), (0.3, 60.0), (1.0, 77.0), (0.9, 71.0)]
    assert plots.pareto(points) == [(0.3, 71.0), (1.0, 77.0)]


def test_every_picture_is_drawn_as_png_and_svg(capsys):
    study()
    assert bame("plot", "imagenet_resnet50") == 0
    made = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.name for path in made} == {f"{name}{s}" for name in plots.PICTURES for s in (".png", ".svg")}
    for path in made:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes()[:4] == b"\x89PNG"
    assert bame("plot", "imagenet_resnet50", "out=again") == 0
    for path in made:
        assert path.read_bytes() == Path("again", path.name).read_bytes(), path


def test_rows_differ_in_more_than_colour():
    study()
    shown = plots.lines(read("imagenet_resnet50", "paper", Path("outputs")))
    looks = list(plots._looks(shown).values())
    assert len(set(looks)) == len(looks)
    assert len({marker for _, marker, _ in looks[:8]}) == min(8, len(looks))


def test_curves_go_by_the_bill(capsys):
    study()
    jobs = read("imagenet_resnet50", "paper", Path("outputs")).jobs
    assert jobs[0].curve == [(0.2, 65.0), (0.4, 70.0)]
    assert plots._mean_curve(jobs[:2]) == ([0.2, 0.4], [65.5, 70.5])


def test_a_bill_is_drawn_with_the_run_that_it_starts_from():
    """ASP without its dense run would be the cheapest of all; where it would be is a hollow marker."""
    flops = {"train": 10, "train_dense": 100, "train_ratio": 0.1, "train_ratio_dense_grad_input": 0.1, "inherited": 100}
    bame = {"flops": flops | {"inference_ratio": 0.09}}
    study(bame0=dict(bame), bame1=dict(bame))
    made = read("imagenet_resnet50", "paper", Path("outputs"))
    (axes,) = plots.flops(made, [line for line in plots.lines(made) if line.mean is not None]).axes
    drawn = {line.get_label(): list(map(float, line.get_xdata())) for line in axes.get_lines()}
    assert drawn["Pareto front"] == [0.4], "not the ten per cent that it would cost alone"
    assert drawn["BAME, without the run it starts from"] == [0.1]
    assert sorted(float(box[0].get_xdata()[0]) for box in axes.containers) == [0.4, 1.1]


def test_nothing_finished_is_nothing_to_draw(capsys):
    study(srste0=None, srste1=None, bame0=None, bame1=None)
    assert bame("plot", "imagenet_resnet50") == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert bame("report", "imagenet_resnet50") == 0, "a page can still say what is missing"


# --- the page ---


def page(**changed: dict | None) -> Path:
    study(**changed)
    assert bame("report", "imagenet_resnet50", "out=page.html") == 0
    return Path("page.html").absolute()


class Balanced(HTMLParser):
    """Whether what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_holds_everything_and_asks_for_nothing():
    text = page(bame1={"status": "diverged", "error": "<b>loss</b> is nan"}).read_text()
    reader = Balanced()
    reader.feed(text)
    assert reader.open == []
    assert "&lt;b&gt;loss&lt;/b&gt; is nan" in text
    assert "seed: &lt;k&gt;" in text
    assert text.count("<details>") == 4
    assert text.count("<svg") == len(plots.PICTURES) + 4
    loaded = re.findall(r'(?:\bsrc|\bhref|xlink:href)="([^"#]+)|url\(([^#)]+)|@import', text)
    assert not loaded, "nothing is fetched"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "pictures in one page do not share ids"


def browse(url: str, tmp_path: Path) -> str:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *QUIET, f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def column(dom: str, number: int) -> list[str]:
    body = re.search(r"<tbody>(.*?)</tbody>", dom, re.DOTALL)[1]
    return [re.findall(r"<td>(.*?)</td>", row)[number - 1] for row in re.findall(r"<tr>(.*?)</tr>", body)]


@pytest.mark.slow
def test_a_real_browser_sorts_the_table(tmp_path):
    url = page().as_uri()
    heads = re.findall(r'<th scope="col">(.*?)</th>', Path("page.html").read_text())
    published, pattern = heads.index("published") + 1, heads.index("pattern") + 1
    as_written = column(browse(url, tmp_path), published)
    up = column(browse(f"{url}#sort={published}", tmp_path), published)
    down = column(browse(f"{url}#sort=-{published}", tmp_path), published)
    figures = [float(text.split()[0]) for text in up if text]
    assert as_written != up
    assert figures == sorted(figures)
    assert [float(text.split()[0]) for text in down if text] == sorted(figures, reverse=True)
    by_density = [text for text in column(browse(f"{url}#sort={pattern}", tmp_path), pattern) if ":" in text]
    shares = [int(n) / int(m) for n, m in (text.split(":") for text in by_density)]
    assert shares == sorted(shares), "N:M by density, not by letters"
