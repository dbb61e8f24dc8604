"""`primal report`: what is found and counted, what the page holds, and what is refused in one line."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from page_cases import bench, config, demo, put_run, summary

pytest.importorskip("tyro")
pytest.importorskip("yaml")

from primal_attention.cli import main as cli
from primal_attention.cli.report import asset, page
from primal_attention.report import charts
from primal_attention.report.page_groups import group
from primal_attention.report.page_runs import collect, command_of


def report(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two models with two seeds each."""
    for label, last in (("primal", (0.98, 0.96)), ("softmax", (0.95, 0.97))):
        for seed, accuracy in enumerate(last):
            put_run(tmp_path / "runs" / f"{label}-seed{seed}", label, seed, accuracy)
    return tmp_path / "runs"


def test_a_page_of_runs_benchmark_and_demo(runs: Path, tmp_path: Path, capsys):
    (tmp_path / "bench.json").write_text(json.dumps(bench()))
    (tmp_path / "demo.json").write_text(json.dumps(demo()))
    out = tmp_path / "deep" / "report.html"
    code, said, err = report(capsys, runs, tmp_path / "bench.json", tmp_path / "demo.json", "-o", out)
    assert (code, err) == (0, "")
    assert "4 runs and 2 files of benchmarks" in said
    text = out.read_text(encoding="utf-8")
    for name in ("accuracy", "results", "learning", "cost", "spectra", "runs"):
        assert f'<section id="{name}"' in text
    assert "97.0 ± 1.4" in text  # mean and deviation (n − 1) of primal at the last epoch
    assert "the paper: 98.4" in text
    assert text.count("primal train uea/JapaneseVowels") >= 4
    assert "model.embed_dim: 16" in text
    assert "the machine was busy" in text  # the benchmark was disturbed: the page must not hide it
    assert 'class="note"' not in text


def test_the_page_loads_nothing_and_every_chart_is_whole(runs: Path):
    text = page(collect([runs]))
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:url\(|@import|http://(?!www\.w3\.org/2000/svg))", text)
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) >= 6
    for drawing in drawings:
        assert "nan" not in drawing
        assert ET.fromstring(drawing).get("aria-label")


def test_what_is_missing_is_said_instead_of_drawn(runs: Path):
    text = page(collect([runs]))
    assert "primal bench attention" in text
    assert "spectrum.json" in text


def test_names_from_files_cannot_become_markup(tmp_path: Path):
    put_run(tmp_path / "a", "<script>alert(1)</script>", 0, 0.5)
    text = page(collect([tmp_path]))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_result_that_also_lies_in_a_run_folder_counts_once(runs: Path, tmp_path: Path):
    results = tmp_path / "results"
    results.mkdir()
    copied = (runs / "primal-seed0" / "summary.json").read_text()
    (results / "copy.json").write_text(copied)
    (results / "other.json").write_text(json.dumps(summary("primal", 7, 0.9) | {"config": config("primal", 7)}))
    (results / "foreign.json").write_text('{"some": "thing"}')
    found = collect([runs, results, runs])
    assert len(found.runs) == 5
    primal = next(g for g in group(found.runs) if g.label == "primal")
    assert [run.seed for run in primal.once()] == [0, 1, 7]


def test_variants_are_kept_apart_and_named_by_what_differs(tmp_path: Path):
    for eta in (0.1, 0.5):
        for seed in (0, 1):
            put_run(tmp_path / f"{eta}-{seed}", "primal", seed, 0.9, eta=eta)
    assert [g.name for g in group(collect([tmp_path]).runs)] == ["primal (eta 0.1)", "primal (eta 0.5)"]


def test_a_repeated_seed_is_no_further_evidence(tmp_path: Path):
    for i in range(3):
        put_run(tmp_path / str(i), "primal", 0, 0.9)
    (one,) = group(collect([tmp_path]).runs)
    assert len(one.runs) == 3
    assert one.accuracy("last").deviation is None


def test_an_unfinished_run_shows_its_curves(tmp_path: Path, capsys):
    put_run(tmp_path / "runs" / "a", "primal", 0, 0.9)
    (tmp_path / "runs" / "a" / "summary.json").unlink()
    out = tmp_path / "r.html"
    assert report(capsys, tmp_path / "runs", "-o", out)[0] == 0
    text = out.read_text()
    assert "not finished" in text
    assert 'data-label="primal, seed 0"' in text
    assert "None of these runs has finished" in text


