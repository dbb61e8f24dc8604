"""`primal report`: groups of runs, the sections of the page, names that cannot become markup, files and messages."""

import json
import re
from pathlib import Path

import pytest

from page_cases import SPECTRUM, bench, put_run, put_runs
from primal_attention.cli import main as cli
from primal_attention.report.page import SCRIPT, group_runs, write_page
from primal_attention.report.results import collect


def report(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two models with two seeds each."""
    return put_runs(tmp_path / "runs", {"primal": (0.98, 0.96), "softmax": (0.95, 0.97)})


def test_a_page_of_runs_spectrum_and_benchmark(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(bench()))
    (runs / "primal-seed0" / "spectrum.csv").write_text(SPECTRUM)
    out = tmp_path / "deep" / "report.html"
    code, text, err = report(capsys, runs, tmp_path / "bench.json", "-o", out)
    assert (code, err) == (0, "")
    assert "runs: 4, benchmarks: 1, left out: 0" in text
    page = out.read_text(encoding="utf-8")
    for name in ("scores", "results", "learning", "cost", "spectra", "runs"):
        assert f'<section id="{name}"' in page
    assert "97.0 ± 1.4" in page  # mean and standard deviation (n − 1) of primal at the last epoch
    assert "98.4" in page  # the published number
    assert page.count("primal train uea/JapaneseVowels") >= 4
    assert "config.model.embed_dim: 16" in page
    assert "load 2.0 on 2 cores" in page  # other programs disturbed the benchmark
    assert 'class="note"' not in page
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert len(charts) == 8
    assert all(json.loads(chart)["data"] for chart in charts)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:|plotly\.min\.js)""", page)
    assert (out.parent / SCRIPT).stat().st_size > 10**6


def test_the_script_can_be_inlined(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, runs, "-o", tmp_path / "one" / "page.html", "--inline")[0] == 0
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["page.html"]
    assert (tmp_path / "one" / "page.html").stat().st_size > 10**6


def test_absent_content_is_named(runs: Path, tmp_path: Path) -> None:
    def page_of(path: Path) -> str:
        write_page(tmp_path / "page.html", collect([path]))
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    page = page_of(runs)
    assert "primal bench attention" in page
    assert "primal spectrum RUN" in page
    (runs / "primal-seed0" / "summary.json").unlink()
    page = page_of(runs / "primal-seed0")
    assert "not finished" in page
    assert "None of these runs has finished" in page


def test_variants_are_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    for eta in (0.1, 0.5):
        for seed in (0, 1):
            put_run(tmp_path / f"{eta}-{seed}", "primal", seed, 0.9, eta=eta)
    assert [group.name for group in group_runs(collect([tmp_path]).runs)] == ["primal (eta 0.1)", "primal (eta 0.5)"]


def test_a_repeated_seed_counts_once_and_a_benchmark_of_ones_own_has_no_published_number(tmp_path: Path) -> None:
    for i in range(3):
        run = put_run(tmp_path / str(i), "primal", 0, 0.9)
        (run / "summary.json").write_text((run / "summary.json").read_text().replace('"uea"', '"../mine"'))
    (group,) = group_runs(collect([tmp_path]).runs)
    assert len(group.runs) == 3
    assert group.score("last").std is None
    assert group.paper is None
