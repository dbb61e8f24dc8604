"""Fits of classifiers: each in its own process, with scores of test or of holdout samples, and provenance."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from primal_attention.report.results import read_summaries
from primal_attention.train import classifiers
from primal_attention.train.classifiers import Fit

pytest.importorskip("aeon")


class Nearest:
    """Predicts the class of the training series with the nearest mean."""

    def fit(self, series, labels):
        self.classes_, self.labels = np.unique(labels), labels
        self.means = np.array([s.mean() for s in series])

    def predict_proba(self, series):
        nearest = [self.labels[np.abs(self.means - s.mean()).argmin()] for s in series]
        return np.eye(len(self.classes_))[np.searchsorted(self.classes_, nearest)]


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_a_fit_scores_test_or_holdout_samples_only(holdout, tmp_path, monkeypatch):
    fit = Fit("Toy", "multirocket-hydra", 1, {"holdout": holdout}, tmp_path / "fit.json", toy.folder(tmp_path))
    monkeypatch.setattr(classifiers, "make_classifier", lambda fit: Nearest())
    summary = json.loads(json.dumps(classifiers.run_fit(fit)))
    prefix = "validation_" if holdout else ""
    assert set(summary["scores"]["last"]) == {f"{prefix}{n}" for n in ("accuracy", "calibration_error", "loss")}
    assert (summary["data"]["train_samples"], summary["data"]["scored_samples"]) == ((21, 9) if holdout else (30, 15))
    assert summary["scores"]["fit"].keys() == {"seconds", "cpu_seconds", "other_cores"}
    assert {"date", "commit", "dirty", "versions", "hardware"} <= summary.keys()
    assert len(summary["data_sha256"]) == 64


def test_a_refusal_is_stored_with_its_reason_and_a_crash_is_reported(tmp_path, capsys):
    folder = toy.folder(tmp_path / "data")
    fits = [
        Fit("Toy", model, 0, {"holdout": 0.0}, tmp_path / "results" / f"{model}.json", folder)
        for model in ("multirocket-hydra", "no-such-model")
    ]
    (error,) = classifiers.run_fits(fits)
    assert error == "Toy no-such-model seed 0: KeyError: 'no-such-model'"
    (run,) = read_summaries(tmp_path / "results")
    assert "unequal length" in run.data["refused"]
    assert not run.scores
    assert "Toy multirocket-hydra seed 0: refused: " in capsys.readouterr().err
