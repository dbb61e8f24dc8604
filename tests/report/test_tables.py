"""Tables: published numbers that agree with each other, separate protocols, averages over comparable sets, writers."""

import csv
from pathlib import Path
from typing import Any

import pytest

from primal_attention.cli.table import NAMES
from primal_attention.data import d4rl
from primal_attention.report import tables
from primal_attention.report.results import Run
from primal_attention.report.tables import Cell, paper
from primal_attention.train import lra, registry
from primal_attention.train.grid import Variant
from primal_attention.train.uea import PAPER
from primal_attention.utils.files import read_text

KINDS = tables.table_kinds()


def run(seed: int = 0, last: float = 0.5, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "path": Path(f"{seed}-{last}-{sorted(changes.items())}.json"),
        "benchmark": "uea",
        "recipe": "uea/Handwriting",
        "label": "primal",
        "seed": seed,
        "scores": {
            "last": {"accuracy": last, "epoch": 9},
            "best_on_test": {"accuracy": last + 0.1, "epoch": 3},
            "validation_chosen": {"accuracy": last - 0.1, "epoch": 5},
        },
        "config": {"trainer": {"steps_per_epoch": 0}},
        "seconds_per_epoch": 2.0,
        "peak_memory_bytes": 10**9,
        "device": "GPU",
        "commit": "0123456789abcdef",
        "data": {"max_length": 152},
    }
    return Run(**{**fields, **changes})


def cell(dataset: str, model: str, *runs: Run) -> Cell:
    return Cell("uea", dataset, Variant("models", model, model), {dataset: runs})


def make(cells: list[Cell], name: str = "uea") -> tables.Table:
    return tables.make_table(KINDS[name], "T", cells, f"primal table {name}")


def rows(table: tables.Table) -> list[list[str]]:
    return [row for section in table.sections for row in section.frame().to_numpy().tolist()]


def test_every_table_has_a_name_in_the_command() -> None:
    assert set(KINDS) == set(NAMES)


def test_published_tables_agree_with_each_other_and_with_the_recipes() -> None:
    uea = {name: paper("uea")[name]["rows"] for name in ("accuracy", "seconds", "eta-s", "data-dependence")}
    assert all(set(rows) == set(PAPER) for rows in uea.values())
    for name, accuracy in uea["accuracy"].items():
        # The main table's PrimalFormer is the best of the ablation's grid, at the recipe's setting.
        rank, eta = PAPER[name][0]
        best = uea["eta-s"][name][f"primal-s{rank}-eta{eta:g}"]
        assert accuracy["primal"] == best == max(uea["eta-s"][name].values())
        assert accuracy["primal+"] == uea["data-dependence"][name]["primal+-dependent"]
    for task, accuracy in paper("lra")["accuracy"]["rows"].items():
        assert accuracy["primal+"] == tables.published("lra", "data-dependence", task, "primal+-dependent")
        assert accuracy["primal"] == tables.published("lra", "r-scores", task, "primal-with-r")
    assert tuple(paper("d4rl")["score"]["rows"]) == d4rl.SETS
    steps = {name: [task.steps, task.batch_size] for name, task in lra.TASKS.items()}
    assert steps == paper("lra")["training"]
    published = [t for name in registry.BENCHMARKS for t in paper(name).values() if isinstance(t, dict) and "rows" in t]
    assert len(published) == 14
    assert all(t["table"].startswith("Table ") and t["label"].startswith("tab::") for t in published)


@pytest.mark.parametrize(
    ("benchmark", "table"), [("uea", "accuracy"), ("uea", "seconds"), ("lra", "accuracy"), ("d4rl", "score")]
)
def test_published_averages_are_those_of_the_rows(benchmark: str, table: str) -> None:
    content = paper(benchmark)[table]
    for model, average in content["average"].items():
        values = [row[model] for row in content["rows"].values()]
        # Two averages of baselines are not the means of the published cells.
        slack = 0.3 if benchmark == "uea" and model in ("longformer", "performer") else 0.051
        assert sum(values) / len(values) == pytest.approx(average, abs=slack)


def test_protocols_are_separate_columns_beside_the_published_number() -> None:
    table = make([cell("Handwriting", "primal", run(0, 0.5), run(1, 0.6)), cell("Handwriting", "nystrom")])
    assert list(table.sections[0].frame().columns)[2:] == [
        "Paper (best on test)", "BEST-ON-TEST", "LAST", "VALIDATION-CHOSEN", "Seeds",
    ]  # fmt: skip
    assert rows(table) == [
        ["Handwriting", "PrimalFormer (primal)", "29.6", "65.0 ± 7.1", "55.0 ± 7.1", "45.0 ± 7.1", "2"],
        ["", "nystrom", "–", "–", "–", "–", "0"],
    ]


