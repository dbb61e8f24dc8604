"""The tables of d4rl, lm and image, drawn from the summaries of small runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import test_d4rl
import test_image
import test_lm

from primal_attention.cli import main as cli
from primal_attention.cli import table
from primal_attention.cli.table import LINEUP
from primal_attention.report import paper_d4rl
from primal_attention.train import loop
from primal_attention.train.grid import QUIET, Plan, Shelf, missing, run_job
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import write_json

trajectories, texts, images = test_d4rl.folder, test_lm.folder, test_image.folder


def flags(settings: dict[str, Any]) -> list[str]:
    skipped = {"data.folder", "trainer.accelerator", *QUIET}
    return ["--set", *(f"{name}={value}" for name, value in settings.items() if name not in skipped)]


@pytest.mark.parametrize("model", paper_d4rl.MODELS)
def test_the_papers_averages_are_those_of_its_cells(model: str):
    mean = sum(row[model][0] for row in paper_d4rl.SCORES.values()) / len(paper_d4rl.SETS)
    assert mean == pytest.approx(paper_d4rl.AVERAGE_SCORE[model], abs=0.051)


def test_d4rl_separates_measured_from_published_scores_and_names_the_data(trajectories: Path, tmp_path: Path, capsys):
    summary = loop.train(test_d4rl.recipe(trajectories), tmp_path / "run", name="d4rl/hopper-medium")
    summary["data"]["source"] = "collected anew in D4RL's layout (medium, Hopper-v4)"
    for name, shift in (("hopper-medium", 0.0), ("walker2d-medium", 10.0)):
        for model, scores in {"softmax": (60.0, 64.0), "primal+": (61.0, 67.0)}.items():
            for seed, score in enumerate(scores):
                changed = json.loads(json.dumps(summary)) | {"recipe": f"d4rl/{name}", "seed": seed, "label": model}
                changed["config"]["model"]["attention"] = [model]
                changed["config"]["data"]["name"] = name
                changed["scores"]["last"]["score"] = score + shift
                write_json(tmp_path / "results" / "d4rl" / name / f"{model}-seed{seed}.json", changed)
    words = ["--no-run", "--results", str(tmp_path / "results"), *flags(test_d4rl.SMALL)]
    files = ["--markdown", str(tmp_path / "t.md"), "--csv", str(tmp_path / "t.csv")]
    assert cli.main(["table", "d4rl", *words, *files]) == 0
    text = (tmp_path / "t.md").read_text()
    for part in (
        "| hopper-medium | DT (softmax) | 64.2 ± 1.1 | 62.0 ± 2.8 |",
        "Primal.+DT (primal+) | 77.9 ± 7.8 | 74.0 ± 4.2 |",
        "| Average | DT (softmax) | 67.4 | 67.0 ± 2.8 |",
        "Average of Primal.+DT less that of DT: +2.0 ± 3.6 (standard error).",
        "The trajectories are not D4RL's but come from other policies",
        "for 6 steps",
        "3 episodes",
    ):
        assert part in text
    assert "hopper-medium,softmax,64.2,1.1,62.0" in (tmp_path / "t.csv").read_text()
    capsys.readouterr()
    assert cli.main(["table", "d4rl-efficiency", *words]) == 0
    printed = capsys.readouterr().out
    assert "20.8" in printed
    assert "s/1K" in printed


def test_lm_compares_with_softmax(texts: Path, tmp_path: Path, capsys):
    models = ("softmax", "primal-mean")
    changes = {**test_lm.SMALL, "data.folder": texts}
    plan = Plan("lm", ("wikipedia",), [LINEUP[m] for m in models], [0], changes, "lm")
    for job in missing(plan, Shelf([]), tmp_path / "runs", tmp_path / "results"):
        assert run_job(job).error is None
    words = ["lm", "--models", *models, "--no-run", "--results", str(tmp_path / "results")]
    assert table.main([*words, *flags(changes)]) == 0
    printed = capsys.readouterr().out
    for part in ("softmax, rotary", "PrimalFormer, mean", "+0.00 %"):
        assert part in printed
    with pytest.raises(RunError, match="--models sofmax is not in this table: choose of softmax, delta, hybrid"):
        table.main(["lm", "--models", "sofmax", "--no-run"])


def test_image_shows_accuracy_speed_and_the_papers_numbers(images: Path, tmp_path: Path, capsys):
    recipe = test_image.small(images, trainer__epochs=1)
    summary = loop.train(recipe, tmp_path / "run", name="image/imagenette")
    write_json(tmp_path / "results" / "run.json", summary)
    words = ["image", "--results", str(tmp_path / "results"), "--csv", str(tmp_path / "table.csv"), "--no-run"]
    table.main([*words, *flags({**test_image.SMALL, "trainer.epochs": 1})])
    printed = capsys.readouterr().out
    assert "Primal.+DeiT-Small (primal+)" in printed
    assert "2330.2" in printed
    with (tmp_path / "table.csv").open() as file:
        softmax, plus, everywhere = csv.DictReader(file)
    assert float(plus["last_mean"]) == pytest.approx(100 * summary["scores"]["last"]["accuracy"])
    assert float(plus["images_per_second_mean"]) == pytest.approx(24 / summary["seconds_per_epoch"])
    assert softmax["last_seeds"] == everywhere["last_seeds"] == "0"
