"""Training steps on Long-Range Arena: the authors' layers compute the same losses, and results are stored."""

from __future__ import annotations

import pytest
import torch

from primal_attention.bench import lra, measurement
from primal_attention.bench.attention import AuthorsPrimal
from primal_attention.cli.bench import main
from primal_attention.utils.errors import RunError
from primal_attention.utils.files import read_json

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_tasks(monkeypatch):
    monkeypatch.setitem(lra.TASKS, "image", lra.Task(32, 20, 3))
    monkeypatch.setitem(lra.TASKS, "retrieval", lra.Task(32, 20, 2, filled=0.5, pairs=True))


def test_authors_layers_give_the_same_losses_without_padding():
    ours, theirs = (lra.Step("image", name, CPU, 4) for name in ("primal", lra.PUBLISHED))
    assert sum(isinstance(m, AuthorsPrimal) for m in theirs.module.modules()) == 2
    theirs.module.load_state_dict(ours.module.state_dict())
    for step in (ours, theirs):
        for module in step.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    losses = ours.module.losses(ours.batch)
    assert {"task_loss", "ksvd_loss"} <= set(losses)
    torch.testing.assert_close(losses, theirs.module.losses(theirs.batch), rtol=1e-4, atol=1e-5)


def test_step_updates_weights_and_drops_its_graph():
    step = lra.Step("retrieval", lra.PUBLISHED, CPU, 2)
    before = step.module.model.head[0].weight.clone()
    step()
    assert not torch.equal(before, step.module.model.head[0].weight)
    assert [m.objective for m in step.module.modules() if isinstance(m, AuthorsPrimal)] == [None, None]


def test_results_are_measured_once(tmp_path, monkeypatch, capsys):
    usual = measurement.time_step
    monkeypatch.setattr(measurement, "time_step", lambda *a, **k: usual(*a, **k, seconds=0.01))
    words = ["lra", "--tasks", "image", "--models", "softmax", "primal+", "--batch-size", "2", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "s eager per 1000 steps" in capsys.readouterr().err
    folder = tmp_path / "image"
    softmax, primal = (read_json(folder / f"{name}.json") for name in ("softmax", "primal+"))
    assert softmax["scores"]["step"]["eager"] > 0
    assert primal["scores"]["step"]["graph"] is None  # on a GPU only
    assert primal["command"].startswith("primal bench lra --tasks image")
    assert {"commit", "versions", "hardware", "date", "device", "torch"} <= set(primal)
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(RunError, match="no model is called 'lstm'"):
        main(["lra", "--models", "lstm", "--out", str(tmp_path)])