@pytest.mark.parametrize("kind", ["json", "list", "csv"])
def test_a_spectrum_in_the_run_folder_is_drawn(kind: str, runs: Path):
    folder = runs / "primal-seed0"
    if kind == "csv":
        (folder / "spectrum.csv").write_text("layer,head,index,value\nfirst,0,2,1.0\nfirst,0,1,2.0\n")
    elif kind == "list":
        (folder / "spectrum.json").write_text('{"singular_values": [2.0, 1.0]}')
    else:
        (folder / "spectrum.json").write_text('{"singular_values": {"first": [[2.0, 1.0], [4.0, 2.0]]}}')
    run = next(r for r in collect([runs]).runs if r.spectrum)
    assert list(run.spectrum.values()) == [[1.0, 0.5]]
    assert "σᵢ / σ₁" in page(collect([runs]))


def test_a_run_started_from_python_gets_its_command():
    from primal_attention.train.config import override, to_plain
    from primal_attention.train.registry import get

    changes = {"model.attention": ("softmax", "primal"), "seed": 3, "data.clip": False, "trainer.progress": False}
    recipe = override(get("uea/NATOPS"), changes)
    command = command_of("uea/NATOPS", to_plain(recipe))
    assert command == "primal train uea/NATOPS --seed 3 --data.no-clip --model.attention softmax primal"


def test_the_engines_own_run_is_read(tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("lightning")
    import numpy as np

    from primal_attention.data import uea
    from primal_attention.data.uea import SeriesData, Split

    rng = np.random.default_rng(0)
    halves = [Split([rng.standard_normal((9, 2)) for _ in range(n)], np.arange(n, dtype=np.int64) % 2) for n in (16, 8)]
    uea.save_npz(SeriesData("Toy", *halves, ("a", "b")), tmp_path / "data" / "uea")
    monkeypatch.chdir(tmp_path)
    flags = """--model.embed-dim 8 --model.num-heads 2 --model.ffn-dim 16 --model.rank 3 --model.landmarks 4
        --trainer.epochs 2 --trainer.batch-size 8 --trainer.accelerator cpu --trainer.no-progress
        --trainer.no-tensorboard --protocol both"""
    assert cli.main(["train", "uea/Toy", *flags.split()]) == 0
    code, _, err = report(capsys, "runs")
    assert (code, err) == (0, "")
    text = (tmp_path / "report.html").read_text()
    for name in ("Task loss", "KSVD objective J", "Held-out accuracy", "VALIDATION-CHOSEN"):
        assert name in text


BROKEN: dict[str, Callable[[Path], object]] = {
    "no config.yaml": lambda run: (run / "config.yaml").unlink(),
    "a config that is not YAML": lambda run: (run / "config.yaml").write_text("a: [1"),
    "a config of something else": lambda run: (run / "config.yaml").write_text("services: {}"),
    "another version's config": lambda run: (run / "config.yaml").write_text("{format: 99, config: {}}"),
    "a seed that is a word": lambda run: (run / "config.yaml").write_text("{format: 1, config: {seed: one}}"),
    "a truncated summary": lambda run: (run / "summary.json").write_text('{"format": 1, "sco'),
    "a summary without scores": lambda run: (run / "summary.json").write_text('{"format": 1}'),
    "a truncated table": lambda run: (run / "metrics.csv").write_text("epoch,task_loss\n1,2.0\n2"),
    "a word in a table": lambda run: (run / "metrics.csv").write_text("epoch,task_loss\n1,two\n"),
    "a negative singular value": lambda run: (run / "spectrum.json").write_text("[1.0, -0.5]"),
    "a spectrum of words": lambda run: (run / "spectrum.csv").write_text("index,value\n1,a\n"),
}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.replace(" ", "-"))
def test_a_broken_run_is_one_line_that_names_it(case: str, runs: Path, tmp_path: Path, capsys):
    BROKEN[case](runs / "primal-seed1")
    out = tmp_path / "r.html"
    code, _, err = report(capsys, runs, "-o", out)
    assert code == 2
    assert err.count("\n") == 1
    assert str(runs / "primal-seed1") in err
    assert not out.exists()
    code, said, err = report(capsys, runs, "-o", out, "--skip-broken")
    assert code == 0
    assert "3 runs, 1 left out" in said
    assert str(runs / "primal-seed1") in err
    assert "Left out" in out.read_text()