def test_columns_with_different_numbers_of_seeds_show_each() -> None:
    last_only = run(1, 0.6, scores={"last": {"accuracy": 0.6, "epoch": 1}})
    assert rows(make([cell("Handwriting", "primal", run(0, 0.5), last_only)]))[0][-1] == "1/2/1"


def test_averages_are_over_sets_that_all_models_have() -> None:
    table = make(
        [
            cell("Handwriting", "softmax", run(0, 0.2), run(1, 0.4)),
            cell("Handwriting", "flow", run(0, 0.3)),
            cell("Heartbeat", "softmax", run(0, 0.4), run(1, 0.4)),
            cell("Heartbeat", "flow", run(0, 0.5)),
            cell("PEMS-SF", "softmax", run(0, 0.9)),
            cell("PEMS-SF", "flow"),
        ]
    )
    # Seed by seed: (20 + 40) / 2 and (40 + 40) / 2. The paper's number is the mean over the same sets.
    assert rows(table)[-2:] == [
        ["Average", "Transformer (softmax)", "54.0", "45.0 ± 7.1", "35.0 ± 7.1", "25.0 ± 7.1", "2"],
        ["", "Flowformer (flow)", "55.7", "50.0", "40.0", "30.0", "1"],
    ]
    assert any("over Handwriting, Heartbeat" in note for note in table.notes)


def test_ablations_have_paired_differences_with_their_interval() -> None:
    accuracies = {"without": (0.50, 0.52, 0.60), "with": (0.53, 0.56, 0.62)}  # differences of 3, 4 and 2 points
    cells = []
    for word, values in accuracies.items():
        variant = Variant("r-scores", f"primal-{word}-r", "primal", {"r_scores": word == "with"})
        own = [run(seed, value) for seed, value in enumerate(values)]
        cells.append(Cell("lra", "text", variant, {"text": own[:2] if word == "without" else own}))
    table = make(cells, "uea-ablation")
    assert rows(table)[1] == [
        "", "PrimalFormer (primal)", "yes", "61.2", "67.0 ± 4.6", "57.0 ± 4.6", "47.0 ± 4.6", *["+3.5 ± 6.4"] * 3, "3",
    ]  # fmt: skip
    assert any("Base: primal-without-r" in note for note in table.notes)
    ranks = [
        Cell("d4rl", "hopper-medium", variant, {"hopper-medium": [run(0, scores={"last": {"score": 70.0 + i}})]})
        for i, variant in enumerate(KINDS["d4rl-ablation"].variants)
    ]
    assert rows(make(ranks, "d4rl-ablation"))[-1] == ["", "96", "73.8", "72.0", "+2.0", "–", "1"]


def fit(
    dataset: str,
    name: str,
    accuracies: dict[int, float],
    other_cores: float | None = 0.0,
    device: str = "CPU, 2 threads",
    **data: str,
) -> Cell:
    """Fits of a classifier; no accuracies: it refused the set."""
    cost = {"seconds": 7.0, "cpu_seconds": 9.0, "other_cores": other_cores}
    part = {"accuracy": 0.4, "calibration_error": 0.1, "fit_seconds": 3.0}
    scores = {"fit": cost, "predict": {**cost, "seconds": 0.5}, "networks": part, "features": part}
    settings: Any = {"config": {"holdout": 0.0}, "device": device}
    runs = [
        run(seed, scores={"last": {"accuracy": a, "calibration_error": 0.02}, **scores}, **settings)
        for seed, a in accuracies.items()
    ]
    refused = [run(0, scores={}, config={"holdout": 0.0}, data=data)] if data else []
    variant = next(variant for variant in KINDS["uea-modern"].variants if variant.name == name)
    return Cell("uea", dataset, variant, {dataset: runs + refused})


