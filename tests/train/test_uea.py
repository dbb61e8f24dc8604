"""UEA recipes: preparation of the data, augmentation, data of one's own, and settings of earlier versions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import yaml

from closeness import assert_close
from primal_attention.cli import main as cli
from primal_attention.data.uea import PrincipalChannels, stratified_holdout
from primal_attention.train import checkpoint, loop
from primal_attention.train.task import hash_data
from primal_attention.train.uea import build_from, mix, scale_and_shift, warp_time
from primal_attention.utils.errors import RunError


def test_principal_channels_reach_the_network_and_only_training_samples_decide_them(toy_folder: Path):
    recipe, data = toy.recipe(toy_folder, protocol="validation", data__principal=True, seed=3), toy.data()
    kept, _ = stratified_holdout(data.train.labels, recipe.data.holdout, 3)
    experiment = build_from(recipe, data)
    assert np.array_equal(experiment.standardizer.basis, PrincipalChannels.fit(data.train.take(kept).series).basis)
    assert experiment.train.tensors[0].shape[::2] == (len(kept), 4)
    assert experiment.module.model.stem.convs[0].in_channels == 4
    plain = build_from(toy.recipe(toy_folder, data__principal=False), data)
    assert plain.module.model.stem.convs[0].in_channels == 2


def test_a_run_folder_of_an_earlier_version_is_evaluated_as_it_was_trained(toy_folder: Path, tmp_path: Path):
    summary = loop.train(toy.recipe(toy_folder, trainer__epochs=1, data__principal=False), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    config = content["config"]
    del config["data"]["principal"], config["data"]["file"], config["data"]["test_file"]
    config["data"]["held"], config["model"]["differences"] = "random", False
    config["augment"] |= {"crop": 0.1, "unequal": True}
    file.write_text(yaml.safe_dump(content))
    assert loop.evaluate(tmp_path / "run")[""]["accuracy"] == summary["scores"]["last"]["accuracy"]
    config["data"]["held"] = "edge"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(RunError, match=r"data\.held 'edge' was removed"):
        checkpoint.read_run(tmp_path / "run")


def test_the_hash_of_the_data_depends_on_every_value_and_on_the_size_of_files(tmp_path: Path):
    data, other, file = toy.data(), toy.data(), tmp_path / "a.jpg"
    assert hash_data(data) == hash_data(other)
    other.train.series[0][0, 0] += 1e-9
    assert hash_data(data) != hash_data(other)
    hashes = []
    for content in (b"a", b"ab"):
        file.write_bytes(content)
        hashes.append(hash_data([file]))
    assert hashes[0] != hashes[1]


@pytest.fixture
def own_files(tmp_path: Path) -> tuple[Path, Path]:
    """Two classes of waves with two channels, in two files."""
    rng = np.random.default_rng(0)
    files = tmp_path / "gestures.npz", tmp_path / "later.npz"
    for file, count in zip(files, (20, 6), strict=True):
        y = np.arange(count) % 2
        X = np.sin((0.3 + y)[:, None, None] * np.arange(15) + rng.uniform(0, 6, (count, 2, 1)))
        np.savez(file, X=X, y=np.array(["slow", "fast"])[y])
    return files


@pytest.mark.parametrize("has_test_file", [False, True])
def test_own_data_is_trained_evaluated_and_reported_like_a_set_of_the_archive(
    own_files, has_test_file: bool, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["--data.file", "gestures.npz", *(["--data.test-file", "later.npz"] if has_test_file else [])]
    assert cli.main(["train", "uea-modern", *words, *toy.FLAGS, "--trainer.progress"]) == 0
    assert "uea-modern gestures-primal: epoch 1/" in capsys.readouterr().err  # no terminal, no bar
    run = tmp_path / "runs/uea-modern/gestures-primal-seed0"
    summary = json.loads((run / "summary.json").read_text())
    samples = 20 if has_test_file else 14  # 30 % of ten samples of each class are the test set
    sizes = {"set": "gestures.npz", "train_samples": samples, "test_samples": 6, "classes": 2, "max_length": 15}
    assert sizes.items() <= summary["data"].items()
    monkeypatch.chdir(run)
    assert cli.main(["evaluate", str(run)]) == 0
    assert "as in the run" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--out", "page.html"]) == 0
    assert "gestures" in Path("page.html").read_text()
    (run / "summary.json").unlink()
    np.savez(own_files[0], X=np.zeros((20, 2, 15)), y=["slow", "fast"] * 10)
    assert cli.main(["train", "uea-modern", "--out", str(run), "--resume"]) == 2
    assert "the data has changed" in capsys.readouterr().err


def test_a_run_that_chooses_settings_computes_no_test_score(toy_folder: Path, tmp_path: Path, capsys):
    words = ["--data.folder", str(toy_folder), *toy.FLAGS, "--protocol", "validation", "--no-test"]
    words += ["--out", str(tmp_path)]
    assert cli.main(["train", "uea/Toy", *words, "--watch-test"]) == 0
    assert "no test score" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["scores"]) == {"validation_chosen"}
    assert set(summary["scores"]["validation_chosen"]) == {"epoch", "validation_accuracy"}
    assert summary["test"] == {}
    assert "test" not in (tmp_path / "metrics.csv").read_text()


@pytest.fixture
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(9) >= torch.tensor([[9], [5], [1]])
    return torch.randn(3, 9, 2).masked_fill(mask.unsqueeze(-1), 0.0), mask


def test_a_warp_is_monotonic_and_stays_inside_the_series(padded):
    x, mask = padded
    assert_close(warp_time(x, mask, 0.0, crop=0.0), x, 1e-5)
    warped, ramp = warp_time(x, mask, 0.5), warp_time(torch.arange(9.0).view(1, 9, 1).expand(3, 9, 1), mask, 0.8)
    assert (warped[mask] == 0).all()
    assert warp_time(x, mask, 1e6).isfinite().all(), "speeds do not overflow"
    for i in range(3):
        low, high = x[i, ~mask[i]].aminmax(dim=0)
        inside = warped[i, ~mask[i]]
        assert ((inside >= low - 1e-5) & (inside <= high + 1e-5)).all()
        assert (ramp[i, ~mask[i], 0].diff() >= 0).all()


def test_scale_and_offset_have_their_standard_deviation():
    scaled = scale_and_shift(torch.ones(200, 50, 3), 0.1)
    assert torch.equal(scaled[:, 0], scaled[:, 1])
    assert abs(float(scaled.std()) - 0.1 * 2**0.5) < 0.03


def test_mixup_keeps_the_steps_of_either_sample(padded):
    x, mask = padded
    mixed, mixed_mask, partner, share = mix(x, mask, 0.2)
    assert torch.equal(mixed_mask, mask & mask[partner])
    assert_close(mixed, share.view(-1, 1, 1) * x + (1 - share.view(-1, 1, 1)) * x[partner], 1e-6)