FOREIGN = {
    "a path that is not there": (None, "does not exist"),
    "an empty folder": ("", "holds no run"),
    "a JSON file of something else": ('{"a": 1}', "neither a run's result nor a benchmark"),
    "a JSON list": ("[]", "neither a run's result nor a benchmark"),
    "no JSON at all": ("hello", "is not JSON"),
    "a benchmark without its fields": ('{"kind": "attention", "format": 1, "rows": [{}]}', "hardware is missing"),
    "a demo of words": ('{"singular_values": {"primal": ["a"]}}', "primal[0] must be a number of at least 0 (got 'a')"),
    "a result of another version": ('{"scores": {}, "format": 99}', "reads format 1"),
    "a result without a seed": ('{"scores": {}, "format": 1, "recipe": "a", "label": "b"}', "seed is missing"),
}


@pytest.mark.parametrize("case", FOREIGN, ids=lambda case: case.replace(" ", "-"))
def test_a_foreign_path_is_one_line_that_names_it(case: str, tmp_path: Path, capsys):
    content, reason = FOREIGN[case]
    place = tmp_path / "given"
    if content == "":
        place.mkdir()
    elif content is not None:
        place.write_text(content)
    for flag in ([], ["--skip-broken"]):  # nothing else is there, so skipping it leaves nothing
        code, _, err = report(capsys, place, *flag)
        assert code == 2
        assert str(place) in err
        assert err.count("\n") == 1
    assert reason in report(capsys, place)[2]


@pytest.mark.parametrize("words", [(), ("--nonsense",)])
def test_a_command_without_runs_is_refused(words: tuple[str, ...], capsys):
    code, _, err = report(capsys, *words)
    assert code == 2
    assert err.count("\n") == 1


def test_a_folder_is_no_page(runs: Path, capsys):
    code, _, err = report(capsys, runs, "-o", runs)
    assert code == 2
    assert "is a folder" in err


def test_lines_break_where_values_cannot_be_drawn():
    line = charts.Series("a", [1, 2, 3, 4], [1.0, float("nan"), None, 2.0])
    drawing = charts.lines([line], title="t", x_name="x", y_name="y")
    path = re.search(r'class="line" d="([^"]+)"', drawing).group(1)
    assert path.count("M") == 2
    assert path.count("h0") == 2  # both ends stand alone and are drawn as dots
    assert charts.lines([charts.Series("a", [1], [-1.0])], title="t", x_name="x", y_name="y", y_log=True) == ""


def test_a_long_curve_is_thinned_but_keeps_its_end():
    line = charts.Series("a", range(5000), [float(i) for i in range(5000)])
    points = line.points()
    assert len(points) <= charts.MOST_POINTS + 1
    assert points[-1] == (4999.0, 4999.0)


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 100, False, [0, 20, 40, 60, 80, 100]),
        (97.8, 100, False, [98, 98.5, 99, 99.5, 100]),
        (1, 1000, True, [1, 10, 100, 1000]),
        (0.9, 5, True, [1, 2, 5]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, log: bool, expected: list[float]):
    assert charts.Scale(low, high, 0, 1, log).ticks() == pytest.approx(expected)


def test_tick_labels_are_plain():
    assert [charts.number(v) for v in (0, 0.5, -2, 1500, 1e-6, 2e7)] == ["0", "0.5", "−2", "1,500", "10⁻⁶", "2·10⁷"]


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_of_text_can_be_read_in_both_themes():
    """WCAG's 4.5 : 1, for the models' colours too: their names are written in them."""
    blocks = re.findall(r"{[^{}]*--back: [^{}]*}", asset("page.css"))
    themes = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks]
    assert len(themes) == 3
    assert themes[1] == themes[2]  # chosen by the system and by the button
    for theme in themes:
        for ground in ("back", "card"):
            for name in ("ink", "soft", "accent", *(f"c{i}" for i in range(charts.SLOTS))):
                high, low = sorted((luminance(theme[name]), luminance(theme[ground])), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