def test_classifiers_are_compared_with_multirocket_hydra_on_the_sets_that_both_accept() -> None:
    cells = [
        fit("A", "primal", {0: 0.9, 1: 0.8}),
        fit("A", "multirocket-hydra", {0: 0.8, 1: 0.8}, other_cores=0.2),
        fit("A", "primal-networks", {0: 0.9}),
        fit("A", "softmax", {0: 0.7}),
        fit("B", "primal", {0: 0.7}),
        fit("B", "multirocket-hydra", {0: 0.6}, other_cores=None),
        fit("B", "softmax", {}),
        fit("C", "primal", {0: 0.5}),
        fit("C", "multirocket-hydra", {}, refused="unequal lengths"),
        fit("C", "softmax", {0: 0.5}, device="CPU, 1 thread"),
    ]
    table = make(cells, "uea-modern")
    assert rows(table) == [
        ["A", "PrimalClassifier", "85.0 ± 7.1", "+5.0 ± 63.5", "2.0 ± 0.0", "7.0 ± 0.0", "0.5 ± 0.0", "9.0 ± 0.0", "2"],
        ["", "MultiRocketHydra (aeon)", "80.0 ± 0.0", "–", "2.0 ± 0.0", "–", "–", "–", "2"],
        ["", "PrimalClassifier, networks alone", "40.0", "-40.0", "10.0", "3.0", "–", "–", "1"],
        ["", "softmax instead of Primal-Attention", "70.0", "-10.0", "2.0", "7.0", "0.5", "9.0", "1"],
        ["B", "PrimalClassifier", "70.0", "+10.0", "2.0", "7.0", "0.5", "9.0", "1"],
        ["", "MultiRocketHydra (aeon)", "60.0", "–", "2.0", "–", "–", "–", "1"],
        ["", "softmax instead of Primal-Attention", "–", "–", "–", "–", "–", "–", "0"],
        ["C", "PrimalClassifier", "50.0", "–", "2.0", "7.0", "0.5", "9.0", "1"],
        ["", "MultiRocketHydra (aeon)", "refused", "–", "–", "–", "–", "–", "0"],
        ["", "softmax instead of Primal-Attention", "50.0", "–", "2.0", "–", "–", "–", "1"],
    ]
    assert any(note.startswith("Refused on C. MultiRocketHydra (aeon): unequal lengths") for note in table.notes)
    both = make([cell for cell in cells if cell.variant.name in ("primal", "multirocket-hydra")], "uea-modern")
    assert rows(both)[-2:] == [
        ["Average", "PrimalClassifier", "80.0", "+10.0", "2.0", "–", "–", "–", "1"],
        ["", "MultiRocketHydra (aeon)", "70.0", "–", "2.0", "–", "–", "–", "1"],
    ]
    assert "Average: over A, B." in both.notes


def test_efficiency_is_relative_to_softmax_on_the_same_device() -> None:
    cells = [
        cell("Handwriting", "softmax", run(0, seconds_per_epoch=3.0, peak_memory_bytes=4 * 10**9)),
        cell("Handwriting", "primal", run(0)),
        cell("Handwriting", "flow", run(0, device="cpu", peak_memory_bytes=None)),
    ]
    assert rows(make(cells, "uea-efficiency")) == [
        ["Handwriting", "152", "Transformer (softmax)", "0.3", "3.00", "1.00×", "–", "4.00", "1.00×", "1"],
        ["", "152", "PrimalFormer (primal)", "0.4", "2.00", "1.50×", "–", "1.00", "4.00×", "1"],
        ["", "152", "Flowformer (flow)", "0.3", "2.00", "–", "–", "–", "–", "1"],
    ]
    both = [cell(name, "primal", run(0)) for name in ("Handwriting", "Heartbeat")]
    assert rows(make(both, "uea-efficiency"))[-1][3:] == ["0.4", "2.00", "–", "2.7", "1.00", "–", "1"]


def test_notes_have_command_commits_and_devices() -> None:
    changed = run(1, commit="fedcba9876543210-changed")
    table = make([cell("Handwriting", "primal", run(0), changed)])
    text = tables.to_markdown(table)
    for part in ("`primal table uea`", "0123456789ab (1 run)", "fedcba987654-changed (1 run)", "device GPU", "Table 1"):
        assert part in text


def test_writers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a|b"
    table = make([cell(name, "primal", run(0, 0.512345), run(1, 0.6)), cell(name, "primal+"), cell("c", "primal+")])
    lines = tables.to_markdown(table).splitlines()
    assert lines[3:6] == [
        "|---|---|--:|--:|--:|--:|--:|",
        "| a\\|b | PrimalFormer (primal) | – | 65.6 ± 6.2 | 55.6 ± 6.2 | 45.6 ± 6.2 | 2 |",
        "|  | Primal.+Trans. (primal+) | – | – | – | – | 0 |",
    ]
    tables.to_csv(table, tmp_path / "t.csv")
    first, second, _ = csv.DictReader(read_text(tmp_path / "t.csv").splitlines())
    assert float(first["last_mean"]) == pytest.approx(55.61725)
    assert (first["last_seeds"], second["last_seeds"], second["last_mean"]) == ("2", "0", "")
    assert first["commit"] == "0123456789abcdef"
    tables.to_terminal(table)
    printed = capsys.readouterr().out
    assert "Set" in printed
    assert "| Set" not in printed


def test_a_narrow_terminal_gets_a_paragraph_per_row(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    table = make([cell("Handwriting", "primal", run(0, 0.512345), run(1, 0.6))])
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    for width in (150, 80, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        tables.to_terminal(table)
        printed = " ".join(capsys.readouterr().out.split())
        numbers = ("29.6", "65.6 ± 6.2", "55.6 ± 6.2", "45.6 ± 6.2")
        headings = (
            ("Paper (best on test) ", "BEST-ON-TEST ", "LAST ", "VALIDATION-CHOSEN ") if width < 150 else [""] * 4
        )
        for heading, number in zip(headings, numbers, strict=True):
            assert heading + number in printed
