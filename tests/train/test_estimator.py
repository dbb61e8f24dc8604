"""PrimalClassifier: aeon's own checks, unequal lengths and gaps, repeatability, and files without code in them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from aeon.testing.estimator_checking import parametrize_with_checks
from safetensors import safe_open
from safetensors.numpy import save_file

from primal_attention.train.estimator import PrimalClassifier

SMALL = {**PrimalClassifier._get_test_params(), "embed_dim": 16, "epochs": 15, "learning_rate": 1e-2, "random_state": 0}


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
    assert [row["epoch"] for row in fitted.history_] == 2 * list(range(1, SMALL["epochs"] + 1))
    gaps = [s.copy() for s in series]
    for s in gaps:
        s[0, 3:5] = np.nan
    assert (fitted.predict(gaps) == labels).mean() > 0.8
    assert fitted.predict([np.random.default_rng(1).standard_normal((2, 80))]).shape == (1,)
    with pytest.raises(ValueError, match="channels"):
        fitted.predict([np.zeros((3, 20))])
    huge = [1e30 * s for s in series]
    assert np.isfinite(fitted.predict_proba(huge)).all()
    assert np.isfinite(fitted.predict_uncertainty(huge)).all()


def test_series_of_an_unknown_class_are_more_uncertain_than_by_their_entropy(waves):
    """Waves of three times the amplitude look like one of the classes to the networks, but have other scores."""
    series, labels = waves
    model = PrimalClassifier(**{**SMALL, "features": False}).fit(series, labels)
    unknown = [3 * s for s in series]
    probabilities = model.predict_proba(series + unknown)
    entropy = -(probabilities * np.log(probabilities)).sum(axis=1)
    areas = [(score[24:, None] > score[:24]).mean() for score in (model.predict_uncertainty(series + unknown), entropy)]
    assert areas[0] > areas[1] + 0.05, areas
    with pytest.raises(ValueError, match="needs networks with Primal-Attention"):
        PrimalClassifier(**{**SMALL, "epochs": 1, "attention": "none"}).fit(series, labels).predict_uncertainty(series)


def test_each_part_alone_and_both(fitted, waves):
    series, labels = waves
    for changes in ({"networks": 0}, {"features": False, "attention": "softmax"}):
        model = PrimalClassifier(**{**SMALL, **changes}).fit(series, labels)
        assert (model.predict(series) == labels).mean() > 0.9
        assert len(model.combination_) == 1
    assert fitted.held_out_.keys() == fitted.combination_.keys() == {"networks", "features"}
    assert all((scores.argmax(1) == (labels == "slow")).mean() > 0.7 for scores in fitted.held_out_.values())


def test_saved_and_loaded_it_predicts_the_same(fitted, waves, tmp_path: Path):
    again = PrimalClassifier.load(fitted.save(tmp_path / "model.safetensors"))
    for name in ("predict_proba", "predict_uncertainty"):
        np.testing.assert_array_equal(getattr(again, name)(waves[0]), getattr(fitted, name)(waves[0]))
    assert again.classes_.tolist() == fitted.classes_.tolist()
    assert again.get_params() == fitted.get_params()


def test_numbers_of_numpy_are_parameters_as_those_of_python_are(waves, tmp_path: Path):
    settings = {"networks": np.int64(2), "epochs": np.int64(1), "rank": np.int64(3), "eta": np.float32(0.5)}
    model = PrimalClassifier(**{**SMALL, **settings, "features": False, "random_state": np.int64(3)}).fit(*waves)
    again = PrimalClassifier.load(model.save(tmp_path / "model.safetensors"))
    assert again.get_params() == model.get_params()
    again.set_params(networks=3)  # of the next fit
    np.testing.assert_array_equal(again.predict_proba(waves[0]), model.predict_proba(waves[0]))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 2}, "format 4 .got format 2"),
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


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": 3}, "divisible"),
        ({"epochs": 0}, "at least 1"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention": "x"}, "unknown"),
        ({"attention": ["softmax", "primal"]}, "attention must be one name"),
        ({"networks": 1}, "networks must be at least 2"),
        ({"networks": 0, "features": False}, "networks must be at least 2"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_a_value_error(changes, complaint, waves):
    with pytest.raises(ValueError, match=complaint):
        PrimalClassifier(**{**SMALL, **changes}).fit(*waves)
