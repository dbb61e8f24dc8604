"""PrimalClassifier: aeon's own checks, unequal lengths and gaps, repeatability, and files without code in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("aeon")

from aeon.testing.estimator_checking import parametrize_with_checks
from safetensors import safe_open
from safetensors.numpy import save_file

from primal_attention.train.estimator import PrimalClassifier

SMALL = {**PrimalClassifier._get_test_params(), "embed_dim": 16, "epochs": 25, "learning_rate": 1e-2, "random_state": 0}


@parametrize_with_checks([PrimalClassifier], use_first_parameter_set=True)
def test_aeons_own_checks(check):
    check()


@pytest.fixture(scope="module")
def waves():
    rng = np.random.default_rng(0)
    labels = np.array(["slow", "fast"] * 12)
    series = []
    for label in labels:
        time = np.arange(rng.integers(15, 30))
        speed = 0.2 if label == "slow" else 1.0
        wave = [np.sin(speed * time + rng.uniform(0, 6)) for _ in range(2)]
        series.append(np.stack(wave) + 0.05 * rng.standard_normal((2, len(time))))
    return series, labels


@pytest.fixture(scope="module")
def fitted(waves):
    return PrimalClassifier(**SMALL).fit(*waves)


def test_unequal_lengths_gaps_and_longer_series(fitted, waves):
    series, labels = waves
    assert (fitted.predict(series) == labels).mean() > 0.9
    np.testing.assert_allclose(fitted.predict_proba(series).sum(axis=1), 1.0)
    assert [row["epoch"] for row in fitted.history_] == list(range(1, SMALL["epochs"] + 1))
    gaps = [s.copy() for s in series]
    for s in gaps:
        s[0, 3:5] = np.nan
    assert (fitted.predict(gaps) == labels).mean() > 0.8
    assert fitted.predict([np.random.default_rng(1).standard_normal((2, 80))]).shape == (1,)
    with pytest.raises(ValueError, match="channels"):
        fitted.predict([np.zeros((3, 20))])


def test_saved_and_loaded_it_predicts_the_same(fitted, waves, tmp_path: Path):
    again = PrimalClassifier.load(fitted.save(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(again.predict_proba(waves[0]), fitted.predict_proba(waves[0]))
    assert again.classes_.tolist() == fitted.classes_.tolist()
    assert again.get_params() == fitted.get_params()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 3}, "format 2 .got format 3"),
        ({"kind": "another"}, "is not a PrimalClassifier"),
        ({"network": {"depth": 3}}, "depth is not a field"),
        ({"classes": 3}, "classes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_with_unknown_content_is_refused(fitted, tmp_path: Path, changes, complaint):
    file = fitted.save(tmp_path / "model.safetensors")
    with safe_open(file, "np") as opened:
        about = json.loads(opened.metadata()["primal_attention"])
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    save_file(arrays, file, {"primal_attention": json.dumps({**about, **changes})})
    with pytest.raises(ValueError, match=complaint):
        PrimalClassifier.load(file)
    file.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="not a safetensors file"):
        PrimalClassifier.load(file)


def test_the_same_seed_gives_the_same_model_and_leaves_the_callers_generator_alone(waves):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    settings = {**SMALL, "epochs": 2}
    first = PrimalClassifier(**settings).fit(*waves)
    assert torch.equal(torch.rand(1), expected)
    torch.manual_seed(99)
    second = PrimalClassifier(**settings).fit(*waves)
    for name, weight in first.weights_.items():
        np.testing.assert_array_equal(weight, second.weights_[name])


def test_early_stopping_keeps_the_best_epoch(waves):
    model = PrimalClassifier(**{**SMALL, "early_stop": 3, "epochs": 60}).fit(*waves)
    assert len(model.history_) < 60
    assert "val_accuracy" in model.history_[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": 3}, "divisible"),
        ({"epochs": 0}, "at least 1"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention": "x"}, "unknown"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_a_value_error(changes, complaint, waves):
    with pytest.raises(ValueError, match=complaint):
        PrimalClassifier(**{**SMALL, **changes}).fit(*waves)
